"""Replaying a trace: its report says what ran and how one case of it is run again."""

import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from attnconform.conformance.replay import replay_trace

SOURCE = Path(__file__).parents[2] / "src"
SCALES_TWICE = "scaling:ScalesTwice"
MODULE = """
from attnconform.conformance.deviations import DEVIATIONS

ScalesTwice = type(DEVIATIONS["scales-twice"].build())
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a replay with a wrong backend says on a narrow terminal."""
    (tmp_path / "scaling.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    monkeypatch.chdir(tmp_path)
    stream = io.StringIO()
    options = {"backend": SCALES_TWICE, "device": "cpu", "seed": 0, "max_cases": 1, "out": Path("replayed")}
    assert replay_trace(Console(file=stream, width=60), Path("gemma3_270m"), **options) == 1
    return stream.getvalue()


def test_its_cases_are_the_traces_and_not_the_matrixs(said: str) -> None:
    assert "declares 1 of 1 cases of the trace (100%)" in " ".join(said.split())
    assert "common matrix" not in said
    assert "1 of 1 cases of the trace" in " ".join(Path("replayed/report.html").read_text().split())


def test_the_command_that_it_prints_runs_the_case_again(said: str) -> None:
    [command] = re.findall(r"^  reproduce: (.*)$", said, re.MULTILINE)  # on one line, however narrow
    arguments = shlex.split(command)
    assert arguments[:2] == ["attnconform", "explain"]
    done = subprocess.run(
        [sys.executable, "-m", "attnconform.conformance.command_line", *arguments[1:], "--device", "cpu"],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "FAIL_value" in done.stdout
    assert shlex.quote(f"replayed/{Path(arguments[2]).name}") in Path("replayed/report.html").read_text()
