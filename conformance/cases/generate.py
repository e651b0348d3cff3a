"""From one row of the covering array to an explicit, valid structure."""

from dataclasses import dataclass

import numpy as np

from attnconform.conformance.cases.axes import Row
from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.cases.structure import CandidateStructure, Structure
from attnconform.conformance.views import Hints
from attnconform.reference.rules import Alibi, And, Causal, Document, MaskRule, Or, PrefixLM, ScoreRule, SoftCap, Window

TILE_KV = 32  # the kv tile that cases ask for, small so that a short request still has several
BLOCK_SIZE = 16
MAX_DECODE_REQUESTS = 3
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


def build_structure(row: Row, seed: int) -> Structure:
    """The structure of one row of axis values; every draw comes from the seed."""
    draw = Draw(seed)
    num_qo_heads, num_kv_heads = (int(x) for x in row["heads"].split("/"))
    head_dim_qk, head_dim_vo = (int(x) for x in row["head_dim"].split("/"))
    page_size = int(row["page_size"])
    lengths = draw_lengths(draw, row, page_size)
    page_table, num_pages = draw_page_table(draw, row["pages"], lengths.kv, page_size)
    return Structure(
        dtype=row["dtype"],  # type: ignore[arg-type]  # the axis holds the literal's values
        seqlens_q=lengths.q,
        seqlens_kv=lengths.kv,
        q_offset=draw_offsets(draw, row, lengths),
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        page_size=page_size,
        num_pages=num_pages,
        page_table=page_table,
        layout=row["layout"],  # type: ignore[arg-type]
        interleaved=row["strides"] == "interleaved",
        candidates=draw_candidates(draw, row, lengths, num_qo_heads, num_kv_heads),
        mask_rule=draw_mask_rule(draw, row["mask"], lengths.kv),
        score_rules=score_rules(row["score"], num_qo_heads),
        sm_scale=1 / float(np.sqrt(head_dim_qk)),
        sink_logits=tuple(h / 4 for h in draw.integers(num_qo_heads, -4, 12)) if row["sink"] == "logits" else None,
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
    draw: Draw, row: Row, lengths: Lengths, num_qo_heads: int, num_kv_heads: int
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
    for i, (n, _) in enumerate(blocks):
        for _ in range(heads):
            entries = draw_list(draw, row["listing"], -(-lengths.kv[n] // block_size))
            lists.append((-1,) * min(len(entries), 2) if i == emptied else entries)
    return CandidateStructure(
        lists=tuple(lists),
        granularity="token" if block_size == 1 else "block",
        block_size=block_size,
        sharing=row["sharing"],  # type: ignore[arg-type]
        q_block_size=q_block_size,
        window=3 if row["local"] in ("window", "window_and_sinks") else 0,
        num_sink_tokens=2 if row["local"] in ("sinks", "window_and_sinks") else 0,
    )


def draw_list(draw: Draw, listing: str, num_ids: int) -> tuple[int, ...]:
    """One list: a subset of the ids, listed as the row says. Half of the ids, and the last one always."""
    if num_ids == 0:
        return ()
    chosen = [*draw.subset(range(num_ids - 1), (num_ids - 1) // 2), num_ids - 1]
    if listing != "sorted":
        chosen = draw.shuffled(chosen)
    if "duplicates" in listing:
        chosen = [*chosen, chosen[0], draw.choice(chosen)]
    if "holes" in listing:  # at the front, in the middle and at the end: tail-only padding hides faults
        middle = len(chosen) // 2
        chosen = [-1, *chosen[:middle], -1, -1, *chosen[middle:], -1]
    return tuple(chosen)


def draw_mask_rule(draw: Draw, kind: str, seqlens_kv: tuple[int, ...]) -> MaskRule | None:
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
        "causal_or_document": Or((Window(left=width, right=0), And((documents, Window(left=None, right=None))))),
    }
    return rules[kind]


def score_rules(kind: str, num_qo_heads: int) -> tuple[ScoreRule, ...]:
    """The rules a row names, in the order of application."""
    alibi = Alibi(tuple(ALIBI_SLOPE / 2**h for h in range(num_qo_heads)))
    rules: dict[str, tuple[ScoreRule, ...]] = {
        "none": (),
        "alibi": (alibi,),
        "softcap": (SoftCap(SOFT_CAP),),
        "alibi_softcap": (alibi, SoftCap(SOFT_CAP)),
    }
    return rules[kind]
