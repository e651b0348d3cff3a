"""Block masks cut out of larger ones, carried to pages, tabled and counted."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.reference.block_mask import BlockMask, build_block_mask, decode_block_mask, transpose_block_mask
from attnconform.reference.blocks.build import Extent, element_mask, rule_block_mask
from attnconform.reference.blocks.physical import decode_physical, sort_by_slot, to_physical
from attnconform.reference.blocks.reuse import CropList, crop_failures, crop_lengths, same_lists, slice_rows
from attnconform.reference.blocks.statistics import block_statistics, nearest_rank, row_lengths
from attnconform.reference.blocks.table import BlockTable, decode_block_table, table_to_lists, to_block_table
from attnconform.reference.coordinates import BoolArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.rules import And, Causal, Document, MaskRule, Or, PrefixLM, Window

profiles.load_profile()

SIZES = st.sampled_from((1, 2, 3, 4))
RULES = st.sampled_from(
    (
        Causal(),
        And((Causal(), Window(left=3))),
        PrefixLM((3,)),
        And((Causal(), Document(((0, 4, 9),)))),
        Or((Window(left=1, right=1), Document(((0, 5),)))),
    )
)


@settings(max_examples=profiles.examples(200))
@given(RULES, st.integers(1, 13), SIZES, SIZES, st.data())
def test_sliced_rows_stand_for_the_masks_own_rows(
    rule: MaskRule, seqlen: int, q_size: int, kv_size: int, data: st.DataObject
) -> None:
    whole = Extent(seqlen_q=seqlen, seqlen_kv=seqlen, q_block_size=q_size, kv_block_size=kv_size)
    start = data.draw(st.integers(0, seqlen - 1))
    end_of_block = min((start // q_size + 1) * q_size, seqlen)
    stop = data.draw(st.integers(start, seqlen if start % q_size == 0 else end_of_block))
    rows = slice_rows(rule_block_mask(rule, whole), start, stop)
    own = replace(whole, seqlen_q=stop - start, q_offset=start)
    wanted = element_mask(rule, own)
    np.testing.assert_array_equal(wanted, element_mask(rule, whole)[:, start:stop])
    np.testing.assert_array_equal(decode_block_mask(rows, wanted), wanted)
    if start % q_size == 0 and (stop % q_size == 0 or stop == seqlen):
        assert same_lists(rows, rule_block_mask(rule, own))


def test_a_sliced_row_that_asks_the_element_mask_from_0_reads_other_keys() -> None:
    whole = Extent(seqlen_q=8, seqlen_kv=8, q_block_size=4, kv_block_size=4)
    rows = slice_rows(rule_block_mask(Causal(), whole), 5, 6)
    at_its_place, at_zero = (
        element_mask(Causal(), replace(whole, seqlen_q=1, q_offset=q_offset)) for q_offset in (5, 0)
    )
    assert decode_block_mask(rows, at_its_place).sum() == 6
    assert decode_block_mask(rows, at_zero).sum() == 4


@pytest.mark.parametrize(
    ("start", "stop", "message"),
    [
        (6, 9, r"rows is \(6, 9\), but the block mask has seqlen_q 8 \[BLOCK-EXTENT\]"),
        (2, 6, r"start is 2, but rows up to 6 straddle its blocks of 4 \[BLOCK-SLICE\]"),
    ],
)
def test_rows_that_are_not_there_or_straddle_blocks_are_refused(start: int, stop: int, message: str) -> None:
    whole = Extent(seqlen_q=8, seqlen_kv=8, q_block_size=4, kv_block_size=4)
    with pytest.raises(RefusedInput, match=message):
        slice_rows(rule_block_mask(Causal(), whole), start, stop)


def mask_of(rule: MaskRule):  # type: ignore[no-untyped-def]
    """A rule as the mask of any length."""
    return lambda n: element_mask(rule, Extent(seqlen_q=n, seqlen_kv=n, q_block_size=1, kv_block_size=1))


def last_key(n: int) -> BoolArray:
    """Every query sees the last key alone."""
    return np.broadcast_to(np.arange(n) == n - 1, (1, n, n)).copy()


def ring(n: int) -> BoolArray:
    """Every query sees its neighbours on a ring."""
    distance = np.abs(np.arange(n)[:, None] - np.arange(n))
    return (np.minimum(distance, n - distance) <= 2)[None]


def mirrored(n: int) -> BoolArray:
    """A rule that is symmetric about the middle of the sequence."""
    return (np.arange(n)[:, None] + np.arange(n) <= n)[None]


@pytest.mark.parametrize(
    "rule",
    [Causal(), And((Causal(), Window(left=3))), PrefixLM((5,)), And((Causal(), Document(((0, 4, 9),))))],
    ids=str,
)
@pytest.mark.parametrize(("q_size", "kv_size"), [(1, 1), (2, 2), (4, 2), (3, 4)])
def test_rules_of_two_positions_are_admitted(rule: MaskRule, q_size: int, kv_size: int) -> None:
    crops = CropList()
    assert crops.admit("rule", mask_of(rule), max_seqlen=13, q_block_size=q_size, kv_block_size=kv_size) == []
    largest = build_block_mask(mask_of(rule)(13), q_block_size=q_size, kv_block_size=kv_size)
    for length in range(14):
        wanted = mask_of(rule)(length)
        cropped = crops.crop("rule", largest, length, length)
        np.testing.assert_array_equal(decode_block_mask(cropped, wanted), wanted)


@pytest.mark.parametrize("rule", [last_key, ring, mirrored])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_rules_that_look_at_the_end_are_not_admitted(rule, size: int) -> None:  # type: ignore[no-untyped-def]
    crops = CropList()
    assert crops.admit("rule", rule, max_seqlen=12, q_block_size=size, kv_block_size=size)
    largest = build_block_mask(rule(12), q_block_size=size, kv_block_size=size)
    with pytest.raises(RefusedInput, match=r"^rule is rule, but only rules whose crop equals a rebuild"):
        crops.crop("rule", largest, 8, 8)


def test_bottom_right_rows_move_with_the_length_and_so_are_not_cropped() -> None:
    # two query rows at the end of the request: with fewer keys they sit elsewhere
    def last_rows(n: int) -> BoolArray:
        return np.concatenate([np.zeros((1, max(n - 2, 0), n), dtype=bool), mask_of(Causal())(n)[:, -2:]], axis=1)

    assert crop_failures(last_rows, max_seqlen=8, lengths=[6], q_block_size=2, kv_block_size=2) == [6]


def test_a_block_mask_cannot_grow() -> None:
    mask = build_block_mask(np.ones((1, 4, 4), dtype=bool), q_block_size=2, kv_block_size=2)
    with pytest.raises(RefusedInput, match=r"^seqlen_kv is 5, but the block mask was made for 4 \[BLOCK-EXTENT\]$"):
        crop_lengths(mask, 4, 5)


@settings(max_examples=profiles.examples(200))
@given(RULES, st.integers(1, 13), SIZES, st.sampled_from((1, 2, 3, 4, 6, 8)), st.integers(0, 2**32))
def test_physical_runs_hold_the_tokens_of_the_listed_blocks_at_their_slots(
    rule: MaskRule, seqlen: int, kv_size: int, page_size: int, seed: int
) -> None:
    mask = rule_block_mask(rule, Extent(seqlen_q=seqlen, seqlen_kv=seqlen, q_block_size=2, kv_block_size=kv_size))
    rng = np.random.default_rng(seed)
    table = rng.permutation(40)[: -(-seqlen // page_size)]
    before = [(lists.indptr.tolist(), lists.indices.tolist()) for lists in (mask.full, mask.partial)]
    physical = to_physical(mask, table, page_size=page_size, num_pages=40)
    for logical, runs in ((mask.full, physical.full), (mask.partial, physical.partial)):
        for row, tokens in enumerate(decode_physical(runs, seqlen_kv=seqlen)):
            wanted = [
                t
                for block in logical.of(row)
                for t in range(int(block) * kv_size, min((int(block) + 1) * kv_size, seqlen))
            ]
            assert [t for t, _ in tokens] == wanted
            assert all(slot == table[t // page_size] * page_size + t % page_size for t, slot in tokens)
        moved = decode_physical(sort_by_slot(runs), seqlen_kv=seqlen)
        assert [sorted(row) for row in moved] == decode_physical(runs, seqlen_kv=seqlen)
        assert all([s for _, s in row] == sorted(s for _, s in row) for row in moved)
    assert before == [(lists.indptr.tolist(), lists.indices.tolist()) for lists in (mask.full, mask.partial)]


def test_two_requests_that_share_pages_keep_one_logical_mask() -> None:
    mask = rule_block_mask(Causal(), Extent(seqlen_q=4, seqlen_kv=4, q_block_size=2, kv_block_size=2))
    for lists in (mask.full, mask.partial):
        lists.indices.flags.writeable = lists.indptr.flags.writeable = False
    first, second = (to_physical(mask, np.array(t), page_size=2, num_pages=9) for t in ([7, 3], [7, 5]))
    assert (first.full.slot.tolist(), second.full.slot.tolist()) == ([14], [14])
    assert (first.partial.slot.tolist(), second.partial.slot.tolist()) == ([14, 6], [14, 10])


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ([0], r"logical page is 1, but the page table has 1 entries"),
        ([0, 9], r"page_table_row\[1\] is 9, but num_pages"),
    ],
)
def test_a_block_on_a_page_that_is_not_there_is_refused(table: list[int], message: str) -> None:
    mask = rule_block_mask(Causal(), Extent(seqlen_q=4, seqlen_kv=4, q_block_size=2, kv_block_size=2))
    with pytest.raises(RefusedInput, match=message):
        to_physical(mask, np.array(table), page_size=2, num_pages=9)


def listed_blocks(mask: BlockMask) -> BoolArray:
    """(1, num_heads, num_q_blocks, num_kv_blocks) of the full lists."""
    listed = np.zeros((1, mask.num_heads, mask.num_q_blocks, mask.num_kv_blocks), dtype=bool)
    for row in range(mask.num_rows):
        listed[(0, *divmod(row, mask.num_q_blocks))][mask.full.of(row)] = True
    return listed


@settings(max_examples=profiles.examples(150))
@given(RULES, st.integers(1, 13), SIZES, st.integers(0, 3), st.sampled_from((0, -1, 99)))
def test_a_block_table_decodes_to_its_lists_whatever_stands_past_the_counts(
    rule: MaskRule, seqlen: int, size: int, spare: int, filler: int
) -> None:
    mask = rule_block_mask(
        rule, Extent(seqlen_q=seqlen, seqlen_kv=seqlen, q_block_size=size, kv_block_size=size), num_heads=2
    )
    width = int(np.diff(mask.full.indptr).max(initial=0)) + spare
    table = to_block_table([mask.full], num_heads=2, width=width, filler=filler)
    got = decode_block_table(table, batch_size=1, num_heads=2, num_kv_blocks=mask.num_kv_blocks)
    np.testing.assert_array_equal(got, listed_blocks(mask))
    (back,) = table_to_lists(table)
    assert back.indptr.tolist() == mask.full.indptr.tolist()
    assert back.indices.tolist() == mask.full.indices.tolist()


def test_a_table_of_one_batch_entry_and_head_broadcasts() -> None:
    table = BlockTable(np.array([[[1, 2]]]), np.array([[[[0, 7], [0, 1]]]]))
    listed = decode_block_table(table, batch_size=3, num_heads=2, num_kv_blocks=2)
    assert listed.shape == (3, 2, 2, 2)
    assert np.array_equal(listed[2, 1], [[True, False], [True, True]])


@pytest.mark.parametrize(
    ("counts", "indices", "message"),
    [
        ([[[3]]], [[[[0, 1]]]], r"num_blocks\[0, 0, 0\] is 3, but width is 2 \[FORMAT-TABLE\]"),
        ([[[2]]], [[[[0, 2]]]], r"indices\[0, 0, 0, 1\] is 2, but there are 2 blocks \[BLOCK-EXTENT\]"),
    ],
)
def test_a_table_that_cannot_be_decoded_is_refused(counts: list, indices: list, message: str) -> None:  # type: ignore[type-arg]
    table = BlockTable(np.array(counts), np.array(indices))
    with pytest.raises(RefusedInput, match=message):
        decode_block_table(table, batch_size=1, num_heads=1, num_kv_blocks=2)


@settings(max_examples=profiles.examples(150))
@given(RULES, st.integers(1, 13), SIZES, SIZES)
def test_statistics_are_those_of_the_blocks_counted_one_by_one(
    rule: MaskRule, seqlen: int, q_size: int, kv_size: int
) -> None:
    extent = Extent(seqlen_q=seqlen, seqlen_kv=seqlen, q_block_size=q_size, kv_block_size=kv_size)
    dense, mask = element_mask(rule, extent), rule_block_mask(rule, extent)
    cells = [
        dense[0, r : r + q_size, c : c + kv_size] for r in range(0, seqlen, q_size) for c in range(0, seqlen, kv_size)
    ]
    columns = -(-seqlen // kv_size)
    lengths = [sum(bool(c.any()) for c in cells[i : i + columns]) for i in range(0, len(cells), columns)]
    got = block_statistics(mask, num_edges=int(dense.sum()), transposed=True)
    assert row_lengths(mask).tolist() == lengths
    assert got.num_full == sum(bool(c.all()) for c in cells)
    assert got.num_partial == sum(bool(c.any()) and not c.all() for c in cells)
    assert got.num_empty == sum(not c.any() for c in cells)
    assert got.row_mean == pytest.approx(sum(lengths) / len(lengths))
    assert got.row_max == max(lengths)
    for p, value in ((50, got.row_p50), (95, got.row_p95)):
        assert value == min(x for x in lengths if 100 * sum(y <= x for y in lengths) >= p * len(lengths))
    assert got.amplification == (got.num_full + got.num_partial) * q_size * kv_size / dense.sum()
    turned = transpose_block_mask(mask)
    arrays = [
        m for lists in (mask, turned) for kind in (lists.full, lists.partial) for m in (kind.indices, kind.indptr)
    ]
    assert got.metadata_bytes == 4 * (sum(len(a) for a in arrays) - 4)  # a count a row, where indptr has one more


def test_equal_density_may_hide_a_long_row() -> None:
    even = build_block_mask(np.eye(8, dtype=bool)[None], q_block_size=1, kv_block_size=1)
    tail = np.zeros((1, 8, 8), dtype=bool)
    tail[0, 3] = True
    uneven = build_block_mask(tail, q_block_size=1, kv_block_size=1)
    a, b = (block_statistics(mask, num_edges=8) for mask in (even, uneven))
    assert (a.row_mean, b.row_mean) == (1.0, 1.0)
    assert (a.row_max, b.row_max) == (1, 8)
    assert (a.row_p50, b.row_p50) == (1, 0)


def test_more_edges_than_elements_are_refused() -> None:
    mask = build_block_mask(np.eye(4, dtype=bool)[None], q_block_size=2, kv_block_size=2)
    with pytest.raises(RefusedInput, match=r"^num_edges is 9, but the listed blocks have 8 elements \[BLOCK-STAT"):
        block_statistics(mask, num_edges=9)


def test_a_rank_of_nothing_is_0() -> None:
    assert nearest_rank(np.empty(0, dtype=np.int64), 95) == 0
