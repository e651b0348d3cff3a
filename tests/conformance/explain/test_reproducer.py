"""The script that explain writes: right by itself with numpy alone, and an accuser where the backend is installed."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.explain import reproducer
from attnconform.conformance.explain.reproducer import reproducer_text
from attnconform.conformance.explain.shrink import is_sound
from attnconform.reference.rules import Alibi, And, Causal, Document, PrefixLM, SoftCap, Window

SOURCE = Path(__file__).parents[3] / "src"
NUMPY = Path(np.__file__).parents[1]
# an interpreter that imports numpy from where it lies, and nothing of ours or of torch
ISOLATED = """
import importlib.abc, runpy, sys
class Blocks(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ("numpy", *sys.stdlib_module_names):
            raise ImportError(f"{name} is not installed here")
sys.meta_path.insert(0, Blocks())
sys.path.append(sys.argv[2])
sys.argv = sys.argv[1:2]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
ADAPTER = """
from attnconform.conformance.deviations import DEVIATIONS

Wrong = type(DEVIATIONS[{deviation!r}].build())
"""


def script(tmp_path, case, backend="reference"):
    path = tmp_path / "reproduce.py"
    path.write_text(reproducer_text(case, StepsBackend(), backend=backend, device="cpu"))
    return path


def largest_error(path):
    """How far the script's own attention is from the numbers it expects, relative to the largest of them."""
    names = runpy.run_path(str(path))
    plain = names["attention"]()
    errors = {}
    for name, want in names["WANT"].items():
        same = plain[name] == want  # two infinities, whose difference is no number
        gap = np.abs(np.where(same, 0.0, plain[name]) - np.where(same, 0.0, want)).max(initial=0.0)
        errors[name] = gap / max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0.0)))
    return errors


def test_it_computes_the_expected_numbers_where_only_numpy_is_installed(small_case, tmp_path):
    path = script(tmp_path, small_case(q=(2,), kv=(9,), mask=Causal()))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", ISOLATED, str(path), str(NUMPY)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "attnconform is not installed, so reference was not called" in done.stdout
    errors = [float(x) for x in re.findall(r"differs by at most (\S+)", done.stdout)]
    assert len(errors) == 2
    assert max(errors) < 1e-12
    assert "expected out:" in done.stdout


def test_it_imports_nothing_of_ours_but_the_call(small_case, tmp_path):
    lines = script(tmp_path, small_case()).read_text().splitlines()
    ours = [line.strip() for line in lines if re.match(r"\s*(from|import) attnconform", line)]
    assert ours == ["from attnconform.conformance.explain.reproducer import call_adapter, why_unasked"]


@pytest.mark.parametrize(
    ("deviation", "line"),
    [
        ("scales-twice", "x the bound"),
        ("keeps-leftover-accumulators", "the same call gives other bits"),
        ("scales-q-in-place", "the backend changed its input q"),
        ("writes-past-out", "bytes past out were overwritten"),
    ],
)
def test_it_accuses_the_backend_where_it_is_installed(small_case, tmp_path, monkeypatch, deviation, line):
    (tmp_path / "adapter.py").write_text(ADAPTER.format(deviation=deviation))
    path = script(tmp_path, small_case(q=(2,), kv=(9,)), "adapter:Wrong")
    monkeypatch.setenv("PYTHONPATH", f"{SOURCE}:{tmp_path}")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert line in done.stdout
    assert "\nreproduced" in done.stdout


def test_it_finds_nothing_wrong_with_a_right_backend(small_case, tmp_path, capsys):
    path = script(tmp_path, small_case(operation="backward", q=(2,), kv=(9,)))
    assert runpy.run_path(str(path))["main"]() == 0
    assert "not reproduced" in capsys.readouterr().out


def test_a_backend_that_does_not_declare_the_case_is_not_called(small_case, tmp_path, monkeypatch, capsys):
    path = script(tmp_path, small_case(operation="backward", q=(2,), kv=(9,)))
    narrow = DEVIATIONS["scales-twice"].build()
    narrow.capabilities = msgspec.structs.replace(narrow.capabilities, has_backward=False)
    monkeypatch.setattr(reproducer, "load_backend", lambda backend, device: narrow)
    assert runpy.run_path(str(path))["main"]() == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "not reproduced: reference does not support this case, so it was not called: no backward"


PARTS = {
    "causal": {"mask": Causal()},
    "window": {"mask": And((Causal(), Window(3)))},
    "prefix": {"mask": PrefixLM((4,))},
    "documents": {"mask": And((Document(((0, 5),)), Causal()))},
    "rules": {"score": (Alibi((0.5, 0.25)), SoftCap(1.5))},
    "lists": {"lists": [(5, -1, 2, 5), (-1,), (0, 8)]},
    "sinks": {"changes": {"sink_logits": (0.5, -1.0)}},
    "groups": {"heads": "2/1"},
}


@pytest.mark.parametrize("operation", ["forward", "backward"])
@pytest.mark.parametrize("part", PARTS)
def test_its_attention_agrees_with_the_reference(small_case, tmp_path, part, operation):
    case = small_case(operation=operation, q=(3,), **PARTS[part])
    errors = largest_error(script(tmp_path, case))
    assert {"out", "lse"} <= errors.keys()
    assert operation == "forward" or {"dq", "dk", "dv"} <= errors.keys()
    assert max(errors.values()) < 1e-11


def numbered():
    cases = [case for case in matrix("L1") if case.operation in ("forward", "backward") and is_sound(case)]
    return cases[:: max(len(cases) // 40, 1)]


@pytest.mark.parametrize("case", numbered(), ids=lambda case: case.id)
def test_its_attention_agrees_on_cases_of_the_matrix(tmp_path, case):
    assert max(largest_error(script(tmp_path, case)).values()) < 1e-9


def test_a_wrong_expectation_would_show(small_case, tmp_path):
    path = script(tmp_path, small_case())
    path.write_text(path.read_text().replace("s = SM_SCALE * (k @ q)", "s = 1.01 * SM_SCALE * (k @ q)"))
    assert max(largest_error(path).values()) > 1e-4


def test_every_deviation_of_the_accusation_exists():
    assert {"scales-twice", "keeps-leftover-accumulators", "scales-q-in-place", "writes-past-out"} <= DEVIATIONS.keys()
