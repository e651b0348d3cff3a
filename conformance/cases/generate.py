"""From one row of the covering array to an explicit, valid structure."""

from dataclasses import dataclass

import numpy as np

from attnconform.conformance.cases.axes import Row
from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.cases.sample_rules import DECAY, STRIPES
from attnconform.conformance.cases.structure import CandidateStructure, QuantStructure, Structure
from attnconform.conformance.views import Hints
from attnconform.reference.dropout import Dropout
from attnconform.reference.epilogue import Activation, Cast, EpilogueStep, Gate
from attnconform.reference.rope import KeyPosition, Rope
from attnconform.reference.rules import (
    Alibi,
    And,
    Causal,
    CustomMask,
    CustomScore,
    Document,
    HeadWindow,
    MaskRule,
    Or,
    PrefixLM,
    RelativeBias,
    ScoreRule,
    SoftCap,
    Window,
)

TILE_KV = 32  # the kv tile that cases ask for, small so that a short request still has several
BLOCK_SIZE = 16
MAX_DECODE_REQUESTS = 3
DROPOUT_RATE = 0.25
FARTHEST = 3  # distance from which a relative bias is the same
HIGH_POOL_PAGES = 24  # unused pages below the used ones where page ids are to be high
ALIBI_SLOPE, SOFT_CAP = (
    0.125,
    1.5,
)  # a slope this small keeps every weight of a short request above half precision's floor


@dataclass(frozen=True)
class Lengths:
    """Query rows and committed tokens of every request."""

    q: tuple[int, ...]
    kv: tuple[int, ...]


def build_structure(row: Row, seed: int, *, lengths: Lengths | None = None) -> Structure:
    """The structure of one row of axis values; every draw comes from the seed. Lengths given stand for the row's."""
    draw = Draw(seed)
    num_qo_heads, num_kv_heads = (int(x) for x in row["heads"].split("/"))
    head_dim_qk, head_dim_vo = (int(x) for x in row["head_dim"].split("/"))
    page_size = int(row["page_size"])
    lengths = lengths or draw_lengths(draw, row, page_size)
    page_table, num_pages = draw_page_table(draw, row["pages"], lengths.kv, page_size)
    offsets = draw_offsets(draw, row, lengths)
    k_quant, v_quant = (quant_of(name, seed + i) for i, name in enumerate(QUANTS[row["quant"]], start=2))
    return Structure(
        dtype=row["dtype"],  # type: ignore[arg-type]  # the axis holds the literal's values
        seqlens_q=lengths.q,
        seqlens_kv=lengths.kv,
        q_offset=offsets,
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        page_size=page_size,
        num_pages=num_pages,
        page_table=page_table,
        layout=row["layout"],  # type: ignore[arg-type]
        interleaved=row["strides"] == "interleaved",
        candidates=draw_candidates(draw, row, lengths, offsets, num_qo_heads, num_kv_heads),
        mask_rule=draw_mask_rule(draw, row["mask"], lengths.kv, num_qo_heads),
        score_rules=score_rules(draw, row["score"], num_qo_heads),
        sm_scale=1 / float(np.sqrt(head_dim_qk)),
        sink_logits=tuple(h / 4 for h in draw.integers(num_qo_heads, -4, 12)) if row["sink"] == "logits" else None,
        head_pages=draw_head_pages(draw, row["head_pages"], num_pages, num_kv_heads),
        k_quant=k_quant,
        v_quant=v_quant,
        dropout=Dropout(DROPOUT_RATE, seed=seed + 1) if row["dropout"] != "none" else None,
        rope=rope_of(row["rope"], head_dim_qk),
        epilogue=epilogue_of(draw, row["epilogue"], num_qo_heads),
        hints=Hints(num_kv_splits=int(row["splits"]), tile_kv=TILE_KV),
    )


def draw_lengths(draw: Draw, row: Row, page_size: int) -> Lengths:
    """Lengths around the edge that the row names."""
    edge = {"page_edge": max(page_size, 2), "tile_edge": TILE_KV}.get(row["lengths"], 24)
    kv = {
        "one": (1, draw.integer(2, 3)),
        "page_edge": (edge - 1, edge, edge + 1),
        "tile_edge": (edge + draw.integer(-1, 1), 2 * edge + draw.integer(-1, 1)),
        "long_and_short": (draw.integer(90, 100), 2, 5),
        "empty_request": (draw.integer(9, 20), 0, draw.integer(9, 20)),
    }[row["lengths"]]
    return Lengths(tuple(query_length(draw, row["phase"], n, t) for n, t in enumerate(kv)), kv)


def query_length(draw: Draw, phase: str, request: int, seqlen_kv: int) -> int:
    """Query rows of one request; never more than its committed tokens."""
    prefill = min(seqlen_kv, 5)
    rows = {"decode": 1, "prefill": prefill, "chunk": draw.integer(2, 4), "mixed": prefill if request == 0 else 1}[
        phase
    ]
    return min(rows, seqlen_kv)


