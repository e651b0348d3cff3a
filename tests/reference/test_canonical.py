"""N(D, W, A, T): triples that agree with every other way to get at a row's candidates, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.reference.candidates import HOLE
from attnconform.reference.canonical import CanonicalRow, RequestPages, canonical_row, canonical_rows
from attnconform.reference.errors import RefusedInput
from attnconform.reference.steps import Steps

profiles.load_profile()

NONE = np.array([], dtype=np.int64)
PAGES = RequestPages(seqlen_kv=10, page_table_row=np.array([5, 2, 7]), page_size=4, num_pages=8)
SOUND = [case for case in matrix("L1") if case.operation in ("forward", "structure")]


def owned_by(*pages: int) -> np.ndarray:
    return np.isin(np.arange(PAGES.num_pages), pages)


@settings(max_examples=profiles.examples(200))
@given(
    st.lists(st.integers(-1, 9)),
    st.lists(st.integers(-3, 14)),
    st.lists(st.integers(0, 14)),
    st.permutations(range(8)),
)
def test_every_position_stands_once_with_the_slot_of_its_own_page(
    dynamic: list[int], window: list[int], sinks: list[int], pages: list[int]
) -> None:
    request = RequestPages(seqlen_kv=10, page_table_row=np.array(pages[:3]), page_size=4, num_pages=8)
    d, w, a = (np.array(part, dtype=np.int64) for part in (dynamic, window, sinks))
    got = canonical_row(d, w, a, request)
    wanted = sorted({t for t in [*dynamic, *window, *sinks] if 0 <= t < 10})
    assert got.triples() == [(t, (t // 4, t % 4), pages[t // 4] * 4 + t % 4) for t in wanted]


@pytest.mark.parametrize("case", SOUND[:: max(len(SOUND) // 12, 1)], ids=lambda case: case.id)
def test_rows_of_a_problem_are_those_of_the_steps(case: Case) -> None:
    problem, steps = build_problem(case.structure), Steps()
    rows = iter(canonical_rows(problem))
    for where in problem.rows():
        for h in range(problem.num_qo_heads):
            got, listed = next(rows), steps.candidates(problem, where, h)
            assert got.positions.values.tolist() == listed.values.tolist()
            assert got.slots.values.tolist() == steps.slots(problem, where, listed).values.tolist()
    assert next(rows, None) is None


def test_a_row_that_lists_nothing_is_empty() -> None:
    assert canonical_row(np.array([HOLE]), NONE, NONE, PAGES).triples() == []


@pytest.mark.parametrize(
    ("dynamic", "request_pages", "last_visible", "clause"),
    [
        ([10], PAGES, None, "SET-RANGE"),  # the last page has room for it, but it is not committed
        ([-2], PAGES, None, "SET-RANGE"),
        ([3, 7], PAGES, 6, "SET-VALIDATE"),
        ([0, 4], RequestPages(**{**vars(PAGES), "owned": owned_by(5, 7)}), None, "SAFE-OWNER"),
        ([9], RequestPages(**{**vars(PAGES), "num_pages": 7}), None, "COORD-PAGE-RANGE"),
        ([9], RequestPages(**{**vars(PAGES), "page_table_row": np.array([5, 2])}), None, "COORD-PAGE-RANGE"),
    ],
)
def test_what_leads_astray_is_refused_by_its_clause(
    dynamic: list[int], request_pages: RequestPages, last_visible: int | None, clause: str
) -> None:
    with pytest.raises(RefusedInput) as refused:
        canonical_row(np.array(dynamic), NONE, NONE, request_pages, last_visible=last_visible)
    assert refused.value.clause == clause


def test_a_page_that_no_candidate_needs_may_be_anyones() -> None:
    request = RequestPages(**{**vars(PAGES), "owned": owned_by(5), "page_table_row": np.array([5, 99, -1])})
    assert canonical_row(np.array([0, 3]), NONE, NONE, request).slots.values.tolist() == [20, 23]


def test_a_list_without_a_declared_end_may_hold_the_future() -> None:
    assert isinstance(canonical_row(np.array([9]), NONE, NONE, PAGES), CanonicalRow)
    assert canonical_row(np.array([6]), NONE, NONE, PAGES, last_visible=6).positions.values.tolist() == [6]
