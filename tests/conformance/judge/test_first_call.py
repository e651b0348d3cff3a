"""A backend that wears out is told from one that is wrong; what another batch leaves behind is found."""

import pytest

from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.judge.first_call import check_first_call_again
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.lifecycle import Session, in_a_smaller_batch
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.variations import with_requests

CASE = next(c for c in matrix("L0") if c.structure.mask_rule is not None)
BACKWARD = next(c for c in matrix("L1") if c.operation == "backward" and c.axes["values"] == "v_mean")
BATCH = next(c for c in matrix("L1") if c.operation == "forward" and len(c.structure.seqlens_q) > 2)
LATE = (
    "adds-to-the-workspace-of-two-calls-ago",
    "gives-the-call-before-in-every-second-call",
    "drops-the-last-row-from-the-third-call-on",
)


@pytest.mark.parametrize("mistake", LATE)
def test_what_is_wrong_from_a_later_call_on_is_named_for_that(mistake: str) -> None:
    result = judge_case(CASE, DEVIATIONS[mistake].build())
    assert result.state == "FAIL_determinism"
    (found,) = [finding for finding in result.findings if finding.check == "check_first_call_again"]
    assert found.clauses == ("DETERMINISM-RUN",)


def test_a_backward_that_wears_out_is_named_for_that() -> None:
    result = judge_case(BACKWARD, DEVIATIONS["doubles-dk-from-the-third-backward-on"].build())
    assert any(finding.check == "check_first_call_again" for finding in result.findings)


def test_a_backend_that_is_wrong_in_every_call_is_not_said_to_wear_out() -> None:
    result = judge_case(CASE, DEVIATIONS["gives-zeros"].build())
    assert not result.is_conforming
    assert not any(finding.check == "check_first_call_again" for finding in result.findings)


def test_nothing_is_called_again_where_nothing_has_failed() -> None:
    trial = Trial(CASE, DEVIATIONS["drops-the-last-row-from-the-third-call-on"].build())
    assert check_first_call_again(trial) == []
    assert trial.calls == 0


def test_some_requests_of_a_batch_keep_their_numbers_and_a_batch_of_none_has_no_rows() -> None:
    trial = Trial(BATCH, DEVIATIONS["gives-zeros"].build())
    last = len(BATCH.structure.seqlens_q) - 1
    alone, nobody = with_requests(trial, [last]), with_requests(trial, [])
    start = int(trial.problem.qo_indptr[last])
    assert (alone.values.q == trial.values.q[start:]).all()
    assert (alone.oracle.out == trial.oracle.out[start:]).all()
    assert nobody.problem.total_q == nobody.problem.batch_size == 0


def test_what_a_batch_of_none_leaves_behind_is_found() -> None:
    trial = Trial(BATCH, DEVIATIONS["gives-nothing-after-a-batch-of-none"].build())
    (found,) = in_a_smaller_batch(trial, Session(trial))
    assert found.clauses[0] == "PLAN-REPLAN"
    assert "one of its requests alone" in found.message
