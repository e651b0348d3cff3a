"""Where rows stand before an operator that masks causally whatever it is asked."""

import pytest

from attnconform.conformance.adapters.placement import causal_places, rows_of_calls
from attnconform.conformance.cases.structure import build_problem
from attnconform.conformance.explain.smoke_cases import Sizes, tiny_structure
from attnconform.conformance.views import ProblemView
from attnconform.reference.rules import Causal


def places(mask, *, q: int, kv: int, offset: int) -> list[int]:
    structure = tiny_structure(sizes=Sizes(), q=(q,), kv=(kv,), mask=mask)
    problem = build_problem(structure)
    problem.q_offset[0] = offset
    return causal_places(ProblemView(problem), 0)


def test_a_causal_row_stands_at_its_own_position() -> None:
    assert places(Causal(), q=3, kv=9, offset=4) == [4, 5, 6]


def test_a_row_past_the_last_key_stands_at_the_last_key() -> None:
    assert places(Causal(), q=3, kv=6, offset=4) == [4, 5, 5]


def test_without_a_mask_every_row_stands_where_it_sees_all() -> None:
    assert places(None, q=3, kv=9, offset=0) == [8, 8, 8]


@pytest.mark.parametrize(
    ("given", "together", "calls"),
    [
        ([4, 5, 6], True, [slice(0, 3)]),
        ([8, 8], True, [slice(0, 1), slice(1, 2)]),
        ([4, 5], False, [slice(0, 1), slice(1, 2)]),
    ],
)  # fmt: skip
def test_rows_side_by_side_are_one_call(given: list[int], together: bool, calls: list[slice]) -> None:
    assert rows_of_calls(given, together=together) == calls
