"""The walk over the stages stops at the one where a mistake was made."""

import msgspec
import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.explain.explain import stage_or_none
from attnconform.conformance.explain.stages import first_wrong_stage
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.views import Hints
from attnconform.reference.rules import Causal
from attnconform.reference.states import PartialState
from attnconform.reference.steps import Steps

LONG = {"q": (4,), "kv": (70,), "heads": "2/1", "mask": Causal()}


class ScalesWhatItMerges(Steps):
    """Two pieces, and a merge that adds a little to the output."""

    def splits(self, num_keys):
        return [slice(0, num_keys // 2), slice(num_keys // 2, num_keys)]

    def merge(self, states, head_dim_vo):
        right = super().merge(states, head_dim_vo)
        return PartialState(right.m, right.l, right.o * (1 + 2.0**-8))


class MergesBadly(StepsBackend):
    """Right in one piece, wrong as soon as a hint asks for splits."""

    def forward(self, problem, tensors):
        steps = ScalesWhatItMerges() if (problem.hints.num_kv_splits or 1) > 1 else Steps()
        backend = type("Chosen", (StepsBackend,), {"steps": steps})()
        return backend.forward(problem, tensors)


@pytest.mark.parametrize(
    ("deviation", "stage"),
    [
        ("sees-one-key-of-the-future", "index"),
        ("scales-twice", "scores"),
        ("returns-lse-in-base-two", "lse"),
        ("returns-an-lse-of-zero", "lse"),
        ("leaves-the-maximum-out-of-lse", "lse"),
    ],
)
def test_the_first_wrong_stage_is_the_one_where_the_mistake_is(small_case, deviation, stage):
    assert first_wrong_stage(Trial(small_case(**LONG), DEVIATIONS[deviation].build())).name == stage


def test_scores_and_lse_that_are_right_leave_the_output(small_case):
    class ClampsTheOutput(StepsBackend):
        """One-hot values, which are not negative, come through."""

        def store(self, tensors, result):
            super().store(tensors, result)
            tensors.out.clamp_(min=0)

    assert first_wrong_stage(Trial(small_case(**LONG), ClampsTheOutput())).name == "out"


def test_what_is_right_in_one_piece_is_a_matter_of_the_merge(small_case):
    case = small_case(**LONG, changes={"hints": Hints(num_kv_splits=3)})
    stage = first_wrong_stage(Trial(case, MergesBadly()))
    assert stage.name == "merge"
    assert "right in one piece, wrong in 3" in stage.message


def test_a_right_backend_has_no_wrong_stage(small_case):
    assert first_wrong_stage(Trial(small_case(**LONG), StepsBackend())) is None
    assert first_wrong_stage(Trial(small_case(operation="backward", q=(2,), kv=(9,)), StepsBackend())) is None


def test_a_call_that_raises_or_writes_outside_stops_the_walk(small_case):
    class Raises(StepsBackend):
        def forward(self, problem, tensors):
            raise RuntimeError("device lost")

    for make, text in ((Raises, "device lost"), (DEVIATIONS["writes-past-out"].build, "bytes past out")):
        case = small_case()
        stage = stage_or_none(case, make, judge_case(case, make()))
        assert stage.name == "call"
        assert text in stage.message


def test_what_is_wrong_in_a_later_call_alone_is_told_with_its_check(small_case):
    case = msgspec.structs.replace(small_case(), clauses=("PLAN-WORKSPACE",))
    make = DEVIATIONS["scales-its-workspace-by-zero"].build
    stage = stage_or_none(case, make, judge_case(case, make()))
    assert stage.name == "none of the case's own call, but check_dirty_workspace"
    assert stage.message.startswith("after a run of NaN")
