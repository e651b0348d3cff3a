"""Candidate sets, effective sets, slots and dense masks against plain loops over every (request, head, query, key)."""

import numpy as np
import pytest
from hypothesis import given, settings
from plain_attention import is_allowed, is_listed, queries, slot_of

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.strategies import structures
from attnconform.conformance.cases.structure import Structure, build_problem
from attnconform.reference.attention import effective_sets
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import candidate_set
from attnconform.reference.coordinates import Positions, to_page_offsets
from attnconform.reference.formats import dense_masks
from attnconform.reference.problem import QueryRow
from attnconform.reference.steps import Steps

profiles.load_profile()


SMALL = structures(max_tokens=36, max_rows=3, head_dims=((2, 2),), heads=((1, 1), (4, 2), (6, 2)), lowest_q_idx=-3)


@settings(max_examples=profiles.examples(150))
@given(SMALL)
def test_candidate_and_effective_sets_are_what_loops_over_every_edge_find(structure: Structure) -> None:
    problem, steps = build_problem(structure), Steps()
    for row, n, r, i in queries(structure):
        for h in range(structure.num_qo_heads):
            where = QueryRow(row, n, r, i)
            listed = [j for j in range(structure.seqlens_kv[n]) if is_listed(structure, n, r, i, h, j)]
            kept = [j for j in listed if is_allowed(structure.mask_rule, n, h, i, j)]
            assert steps.candidates(problem, where, h).values.tolist() == listed, (row, h)
            assert steps.effective(problem, where, h).values.tolist() == kept, (row, h)


@settings(max_examples=profiles.examples(100))
@given(SMALL)
def test_edges_slots_and_dense_masks_are_what_loops_over_every_edge_find(structure: Structure) -> None:
    problem = build_problem(structure)
    edges, masks = effective_sets(problem), dense_masks(problem)
    assert [m.shape for m in masks] == [
        (structure.num_qo_heads, rows, t) for rows, t in zip(structure.seqlens_q, structure.seqlens_kv, strict=True)
    ]
    assert edges.counts().shape == (sum(structure.seqlens_q), structure.num_qo_heads)
    for row, n, r, i in queries(structure):
        for h in range(structure.num_qo_heads):
            attended = [
                is_listed(structure, n, r, i, h, j) and is_allowed(structure.mask_rule, n, h, i, j)
                for j in range(structure.seqlens_kv[n])
            ]
            keys = [j for j, sees in enumerate(attended) if sees]
            positions, slots = edges.of(row, h)
            assert masks[n][h, r].tolist() == attended, (row, h)
            assert positions.tolist() == keys, (row, h)
            assert slots.tolist() == [slot_of(structure, n, j) for j in keys], (row, h)
            assert edges.counts()[row, h] == len(keys), (row, h)


@settings(max_examples=profiles.examples(50))
@given(SMALL)
def test_rows_keep_their_request_and_logical_position(structure: Structure) -> None:
    found = [(w.row, w.request, w.local, w.q_idx) for w in build_problem(structure).rows()]
    assert found == list(queries(structure))


def test_six_candidates_of_the_article_lie_in_pages_41_and_7() -> None:
    tokens = np.array([1, 2, 63, 64, 65, 127])
    cache = PagedCache(page_size=64, num_pages=64, page_table=np.array([[41, 7]]))
    where = to_page_offsets(Positions(tokens), page_size=64)
    assert where.page.tolist() == [0, 0, 0, 1, 1, 1]
    assert where.offset.tolist() == [1, 2, 63, 0, 1, 63]
    assert cache.slots(0, Positions(tokens)).values.tolist() == [41 * 64 + i for i in (1, 2, 63)] + [
        7 * 64 + i for i in (0, 1, 63)
    ]


def test_five_candidates_of_the_article_lie_in_logical_pages_1_and_4() -> None:
    where = to_page_offsets(Positions(np.array([18, 23, 70, 71, 72])), page_size=16)
    assert where.page.tolist() == [1, 1, 4, 4, 4]
    assert where.offset.tolist() == [2, 7, 6, 7, 8]


def test_64k_request_of_the_article_lists_4224_tokens_in_264_pages() -> None:
    pages = np.concatenate([np.arange(256) * 15, np.arange(4088, 4096)])
    found = candidate_set(pages, q_idx=65535, seqlen_kv=65536, block_size=16, window=0, num_sink_tokens=0)
    assert len(found) == 4224


def test_slots_past_two_to_the_31_do_not_wrap() -> None:
    table = np.array([[2**28, 2**28 + 1]], dtype=np.int32)
    cache = PagedCache(page_size=16, num_pages=2**28 + 2, page_table=table)  # type: ignore[arg-type]  # what a caller of 32 bits passes
    assert cache.slots(0, Positions(np.array([0, 15, 16]))).values.tolist() == [2**32, 2**32 + 15, 2**32 + 16]


@pytest.mark.parametrize(
    ("window", "q_idx", "want"),
    [(0, 5, []), (1, 5, [5]), (3, 5, [3, 4, 5]), (3, 0, [0]), (3, 9, [7]), (3, 10, []), (3, -1, [])],
)
def test_window_counts_the_querys_own_position_and_stays_inside_the_request(
    window: int, q_idx: int, want: list[int]
) -> None:
    none = np.empty(0, dtype=np.int64)
    found = candidate_set(none, q_idx=q_idx, seqlen_kv=8, block_size=1, window=window, num_sink_tokens=0)
    assert found.values.tolist() == want
