"""Other batches through one backend: larger ones, ones in another order, and ones whose requests have ended."""

import numpy as np
import pytest

from attnconform.conformance.adapters.reference_plans import ReferencePlans
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.judge.hygiene import check_written
from attnconform.conformance.judge.interference import check_other_rows
from attnconform.conformance.judge.judge import Check, judge_case
from attnconform.conformance.judge.lifecycle import (
    check_dirty_workspace,
    check_planning_again,
    check_two_plans,
    other_batches,
)
from attnconform.conformance.judge.metamorphic import check_appended_request
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.variations import with_a_request_ended

FORWARD = [case for case in matrix("L1") if case.operation == "forward"]
FOUND: dict[str, Check] = {
    "cuts-to-the-longest-of-the-first-call": check_planning_again,
    "runs-as-many-requests-as-the-first-call-had": check_planning_again,
    "keeps-the-results-of-ended-requests": check_planning_again,
    "keeps-its-rows-when-planned-again": check_planning_again,
    "takes-the-scale-of-the-next-plan": check_two_plans,
    "adds-zero-times-the-queries-before": check_dirty_workspace,
    "adds-zero-times-the-row-before": check_other_rows,
}


def cases_of(clause: str) -> list[Case]:
    return [case for case in FORWARD if clause in case.clauses and case.structure.page_stride is None]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("mistake", FOUND)
def test_a_mistake_about_the_batch_before_is_found_by_the_check_of_its_clause(mistake: str) -> None:
    deviation, check = DEVIATIONS[mistake], FOUND[mistake]
    results = (judge_case(case, deviation.build(), [check]) for case in cases_of(deviation.clause)[:24])
    assert any(deviation.clause in finding.clauses for result in results for finding in result.findings)


@pytest.mark.parametrize("backend", [StepsBackend, ReferencePlans], ids=lambda backend: backend.name)
def test_the_reference_is_accepted(backend: type[StepsBackend]) -> None:
    checks = [check_planning_again, check_two_plans, check_dirty_workspace, check_appended_request, check_other_rows]
    for clause in ("PLAN-REPLAN", "DETERMINISM-BATCH"):
        for case in cases_of(clause)[::6]:
            assert judge_case(case, backend(), checks).findings == ()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "mistake", ["cuts-to-the-longest-of-the-first-call", "runs-as-many-requests-as-the-first-call-had"]
)
def test_a_request_that_is_added_is_held_to_its_own_answer(mistake: str) -> None:
    case = next(c for c in cases_of("DETERMINISM-BATCH") if c.structure.candidates is None)
    result = judge_case(case, DEVIATIONS[mistake].build(), [check_written, check_appended_request])
    assert [finding.clauses for finding in result.findings] == [("PLAN-REPLAN", "COORD-ROW")]


def test_a_request_that_ended_keeps_its_rows_and_has_no_keys() -> None:
    for case in (cases_of("GQA-LISTS")[0], cases_of("MASK-CAUSAL")[0]):
        trial = Trial(case, StepsBackend())
        ended = with_a_request_ended(trial)
        longest = int(np.argmax(trial.problem.seqlen_kv))
        assert ended.problem.seqlen_kv[longest] == 0
        assert (ended.problem.qo_indptr == trial.problem.qo_indptr).all()
        rows = [where.row for where in ended.problem.rows() if where.request == longest]
        assert (ended.edges.counts()[rows] == 0).all()


def test_a_batch_of_registered_rules_is_not_reversed() -> None:
    of_rules = next(case for case in FORWARD if case.axes["mask"] == "custom")
    assert list(other_batches(Trial(of_rules, StepsBackend()))) == ["a request that ended"]
