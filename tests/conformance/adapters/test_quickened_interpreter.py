"""The interpreter gives the same bits with less work, and a Triton that works otherwise is left alone."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from attnconform.conformance.adapters import triton_kernels
if sys.argv[1] == "as it is":
    triton_kernels.quicken = lambda: False
from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.work import steps_of
from attnconform.conformance.judge.judge import undeclared
from attnconform.conformance.judge.trial import Trial
backend = load_backend("triton", "cpu")
cases = [case for case in matrix("L1") if case.operation in ("forward", "backward") and not undeclared(case, backend)]
cases.sort(key=lambda case: steps_of(case.structure, case.operation))
asked = (
    lambda case: case.operation == "backward" and case.structure.score_rules,
    lambda case: case.operation == "forward" and case.structure.v_quant and case.axes["granularity"] == "token",
    lambda case: case.structure.dtype == "bfloat16" and case.axes["mask"] == "head_window",
    lambda case: case.operation == "forward" and case.axes["dropout"] != "none" and case.axes["score"] != "none",
)
for is_asked in asked:
    case = next(filter(is_asked, cases))
    trial = Trial(case, backend)
    print(case.id, trial.base.out.tobytes().hex(), trial.base.lse.tobytes().hex())
    if case.operation == "backward":
        gradients = trial.run_backward(trial.values, trial.base)
        print(gradients.dq.tobytes().hex(), gradients.dk.tobytes().hex(), gradients.dv.tobytes().hex())
"""
OF_ANOTHER = """
from unittest import mock
from attnconform.conformance.adapters import quickened_arrays, quickened_language
import triton.language as tl
with mock.patch.dict(quickened_language.SOURCES, {"dtype.is_int": "another"}):
    print(quickened_language.quicken_language(), tl.block_type(tl.int32, [2]) is tl.block_type(tl.int32, [2]))
with mock.patch.dict(quickened_arrays.SOURCES, {"ReduceOps.min_max": "another"}):
    print(quickened_arrays.quicken_arrays())
print(quickened_language.quicken_language(), tl.block_type(tl.int32, [2]) is tl.block_type(tl.int32, [2]))
print(quickened_arrays.quicken_arrays())
"""
KNOWN = ("3.9.0",)  # versions of Triton whose functions the replacements were written for


def said(script: str, *arguments: str) -> str:
    """What a script prints in a process that interprets."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_gives_the_same_bits():
    pytest.importorskip("triton")
    assert said(SCRIPT, "quicker") == said(SCRIPT, "as it is") != ""


def test_functions_of_another_source_are_left_alone():
    triton = pytest.importorskip("triton")
    if triton.__version__ not in KNOWN:
        pytest.skip(f"of Triton {triton.__version__} nothing is replaced")
    assert said(OF_ANOTHER).split() == ["False", "False", "False", "True", "True", "True"]


def test_a_triton_that_works_otherwise_is_left_alone(monkeypatch):
    pytest.importorskip("triton")
    from triton.runtime import interpreter as triton_interpreter

    from attnconform.conformance.adapters.quickened_interpreter import quicken

    def other(fn, builder):
        raise AssertionError

    monkeypatch.setattr(triton_interpreter, "_patch_lang", other)
    assert not quicken()
    assert triton_interpreter._patch_lang is other
