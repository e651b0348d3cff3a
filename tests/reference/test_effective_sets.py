"""Candidate sets, effective sets, slots and dense masks against plain loops over every (request, head, query, key).

The loops read the contract by themselves: membership is asked of one key at a time, and they call nothing
of the reference.
"""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.strategies import structures
from attnconform.conformance.cases.structure import CandidateStructure, Structure, build_problem
from attnconform.reference.attention import effective_sets
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import candidate_set
from attnconform.reference.coordinates import Positions, to_page_offsets
from attnconform.reference.formats import dense_masks
from attnconform.reference.problem import QueryRow
from attnconform.reference.rules import And, Causal, Document, MaskRule, Or, PrefixLM, Window
from attnconform.reference.steps import Steps

profiles.load_profile()


def queries(structure: Structure) -> Iterator[tuple[int, int, int, int]]:
    """Row of q, request, row within the request and logical position of every query."""
    row = 0
    for n in range(len(structure.seqlens_kv)):
        if structure.q_offset is None:
            first = structure.seqlens_kv[n] - structure.seqlens_q[n]
        else:
            first = structure.q_offset[n]
        for r in range(structure.seqlens_q[n]):
            yield row, n, r, first + r
            row += 1


def list_of(structure: Structure, lists: CandidateStructure, request: int, r: int, h: int) -> tuple[int, ...]:
    """The list a query head reads, found by counting every list before it."""
    at = 0
    for n in range(len(structure.seqlens_q)):
        for first in range(0, structure.seqlens_q[n], lists.q_block_size):
            for group in head_groups(structure, lists):
                if n == request and first <= r < first + lists.q_block_size and h in group:
                    return lists.lists[at]
                at += 1
    raise AssertionError(f"no list for request {request}, row {r}, head {h}")


def head_groups(structure: Structure, lists: CandidateStructure) -> list[list[int]]:
    """Which query heads share a list."""
    heads = list(range(structure.num_qo_heads))
    size = structure.num_qo_heads // structure.num_kv_heads
    if lists.sharing == "shared":
        return [heads]
    if lists.sharing == "kv_head":
        return [heads[i : i + size] for i in range(0, len(heads), size)]
    return [[h] for h in heads]


def is_listed(structure: Structure, request: int, r: int, i: int, h: int, j: int) -> bool:
    """Whether a row lists one key: by an entry, by the window or as a sink position."""
    lists = structure.candidates
    if lists is None:
        return True
    for entry in list_of(structure, lists, request, r, h):
        if entry != -1 and entry * lists.block_size <= j < (entry + 1) * lists.block_size:
            return True
    in_window = j <= i and i - j < lists.window
    return in_window or j < lists.num_sink_tokens


def document_at(starts: tuple[int, ...], position: int) -> int:
    """How many documents have begun at a position."""
    return sum(1 for start in starts if start <= position)


def is_allowed(rule: MaskRule | None, n: int, i: int, j: int) -> bool:
    """Whether a rule lets the query at i look at the key at j."""
    if rule is None:
        return True
    if isinstance(rule, Causal):
        return j <= i
    if isinstance(rule, Window):
        return (rule.left is None or i - j <= rule.left) and (rule.right is None or j - i <= rule.right)
    if isinstance(rule, PrefixLM):
        return j < rule.prefix_len[n] or j <= i
    if isinstance(rule, Document):
        return document_at(rule.starts[n], i) == document_at(rule.starts[n], j)
    if isinstance(rule, And):
        return all(is_allowed(part, n, i, j) for part in rule.rules)
    assert isinstance(rule, Or)
    return any(is_allowed(part, n, i, j) for part in rule.rules)


def slot_of(structure: Structure, n: int, j: int) -> int:
    """Where one token lies in the pool."""
    page, offset = divmod(j, structure.page_size)
    return structure.page_table[n][page] * structure.page_size + offset


SMALL = structures(max_tokens=36, max_rows=3, head_dims=((2, 2),), heads=((1, 1), (4, 2), (6, 2)), lowest_q_idx=-3)


@settings(max_examples=profiles.examples(150))
@given(SMALL)
def test_candidate_and_effective_sets_are_what_loops_over_every_edge_find(structure: Structure) -> None:
    problem, steps = build_problem(structure), Steps()
    for row, n, r, i in queries(structure):
        for h in range(structure.num_qo_heads):
            where = QueryRow(row, n, r, i)
            listed = [j for j in range(structure.seqlens_kv[n]) if is_listed(structure, n, r, i, h, j)]
            kept = [j for j in listed if is_allowed(structure.mask_rule, n, i, j)]
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
                is_listed(structure, n, r, i, h, j) and is_allowed(structure.mask_rule, n, i, j)
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
