"""A case that leaves the device unusable is told as it is: in that process every smaller case would fail as well."""

import io
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from rich.console import Console

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backward, Forward, Tensors
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.explain import explain as explaining
from attnconform.conformance.explain import reproducer as reproducing
from attnconform.conformance.explain.reproducer import write_reproducer
from attnconform.conformance.views import ProblemView


class Misaligned(StepsBackend):
    """Fails as a kernel does that ends the CUDA context, from its first call on."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        raise RuntimeError("CUDA error: misaligned address")


def test_a_case_that_ends_the_context_is_neither_shrunk_nor_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(explaining, "load_backend", lambda backend, device: Misaligned(device))
    case, written = matrix("L0")[0], io.StringIO()
    console = Console(file=written, width=200)
    assert explaining.explain_case(console, case.id, backend="misaligned", device="cpu") == 1
    assert "misaligned address" in written.getvalue()
    assert "is neither shrunk nor compared" in written.getvalue()
    assert {path.name for path in tmp_path.iterdir()} == {f"{case.id}.json", f"reproduce_{case.id}.py"}


class MisalignedLater(StepsBackend):
    """Likewise, which only a later synchronization shows: reading the output."""

    calls = 0

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        MisalignedLater.calls += 1
        result = super().forward(problem, tensors)
        return replace(result, out=cast(torch.Tensor, Unreadable(result.out)))


class Unreadable:
    """An output that a device fault keeps from being read."""

    def __init__(self, out: torch.Tensor) -> None:
        self.dtype, self.shape = out.dtype, out.shape

    def detach(self) -> torch.Tensor:
        raise RuntimeError("CUDA error: misaligned address")


class WrongThenMisaligned(StepsBackend):
    """Twice the answer; the context ends in a call of what explain makes after the judge's backend."""

    made = 0

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        WrongThenMisaligned.made += 1
        self.is_first = WrongThenMisaligned.made == 1

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        result = super().forward(problem, tensors)
        return replace(result, out=2 * result.out if self.is_first else cast(torch.Tensor, Unreadable(result.out)))


def test_a_device_that_is_lost_while_explain_shrinks_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(WrongThenMisaligned, "made", 0)
    monkeypatch.setattr(explaining, "load_backend", lambda backend, device: WrongThenMisaligned(device))
    case, written = matrix("L0")[0], io.StringIO()
    console = Console(file=written, width=200)
    assert explaining.explain_case(console, case.id, backend="misaligned", device="cpu") == 1
    said = written.getvalue()
    assert "FAIL_value" in said
    assert "is neither shrunk nor compared" in said
    assert "Traceback" not in said
    assert {path.name for path in tmp_path.iterdir()} == {f"{case.id}.json", f"reproduce_{case.id}.py"}


@pytest.mark.parametrize("backend", [Misaligned, MisalignedLater])
def test_its_single_file_is_written_and_calls_nothing_after_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], backend: type
) -> None:
    case, path = matrix("L0")[0], tmp_path / "reproduce.py"
    write_reproducer(path, case, backend(), backend="misaligned", device="cpu")
    monkeypatch.setattr(reproducing, "load_backend", lambda name, device: backend(device))
    MisalignedLater.calls = 0
    names = runpy.run_path(str(path))
    assert names["main"]() == 1
    said = capsys.readouterr().out
    assert "after first: the backend raised RuntimeError" in said
    assert said.endswith("reproduced\n")
    assert MisalignedLater.calls <= 1
    assert max(abs(names["attention"]()["out"] - names["WANT"]["out"]).ravel()) < 1e-9


class EndsInBackward(StepsBackend):
    """Likewise, in the first backward."""

    def backward(self, *given: object) -> Backward:
        raise RuntimeError("CUDA error: misaligned address")


@pytest.mark.parametrize(("backend", "operation"), [(Misaligned, "forward"), (EndsInBackward, "backward")])
def test_a_right_backend_is_not_accused_by_the_file_of_a_device_that_was_lost(
    small_case: Callable[..., Case], tmp_path: Path, backend: type, operation: str
) -> None:
    """What was not answered here is held to the declared bounds where it is."""
    case = small_case(operation=operation, q=(2,), kv=(9,))
    scripts = []
    for subject in (backend(), StepsBackend()):
        scripts.append(tmp_path / f"{subject.__class__.__name__}.py")
        write_reproducer(scripts[-1], case, subject, backend="reference", device="cpu")
    lost, answered = (runpy.run_path(str(script)) for script in scripts)
    assert lost["BOUND"].keys() == answered["BOUND"].keys()
    assert all(np.array_equal(lost["BOUND"][name], bound) for name, bound in answered["BOUND"].items())
    assert lost["main"]() == 0
