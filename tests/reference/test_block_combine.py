"""Block masks combined, shared and of candidate lists: against the dense masks they stand for."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.reference.block_mask import BlockLists, build_block_mask, check_block_mask, decode_block_mask
from attnconform.reference.blocks.algebra import intersect_block_masks, unite_block_masks
from attnconform.reference.blocks.broadcast import joint_block_mask, repeat_heads, serves_heads, serves_requests
from attnconform.reference.blocks.build import Extent, element_mask, rule_block_mask
from attnconform.reference.blocks.candidates import problem_block_mask
from attnconform.reference.blocks.classify import classify_blocks
from attnconform.reference.blocks.reuse import same_lists
from attnconform.reference.blocks.transpose import transpose_csr
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import Candidates
from attnconform.reference.coordinates import BoolArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.formats import dense_masks
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import And, Causal, Document, MaskRule, PrefixLM, Window

profiles.load_profile()

SIZES = st.sampled_from((1, 2, 3, 4))
LENGTHS = st.sampled_from((1, 3, 4, 5, 11))


def random_mask(seed: int, shape: tuple[int, int, int]) -> BoolArray:
    """Noise in some rectangles and all or nothing in others, so that every kind of block comes up."""
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.5
    for value in (True, False, True):
        top, left = (int(rng.integers(0, n)) for n in shape[1:])
        mask[:, top : top + 6, left : left + 6] = value
    return mask


@settings(max_examples=profiles.examples(150))
@given(st.integers(0, 2**32), LENGTHS, LENGTHS, SIZES, SIZES, st.integers(1, 2))
def test_intersection_and_union_stand_for_those_of_the_masks(
    seed: int, seqlen_q: int, seqlen_kv: int, q_size: int, kv_size: int, heads: int
) -> None:
    a, b = (random_mask(seed + i, (heads, seqlen_q, seqlen_kv)) for i in range(2))
    sizes = {"q_block_size": q_size, "kv_block_size": kv_size}
    built_a, built_b = (build_block_mask(mask, **sizes) for mask in (a, b))
    for got, want in (
        (intersect_block_masks(built_a, built_b), a & b),
        (unite_block_masks(built_a, built_b), a | b),
    ):
        check_block_mask(got)
        np.testing.assert_array_equal(decode_block_mask(got, want), want)
    # and they know all that the lists can know: a block full in both, or in one, is full
    exact = build_block_mask(a & b, **sizes)
    assert same_full(intersect_block_masks(built_a, built_b).full, exact.full)


def same_full(a: BlockLists, b: BlockLists) -> bool:
    return np.array_equal(a.indptr, b.indptr) and np.array_equal(a.indices, b.indices)


@settings(max_examples=profiles.examples(150))
@given(st.integers(0, 2**32), LENGTHS, LENGTHS, SIZES, SIZES)
def test_blocks_classified_by_bounds_stand_for_every_mask_between_them(
    seed: int, seqlen_q: int, seqlen_kv: int, q_size: int, kv_size: int
) -> None:
    inner, extra, more = (random_mask(seed + i, (1, seqlen_q, seqlen_kv)) for i in range(3))
    between, outer = inner | extra, inner | extra | more
    blocks = classify_blocks(outer, inner, q_block_size=q_size, kv_block_size=kv_size)
    check_block_mask(blocks)
    for mask in (inner, between, outer):
        np.testing.assert_array_equal(decode_block_mask(blocks, mask), mask)


def test_bounds_that_cross_are_refused() -> None:
    outer, inner = np.array([[[True, False]]]), np.array([[[True, True]]])
    with pytest.raises(
        RefusedInput, match=r"^inner\[0, 0, 1\] is True, but the outer bound is False there \[BLOCK-CONS"
    ):
        classify_blocks(outer, inner, q_block_size=1, kv_block_size=2)


def test_two_partial_blocks_may_unite_to_a_full_one_and_stay_partial() -> None:
    left, right = np.array([[[True, False]]]), np.array([[[False, True]]])
    sizes = {"q_block_size": 1, "kv_block_size": 2}
    united = unite_block_masks(build_block_mask(left, **sizes), build_block_mask(right, **sizes))
    assert united.full.indices.tolist() == []
    assert united.partial.indices.tolist() == [0]


@pytest.mark.parametrize("change", [{"seqlen_kv": 9}, {"q_block_size": 3}, {"num_heads": 2}])
def test_block_masks_of_other_grids_are_not_combined(change: dict[str, int]) -> None:
    mask = build_block_mask(np.ones((1, 8, 8), dtype=bool), q_block_size=2, kv_block_size=2)
    (name,) = change
    with pytest.raises(RefusedInput, match=rf"^{name} is \d, but the other block mask has \d \[BLOCK-EXTENT\]$"):
        intersect_block_masks(mask, replace(mask, **change))


@settings(max_examples=profiles.examples(100))
@given(st.integers(0, 2**32), st.integers(2, 3), LENGTHS, SIZES)
def test_joint_lists_serve_every_request_with_its_own_element_mask(
    seed: int, requests: int, seqlen: int, size: int
) -> None:
    masks = [random_mask(seed + i, (2, seqlen, seqlen)) for i in range(requests)]
    built = [build_block_mask(mask, q_block_size=size, kv_block_size=size) for mask in masks]
    joint = joint_block_mask(built)
    check_block_mask(joint)
    assert serves_requests(joint, masks)


def test_documents_of_one_request_do_not_serve_another() -> None:
    extent = Extent(seqlen_q=8, seqlen_kv=8, q_block_size=2, kv_block_size=2)
    rule = And((Causal(), Document(((0, 4), (0, 6)))))
    masks = [element_mask(rule, extent, request=n) for n in range(2)]
    own = [rule_block_mask(rule, extent, request=n) for n in range(2)]
    assert serves_requests(own[0], masks[:1])
    assert not serves_requests(own[0], masks)
    assert not serves_requests(own[1], masks)
    assert serves_requests(joint_block_mask(own), masks)
    assert not serves_requests(joint_block_mask(own), [masks[0], masks[1][:, :6]])


def test_lists_of_one_head_serve_equal_heads_and_no_others() -> None:
    extent = Extent(seqlen_q=6, seqlen_kv=6, q_block_size=2, kv_block_size=2)
    wide, narrow = (element_mask(And((Causal(), Window(left=w))), extent) for w in (5, 1))
    lists = rule_block_mask(And((Causal(), Window(left=5))), extent)
    assert serves_heads(lists, np.concatenate([wide, wide]))
    assert not serves_heads(lists, np.concatenate([wide, narrow]))
    with pytest.raises(RefusedInput, match=r"num_heads is 2, but lists of 1 or 3 heads serve 3 heads"):
        repeat_heads(repeat_heads(lists, 2), 3)


@settings(max_examples=profiles.examples(150))
@given(st.data())
def test_a_transposed_list_holds_the_same_pairs_as_often(data: st.DataObject) -> None:
    columns = data.draw(st.integers(1, 6))
    lists = data.draw(st.lists(st.lists(st.integers(0, columns - 1), max_size=8), max_size=7))
    indptr = np.cumsum([0, *map(len, lists)])
    indices = np.array([c for row in lists for c in row], dtype=np.int64)
    starts, rows = transpose_csr(indptr, indices, columns)
    got = [(int(row), c) for c in range(columns) for row in rows[starts[c] : starts[c + 1]]]
    assert sorted(got) == sorted((r, c) for r, row in enumerate(lists) for c in row)
    assert all((np.diff(rows[starts[c] : starts[c + 1]]) >= 0).all() for c in range(columns))


def test_a_transpose_of_a_hundred_thousand_rows_and_columns_needs_no_dense_matrix() -> None:
    size = 100_000  # as a dense matrix, 10 GB
    indptr, indices = np.arange(size + 1) * 2, np.stack([np.arange(size), np.arange(size)[::-1]], axis=1).ravel()
    starts, rows = transpose_csr(indptr, indices, size)
    assert np.array_equal(np.diff(starts), np.full(size, 2))
    assert rows[starts[7] : starts[8]].tolist() == [7, size - 8]


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    """Two small requests, with lists or without, under a rule or none."""
    seqlens_kv = np.array([draw(st.sampled_from((1, 3, 4, 5, 9))) for _ in range(2)])
    seqlens_q = np.array([draw(st.integers(0, int(t))) for t in seqlens_kv])
    rule: MaskRule | None = draw(
        st.sampled_from((None, Causal(), And((Causal(), Window(left=2))), PrefixLM((2, 3)), Document(((0, 2), (0, 1)))))
    )
    lists = None
    if draw(st.booleans()):
        entries = [
            draw(st.lists(st.integers(-1, int(t) - 1), max_size=12))
            for t, rows in zip(seqlens_kv, seqlens_q, strict=True)
            for _ in range(rows * 2)
        ]
        # now and then a row lists everything, or no block would be full
        entries = [list(range(int(seqlens_kv.min()))) if len(e) > 8 else e for e in entries]
        indices = np.array([t for e in entries for t in e], dtype=np.int64)
        lists = Candidates(indptr=np.cumsum([0, *map(len, entries)]), indices=indices)
    return AttentionProblem(
        qo_indptr=np.cumsum([0, *seqlens_q]),
        seqlen_kv=seqlens_kv,
        q_offset=seqlens_kv - seqlens_q,
        num_qo_heads=2,
        num_kv_heads=1,
        head_dim_qk=1,
        head_dim_vo=1,
        cache=PagedCache(page_size=4, num_pages=6, page_table=np.arange(6).reshape(2, 3)),
        sm_scale=1.0,
        mask_rule=rule,
        candidates=lists,
    )


@settings(max_examples=profiles.examples(200))
@given(problems(), SIZES, SIZES)
def test_the_block_mask_of_a_problem_is_that_of_its_dense_masks(
    problem: AttentionProblem, q_size: int, kv_size: int
) -> None:
    sizes = {"q_block_size": q_size, "kv_block_size": kv_size}
    for request, mask in enumerate(dense_masks(problem)):
        got = problem_block_mask(problem, request, **sizes)
        check_block_mask(got)
        assert same_lists(got, build_block_mask(mask, **sizes))


def test_a_request_that_the_batch_does_not_have_is_refused() -> None:
    with pytest.raises(RefusedInput, match=r"^request is 2, but batch_size is 2 \[BLOCK-EXTENT\]$"):
        problem_block_mask(two_requests(), 2, q_block_size=2, kv_block_size=2)


def two_requests() -> AttentionProblem:
    return AttentionProblem(
        qo_indptr=np.array([0, 1, 2]),
        seqlen_kv=np.array([3, 4]),
        q_offset=np.array([2, 3]),
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=1,
        head_dim_vo=1,
        cache=PagedCache(page_size=4, num_pages=2, page_table=np.array([[0], [1]])),
        sm_scale=1.0,
    )


def test_the_union_of_two_rows_lists_is_no_full_block() -> None:
    lists = Candidates(indptr=np.array([0, 2, 4]), indices=np.array([0, 1, 2, 3]))
    problem = replace(two_requests(), qo_indptr=np.array([0, 0, 2]), q_offset=np.array([3, 2]), candidates=lists)
    together = problem_block_mask(problem, 1, q_block_size=2, kv_block_size=4)
    assert (together.full.indices.tolist(), together.partial.indices.tolist()) == ([], [0])
    apart = problem_block_mask(problem, 1, q_block_size=1, kv_block_size=2)
    assert (apart.full.indices.tolist(), apart.partial.indices.tolist()) == ([0, 1], [])


@pytest.mark.parametrize(
    ("field", "lists", "message"),
    [
        ("full", BlockLists(np.array([0, 1]), np.array([0])), r"len\(full.indptr\) is 2, but 1 heads of 2 block rows"),
        ("partial", BlockLists(np.array([0, 1, 1]), np.array([2])), r"partial.indices\[0\] is 2, but there are 2"),
        ("partial", BlockLists(np.array([0, 1, 1]), np.array([0])), r"block\[0\] is 0, but it is listed twice"),
    ],
)
def test_lists_that_do_not_fit_are_refused_by_name(field: str, lists: BlockLists, message: str) -> None:
    mask = build_block_mask(np.ones((1, 4, 4), dtype=bool), q_block_size=2, kv_block_size=2)
    with pytest.raises(RefusedInput, match=message):
        check_block_mask(replace(mask, **{field: lists}))


@pytest.mark.parametrize("shape", [(1, 4, 5), (1, 5, 4), (2, 4, 4), (1, 4, 3)])
def test_a_block_mask_of_other_lengths_than_the_data_is_an_error(shape: tuple[int, int, int]) -> None:
    mask = build_block_mask(np.ones((1, 4, 4), dtype=bool), q_block_size=2, kv_block_size=2)
    with pytest.raises(RefusedInput, match=r"but the data has \d \[BLOCK-EXTENT\]$"):
        decode_block_mask(mask, np.ones(shape, dtype=bool))
