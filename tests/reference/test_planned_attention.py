"""A reference plan owns what it needs, and forgets what it was made for before."""

from dataclasses import replace

import numpy as np
import pytest

from attnconform.reference.attention import attention
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import Candidates
from attnconform.reference.errors import RefusedInput
from attnconform.reference.planned_attention import PlannedAttention
from attnconform.reference.problem import AttentionProblem


def problem_of(entries, seqlen_kv=8):
    """One query row and head over a request of two pages."""
    return AttentionProblem(
        qo_indptr=np.array([0, 1]),
        seqlen_kv=np.array([seqlen_kv]),
        q_offset=np.array([seqlen_kv - 1]),
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=4,
        head_dim_vo=2,
        cache=PagedCache(page_size=4, num_pages=2, page_table=np.array([[1, 0]])),
        sm_scale=0.5,
        candidates=Candidates(indptr=np.array([0, len(entries)]), indices=np.array(entries)),
    )


@pytest.fixture
def numbers():
    draw = np.random.default_rng(3)
    return draw.normal(size=(1, 1, 4)), draw.normal(size=(8, 1, 4)), draw.normal(size=(8, 1, 2))


def test_a_plan_made_again_gives_what_a_fresh_one_gives(numbers):
    planned = PlannedAttention(problem_of([0, 3, 6]))
    planned.run(*numbers)
    planned.replan(problem_of([1], seqlen_kv=5))
    assert (planned.run(*numbers).out == attention(problem_of([1], seqlen_kv=5), *numbers).out).all()


def test_index_arrays_written_over_after_planning_have_no_influence(numbers):
    problem = problem_of([0, 3, 6])
    want = attention(problem, *numbers).out
    planned = PlannedAttention(problem)
    problem.candidates.indices[:] = 1
    problem.cache.page_table[:] = 0
    assert (planned.run(*numbers).out == want).all()


def test_two_plans_have_workspaces_of_their_own():
    first, second = PlannedAttention(problem_of([0])), PlannedAttention(problem_of([1]))
    assert not np.shares_memory(first.out, second.out)
    assert not np.shares_memory(first.lse, second.lse)


def test_rows_that_do_not_fit_are_refused_and_the_plan_before_stands(numbers):
    planned = PlannedAttention(problem_of([0, 3, 6]))
    want = planned.run(*numbers).out
    with pytest.raises(RefusedInput, match="PLAN-CAPACITY"):
        planned.replan(replace(problem_of([0]), num_qo_heads=2))
    assert (planned.run(*numbers).out == want).all()
