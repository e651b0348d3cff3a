"""A case that leaves the device unusable is told as it is: in that process every smaller case would fail as well."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Forward, Tensors
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.explain import explain as explaining
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
    assert written.getvalue().endswith("is neither shrunk nor compared\n")
    assert not list(tmp_path.iterdir())
