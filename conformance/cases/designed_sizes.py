"""Designed cases of sizes that the arrays do not reach: no keys, many heads, large pages and blocks, wide windows.

Each is small in all else. Seeds begin elsewhere than those of `designed`, so that either list grows without renaming
the other's cases.
"""

import msgspec

from attnconform.conformance.cases.axes import Row
from attnconform.conformance.cases.designed import LONG, Change, designed_case, unsplit
from attnconform.conformance.cases.generate import Lengths
from attnconform.conformance.cases.structure import Case, Structure
from attnconform.conformance.views import Hints
from attnconform.reference.candidates import HOLE
from attnconform.reference.rope import Rope
from attnconform.reference.rules import And, Causal, RelativeBias, Window

FIRST_SEED = 0x5EED_6000_0000
PADDED_BATCH = Lengths(q=(1, 1, 1, 1), kv=(0, 17, 0, 33))  # requests of no tokens fill up a captured batch
ROWS_WITHOUT_KEYS = Lengths(q=(2, 3, 1, 2), kv=(0, 20, 33, 0))
LISTS_PAST_64 = Lengths(q=(67,), kv=(70,))
TWO_SHORT = Lengths(q=(1, 2), kv=(9, 33))
LONGEST_ENDS_A_PAGE = Lengths(q=(3, 2), kv=(112, 50))  # of 16 tokens: a window of 48 takes 3 of them here, and 4 there
PAST_A_PAGE_OF_272 = Lengths(q=(2, 1), kv=(281, 5))
PAST_256_PAGES = Lengths(q=(1, 1), kv=(290, 3))  # of one token
BLOCKS_OF_64 = Lengths(q=(1, 2), kv=(200, 70))
PAST_128 = Lengths(q=(2, 1), kv=(150, 3))
BACK_BY_50 = Lengths(q=(3, 1), kv=(57, 20))
PACKED_PAST_192 = Lengths(q=(25,), kv=(25,))  # rows times the heads of a group of eight, as kernels pack them
WIDE, FARTHEST, MANY_HOLES = 47, 20, 64


def with_window(structure: Structure, left: int) -> Structure:
    """A causal window of so many positions before the query's own."""
    return msgspec.structs.replace(structure, mask_rule=And((Causal(), Window(left=left))))


def wider_than_a_tile(structure: Structure) -> Structure:
    """A window that begins pages and tiles before the query, in the middle of one. [MASK-WINDOW, MERGE-SPLIT]"""
    return with_window(structure, WIDE)


def of_the_query_alone(structure: Structure) -> Structure:
    """A window with a left edge of 0, which is not the word for none. [MASK-WINDOW]"""
    return with_window(unsplit(structure), 0)


def past_the_end(structure: Structure) -> Structure:
    """Queries behind the last committed token, as where the newest keys lie in another shard. [MASK-OFFSET]"""
    offsets = tuple(
        length + 1 - rows // 2 for rows, length in zip(structure.seqlens_q, structure.seqlens_kv, strict=True)
    )
    return msgspec.structs.replace(with_window(unsplit(structure), 6), q_offset=offsets)


def in_blocks_of_64(structure: Structure) -> Structure:
    """Blocks of several pages and tiles, the last of a request ragged. [BLOCK-EXPAND]"""
    assert structure.candidates is not None
    lists = ((3, 1), (2, 0), (1,), (1, 0), (0, 1), (0,))
    candidates = msgspec.structs.replace(structure.candidates, block_size=64, lists=lists)
    return msgspec.structs.replace(unsplit(structure), candidates=candidates)


