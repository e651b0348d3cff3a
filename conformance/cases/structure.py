"""A case: explicit structure, a recipe for the numbers, one 64-bit seed, and the clauses it exercises."""

import hashlib
from typing import Final, Literal

import msgspec
import numpy as np

from attnconform.conformance.views import Hints
from attnconform.reference import philox
from attnconform.reference.cache import UNUSED_PAGE, PagedCache
from attnconform.reference.candidates import Candidates
from attnconform.reference.dropout import Dropout
from attnconform.reference.epilogue import EpilogueStep
from attnconform.reference.problem import AttentionProblem, default_q_offset
from attnconform.reference.quantization import QuantFormat, Quantization, ScaleGranularity, scale_shape
from attnconform.reference.rope import Rope
from attnconform.reference.rules import Alibi, MaskRule, RelativeBias, ScoreRule

Operation = Literal["forward", "backward", "refusal", "structure"]
Dtype = Literal["float32", "bfloat16", "float16"]
ValueKind = Literal[
    "normal",
    "peaked",
    "zero_q",
    "half_mass",
    "equal_keys",
    "extreme",
    "far_key",
    "zero_lane",
    "v_mean",
    "integers",
    "code_edges",
    "near_ties",
    "last_visible",
    "first_hidden",
    "summed_out",
]

# what JSON cannot hold, or what belongs to a tensor and not to the problem
Corruption = Literal[
    "nan_sm_scale", "nan_sink_logit", "inf_slope", "inf_bias", "zero_scale", "scale_shape", "q_head_dim", "kv_heads"
]  # fmt: skip
SCALE_STREAM = 6
OWN = "d"
REPLAYED: Final = "L4"


class CandidateStructure(msgspec.Struct, frozen=True, kw_only=True):
    """Dynamic lists exactly as a backend gets them: holes, duplicates and order included."""

    lists: tuple[tuple[int, ...], ...]
    granularity: Literal["token", "block"] = "token"
    block_size: int = 1
    sharing: Literal["query_head", "kv_head", "shared"] = "query_head"
    q_block_size: int = 1
    window: int = 0
    num_sink_tokens: int = 0
    form: Literal["set", "sequence", "multiset"] = "set"
    rank_bias: tuple[float, ...] | None = None  # of a sequence


class QuantStructure(msgspec.Struct, frozen=True, kw_only=True):
    """How one cache is stored; its scales are drawn from a seed of their own, around 2^-3."""

    format: QuantFormat
    granularity: ScaleGranularity
    seed: int = 0


class Structure(msgspec.Struct, frozen=True, kw_only=True):
    """Everything of a case but the numbers in its tensors. Lengths are in tokens, one per request."""

    dtype: Dtype = "float32"
    seqlens_q: tuple[int, ...]
    seqlens_kv: tuple[int, ...]
    q_offset: tuple[int, ...] | None = None  # None: bottom-right
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    num_pages: int
    page_table: tuple[tuple[int, ...], ...]  # per request, only the pages it uses
    layout: Literal["NHD", "HND"] = "NHD"
    interleaved: bool = False  # K and V are views of one pool, so that strides are not those of a dense tensor
    page_stride: int | None = None  # elements from page to page of a pool far larger than its pages; None: no gap
    page_owner: tuple[int, ...] | None = None  # the one request that may read a page, or -1 for every request
    candidates: CandidateStructure | None = None
    mask_rule: MaskRule | None = None
    score_rules: tuple[ScoreRule, ...] = ()
    sm_scale: float
    sink_logits: tuple[float, ...] | None = None
    empty_row: Literal["zero", "refuse"] = "zero"
    head_pages: tuple[tuple[int, ...], ...] | None = None  # (num_pages, num_kv_heads); None: every head's the same
    k_quant: QuantStructure | None = None
    v_quant: QuantStructure | None = None
    dropout: Dropout | None = None
    rope: Rope | None = None
    epilogue: tuple[EpilogueStep, ...] = ()
    hints: Hints = Hints()
    corruption: Corruption | None = None  # refusal cases alone


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the matrix. The id names the content: a changed case has another id."""

    id: str
    level: Literal["L0", "L1", "L2", "L3", "L4", "L0d", "L1d", "L3d"]  # d: of a backend's own domain
    operation: Operation
    structure: Structure
    values: ValueKind
    seed: int
    clauses: tuple[str, ...]  # what this case exercises
    axes: dict[str, str] = {}
    refuses: str | None = None  # the clause under which the problem must be refused


def case_digest(case: Case) -> str:
    """Eight hex digits of everything that decides the case's content."""
    content = (case.operation, case.structure, case.values, case.seed, case.refuses)
    return hashlib.sha256(msgspec.json.encode(content, order="deterministic")).hexdigest()[:8]


def is_own(case_id: str) -> bool:
    """Whether an id is of a case of a backend's own domain: its level ends in OWN."""
    return case_id.split(".")[0].endswith(OWN)


def is_replayed(case_id: str) -> bool:
    """Whether an id is of a case of a trace, which no matrix holds."""
    return case_id.split(".")[0] == REPLAYED


def named(case: Case, slug: str) -> Case:
    """The case with its permanent id, level.operation.slug.digest."""
    return msgspec.structs.replace(case, id=f"{case.level}.{case.operation}.{slug}.{case_digest(case)}")


