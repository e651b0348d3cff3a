"""Faults of memory and device are told apart from faults of the suite, wherever they surface."""

import signal

import pytest

from attnconform.conformance import isolation
from attnconform.conformance.isolation import count_kernel_kills, death_of, is_spoilt, settled, with_device_state
from attnconform.conformance.judge.verdict import CaseResult, Finding


def result_of(state, message):
    """A result with one finding."""
    clauses = () if state == "HARNESS_ERROR" else ("SAFE-PATH",)
    return CaseResult(case_id="c", state=state, findings=(Finding(state=state, clauses=clauses, message=message),))


@pytest.mark.parametrize(
    "message",
    [
        "raised OutOfMemoryError: CUDA out of memory. Tried to allocate 96.00 GiB",
        "raised MemoryError: ",
        "raised _ArrayMemoryError: Unable to allocate 7.28 TiB for an array with shape (1000000000000,)",
        "raised RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory",
        "raised AcceleratorError: CUDA error: out of memory",
        "raised RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_memory_that_ran_out_is_oom_and_spoils_the_process(message):
    found = settled(result_of("CRASH", message))
    assert found.state == "OOM"
    assert is_spoilt(found)


@pytest.mark.parametrize(
    "message",
    [
        "raised AcceleratorError: CUDA error: an illegal memory access was encountered",
        "raised RuntimeError: CUDA error: device-side assert triggered",
        "raised RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
        "raised RuntimeError: HIP error: unspecified launch failure",
    ],
)
def test_a_device_fault_is_a_crash_that_spoils_the_process(message):
    found = settled(result_of("CRASH", message))
    assert found.state == "CRASH"
    assert is_spoilt(found)


def test_a_device_fault_that_surfaces_in_the_judge_is_the_backends_crash():
    message = "AcceleratorError: CUDA error: an illegal memory access was encountered (as_float64, line 227)"
    found = settled(result_of("HARNESS_ERROR", message))
    assert found.state == "CRASH"
    assert found.findings[0].clauses == ("SAFE-PATH",)


@pytest.mark.parametrize("message", ["raised ValueError: no such tile", "raised RuntimeError: shapes differ"])
def test_an_exception_that_is_neither_leaves_the_process_in_use(message):
    assert settled(result_of("CRASH", message)) == result_of("CRASH", message)
    assert not is_spoilt(result_of("CRASH", message))


def test_a_finding_about_numbers_is_never_taken_for_a_fault_by_its_words():
    finding = result_of("FAIL_value", "out of memory is a path in this message")
    assert settled(finding) == finding


@pytest.mark.parametrize(
    ("returncode", "kernel_killed", "state", "words"),
    [
        (-signal.SIGSEGV, False, "CRASH", "SIGSEGV"),
        (-signal.SIGABRT, None, "CRASH", "SIGABRT"),
        (-signal.SIGKILL, True, "OOM", "the kernel killed"),
        (-signal.SIGKILL, None, "OOM", "SIGKILL"),
        (-signal.SIGKILL, False, "CRASH", "SIGKILL"),
        (11, True, "CRASH", "exit code 11"),
        (None, None, "CRASH", "the process died"),
    ],
)
def test_the_death_of_a_worker_is_named_by_how_it_ended(returncode, kernel_killed, state, words):
    found, message = death_of(returncode, kernel_killed=kernel_killed)
    assert found == state
    assert words in message


def test_the_kernels_kills_are_counted_where_it_says_so(tmp_path, monkeypatch):
    (tmp_path / "vmstat").write_text("nr_free_pages 5\noom_kill 3\n")
    monkeypatch.setattr(isolation, "KERNEL_COUNTERS", (tmp_path / "absent", tmp_path / "vmstat"))
    assert count_kernel_kills() == 3
    monkeypatch.setattr(isolation, "KERNEL_COUNTERS", (tmp_path / "absent",))
    assert count_kernel_kills() is None


def test_a_device_that_fails_after_the_last_call_is_a_crash(monkeypatch):
    def fail(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nand advice")

    monkeypatch.setattr(isolation.torch.cuda, "synchronize", fail)
    found = with_device_state(CaseResult(case_id="c", state="PASS"), "cuda:0")
    assert found.state == "CRASH"
    assert is_spoilt(found)
    assert with_device_state(CaseResult(case_id="c", state="PASS"), "cpu").state == "PASS"
