"""Each way to misbehave has its own state, and the other cases still finish."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnconform.conformance.results import read_run

SOURCE = Path(__file__).parents[2] / "src"


def attnconform(*arguments, cwd):
    """The command in a process of its own, as a person calls it."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "200"}
    command = [sys.executable, "-m", "attnconform.conformance.command_line", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("backend", "state"),
    [
        ("Dies", "CRASH"),
        ("Hangs", "HANG"),
        ("Raises", "CRASH"),
        ("WritesOutside", "FAIL_oob_write"),
        ("MutatesItsInput", "FAIL_input_mutated"),
        ("GivesNan", "FAIL_nonfinite"),
        ("LeavesARow", "FAIL_unwritten"),
        ("HidesAFallback", "FALLBACK_UNDECLARED"),
        ("DropsAKey", "FAIL_membership"),
    ],
)
def test_a_misbehaving_backend_gets_its_state_and_loses_no_other_case(miniatures, backend, state):
    options = ("--level", "L0", "-n", "1", "--device", "cpu", "--case-timeout", "20", "--out", "results")
    done = attnconform("run", "-b", f"miniatures:{backend}", *options, cwd=miniatures)
    assert done.returncode == 1, done.stdout + done.stderr
    run = read_run(miniatures / "results" / "results.jsonl")
    states = {line.case.structure.mask_rule is not None: line.result.state for line in run.lines}
    assert states == {True: state, False: "PASS"}
    assert "reproduce: attnconform run" in done.stdout
    assert (miniatures / "results" / "report.html").exists()
    assert (miniatures / "results" / "junit.xml").exists()


def test_a_right_backend_conforms_and_exits_with_0(miniatures):
    done = attnconform("run", "-b", "miniatures:Right", "--level", "L0", "-n", "1", "--device", "cpu", cwd=miniatures)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "CONFORMING on 6 cases" in done.stdout


def test_a_backend_that_declares_nothing_runs_nothing_and_exits_with_3(miniatures):
    done = attnconform(
        "run", "-b", "miniatures:RunsNothing", "--level", "L0", "-n", "1", "--device", "cpu", cwd=miniatures
    )
    assert done.returncode == 3, done.stdout + done.stderr
    assert "NOTHING RAN" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "-b", "nosuch"), "backend is 'nosuch', but must be MODULE:CLASS or one of"),
        (("run", "-b", "miniatures:Nothing"), "miniatures has no Nothing"),
        (("run", "-b", "miniatures:NOT_A_BACKEND"), "NOT_A_BACKEND in miniatures is not a subclass of Backend"),
        (("run", "-b", "no_such_module:X"), "no_such_module does not import: ModuleNotFoundError"),
        (("run", "-b", "miniatures:FailsToStart"), "did not start: OSError: no licence found"),
        (("run", "-b", "reference", "--select", "nothing-like-it"), "keeps none of the"),
        (("run", "-b", "reference", "--level", "L9"), "level is L9"),
        (("run", "-b", "reference", "--shard", "3/2"), "shard is '3/2'"),
        (("gate", "-b", "reference", "--baseline", "none.jsonl"), "none.jsonl: No such file"),
        (("replay", "no-such-trace"), "no-such-trace"),
        (("explain", "L1.no-such-case"), "is not the id of a case"),
        (("explain", "truncated.json", "-b", "reference"), "truncated.json is not a case"),
    ],
)
def test_bad_input_ends_in_one_line_and_exit_code_2(miniatures, arguments, message):
    (miniatures / "truncated.json").write_text('{"id": "L1.forward')
    done = attnconform(*arguments, "--device", "cpu", cwd=miniatures)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert not (miniatures / "attnconform-results").exists()
