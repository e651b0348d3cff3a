"""The four kinds of fault that an engineer tells apart first, and the stage at which each shows."""

import pytest

from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.explain.explain import explain
from attnconform.conformance.explain.signature import (
    BATCH_ALONE,
    EDGES_ALONE,
    GRADIENT_ALONE,
    SMALL_EVERYWHERE,
    signature_of,
)
from attnconform.conformance.explain.stages import first_wrong_stage
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.trial import Trial
from attnconform.reference.rules import Causal

LONG = {"q": (4,), "kv": (70,), "heads": "2/1", "mask": Causal()}
GROUPED = {"q": (4,), "kv": (20,), "heads": "4/2", "operation": "backward"}
BATCH = {"q": (2, 3), "kv": (20, 35), "heads": "2/1"}
KINDS = [
    ("compares-tiles-for-causality", LONG, EDGES_ALONE, "index"),
    ("computes-float32-in-bf16", LONG, SMALL_EVERYWHERE, "scores"),
    ("divides-by-the-group-size", GROUPED, GRADIENT_ALONE, "dv"),
    ("reads-the-first-requests-table", BATCH, BATCH_ALONE, "index"),
]


@pytest.mark.parametrize(("deviation", "sizes", "signature", "stage"), KINDS)
def test_each_kind_of_fault_is_told_and_stops_at_its_stage(small_case, deviation, sizes, signature, stage):
    case, entry = small_case(**sizes), DEVIATIONS[deviation]
    explanation = explain(case, entry.build, judge_case(case, entry.build()), deviations=[entry], cases=[])
    assert explanation.signature == signature
    assert "look at" in str(explanation.signature)
    assert first_wrong_stage(Trial(case, entry.build())).name == stage


@pytest.mark.parametrize(
    ("deviation", "sizes"),
    [
        ("returns-lse-in-base-two", LONG),  # wrong by a lot
        ("ignores-the-page-table", BATCH),  # wrong in whole blocks, and for each request alone
        ("counts-a-duplicate-twice", {"lists": [(1, 4, 4, 7)]}),  # repeated keys are no matter of edges
    ],
)
def test_a_fault_of_no_kind_is_not_given_one(small_case, deviation, sizes):
    case, make = small_case(**sizes), DEVIATIONS[deviation].build
    assert signature_of(case, make, judge_case(case, make())) is None
