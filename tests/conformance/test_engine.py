"""Each way to misbehave has its own state, and the other cases still finish."""

import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from attnconform.conformance.engine import threads_shared_out
from attnconform.conformance.results import encode_line, read_run

SOURCE = Path(__file__).parents[2] / "src"


def command_of(*arguments):
    return [sys.executable, "-m", "attnconform.conformance.command_line", *arguments]


def environment():
    """Ours, without what says that this process is a worker of pytest: the command is none."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return ours | {"PYTHONPATH": str(SOURCE), "COLUMNS": "200"}


def attnconform(*arguments, cwd):
    """The command in a process of its own, as a person calls it."""
    command = command_of(*arguments)
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=300)


def wait_until(is_so, seconds=60):
    """Waits for something that another process does."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def is_quiet(path, seconds=3):
    """Whether nothing writes into a file any more."""
    before = path.stat().st_size
    time.sleep(seconds)
    return path.stat().st_size == before


@pytest.mark.parametrize(
    ("backend", "state"),
    [
        ("Dies", "CRASH"),
        ("Hangs", "HANG"),
        ("Raises", "CRASH"),
        ("Segfaults", "CRASH"),
        ("Aborts", "CRASH"),
        ("HangsWithTheLock", "HANG"),
        ("RunsOutOfMemory", "OOM"),
        ("RunsOutOfDeviceMemory", "OOM"),
        ("PoisonsTheDevice", "CRASH"),
        ("Leaks", "FAIL_leak"),
        ("Races", "FAIL_race"),
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
    states = {(line.case.structure.mask_rule is not None, line.result.state) for line in run.lines}
    assert states == {(True, state), (False, "PASS")}
    assert len(run.lines) == 6
    assert "reproduce: attnconform run" in done.stdout
    assert (miniatures / "results" / "report.html").exists()
    assert (miniatures / "results" / "junit.xml").exists()


@pytest.mark.parametrize(
    ("backend", "words"),
    [
        ("Segfaults", "killed by SIGSEGV"),
        ("Dies", "ended with exit code 11"),
        ("Hangs", "outlived its time limit in misbehave, miniatures.py line"),
        ("Leaks", "each of 24 equal calls keeps memory"),
        ("Races", "differs from run to run"),
    ],
)
def test_a_finding_says_how_it_came_about(miniatures, backend, words):
    options = ("--level", "L0", "-n", "1", "--device", "cpu", "--case-timeout", "10", "--select", "causal")
    done = attnconform("run", "-b", f"miniatures:{backend}", *options, cwd=miniatures)
    assert done.returncode == 1, done.stdout + done.stderr
    assert words in done.stdout


def test_a_dense_path_under_the_native_name_is_an_undeclared_fallback(miniatures):
    done = attnconform("run", "-b", "miniatures:DeniesADenseFallback", "--level", "L0", "-n", "1", cwd=miniatures)
    run = read_run(miniatures / "attnconform-results" / "results.jsonl")
    states = {(line.case.structure.candidates is not None, line.result.state) for line in run.lines}
    assert states == {(True, "FALLBACK_UNDECLARED"), (False, "PASS")}
    assert "made a tensor of" in done.stdout


def test_a_run_that_is_killed_half_way_is_resumed_without_judging_a_case_twice(miniatures):
    options = ("run", "-b", "miniatures:Logs", "--level", "L0", "-n", "1", "--device", "cpu")
    results = miniatures / "attnconform-results" / "results.jsonl"
    started = subprocess.Popen(command_of(*options), cwd=miniatures, env=environment(), stdout=subprocess.DEVNULL)
    wait_until(lambda: results.exists() and len(results.read_bytes().splitlines()) >= 4)
    started.kill()
    started.wait()
    kept = results.read_bytes().splitlines()[:4]
    results.write_bytes(b"\n".join([*kept, kept[1][:200]]))  # a line that was being written
    wait_until(lambda: is_quiet(miniatures / "calls.log"))  # its worker ends once it sees that its master is gone
    (miniatures / "calls.log").unlink()
    done = attnconform(*options, "--resume", cwd=miniatures)
    assert done.returncode == 0, done.stdout + done.stderr
    run = read_run(results)
    assert len(run.lines) == 6
    assert {x.case.id for x in run.lines[:3]} == {msgspec.json.decode(x)["case"]["id"] for x in kept[1:]}
    assert [encode_line(x).strip() for x in run.lines[:3]] == kept[1:]
    fresh = sum(x.result.calls for x in run.lines[3:])
    assert len((miniatures / "calls.log").read_text().splitlines()) == fresh


def test_a_run_that_has_nothing_to_go_on_from_says_so(miniatures):
    options = (
        "run",
        "-b",
        "miniatures:Right",
        "--level",
        "L0",
        "-n",
        "1",
        "--device",
        "cpu",
        "--select",
        "L0.forward.plain",
    )
    words = "attnconform-results has no results to go on from"
    assert words in attnconform(*options, "--resume", cwd=miniatures).stdout
    assert words not in attnconform(*options, "--resume", cwd=miniatures).stdout
    assert words not in attnconform(*options, cwd=miniatures).stdout


def test_a_backend_that_ends_every_worker_before_it_judges_ends_the_run(miniatures):
    options = ("--level", "L0", "-n", "1", "--device", "cpu")
    done = attnconform("run", "-b", "miniatures:DiesInWorkers", *options, cwd=miniatures)
    assert done.returncode == 1, done.stdout + done.stderr
    run = read_run(miniatures / "attnconform-results" / "results.jsonl")
    assert [line.result.state for line in run.lines] == ["CRASH"] * 6


def test_a_run_cannot_be_resumed_by_another_backend(miniatures):
    results = miniatures / "attnconform-results" / "results.jsonl"
    attnconform("run", "-b", "miniatures:Right", "--level", "L0", "-n", "1", "--device", "cpu", cwd=miniatures)
    before = results.read_bytes()
    other = ("run", "-b", "miniatures:GivesNan", "--level", "L0", "-n", "1", "--device", "cpu", "--resume")
    done = attnconform(*other, cwd=miniatures)
    assert done.returncode == 2
    assert "so it cannot be resumed" in done.stderr
    assert results.read_bytes() == before


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


def test_workers_share_the_cores_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    for workers, share in ((1, "8"), (3, "2"), (16, "1")):
        with threads_shared_out(workers):
            assert (os.environ["OMP_NUM_THREADS"], os.environ["OPENBLAS_NUM_THREADS"]) == (share, "3")
        assert "OMP_NUM_THREADS" not in os.environ
