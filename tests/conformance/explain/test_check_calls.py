"""What a check's own calls show."""

import msgspec
import pytest

from attnconform.conformance.adapters.reference_plans import ReferencePlans
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.explain.check_calls import check_answers
from attnconform.conformance.explain.evidence import Script
from attnconform.conformance.judge.lifecycle import check_dirty_workspace
from attnconform.conformance.judge.memory import check_memory
from attnconform.conformance.judge.metamorphic import REVERSED, check_reversed_requests
from attnconform.conformance.judge.trial import Trial


@pytest.fixture
def batch(small_case):
    """Two requests whose order a check reverses, by a seed that it takes."""
    case = small_case(q=(1, 3), kv=(5, 19))
    return msgspec.structs.replace(case, clauses=("COORD-ROW", "PLAN-WORKSPACE"), seed=REVERSED)


def test_calls_of_a_check_are_answers_and_its_verdict_comes_last(batch):
    answers = list(check_answers(Trial(batch, StepsBackend()), check_reversed_requests))
    assert [answer.call for answer in answers] == [
        "check_reversed_requests, forward",
        "check_reversed_requests, forward",
        "verdict of check_reversed_requests",
    ]
    assert answers[0].numbers["out"].shape == (4, 2, 64)
    assert answers[-1].marks == ()


def test_a_call_that_calls_another_is_one_answer(batch):
    answers = list(check_answers(Trial(batch, ReferencePlans()), check_reversed_requests))
    assert [answer.call for answer in answers[:-1]] == ["check_reversed_requests, forward"] * 2
    runs = list(check_answers(Trial(batch, ReferencePlans()), check_dirty_workspace))
    assert [answer.call for answer in runs[:-1]] == ["check_dirty_workspace, run"] * 5


def test_memory_is_told_by_the_verdict_alone(batch):
    answers = list(check_answers(Trial(batch, DEVIATIONS["keeps-every-output"].build()), check_memory))
    assert [(answer.call, answer.marks) for answer in answers] == [("verdict of check_memory", ("FAIL_leak",))]


def test_an_error_is_an_answer(batch):
    class Raises(StepsBackend):
        def forward(self, problem, tensors):
            raise KeyError("x")

    answers = list(check_answers(Trial(batch, Raises()), check_reversed_requests))
    assert answers[0].marks == ("raised", "KeyError")
    assert answers[-1].marks == ("CRASH",)


def test_a_mistake_that_no_fixed_call_shows_shows_in_the_calls_of_its_check(batch):
    make = DEVIATIONS["scales-its-workspace-by-zero"].build
    for checks, differs in (((), False), (("check_dirty_workspace",), True)):
        script = Script(batch, checks)
        right, wrong = list(script.answers(StepsBackend)), list(script.answers(make))
        assert differs == any(not a.same_bits(b) for a, b in zip(right, wrong, strict=False))


def test_what_one_backend_showed_is_not_seen_by_the_next(batch):
    script = Script(batch)
    first = script.trial(StepsBackend())
    for value in vars(first).values():
        if isinstance(value, list):
            value.append(1)
    first.rewritten.add("page_table")
    again = script.trial(StepsBackend())
    assert not again.rewritten
    assert not any(value for value in vars(again).values() if isinstance(value, list))
