"""A life of a cache finds backends that carry something from one step into the next."""

import pytest

from attnconform.conformance.adapters.reference_plans import ReferencePlans
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.judge.stateful import check_lives


@pytest.mark.parametrize("backend", [StepsBackend, ReferencePlans])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_lives_through_appends_forks_evictions_and_moves(backend, dtype):
    check_lives(backend, examples=8, dtype=dtype)


@pytest.mark.parametrize(
    "mistake",
    [
        "keeps-the-plan-where-the-rows-fit",
        "finds-plans-without-their-candidates",
        "reads-a-stale-copy-of-the-cache",
        "gathers-keys-once",
        "ignores-the-page-table",
    ],
)
def test_a_life_ends_where_something_is_carried_over(mistake):
    with pytest.raises(AssertionError, match="x the bound"):
        check_lives(DEVIATIONS[mistake].build, examples=30, shrinks=False)
