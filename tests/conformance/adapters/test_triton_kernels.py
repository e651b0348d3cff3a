"""The bundled kernels behind the backend interface: what the adapter itself decides."""

import msgspec
import numpy as np
import pytest
import torch

from attnconform.conformance.adapters.triton_kernels import (
    TritonAtomic,
    TritonHopper,
    TritonKernels,
    interpreting,
    refuse_inexpressible,
)
from attnconform.conformance.backend import Unavailable
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.refusals import REFUSALS, SOUND
from attnconform.conformance.cases.structure import build_problem
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.views import Hints, ProblemView
from attnconform.kernels.sparse_attention import hopper_choice
from attnconform.kernels.sparse_attention import rules as kernel_rules
from attnconform.reference.errors import RefusedInput
from attnconform.reference.rules import Alibi, And, Causal, Document, Or, PrefixLM, SoftCap, Window

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HINTS = Hints(num_kv_splits=2, tile_kv=16)


def test_the_smoke_cases_conform() -> None:
    backend = TritonKernels(DEVICE)
    assert {case.id: judge_case(case, backend).state for case in matrix("L0")} == dict.fromkeys(
        (case.id for case in matrix("L0")), "PASS"
    )


@pytest.mark.parametrize("backend", [TritonKernels, TritonAtomic])
def test_both_ways_of_adding_key_gradients_conform(backend: type[TritonKernels]) -> None:
    wanted = {"lengths": "one", "sink": "logits"}
    case = next(c for c in matrix("L1") if c.operation == "backward" and wanted.items() <= c.axes.items())
    result = judge_case(case, backend(DEVICE))
    assert result.state == "PASS", result.findings


def test_every_refusal_that_is_claimed_comes_before_anything_is_written() -> None:
    backend = TritonKernels(DEVICE)
    states = {c.axes["refusal"]: judge_case(c, backend).state for c in matrix("L1") if c.operation == "refusal"}
    unclaimed = {name for name, state in states.items() if state == "UNSUPPORTED"}
    # the kernels know no other policy for empty rows, and none of the features that these are about
    assert unclaimed == {
        "empty-row-refused", "rank-twice", "rank-of-a-window", "rank-without-bias", "head-base-outside",
        "rule-unknown", "score-rule-unknown", "rule-impure", "rotated-page-twice", "rotary-dim-odd",
        "rotary-dim-beyond", "activation-unknown",
    }  # fmt: skip
    assert {state for name, state in states.items() if name not in unclaimed} == {"REFUSED_OK"}


@pytest.mark.parametrize("name", ["empty-row-refused", "repeated-key-asked-for"])
def test_what_a_plan_has_no_word_for_is_refused_by_the_adapter(name: str) -> None:
    clause, structure = REFUSALS[name]
    with pytest.raises(RefusedInput, match=clause):
        refuse_inexpressible(build_problem(structure))


def test_a_rule_lowers_to_the_kernels_descriptor_of_the_same_name_and_fields() -> None:
    lower = TritonKernels(DEVICE).lower
    assert lower(And((Causal(), Window(left=3)))) == kernel_rules.And(
        (kernel_rules.Causal(), kernel_rules.Window(left=3, right=None))
    )
    assert lower(Or((PrefixLM((1, 2)), Document(((0, 4), (0,)))))) == kernel_rules.Or(
        (kernel_rules.PrefixLM((1, 2)), kernel_rules.Document(((0, 4), (0,))))
    )
    assert lower(Alibi((0.5, 0.25))) == kernel_rules.Alibi((0.5, 0.25))
    assert lower(SoftCap(1.5)) == kernel_rules.SoftCap(1.5)


def test_hints_reach_the_plan_and_change_no_candidate() -> None:
    backend = TritonKernels(DEVICE)
    views = [ProblemView(build_problem(SOUND), hints, DEVICE) for hints in (HINTS, Hints())]
    plans = [backend.plan(view, torch.float32) for view in views]
    assert plans[0].launches[0].shape.tile_kv == HINTS.tile_kv
    assert torch.equal(plans[0].list_positions, plans[1].list_positions)


@pytest.mark.parametrize("sm_scale", [0.25, 0.0])
def test_a_scale_of_zero_is_left_to_the_other_kernel(sm_scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_choice, "why_not_here", lambda device: None)
    backend = TritonHopper(DEVICE)
    monkeypatch.setattr(backend.kernels, "plan", lambda **arguments: arguments)
    problem = build_problem(msgspec.structs.replace(SOUND, sm_scale=sm_scale))
    arguments = backend.plan(ProblemView(problem, HINTS, DEVICE), torch.bfloat16)
    assert ("choice" in arguments) == (sm_scale > 0)


def test_numpy_that_breaks_the_interpreter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "2.4.1")
    with pytest.raises(Unavailable, match=r"numpy < 2\.4, but numpy is 2\.4\.1"):
        interpreting("cpu")


def test_triton_that_was_imported_to_compile_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Unavailable, match="set TRITON_INTERPRET=1"):
        interpreting("cpu")
