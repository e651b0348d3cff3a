"""From one row of L2's and L3's axes to a structure: what L1's generator makes of the row, with edges of its own."""

import msgspec

from attnconform.conformance.cases.axes import FORWARD_AXES, Row
from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.cases.generate import BLOCK_SIZE, Lengths, build_structure
from attnconform.conformance.cases.structure import CandidateStructure, Structure

EDGE_SEED = 1 << 50  # draws of an edge never meet those of the structure it changes
NEAR_TIE_SCALE = 2.0**-12  # scores of a few thousandths: every weight is nearly the same
SPARE_ELEMENTS = 8  # beyond the wider head_dim, as an interleaved pool has them
MANY_REQUESTS = 11
NEAR = 7  # ids before the end among which the one of a list is: where a mask's window looks
LONG = 2049  # keys of the one long request: past two splits of a thousand, and no multiple of any page or tile


def build_wide_structure(row: Row, seed: int, *, lengths: Lengths | None = None) -> Structure:
    """The structure of a row of L2 or L3; every draw comes from the seed. Lengths given stand for the row's."""
    draw = Draw(seed ^ EDGE_SEED)
    structure = build_structure(plain_row(row), seed, lengths=lengths or edge_lengths(draw, row))
    if structure.candidates is not None and row["counts"] != "half":
        lists = recounted(draw, row, structure)
        structure = msgspec.structs.replace(structure, candidates=lists)
    if row["scale"] == "near_ties":
        structure = msgspec.structs.replace(structure, sm_scale=NEAR_TIE_SCALE)
    if row["base"] == "misaligned":
        structure = msgspec.structs.replace(structure, page_stride=odd_page_stride(structure))
    return structure


def plain_row(row: Row) -> Row:
    """The row with a length that L1's generator knows."""
    return row if row["lengths"] in FORWARD_AXES["lengths"] else {**row, "lengths": "page_edge"}


def edge_lengths(draw: Draw, row: Row) -> Lengths | None:
    """Lengths that L1 has not; None where it has them."""
    kv = {
        "block_edge": (BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1),
        "one_and_many": (draw.integer(130, 150), *(draw.integer(1, 4) for _ in range(MANY_REQUESTS))),
        "thousands": (LONG,),
    }.get(row["lengths"])
    if kv is None:
        return None
    rows = {"decode": (1,), "prefill": (5,), "chunk": (3,), "mixed": (5, 1)}[row["phase"]]
    return Lengths(tuple(min(rows[min(n, len(rows) - 1)], t) for n, t in enumerate(kv)), kv)


def recounted(draw: Draw, row: Row, structure: Structure) -> CandidateStructure:
    """Lists of the same shape that name one id, all of them, none, or the same one everywhere. [SET-IDENTITY]"""
    lists = structure.candidates
    assert lists is not None
    requests = [
        n
        for n, rows in enumerate(structure.seqlens_q)
        for _ in range(-(-rows // lists.q_block_size) * (len(lists.lists) // num_q_blocks(structure)))
    ]
    changed = []
    for n, before in zip(requests, lists.lists, strict=True):
        num_ids = -(-structure.seqlens_kv[n] // lists.block_size)
        is_emptied = all(i == -1 for i in before)
        changed.append(before if is_emptied else arranged(draw, row["listing"], chosen(draw, row["counts"], num_ids)))
    longest = max(map(len, changed), default=0)
    bias = None if lists.rank_bias is None else tuple(x / 8 for x in draw.integers(max(longest, 1), -12, 4))[:longest]
    return msgspec.structs.replace(lists, lists=tuple(changed), rank_bias=bias)


def num_q_blocks(structure: Structure) -> int:
    """Blocks of query rows over all requests: each has a list for every head that lists are given for."""
    assert structure.candidates is not None
    return sum(-(-rows // structure.candidates.q_block_size) for rows in structure.seqlens_q)


def chosen(draw: Draw, counts: str, num_ids: int) -> list[int]:
    """The ids of one list."""
    if counts == "none" or not num_ids:
        return []
    one = draw.integer(max(num_ids - NEAR, 0), num_ids - 1)
    return {"one": [one], "all": list(range(num_ids)), "hot": [0]}[counts]


def arranged(draw: Draw, listing: str, ids: list[int]) -> tuple[int, ...]:
    """Ids listed as a row says, like L1's lists."""
    entries = ids if listing == "sorted" else draw.shuffled(ids)
    if "duplicates" in listing and entries:
        entries = [*entries, entries[0], draw.choice(entries)]
    if "holes" in listing:
        middle = len(entries) // 2
        entries = [-1, *entries[:middle], -1, -1, *entries[middle:], -1]
    return tuple(entries)


def odd_page_stride(structure: Structure) -> int:
    """Elements from page to page, odd, so that no second page starts where a wide load may. [COORD-STRIDE]"""
    dim = max(structure.head_dim_qk, structure.head_dim_vo) + SPARE_ELEMENTS
    return 2 * structure.page_size * structure.num_kv_heads * dim + 1
