"""Candidate lists as CSR, fixed width and dense rows, with their decoders; token lists expanded to blocks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.reference.block_expansion import decode_members, expand_to_blocks, loaded_positions
from attnconform.reference.candidates import HOLE
from attnconform.reference.errors import RefusedInput
from attnconform.reference.formats import (
    csr_to_dense,
    csr_to_fixed_width,
    decode_csr,
    decode_fixed_width,
    dense_to_csr,
    fixed_width_to_csr,
    lists_to_csr,
)

profiles.load_profile()

LISTS = st.lists(st.lists(st.integers(0, 20), max_size=6), max_size=6)
WITH_HOLES = st.lists(st.lists(st.integers(-1, 20), max_size=9), max_size=6)


@settings(max_examples=profiles.examples(200))
@given(LISTS, st.integers(0, 3))
def test_every_form_and_back_gives_the_lists_with_their_order_and_duplicates(
    lists: list[list[int]], spare: int
) -> None:
    indptr, indices = lists_to_csr(lists)
    assert decode_csr(indptr, indices) == lists
    fixed = csr_to_fixed_width(indptr, indices, max(map(len, lists), default=0) + spare)
    assert decode_fixed_width(fixed) == lists
    assert decode_csr(*fixed_width_to_csr(fixed)) == lists


@settings(max_examples=profiles.examples(200))
@given(WITH_HOLES)
def test_holes_are_nothing_in_every_form(lists: list[list[int]]) -> None:
    kept = [[entry for entry in entries if entry != HOLE] for entries in lists]
    indptr, indices = lists_to_csr(lists)
    fixed = csr_to_fixed_width(indptr, indices, max(map(len, lists), default=0))
    assert decode_csr(indptr, indices) == decode_fixed_width(fixed) == decode_csr(*fixed_width_to_csr(fixed)) == kept
    dense = csr_to_dense(indptr, indices, 21)
    assert decode_csr(*dense_to_csr(dense)) == [sorted(set(entries)) for entries in kept]


@pytest.mark.parametrize(
    ("indptr", "message"),
    [
        ([1, 3], r"indptr\[0\] is 1, but must start at 0"),
        ([0, 2, 1], r"indptr\[2\] is 1, but the entry before is 2"),
        ([0, 2], r"indptr\[1\] is 2, but len\(indices\) is 3"),
        ([], r"indptr.shape is \(0,\), but must be \(num_lists \+ 1,\)"),
    ],
)
def test_an_indptr_that_does_not_fit_is_refused_by_name(indptr: list[int], message: str) -> None:
    with pytest.raises(RefusedInput, match=message + r" \[FORMAT-CSR\]$"):
        decode_csr(np.array(indptr, dtype=np.int64), np.array([1, 2, 3]))


def test_a_list_is_never_cut_to_the_width() -> None:
    indptr, indices = lists_to_csr([[1], [2, 3, 4]])
    with pytest.raises(RefusedInput, match=r"^len\(list\)\[1\] is 3, but width is 2 \[FORMAT-WIDTH\]$"):
        csr_to_fixed_width(indptr, indices, 2)


def test_a_column_that_is_not_there_is_refused() -> None:
    with pytest.raises(RefusedInput, match=r"^indices\[1\] is 3, but there are 3 columns \[FORMAT-DENSE\]$"):
        csr_to_dense(np.array([0, 2]), np.array([0, 3]), 3)


@settings(max_examples=profiles.examples(200))
@given(
    st.lists(st.lists(st.integers(-1, 150), max_size=9), max_size=7),
    st.sampled_from((1, 2, 3, 16, 63, 64, 65, 128)),
    st.sampled_from((1, 2, 4)),
)
def test_bitmaps_hold_what_each_row_lists_and_blocks_are_the_least_that_hold_it(
    lists: list[list[int]], block_size: int, q_block_size: int
) -> None:
    members = expand_to_blocks(*lists_to_csr(lists), block_size=block_size, q_block_size=q_block_size)
    wanted = [sorted({t for t in entries if t != HOLE}) for entries in lists]
    assert decode_members(members) == wanted
    for q_block in range(-(-len(lists) // q_block_size)):
        rows = wanted[q_block * q_block_size : (q_block + 1) * q_block_size]
        assert members.of(q_block).tolist() == sorted({t // block_size for row in rows for t in row})
        loaded = loaded_positions(members, q_block, seqlen_kv=140).values
        assert loaded.tolist() == [t for t in range(140) if t // block_size in members.of(q_block)]


def test_six_candidates_lie_in_two_blocks_of_64_of_which_128_tokens_are_loaded() -> None:
    members = expand_to_blocks(np.array([0, 6]), np.array([1, 2, 63, 64, 65, 127]), block_size=64)
    assert (members.indptr.tolist(), members.blocks.tolist()) == ([0, 2], [0, 1])
    assert len(loaded_positions(members, 0, seqlen_kv=1000)) == 128
    assert [bin(int(word)).count("1") for word in members.bitmaps.ravel()] == [3, 3]


@pytest.mark.parametrize(
    ("positions", "sizes", "message"),
    [
        ([0, -2], {"block_size": 4}, r"positions\[1\] is -2, but only a hole, -1, is negative \[SET-RANGE\]"),
        ([0, 1], {"block_size": 0}, r"block_size is 0, but must be at least 1 \[FORMAT-COVER\]"),
        ([0, 1], {"block_size": 2, "q_block_size": 0}, r"q_block_size is 0, but must be at least 1 \[FORMAT-COVER\]"),
    ],
)
def test_an_expansion_of_nonsense_is_refused(positions: list[int], sizes: dict[str, int], message: str) -> None:
    with pytest.raises(RefusedInput, match=message):
        expand_to_blocks(np.array([0, 2]), np.array(positions), **sizes)
