"""Plans that keep what they should forget are found, and a backend that has no such step is not blamed."""

import pytest
import torch

from attnconform.conformance.adapters.cuda_graphs import CapturedRun
from attnconform.conformance.adapters.reference_plans import ReferencePlans
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.judge import lifecycle
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.lifecycle import offers_steps

FORWARD = [case for case in matrix("L1") if case.operation == "forward"]
OF_CLAUSE = {
    "PLAN-REPLAN": lifecycle.check_planning_again,
    "PLAN-WORKSPACE": lifecycle.check_dirty_workspace,
    "PLAN-INPUTS": lifecycle.check_inputs_in_place,
    "PLAN-APART": lifecycle.check_two_plans,
    "PLAN-COPY": lifecycle.check_index_storage,
    "PLAN-ALLOCATE": lifecycle.check_allocations,
    "PLAN-REPLAY": lifecycle.check_replay,
}
MISTAKES = [d for d in DEVIATIONS.values() if d.clause in OF_CLAUSE and offers_steps(d.build(), "plan")]


def cases_of(clause, count=None):
    return [case for case in FORWARD if clause in case.clauses][:count]


def test_every_clause_of_a_lifecycle_has_cases_a_check_and_a_deviation():
    assert {d.clause for d in MISTAKES} == set(OF_CLAUSE)
    assert set(OF_CLAUSE.values()) == set(lifecycle.LIFECYCLE_CHECKS)
    assert all(len(cases_of(clause)) >= 6 for clause in OF_CLAUSE)


@pytest.mark.parametrize("clause", OF_CLAUSE)
def test_reference_plans_are_accepted(clause):
    for case in cases_of(clause, 5):
        trial = Trial(case, ReferencePlans())
        assert OF_CLAUSE[clause](trial) == []
        assert trial.calls > 0


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda d: d.id)
def test_a_mistake_of_planning_is_found_by_the_check_of_its_clause(mistake):
    found = [f for case in cases_of(mistake.clause) for f in OF_CLAUSE[mistake.clause](Trial(case, mistake.build()))]
    assert found
    assert all(mistake.clause in finding.clauses for finding in found)


@pytest.mark.parametrize("clause", ["PLAN-REPLAN", "PLAN-WORKSPACE", "PLAN-INPUTS"])
def test_a_backend_without_plans_is_judged_through_forward_calls(clause):
    trial = Trial(cases_of(clause)[0], StepsBackend())
    assert OF_CLAUSE[clause](trial) == []
    assert trial.calls > 1


@pytest.mark.parametrize("clause", ["PLAN-APART", "PLAN-COPY", "PLAN-ALLOCATE", "PLAN-REPLAY"])
def test_a_backend_without_plans_is_not_asked_for_what_only_plans_have(clause):
    trial = Trial(cases_of(clause)[0], StepsBackend())
    assert OF_CLAUSE[clause](trial) == []
    assert trial.calls == 0


class CapturesOnDevices(ReferencePlans):
    """Captures CUDA graphs, which a CPU has not."""

    def capture(self, handle, tensors):
        return CapturedRun(lambda: self.run(handle, tensors), self.device)


def test_a_replay_that_was_not_judged_says_so():
    (finding,) = lifecycle.check_replay(Trial(cases_of("PLAN-REPLAY")[0], CapturesOnDevices()))
    assert (finding.state, finding.clauses) == ("UNSUPPORTED", ("PLAN-REPLAY",))
    assert "cpu" in finding.message


def test_index_arrays_hold_what_they_held_after_they_were_written_over():
    trial = Trial(next(c for c in cases_of("PLAN-COPY") if c.structure.candidates), ReferencePlans())
    table, indices = trial.problem.cache.page_table.copy(), trial.problem.candidates.indices.copy()
    lifecycle.check_index_storage(trial)
    assert (trial.problem.cache.page_table == table).all()
    assert (trial.problem.candidates.indices == indices).all()


@pytest.mark.parametrize(
    ("call", "counts"),
    [
        (lambda x: torch.empty_like(x), True),
        (lambda x: x + 1, True),
        (lambda x: x.to(torch.float64), True),
        (lambda x: x.view(4).add_(1), False),
        (lambda x: x[0].copy_(x[1]), False),
    ],
    ids=["empty", "sum", "conversion", "in-place", "copy-into"],
)
def test_an_allocation_is_an_operator_whose_result_lies_in_new_memory(call, counts):
    x = torch.zeros(2, 2)
    assert bool(lifecycle.count_allocations("cpu", lambda: call(x))) is counts