def build_problem(structure: Structure) -> AttentionProblem:
    """The AttentionProblem of a structure. Invalid structures build too: refusing them is the backend's part."""
    structure = corrupt(structure)
    qo_indptr = np.concatenate([[0], np.cumsum(structure.seqlens_q)]).astype(np.int64)
    seqlen_kv = np.asarray(structure.seqlens_kv, dtype=np.int64)
    sinks = structure.sink_logits
    return AttentionProblem(
        qo_indptr=qo_indptr,
        seqlen_kv=seqlen_kv,
        q_offset=default_q_offset(qo_indptr, seqlen_kv)
        if structure.q_offset is None
        else np.asarray(structure.q_offset, dtype=np.int64),
        num_qo_heads=structure.num_qo_heads,
        num_kv_heads=structure.num_kv_heads,
        head_dim_qk=structure.head_dim_qk,
        head_dim_vo=structure.head_dim_vo,
        cache=build_cache(structure),
        sm_scale=structure.sm_scale,
        candidates=None if structure.candidates is None else build_candidates(structure.candidates),
        mask_rule=structure.mask_rule,
        score_rules=structure.score_rules,
        sink_logits=None if sinks is None else np.asarray(sinks, dtype=np.float64),
        empty_row=structure.empty_row,
        k_quant=build_quantization(structure, structure.k_quant, structure.head_dim_qk),
        v_quant=build_quantization(structure, structure.v_quant, structure.head_dim_vo),
        dropout=structure.dropout,
        rope=structure.rope,
        epilogue=structure.epilogue,
    )


def build_quantization(structure: Structure, quant: QuantStructure | None, head_dim: int) -> Quantization | None:
    """One cache's storage with its scales: between 2^-4 and 2^-2, exact in float32."""
    if quant is None:
        return None
    shape = scale_shape(
        quant.granularity,
        num_pages=structure.num_pages,
        page_size=structure.page_size,
        num_kv_heads=structure.num_kv_heads,
        head_dim=head_dim,
    )
    scale = 2.0 ** (2 * philox.uniform(quant.seed, SCALE_STREAM, shape) - 4)
    if structure.corruption == "zero_scale":
        scale.flat[-1] = 0.0
    if structure.corruption == "scale_shape":
        scale = np.concatenate([scale, scale])
    return Quantization(
        format=quant.format, granularity=quant.granularity, scale=scale.astype(np.float32).astype(np.float64)
    )


def corrupt(structure: Structure) -> Structure:
    """The structure with its corruption applied, where that is one of the problem's own numbers."""
    match structure.corruption:
        case "nan_sm_scale":
            return msgspec.structs.replace(structure, sm_scale=float("nan"))
        case "nan_sink_logit":
            return msgspec.structs.replace(structure, sink_logits=(float("nan"), *(structure.sink_logits or ())[1:]))
        case "inf_slope":
            return msgspec.structs.replace(structure, score_rules=(Alibi((float("inf"),) * structure.num_qo_heads),))
        case "inf_bias":
            tables = ((float("inf"),) * 3,) * structure.num_qo_heads
            return msgspec.structs.replace(structure, score_rules=(RelativeBias(tables),))
        case _:
            return structure


def build_cache(structure: Structure) -> PagedCache:
    """The paged cache, its table padded with UNUSED_PAGE."""
    width = max((len(row) for row in structure.page_table), default=0)
    table = np.full((len(structure.page_table), width), UNUSED_PAGE, dtype=np.int64)
    for n, row in enumerate(structure.page_table):
        table[n, : len(row)] = row
    owned = None
    if structure.page_owner is not None:
        owner = np.asarray(structure.page_owner)
        owned = (owner == -1) | (owner == np.arange(len(structure.page_table))[:, None])
    return PagedCache(
        page_size=structure.page_size,
        num_pages=structure.num_pages,
        page_table=table,
        layout=structure.layout,
        owned=owned,
        head_pages=None if structure.head_pages is None else np.asarray(structure.head_pages, dtype=np.int64),
    )


def build_candidates(structure: CandidateStructure) -> Candidates:
    """Lists as CSR."""
    flat = [i for entries in structure.lists for i in entries]
    return Candidates(
        indptr=np.concatenate([[0], np.cumsum([len(entries) for entries in structure.lists])]).astype(np.int64),
        indices=np.asarray(flat, dtype=np.int64),
        granularity=structure.granularity,
        block_size=structure.block_size,
        sharing=structure.sharing,
        q_block_size=structure.q_block_size,
        window=structure.window,
        num_sink_tokens=structure.num_sink_tokens,
        form=structure.form,
        rank_bias=None if structure.rank_bias is None else np.asarray(structure.rank_bias, dtype=np.float64),
    )


def encode_case(case: Case) -> bytes:
    """A case as JSON."""
    return msgspec.json.format(msgspec.json.encode(case, order="deterministic"), indent=1)


def decode_case(data: bytes, source: str) -> Case:
    """A case from JSON. Raises ValueError naming the source where it is not one, or where it was edited."""
    try:
        case = msgspec.json.decode(data, type=Case)
    except msgspec.DecodeError as error:
        raise ValueError(f"{source} is not a case: {error}") from None
    if not case.id.endswith(case_digest(case)):
        raise ValueError(f"{source}: id {case.id} does not match its content, digest {case_digest(case)}")
    return case