def draw_offsets(draw: Draw, row: Row, lengths: Lengths) -> tuple[int, ...] | None:
    """Where a mask looks at positions, queries a little before the end of what is committed.

    At the end a causal mask would have nothing to remove, and a query there cannot tell causal from none.
    """
    if row["mask"] == "none" or row["phase"] == "prefill":
        return None
    behind = draw.integer(1, 4)
    return tuple(max(t - q - behind, 0) for q, t in zip(lengths.q, lengths.kv, strict=True))


def draw_page_table(
    draw: Draw, kind: str, seqlens_kv: tuple[int, ...], page_size: int
) -> tuple[tuple[tuple[int, ...], ...], int]:
    """Pages of every request, and the size of the pool; the pool always has pages that nobody owns."""
    needed = [-(-t // page_size) for t in seqlens_kv]
    used = sum(needed)
    num_pages = used + 2 + (HIGH_POOL_PAGES // page_size + 2 if kind == "high" else 0)
    ids = list(range(num_pages))
    if kind in ("shuffled", "shared_prefix", "aliased"):
        ids = draw.shuffled(ids)
    if kind == "high":
        ids = ids[::-1]
    starts = np.concatenate([[0], np.cumsum(needed)]).astype(int)
    table = [ids[starts[n] : starts[n + 1]] for n in range(len(needed))]
    if kind == "shared_prefix":
        donor = int(np.argmax(needed))
        table = [[table[donor][0], *row[1:]] if len(row) > 1 else row for row in table]
    if kind == "aliased":  # a request names the same page at two logical places
        table = [[*row[:-1], row[0]] if len(row) > 1 else row for row in table]
    return tuple(tuple(row) for row in table), num_pages


def draw_candidates(
    draw: Draw, row: Row, lengths: Lengths, offsets: tuple[int, ...] | None, num_qo_heads: int, num_kv_heads: int
) -> CandidateStructure | None:
    """Dynamic lists of every block of query rows and head."""
    if row["granularity"] == "dense":
        return None
    block_size = BLOCK_SIZE if row["granularity"] == "block" else 1
    q_block_size = int(row["q_block"])
    heads = {"query_head": num_qo_heads, "kv_head": num_kv_heads, "shared": 1}[row["sharing"]]
    blocks = [(n, b) for n, rows in enumerate(lengths.q) for b in range(-(-rows // q_block_size))]
    emptied = {"first": 0, "middle": len(blocks) // 2, "last": len(blocks) - 1}.get(row["empty"])
    lists = []
    for i, (n, block) in enumerate(blocks):
        first = (lengths.kv[n] - lengths.q[n] if offsets is None else offsets[n]) + block * q_block_size
        own = min(first, lengths.kv[n] - 1) // block_size
        for _ in range(heads):
            entries = draw_list(draw, row["listing"], -(-lengths.kv[n] // block_size), own)
            lists.append((-1,) * min(len(entries), 2) if i == emptied else entries)
    return CandidateStructure(
        lists=tuple(lists),
        granularity="token" if block_size == 1 else "block",
        block_size=block_size,
        sharing=row["sharing"],  # type: ignore[arg-type]
        q_block_size=q_block_size,
        window=3 if row["local"] in ("window", "window_and_sinks") else 0,
        num_sink_tokens=2 if row["local"] in ("sinks", "window_and_sinks") else 0,
        form=row["form"],  # type: ignore[arg-type]
        rank_bias=rank_biases(draw, lists) if row["form"] == "sequence" else None,
    )


def rank_biases(draw: Draw, lists: list[tuple[int, ...]]) -> tuple[float, ...]:
    """A bias for each rank of the longest list, in eighths."""
    longest = max((len(entries) for entries in lists), default=0)
    return tuple(x / 8 for x in draw.integers(longest, -12, 4)) if longest else ()


def draw_list(draw: Draw, listing: str, num_ids: int, own: int) -> tuple[int, ...]:
    """One list: a subset of the ids, listed as the row says. Half of the ids, and the last one always.

    Every second list names the query's own id, which every mask allows, so that a case has edges.
    """
    if num_ids == 0:
        return ()
    chosen = [*draw.subset(range(num_ids - 1), (num_ids - 1) // 2), num_ids - 1]
    if draw.integer(0, 1) and own not in chosen:
        chosen = sorted([own, *chosen])
    if listing != "sorted":
        chosen = draw.shuffled(chosen)
    if "duplicates" in listing:
        chosen = [*chosen, chosen[0], draw.choice(chosen)]
    if "holes" in listing:  # at the front, in the middle and at the end: tail-only padding hides faults
        middle = len(chosen) // 2
        chosen = [-1, *chosen[:middle], -1, -1, *chosen[middle:], -1]
    return tuple(chosen)


def draw_mask_rule(draw: Draw, kind: str, seqlens_kv: tuple[int, ...], num_qo_heads: int) -> MaskRule | None:
    """The rule a row names, with parameters that cut inside the lengths."""
    width = draw.integer(2, 6)
    prefix = PrefixLM(tuple(draw.integer(0, max(t - 1, 0)) for t in seqlens_kv))
    documents = Document(tuple((0, *sorted({draw.integer(1, t - 1)} if t > 1 else ())) for t in seqlens_kv))
    rules: dict[str, MaskRule | None] = {
        "none": None,
        "causal": Causal(),
        "window": Window(left=width, right=1),
        "causal_window": And((Causal(), Window(left=width - 1))),
        "prefix": prefix,
        "document": And((documents, Causal())),
        "head_window": And((Causal(), head_windows(width, num_qo_heads))),
        "custom": CustomMask(STRIPES),
        "causal_or_document": Or((Window(left=width, right=0), And((documents, Window(left=None, right=None))))),
    }
    return rules[kind]


def head_windows(width: int, num_qo_heads: int) -> HeadWindow:
    """A window of each head's own: wider from head to head, and without limit on the last one's left."""
    lefts = tuple(width + h if h < num_qo_heads - 1 else None for h in range(num_qo_heads))
    return HeadWindow(left=lefts, right=tuple(h % 2 or None for h in range(num_qo_heads)))


def draw_head_pages(draw: Draw, kind: str, num_pages: int, num_kv_heads: int) -> tuple[tuple[int, ...], ...] | None:
    """Where each KV head's part of a page lies: an order of its own for each head."""
    if kind == "none":
        return None
    of_head = [draw.shuffled(range(num_pages)) for _ in range(num_kv_heads)]
    return tuple(zip(*of_head, strict=True))


# what a row's value says of K and of V
QUANTS: dict[str, tuple[str, str]] = {
    "none": ("", ""),
    "int8_tensor": ("int8 tensor", "int8 tensor"),
    "int8_channel": ("int8 channel", "int8 channel"),
    "e4m3_page": ("float8_e4m3 page", "float8_e4m3 page"),
    "e4m3_token": ("float8_e4m3 token", "float8_e4m3 token"),
    "e5m2_head": ("float8_e5m2 head", "float8_e5m2 head"),
    "k_only": ("int8 page", ""),
    "v_only": ("", "float8_e4m3 head"),
    "mixed": ("int8 token", "float8_e5m2 page"),
}


def quant_of(name: str, seed: int) -> QuantStructure | None:
    """How one cache is stored."""
    if not name:
        return None
    code_format, granularity = name.split()
    return QuantStructure(format=code_format, granularity=granularity, seed=seed)  # type: ignore[arg-type]


def rope_of(kind: str, head_dim: int) -> Rope | None:
    """The rotation a row names; all of the head turns, or three quarters of it."""
    if kind == "none":
        return None
    rotary_dim = head_dim * 3 // 8 * 2 if kind == "raw_interleaved" else head_dim
    position: KeyPosition = "encoded" if kind == "encoded" else "raw"
    return Rope(rotary_dim=rotary_dim, interleaved=kind == "raw_interleaved", k_position=position)


def epilogue_of(draw: Draw, kind: str, num_qo_heads: int) -> tuple[EpilogueStep, ...]:
    """What is done to complete rows."""
    gates = Gate(tuple(logit / 4 for logit in draw.integers(num_qo_heads, -6, 6)))
    steps: dict[str, tuple[EpilogueStep, ...]] = {
        "none": (),
        "relu": (Activation("relu"),),
        "silu_gate": (Activation("silu"), gates),
        "cast": (Cast("bfloat16"),),
    }
    return steps[kind]


def score_rules(draw: Draw, kind: str, num_qo_heads: int) -> tuple[ScoreRule, ...]:
    """The rules a row names, in the order of application."""
    relative = RelativeBias(
        tuple(tuple(x / 8 for x in draw.integers(2 * FARTHEST + 1, -6, 6)) for _ in range(num_qo_heads))
    )
    alibi = Alibi(tuple(ALIBI_SLOPE / 2**h for h in range(num_qo_heads)))
    rules: dict[str, tuple[ScoreRule, ...]] = {
        "none": (),
        "alibi": (alibi,),
        "softcap": (SoftCap(SOFT_CAP),),
        "alibi_softcap": (alibi, SoftCap(SOFT_CAP)),
        "relative": (relative,),
        "softcap_relative": (SoftCap(SOFT_CAP), relative),
        "custom": (CustomScore(DECAY),),
    }
    return rules[kind]
