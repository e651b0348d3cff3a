"""The script of a problem that must be refused: it shows why by itself, and accuses who accepts it."""

import runpy
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backend, OneOf
from attnconform.conformance.cases.refusals import refusal_cases
from attnconform.conformance.cases.structure import Case, decode_case
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.explain import reproducer as reproducing
from attnconform.conformance.explain.reproducer import write_reproducer
from attnconform.conformance.report.findings import BUNDLED

CASES = {case.axes["refusal"]: case for case in refusal_cases()}
# what the script finds out of range by its own lines
SHOWN = {name for name in CASES if CASES[name].refuses in ("SET-RANGE", "COORD-PAGE-RANGE", "GQA-MAP")} | {
    "too-few-lists"
}


def script(folder: Path, case: Case) -> Path:
    path = folder / "reproduce.py"
    write_reproducer(path, case, StepsBackend(), backend="reference", device="cpu")
    return path


@pytest.mark.parametrize("name", CASES)
def test_it_names_the_clause_and_finds_the_number_itself(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    names = runpy.run_path(str(script(tmp_path, case)))
    assert names["CLAUSE"] == case.refuses
    assert names["WHY"]
    assert bool(list(names["out_of_range"]())) == (name in SHOWN)


def test_it_finds_nothing_in_a_sound_problem(tmp_path: Path) -> None:
    case = CASES["position-at-length"]
    sound = msgspec.structs.replace(case.structure, candidates=None, corruption=None)
    names = runpy.run_path(str(script(tmp_path, msgspec.structs.replace(case, structure=sound))))
    assert not list(names["out_of_range"]())


def test_it_needs_nothing_installed(tmp_path: Path) -> None:
    path = BUNDLED.parent / "flashinfer-bsr-block-past-the-end.json"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(script(tmp_path, decode_case(path.read_bytes(), path.name)))],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "in this file: list 0 has 2: tokens from 16 on, of a request that has 16" in done.stdout
    assert "attnconform is not installed, so reference was not called" in done.stdout


@pytest.mark.parametrize("deviation", [None, "clamps-positions-into-the-request"])
def test_it_accuses_who_accepts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], deviation: str | None
) -> None:
    path = BUNDLED.parent / "flashinfer-bsr-block-past-the-end.json"
    names = runpy.run_path(str(script(tmp_path, decode_case(path.read_bytes(), path.name))))
    make = StepsBackend if deviation is None else DEVIATIONS[deviation].build
    monkeypatch.setattr(reproducing, "load_backend", lambda backend, device: make())
    assert names["main"]() == int(deviation is not None)
    said = capsys.readouterr().out
    assert ("the input breaks SET-RANGE and was accepted" in said) == (deviation is not None)
    assert said.splitlines()[-1].startswith("not reproduced" if deviation is None else "reproduced")


def test_a_case_that_is_not_declared_is_unsupported_and_not_called_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = CASES["position-at-length"]
    names = runpy.run_path(str(script(tmp_path, case)))
    make = DEVIATIONS["clamps-positions-into-the-request"].build  # accepts it, were it asked
    narrow = msgspec.structs.replace(make().capabilities, supported={"refusal": OneOf(("another",))})

    def load(backend: str, device: str) -> Backend:
        subject = make()
        subject.capabilities = narrow
        return subject

    monkeypatch.setattr(reproducing, "load_backend", load)
    assert names["main"]() == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("not reproduced: reference does not support this case, so it was not called: refusal = ")
    assert "refused" not in said
