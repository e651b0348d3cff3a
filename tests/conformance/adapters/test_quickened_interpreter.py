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
from attnconform.conformance.judge.trial import Trial
backend = load_backend("triton", "cpu")
case = next(c for c in matrix("L1") if "backward.decode-dense" in c.id and c.structure.score_rules)
trial = Trial(case, backend)
gradients = trial.run_backward(trial.values, trial.base)
print(trial.base.out.tobytes().hex(), gradients.dq.tobytes().hex(), gradients.dk.tobytes().hex())
"""


def numbers(how: str) -> str:
    """Outputs and gradients of a process that interprets as it is, or quicker."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_gives_the_same_bits():
    pytest.importorskip("triton")
    assert numbers("quicker") == numbers("as it is") != ""


def test_a_triton_that_works_otherwise_is_left_alone(monkeypatch):
    pytest.importorskip("triton")
    from triton.runtime import interpreter as triton_interpreter

    from attnconform.conformance.adapters.quickened_interpreter import quicken

    def other(fn, builder):
        raise AssertionError

    monkeypatch.setattr(triton_interpreter, "_patch_lang", other)
    assert not quicken()
    assert triton_interpreter._patch_lang is other
