"""What a backend does after a call that raised: its path is as before, or it is told."""

from dataclasses import replace

import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backward, Forward
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.deviations import DEVIATIONS, VARIANTS
from attnconform.conformance.judge.after_error import PERIOD, check_after_a_call_that_raised
from attnconform.conformance.judge.trial import Trial

CASES = [case for case in matrix("L0") if case.operation == "forward"]
ASKED = next(case for case in CASES if case.seed % PERIOD == 0)
ASKED_LATER = next(case for case in CASES if case.seed % PERIOD)
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


@pytest.mark.parametrize("case", [ASKED, ASKED_LATER])
def test_the_same_path_after_an_error_is_right(case: Case) -> None:
    backend = StepsBackend()
    backend.capabilities = MISTAKE.build().capabilities
    backend.backward = Answers.forward.__get__(backend)  # type: ignore[method-assign]
    assert check_after_a_call_that_raised(Trial(case, backend)) == []


@pytest.mark.parametrize(
    ("mistake", "later"),
    [
        ("runs-elsewhere-after-a-call-that-raised", "fallback: uncompiled"),
        ("takes-another-path-after-a-call-that-raised", "eager"),
        ("takes-its-declared-fallback-after-a-call-that-raised", "fallback: as declared"),
    ],
)
def test_a_path_is_held_against_the_one_before_the_error_whatever_its_name(mistake: str, later: str) -> None:
    trial = Trial(ASKED_LATER, DEVIATIONS[mistake].build())
    (finding,) = check_after_a_call_that_raised(trial)
    assert trial.calls == 3  # two before the error and one after it
    assert (finding.state, finding.clauses) == ("FALLBACK_UNDECLARED", ("SAFE-PATH",))
    assert finding.message.startswith("forwards ran on 'native'; after a call for gradients that raised Not")
    assert repr(later) in finding.message


class TakesTurns(StepsBackend):
    """No gradients, and two paths that calls take in turns, whether any raised or not."""

    capabilities = MISTAKE.build().capabilities

    def __init__(self) -> None:
        super().__init__()
        self.forwards = 0

    def backward(self, *arguments: object) -> Backward:
        raise AssertionError("paths that change without an error are no reason to ask for one")

    def forward(self, *arguments: object) -> Forward:
        self.forwards += 1
        return replace(super().forward(*arguments), path=f"buffer {self.forwards % 2}")  # type: ignore[arg-type]


def test_paths_that_change_from_call_to_call_are_not_blamed_on_an_error() -> None:
    assert check_after_a_call_that_raised(Trial(ASKED_LATER, TakesTurns())) == []
