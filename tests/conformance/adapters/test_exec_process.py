"""Programs as backends: two independent ones conform, and each way to break off has its own state and line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnconform.conformance.adapters.exec_process import ExecBackend
from attnconform.conformance.adapters.registry import BackendError, load_backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.exec.program import TIMEOUT_VARIABLE
from attnconform.conformance.isolation import is_spoilt, settled
from attnconform.conformance.judge.judge import judge_case, undeclared
from attnconform.conformance.judge.verdict import CONFORMING
from attnconform.conformance.results import read_run

SOURCE = Path(__file__).parents[3] / "src"
PLAIN = next(c for c in matrix("L0") if c.structure.mask_rule is None and c.structure.candidates is not None)
MASKED = next(c for c in matrix("L0") if c.structure.mask_rule is not None)


@pytest.fixture
def loaded(request):
    """Loads a program, and ends it with the test."""

    def load(command):
        backend = load_backend(f"exec:{command}", "cpu")
        request.addfinalizer(backend.close)
        return backend

    return load


def judged(backend):
    """Every case of L1 that a backend declares, with its state."""
    cases = [case for case in matrix("L1") if undeclared(case, backend) is None]
    return [(case, settled(judge_case(case, backend)).state) for case in cases]


def test_the_backend_in_cpp_conforms_on_all_that_it_declares(loaded, attention_program):
    states = judged(loaded(attention_program))
    assert {case.id: state for case, state in states if state not in CONFORMING} == {}
    assert sum(case.operation == "forward" for case, _ in states) >= 14
    assert sum(case.operation == "backward" for case, _ in states) >= 3
    assert sum(state == "REFUSED_OK" for _, state in states) == 18


def test_onnx_runtime_conforms_but_for_masked_scores_that_overflow_float16(loaded, onnx_program):
    """A masked score that is infinite in float16 meets the mask's -inf, and the row is NaN. [MASK-NO-BIAS]"""
    states = judged(loaded(onnx_program))
    assert len(states) >= 25
    failing = [case for case, state in states if state not in CONFORMING]
    assert all(c.structure.dtype == "float16" and c.values in ("far_key", "extreme") for c in failing)


@pytest.mark.parametrize(
    ("mode", "state", "words"),
    [
        ("exits", "CRASH", "ended with exit code 7 while 'run' was asked; its last words: no licence left"),
        ("segfaults", "CRASH", "was killed by SIGSEGV while 'run' was asked"),
        ("hangs", "HANG", "no answer to 'run' within 2 s"),
        ("chatters", "FAIL_protocol", "answered 'run' with 'loading weights ...'"),
        ("answers-another-run", "FAIL_protocol", "as number"),
        ("answers-another-request", "FAIL_protocol", "answered 'stopped' to 'run'"),
        ("writes-nothing", "FAIL_protocol", "wrote no 1-outputs.safetensors"),
        ("writes-half-a-file", "FAIL_protocol", "that is no safetensors file"),
        ("writes-inputs", "FAIL_protocol", "wrote no out, but"),
        ("runs-out-of-memory", "OOM", "workspace of 96 GiB"),
        ("fails", "CRASH", "no kernel for this window"),
    ],
)
def test_each_way_to_break_off_has_its_state_and_the_next_case_is_judged(
    loaded, spoilt_program, monkeypatch, mode, state, words
):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "2" if mode == "hangs" else "60")
    backend = loaded(spoilt_program(mode))
    result = settled(judge_case(MASKED, backend))
    assert result.state == state
    assert words in result.findings[0].message
    assert "\n" not in result.findings[0].message
    assert not is_spoilt(result)
    assert judge_case(PLAIN, backend).state == "PASS"


def test_a_program_that_was_closed_has_ended_and_left_no_files(attention_program):
    backend = ExecBackend(command=attention_program)
    process, folder = backend.program.process, Path(backend.folder.name)
    assert judge_case(PLAIN, backend).state == "PASS"
    backend.close()
    assert process.poll() == 0
    assert not folder.exists()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("no-such-program", "backend 'exec:no-such-program' did not start: FileNotFoundError"),
        ("false", "did not start: ProgramDied: ended with exit code 1 while 'start' was asked"),
        ("cat", "did not start: ProtocolError: answered 'start' with"),
        ("", "did not start: ValueError: exec: names no command"),
        ("'unbalanced", "did not start: ValueError: No closing quotation"),
    ],
)
def test_a_program_that_does_not_start_is_an_error_of_one_line(command, message):
    with pytest.raises(BackendError) as error:
        load_backend(f"exec:{command}", "cpu")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_time_limit_that_is_no_number_is_said(monkeypatch, attention_program):
    monkeypatch.setenv(TIMEOUT_VARIABLE, "soon")
    with pytest.raises(BackendError, match="ATTNCONFORM_EXEC_TIMEOUT is 'soon'"):
        load_backend(f"exec:{attention_program}", "cpu")


def test_a_run_of_the_matrix_takes_a_program_by_its_command(tmp_path, spoilt_program):
    command = [sys.executable, "-m", "attnconform.conformance.command_line", "run", "--level", "L0", "-n", "1"]
    backend = f"exec:{spoilt_program('chatters')}"
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "COLUMNS": "400"}
    done = subprocess.run(
        [*command, "--device", "cpu", "-b", backend], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    run = read_run(tmp_path / "attnconform-results" / "results.jsonl")
    states = {(line.case.structure.mask_rule is not None, line.result.state) for line in run.lines}
    assert states == {(True, "FAIL_protocol"), (False, "PASS")}
    assert run.header.versions["program"] == "plain loops in C++"
    assert f"reproduce: attnconform run -b '{backend}' --select" in done.stdout
