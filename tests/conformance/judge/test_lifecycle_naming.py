"""A row that sees no key is named as what is wrong, whatever check meets it."""

import numpy as np

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Capabilities
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.judge.lifecycle import check_planning_again, other_problems
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.values import check_values
from attnconform.reference.attention import effective_sets


class AveragesAnEmptyRow(StepsBackend):
    """Gives a row without a key the mean of V, and no lse to tell it by."""

    capabilities = Capabilities(returns_lse=False)

    def forward(self, problem, tensors):
        done = super().forward(problem, tensors)
        done.out[np.nonzero(effective_sets(problem.spec).counts() == 0)] = 0.25
        return done


def cases(*clauses):
    return [c for c in matrix("L1") if c.operation == "forward" and all(clause in c.clauses for clause in clauses)]


def test_an_empty_row_is_named_where_there_is_no_lse_to_tell_it_by():
    case = next(c for c in cases("EMPTY-OUT", "SCORE-ALIBI"))
    (found,) = check_values(Trial(case, AveragesAnEmptyRow()))
    assert found.clauses[0].startswith("EMPTY")


def test_a_plan_made_again_is_not_blamed_for_a_row_that_became_empty():
    backend = AveragesAnEmptyRow()
    for case in cases("PLAN-REPLAN"):
        trial = Trial(case, backend)
        becomes_empty = any((other.edges.counts() == 0).any() for other in other_problems(trial).values())
        if trial.edges.counts().all() and becomes_empty:
            break
    found = check_planning_again(trial)
    assert found
    assert all(finding.clauses[0] == "EMPTY-OUT" for finding in found)
