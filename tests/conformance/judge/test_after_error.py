"""What a backend does after a call that raised: its path is as before, or it is told."""

import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backward, Forward
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.deviations import DEVIATIONS, VARIANTS
from attnconform.conformance.judge.after_error import PERIOD, check_after_a_call_that_raised
from attnconform.conformance.judge.trial import Trial

CASES = [case for case in matrix("L0") if case.operation == "forward"]
ASKED = next(case for case in CASES if case.seed % PERIOD == 0)
NOT_ASKED = next(case for case in CASES if case.seed % PERIOD)
MISTAKE = DEVIATIONS["runs-elsewhere-after-a-call-that-raised"]


class Answers(StepsBackend):
    """Has no backward by its declaration, and answers all the same."""

    capabilities = MISTAKE.build().capabilities

    def backward(self, *arguments: object) -> Backward:
        return Backward(*(None,) * 3)  # type: ignore[arg-type]

    def forward(self, *arguments: object) -> Forward:
        raise AssertionError("nothing raised, so there is nothing to ask after")


def test_a_path_that_an_error_has_changed_is_told_with_the_error() -> None:
    trial = Trial(ASKED, MISTAKE.build())
    (finding,) = check_after_a_call_that_raised(trial)
    assert trial.calls == 1  # the forward is the first that counts
    assert (finding.state, finding.clauses) == ("FALLBACK_UNDECLARED", ("SAFE-PATH",))
    assert "raised NotImplementedError" in finding.message
    assert "'fallback: uncompiled'" in finding.message


@pytest.mark.parametrize("backend", [StepsBackend(), VARIANTS["falls-back-as-declared"].build(), Answers()])
def test_who_has_gradients_or_answers_is_not_accused(backend: StepsBackend) -> None:
    assert check_after_a_call_that_raised(Trial(ASKED, backend)) == []


def test_the_same_path_after_an_error_is_right() -> None:
    backend = StepsBackend()
    backend.capabilities = MISTAKE.build().capabilities
    backend.backward = Answers.forward.__get__(backend)  # type: ignore[method-assign]
    assert check_after_a_call_that_raised(Trial(ASKED, backend)) == []


def test_half_of_the_cases_are_not_asked() -> None:
    trial = Trial(NOT_ASKED, MISTAKE.build())
    assert check_after_a_call_that_raised(trial) == []
    assert trial.calls == 0
