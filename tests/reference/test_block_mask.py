"""Block masks: what they list, what they decode to, and their transpose, against the dense mask they stand for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from attnconform.conformance.cases import profiles
from attnconform.reference.block_mask import (
    BlockLists,
    BlockMask,
    build_block_mask,
    decode_block_mask,
    transpose_block_mask,
)
from attnconform.reference.coordinates import BoolArray
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.rules import And, Causal, Window

profiles.load_profile()

BLOCK_SIZES = st.sampled_from((1, 2, 3, 4, 8))


@st.composite
def masks(draw: st.DrawFn, least: int = 1) -> BoolArray:
    """Dense masks (heads, q, kv) of any length, of noise or of rectangles: noise alone has no full block."""
    shape = (draw(st.integers(1, 2)), draw(st.integers(least, 11)), draw(st.integers(least, 11)))
    if draw(st.booleans(), label="noise"):
        return draw(arrays.arrays(np.bool_, shape), label="mask")
    mask = np.zeros(shape, dtype=bool)
    for _ in range(draw(st.integers(0, 3), label="rectangles")):
        (top, bottom), (left, right) = (sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape[1:])
        mask[draw(st.integers(0, shape[0] - 1)), top:bottom, left:right] = True
    return mask


def pairs(lists: BlockLists, num_rows: int) -> set[tuple[int, int, int]]:
    """Every (head, block row, block column) that is listed; a list must ascend, so nothing is listed twice."""
    found = set()
    for i in range(len(lists.indptr) - 1):
        columns = lists.of(i).tolist()
        assert columns == sorted(set(columns)), i
        found |= {(i // num_rows, i % num_rows, column) for column in columns}
    return found


def cell(mask: BoolArray, block_mask: BlockMask, head: int, row: int, column: int) -> BoolArray:
    """The elements of one block that exist."""
    top, left = row * block_mask.q_block_size, column * block_mask.kv_block_size
    return mask[head, top : top + block_mask.q_block_size, left : left + block_mask.kv_block_size]


@settings(max_examples=profiles.examples(200))
@given(masks(), BLOCK_SIZES, BLOCK_SIZES)
def test_decoding_a_block_mask_gives_the_mask_it_was_built_from(mask: BoolArray, q_size: int, kv_size: int) -> None:
    block_mask = build_block_mask(mask, q_block_size=q_size, kv_block_size=kv_size)
    np.testing.assert_array_equal(decode_block_mask(block_mask, mask), mask)


@settings(max_examples=profiles.examples(200))
@given(masks(), BLOCK_SIZES, BLOCK_SIZES)
def test_blocks_are_full_partial_or_empty_and_never_two_of_these(mask: BoolArray, q_size: int, kv_size: int) -> None:
    block_mask = build_block_mask(mask, q_block_size=q_size, kv_block_size=kv_size)
    full, partial = (pairs(lists, block_mask.num_q_blocks) for lists in (block_mask.full, block_mask.partial))
    for head in range(mask.shape[0]):
        for row in range(-(-mask.shape[1] // q_size)):
            for column in range(-(-mask.shape[2] // kv_size)):
                elements = [bool(x) for x in cell(mask, block_mask, head, row, column).flat]
                at = (head, row, column)
                assert (at in full) == all(elements), at
                assert (at in partial) == (any(elements) and not all(elements)), at
    assert not full & partial


@settings(max_examples=profiles.examples(100))
@given(masks(), BLOCK_SIZES, BLOCK_SIZES)
def test_only_partial_blocks_ask_the_element_mask(mask: BoolArray, q_size: int, kv_size: int) -> None:
    block_mask = build_block_mask(mask, q_block_size=q_size, kv_block_size=kv_size)
    partial = pairs(block_mask.partial, block_mask.num_q_blocks)
    elsewhere = np.ones_like(mask)
    for at in partial:
        cell(elsewhere, block_mask, *at)[:] = False
    np.testing.assert_array_equal(decode_block_mask(block_mask, mask ^ elsewhere), mask)


@settings(max_examples=profiles.examples(200))
@given(masks(), BLOCK_SIZES, BLOCK_SIZES)
def test_a_transposed_block_mask_is_that_of_the_transposed_mask(mask: BoolArray, q_size: int, kv_size: int) -> None:
    block_mask = build_block_mask(mask, q_block_size=q_size, kv_block_size=kv_size)
    got = transpose_block_mask(block_mask)
    want = build_block_mask(mask.swapaxes(1, 2), q_block_size=kv_size, kv_block_size=q_size)
    for kind in ("full", "partial"):
        ours, theirs = getattr(got, kind), getattr(want, kind)
        assert ours.indptr.tolist() == theirs.indptr.tolist()
        assert ours.indices.tolist() == theirs.indices.tolist()
        swapped = {(head, row, column) for head, column, row in pairs(ours, got.num_q_blocks)}
        assert swapped == pairs(getattr(block_mask, kind), block_mask.num_q_blocks)
    back = transpose_block_mask(got)
    assert back.full.indices.tolist() == block_mask.full.indices.tolist()
    assert back.partial.indptr.tolist() == block_mask.partial.indptr.tolist()


@pytest.mark.parametrize("seqlen", [7, 8, 9])
def test_a_ragged_last_block_is_full_when_all_it_has_is_allowed(seqlen: int) -> None:
    block_mask = build_block_mask(np.ones((1, seqlen, seqlen), dtype=bool), q_block_size=4, kv_block_size=4)
    blocks = -(-seqlen // 4)
    assert len(block_mask.full.indices) == blocks * blocks
    assert block_mask.partial.indices.size == 0


@pytest.mark.parametrize(("seqlen_q", "seqlen_kv"), [(0, 5), (5, 0), (0, 0)])
def test_a_request_without_queries_or_keys_has_a_block_mask_without_blocks(seqlen_q: int, seqlen_kv: int) -> None:
    mask = np.zeros((2, seqlen_q, seqlen_kv), dtype=bool)
    block_mask = build_block_mask(mask, q_block_size=4, kv_block_size=4)
    assert block_mask.full.indices.size == block_mask.partial.indices.size == 0
    assert len(block_mask.full.indptr) == 2 * -(-seqlen_q // 4) + 1
    assert decode_block_mask(block_mask, mask).shape == mask.shape
    assert len(transpose_block_mask(block_mask).full.indptr) == 2 * -(-seqlen_kv // 4) + 1


def test_eight_tokens_and_window_4_have_26_edges_in_9_of_16_blocks() -> None:
    q_idx, kv_idx = np.arange(8)[:, None], np.arange(8)
    mask = mask_allows(And((Causal(), Window(left=3))), 0, q_idx, kv_idx)[None]
    block_mask = build_block_mask(mask, q_block_size=2, kv_block_size=2)
    full, partial = (pairs(lists, 4) for lists in (block_mask.full, block_mask.partial))
    assert mask.sum() == 26
    assert len(full) + len(partial) == 9
    assert block_mask.num_q_blocks * block_mask.num_kv_blocks == 16
    # the article's own: of queries 4-5, keys 0-1 hold the edge (4, 1) alone, and keys 2-3 are allowed throughout
    assert cell(mask, block_mask, 0, 2, 0).tolist() == [[False, True], [False, False]]
    assert (0, 2, 0) in partial
    assert (0, 2, 1) in full