def holes_within(structure: Structure) -> Structure:
    """Lists with tiles of nothing but holes in their middle, and entries of before them behind. [SET-HOLE]"""
    assert structure.candidates is not None
    lists = tuple(
        entries[: len(entries) // 2] + (HOLE,) * MANY_HOLES + entries[len(entries) // 2 :] + entries[:2]
        for entries in structure.candidates.lists
    )
    candidates = msgspec.structs.replace(structure.candidates, lists=lists)
    return msgspec.structs.replace(structure, candidates=candidates, hints=Hints(num_kv_splits=3))


def turned_in_part(structure: Structure) -> Structure:
    """Pairs lie apart by half of what turns, not by half of the head. [ROPE-PAIRS]"""
    rope = Rope(rotary_dim=structure.head_dim_qk // 2, k_position="raw")
    return msgspec.structs.replace(unsplit(structure), rope=rope)


def by_a_long_table(structure: Structure) -> Structure:
    """A relative bias that tells distances apart over more than a tile. [SCORE-RELATIVE]"""
    entries = range(2 * FARTHEST + 1)
    tables = tuple(tuple((7 * i + 3 * h) % 13 / 8 for i in entries) for h in range(structure.num_qo_heads))
    return msgspec.structs.replace(unsplit(structure), score_rules=(RelativeBias(tables),))


# slug: what differs from a plain row, lengths, what is changed then, further clauses
FORWARD: dict[str, tuple[dict[str, str], Lengths, Change, tuple[str, ...]]] = {
    "requests-without-keys": (
        {"lengths": "empty_request", "empty": "first", "values": "v_mean"}, PADDED_BATCH, unsplit, ("PLAN-REPLAN",)
    ),
    "rows-without-keys-and-sinks": (
        {"phase": "chunk", "mask": "causal", "lengths": "empty_request", "empty": "first", "sink": "logits",
         "splits": "3"}, ROWS_WITHOUT_KEYS, lambda structure: structure, ()
    ),
    "lists-of-rows-past-a-tile": (
        {"phase": "prefill", "granularity": "token", "listing": "holes", "heads": "4/1", "dtype": "bfloat16"},
        LISTS_PAST_64, unsplit, ()
    ),
    "four-kv-heads": (
        {"heads": "28/4", "head_dim": "64/32", "phase": "chunk", "mask": "causal", "granularity": "token",
         "sharing": "kv_head", "listing": "shuffled", "score": "alibi", "sink": "logits"}, TWO_SHORT, unsplit, ()
    ),
    "scales-of-four-heads": ({"heads": "28/4", "head_dim": "64/32", "quant": "e5m2_head"}, TWO_SHORT, unsplit, ()),
    "a-group-of-24": ({"heads": "48/2", "head_dim": "64/32"}, TWO_SHORT, unsplit, ()),
    "a-head-of-72": (
        {"head_dim": "72/72", "phase": "chunk", "mask": "causal", "dtype": "float16"}, TWO_SHORT, unsplit, ()
    ),
    "window-past-a-tile": (
        {"phase": "prefill", "mask": "causal_window", "splits": "3", "values": "v_mean"}, LONGEST_ENDS_A_PAGE,
        wider_than_a_tile, ()
    ),
    "window-of-the-query-alone": ({"phase": "chunk", "mask": "causal_window"}, BACK_BY_50, of_the_query_alone, ()),
    "queries-past-the-end": (
        {"phase": "chunk", "mask": "causal_window", "score": "alibi"}, BACK_BY_50, past_the_end, ()
    ),
    "pages-of-272": (
        {"page_size": "272", "head_dim": "256/256", "phase": "chunk", "mask": "causal"}, PAST_A_PAGE_OF_272, unsplit, ()
    ),
    "pages-past-256": (
        {"page_size": "1", "heads": "4/1", "head_dim": "256/256", "dtype": "float16"}, PAST_256_PAGES, unsplit, ()
    ),
    "blocks-of-64": (
        {"granularity": "block", "sharing": "kv_head", "listing": "shuffled", "phase": "chunk"}, BLOCKS_OF_64,
        in_blocks_of_64, ()
    ),
    "tiles-of-holes-within": (
        {"granularity": "token", "sharing": "query_head", "listing": "holes_and_duplicates", "splits": "3",
         "lengths": "long_and_short"}, LONG, holes_within, ()
    ),
    "turned-in-part": ({"rope": "raw", "phase": "chunk", "mask": "causal"}, PAST_128, turned_in_part, ()),
    "a-long-table": ({"score": "relative", "phase": "chunk", "mask": "causal"}, BACK_BY_50, by_a_long_table, ()),
}  # fmt: skip
BACKWARD: dict[str, tuple[dict[str, str], Lengths, Change, tuple[str, ...]]] = {
    "rows-without-keys-and-sinks": (
        {"phase": "chunk", "mask": "causal", "lengths": "empty_request", "empty": "first", "sink": "logits"},
        ROWS_WITHOUT_KEYS, unsplit, ()
    ),
}  # fmt: skip
# after those above, whose seeds follow from their places
FURTHER: dict[str, tuple[dict[str, str], Lengths, Change, tuple[str, ...]]] = {
    # some kernels load pages otherwise where a page holds whole tiles of keys and rows are more than a tile
    "rows-past-a-tile-over-pages-of-128": (
        {"page_size": "128", "heads": "8/1", "dtype": "float16", "phase": "prefill", "mask": "causal"},
        PACKED_PAST_192, unsplit, ()
    ),
}  # fmt: skip


def cases_of_sizes(plain: Row) -> tuple[Case, ...]:
    """One case a design; `plain` has the axis values that a design does not name."""
    designs = [("forward", slug, design) for slug, design in FORWARD.items()]
    designs += [("backward", slug, design) for slug, design in BACKWARD.items()]
    designs += [("forward", slug, design) for slug, design in FURTHER.items()]
    return tuple(
        designed_case(operation, slug, {**plain, **changes}, FIRST_SEED + 8 * i + 1, lengths, change, further)
        for i, (operation, slug, (changes, lengths, change, further)) in enumerate(designs)
    )
