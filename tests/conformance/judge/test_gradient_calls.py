"""Further backward calls: what enters by lse alone, other problems on the same shapes, other bytes, what is written."""

from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.deviations import DEVIATIONS, VARIANTS
from attnconform.conformance.judge.gradient_calls import (
    AGAIN,
    ALONE,
    PERIOD,
    check_gradient_of_lse,
    check_gradients_of_other_problems,
)
from attnconform.conformance.judge.gradients import check_gradients
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.values import compare_forward
from attnconform.conformance.judge.verdict import Finding

BACKWARD = [case for case in matrix("L1") if case.operation == "backward"]
Check = Callable[[Trial], list[Finding]]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Threads that wait for each other's cores cost more than these small tensors do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sampled(remainder: int, count: int = 3) -> list[Case]:
    """The first cases of a remainder that have lists."""
    return [c for c in BACKWARD if c.seed % PERIOD == remainder and c.structure.candidates is not None][:count]


def states(check: Check, backend: Backend, cases: list[Case]) -> set[tuple[str, str]]:
    """State and first clause of everything found."""
    return {(f.state, f.clauses[0]) for case in cases for f in check(Trial(case, backend))}


@pytest.mark.parametrize(
    ("check", "remainder"), [(check_gradient_of_lse, ALONE), (check_gradients_of_other_problems, AGAIN)]
)
def test_the_reference_conforms(check: Check, remainder: int) -> None:
    assert states(check, StepsBackend(), sampled(remainder)) == set()


def test_a_row_without_dout_is_not_skipped_for_that() -> None:
    backend = DEVIATIONS["skips-rows-without-dout"].build()
    assert states(check_gradient_of_lse, backend, sampled(ALONE)) == {("FAIL_gradient", "GRAD-LSE")}


def test_a_backend_that_takes_no_gradient_of_lse_is_not_asked_for_it() -> None:
    assert states(check_gradient_of_lse, VARIANTS["takes-no-gradient-of-lse"].build(), sampled(ALONE)) == set()


def test_lists_that_a_backward_keeps_show_in_the_backward_of_another_problem() -> None:
    build = DEVIATIONS["keeps-the-lists-of-the-first-backward"].build
    found = [states(check_gradients_of_other_problems, build(), [case]) for case in sampled(AGAIN)]
    assert {("FAIL_gradient", "PLAN-REPLAN")} in found


def test_bytes_that_no_row_attends_have_no_influence_on_gradients() -> None:
    build = DEVIATIONS["multiplies-masked-keys-by-zero-in-backward"].build
    unselected = [case for case in BACKWARD if (trial := Trial(case, build())).owned.sum() > trial.selected.sum()][:2]
    assert states(check_gradients, build(), unselected) == {("FAIL_interference", "MASK-INTERFERE")}


@pytest.mark.parametrize(
    ("deviation", "name"), [("overwrites-lse-in-backward", "lse"), ("scales-dlse-in-place", "dlse")]
)
def test_what_a_backward_is_given_is_left_as_it_was(deviation: str, name: str) -> None:
    trial = Trial(BACKWARD[0], DEVIATIONS[deviation].build())
    assert name in trial.base_gradients.mutated
    assert ("FAIL_input_mutated", "SAFE-INPUTS") in {(f.state, f.clauses[0]) for f in check_gradients(trial)}


def test_bits_of_every_gradient_repeat_where_that_is_declared() -> None:
    case = next(c for c in BACKWARD if c.structure.sink_logits is not None and sum(c.structure.seqlens_q) > 4)
    found = check_gradients(Trial(case, DEVIATIONS["adds-dsink-in-any-order"].build()))
    assert ("FAIL_determinism", "DETERMINISM-RUN") in {(f.state, f.clauses[0]) for f in found}
    assert any("dsink" in f.message for f in found)


@pytest.mark.parametrize("scale", [0.0, -4.0])
def test_bounds_are_sound_whatever_the_scale(scale: float) -> None:
    case = next(c for c in matrix("L1") if "designed-a-scale-of-zero" in c.id)
    case = msgspec.structs.replace(case, structure=msgspec.structs.replace(case.structure, sm_scale=scale))
    trial = Trial(case, StepsBackend())
    for comparison in compare_forward(trial, trial.values, trial.base, trial.oracle):
        assert (comparison.worst > 0).all()
        assert comparison.worst_ratio <= 1
