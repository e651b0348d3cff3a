"""One attention call as data: requests, heads, cache, candidates, rules. No tensors of any framework."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from attnconform.reference.cache import PagedCache, check_cache, check_head_pages
from attnconform.reference.candidates import Candidates, check_entries, check_sequence
from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.dropout import Dropout, check_dropout
from attnconform.reference.epilogue import EpilogueStep, check_epilogue
from attnconform.reference.errors import RefusedInput
from attnconform.reference.quantization import Quantization, check_quantization
from attnconform.reference.rope import Rope, check_encoded_pages, check_rope
from attnconform.reference.rule_values import check_mask_rule, check_score_rule
from attnconform.reference.rules import MaskRule, ScoreRule

EmptyRow = Literal["zero", "refuse"]


@dataclass(frozen=True)
class QueryRow:
    """A row's identity, kept through any reordering. [COORD-ROW]"""

    row: int  # index into q and out
    request: int
    local: int  # index within the request
    q_idx: int  # logical position


@dataclass(frozen=True, kw_only=True)
class AttentionProblem:
    """Everything that decides the answer, apart from the numbers in q, k and v."""

    qo_indptr: IntArray  # (batch_size + 1,) where each request's query rows start
    seqlen_kv: IntArray  # (batch_size,) committed tokens of each request
    q_offset: IntArray  # (batch_size,) logical position of a request's first query row
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    cache: PagedCache
    sm_scale: float
    candidates: Candidates | None = None  # None: every committed position
    mask_rule: MaskRule | None = None  # None: nothing masked
    score_rules: tuple[ScoreRule, ...] = ()  # applied in this order
    sink_logits: FloatArray | None = None  # (num_qo_heads,)
    empty_row: EmptyRow = "zero"
    k_quant: Quantization | None = None  # None: the cache holds the numbers themselves
    v_quant: Quantization | None = None
    dropout: Dropout | None = None
    rope: Rope | None = None
    epilogue: tuple[EpilogueStep, ...] = ()  # done to each row's output, in this order, once it is complete

    @property
    def batch_size(self) -> int:
        return len(self.seqlen_kv)

    @property
    def total_q(self) -> int:
        return int(self.qo_indptr[-1])

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    def rows(self) -> Iterator[QueryRow]:
        """Every query row in order, with its request and logical position. [MASK-OFFSET, COORD-ROW]"""
        for n in range(self.batch_size):
            for local, row in enumerate(range(int(self.qo_indptr[n]), int(self.qo_indptr[n + 1]))):
                yield QueryRow(row, n, local, int(self.q_offset[n]) + local)

    def list_index(self, where: QueryRow, qo_head: int) -> int:
        """Which candidate list a row and query head use. [GQA-LISTS]"""
        assert self.candidates is not None
        blocks = -(-np.diff(self.qo_indptr) // self.candidates.q_block_size)
        block = int(blocks[: where.request].sum()) + where.local // self.candidates.q_block_size
        return block * self.lists_per_block + self._list_head(qo_head)

    @property
    def lists_per_block(self) -> int:
        assert self.candidates is not None
        return {"query_head": self.num_qo_heads, "kv_head": self.num_kv_heads, "shared": 1}[self.candidates.sharing]

    def _list_head(self, qo_head: int) -> int:
        assert self.candidates is not None
        return {"query_head": qo_head, "kv_head": qo_head // self.group_size, "shared": 0}[self.candidates.sharing]


def default_q_offset(qo_indptr: IntArray, seqlen_kv: IntArray) -> IntArray:
    """Bottom-right alignment: the last query row sits at the last committed position. [MASK-OFFSET]"""
    return np.asarray(seqlen_kv - np.diff(qo_indptr), dtype=np.int64)


def check_problem(problem: AttentionProblem) -> None:
    """Refuses a problem that breaks the contract, before anything is launched. [SAFE-REFUSE]

    Raises RefusedInput with the clause, the name, the index and the value.
    """
    _check_geometry(problem)
    _check_requests(problem)
    check_cache(problem.cache, problem.seqlen_kv)
    check_head_pages(problem.cache, problem.num_kv_heads)
    _check_numbers(problem)
    _check_storage(problem)
    if problem.dropout is not None:
        check_dropout(problem.dropout)
    check_epilogue(problem.epilogue, problem.num_qo_heads)
    check_mask_rule(problem.mask_rule, problem.batch_size, problem.num_qo_heads)
    for rule in problem.score_rules:
        check_score_rule(rule, problem.num_qo_heads)
    if problem.candidates is not None:
        _check_candidates(problem, problem.candidates)


def _check_geometry(problem: AttentionProblem) -> None:
    for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"):
        if getattr(problem, name) < 1:
            raise RefusedInput("SAFE-SHAPE", name, getattr(problem, name), "must be at least 1")
    if problem.num_qo_heads % problem.num_kv_heads:
        limit = f"must be a multiple of num_kv_heads, {problem.num_kv_heads}"
        raise RefusedInput("GQA-MAP", "num_qo_heads", problem.num_qo_heads, limit)


def _check_requests(problem: AttentionProblem) -> None:
    if len(problem.qo_indptr) != problem.batch_size + 1:
        limit = f"must be batch_size + 1, {problem.batch_size + 1}"
        raise RefusedInput("SAFE-SHAPE", "len(qo_indptr)", len(problem.qo_indptr), limit)
    if len(problem.q_offset) != problem.batch_size:
        raise RefusedInput("SAFE-SHAPE", "len(q_offset)", len(problem.q_offset), f"must be {problem.batch_size}")
    if problem.qo_indptr[0] != 0:
        raise RefusedInput("SAFE-SHAPE", "qo_indptr", int(problem.qo_indptr[0]), "must start at 0", (0,))
    _check_ascends("qo_indptr", problem.qo_indptr)
    negative = np.flatnonzero(problem.seqlen_kv < 0)
    if negative.size:
        n = int(negative[0])
        raise RefusedInput("SAFE-SHAPE", "seqlen_kv", int(problem.seqlen_kv[n]), "must be at least 0", (n,))


def _check_ascends(name: str, indptr: IntArray) -> None:
    falls = np.flatnonzero(np.diff(indptr) < 0)
    if falls.size:
        at = int(falls[0]) + 1
        raise RefusedInput("SAFE-SHAPE", name, int(indptr[at]), f"the entry before is {int(indptr[at - 1])}", (at,))


def _check_numbers(problem: AttentionProblem) -> None:
    if not np.isfinite(problem.sm_scale):
        raise RefusedInput("SAFE-FINITE", "sm_scale", problem.sm_scale, "must be finite")
    if problem.sink_logits is None:
        return
    if problem.sink_logits.shape != (problem.num_qo_heads,):
        limit = f"must be ({problem.num_qo_heads},)"
        raise RefusedInput("SAFE-SHAPE", "sink_logits.shape", problem.sink_logits.shape, limit)
    bad = np.flatnonzero(~np.isfinite(problem.sink_logits))
    if bad.size:
        h = int(bad[0])
        raise RefusedInput("SAFE-FINITE", "sink_logits", float(problem.sink_logits[h]), "must be finite", (h,))


def _check_storage(problem: AttentionProblem) -> None:
    """Scales of quantized caches, and whether the keys' rotations fit where the pages stand."""
    cache = problem.cache
    for name, quantization, dim in (
        ("k_quant", problem.k_quant, problem.head_dim_qk),
        ("v_quant", problem.v_quant, problem.head_dim_vo),
    ):
        if quantization is not None:
            sizes = {"num_pages": cache.num_pages, "page_size": cache.page_size, "num_kv_heads": problem.num_kv_heads}
            check_quantization(name, quantization, head_dim=dim, **sizes)
    if problem.rope is not None:
        check_rope(problem.rope, problem.head_dim_qk)
        if not problem.rope.turns:
            check_encoded_pages(cache.page_table, -(-problem.seqlen_kv // cache.page_size))


def _check_candidates(problem: AttentionProblem, candidates: Candidates) -> None:
    if candidates.form not in ("set", "sequence"):
        limit = "candidates are a set: a repeated key would add ln 2 to its score"
        raise RefusedInput("SET-FORM", "form", candidates.form, limit)
    for name, least in (("block_size", 1), ("q_block_size", 1), ("window", 0), ("num_sink_tokens", 0)):
        if getattr(candidates, name) < least:
            raise RefusedInput("SAFE-SHAPE", name, getattr(candidates, name), f"must be at least {least}")
    if candidates.granularity == "token" and candidates.block_size != 1:
        raise RefusedInput("SAFE-SHAPE", "block_size", candidates.block_size, "must be 1 at token granularity")
    blocks = -(-np.diff(problem.qo_indptr) // candidates.q_block_size)
    want = int(blocks.sum()) * problem.lists_per_block
    if candidates.num_lists != want:
        raise RefusedInput("SAFE-SHAPE", "len(indptr)", candidates.num_lists + 1, f"must be {want + 1}")
    if candidates.indptr[0] != 0 or candidates.indptr[-1] != len(candidates.indices):
        limit = f"must run from 0 to len(indices), {len(candidates.indices)}"
        raise RefusedInput("SAFE-SHAPE", "indptr", (int(candidates.indptr[0]), int(candidates.indptr[-1])), limit)
    _check_ascends("indptr", candidates.indptr)
    requests = np.repeat(np.arange(problem.batch_size), blocks * problem.lists_per_block)
    for i, n in enumerate(requests.tolist()):
        start, seqlen_kv = int(candidates.indptr[i]), int(problem.seqlen_kv[n])
        entries = candidates.entries(i)
        check_entries(entries, list_idx=i, start=start, block_size=candidates.block_size, seqlen_kv=seqlen_kv)
    if candidates.form == "sequence":
        check_sequence(candidates)
    elif candidates.rank_bias is not None:
        limit = "form is 'set', and the entries of a set have no rank"
        raise RefusedInput("SET-SEQUENCE", "rank_bias.shape", candidates.rank_bias.shape, limit)
