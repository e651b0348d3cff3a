"""What a case did to the process it ran in: memory that ran out, a device that no longer answers, a death.

A worker that is no longer fit for the next case reports the one that spoiled it, ends, and is replaced.
"""

import os
import re
import signal
from pathlib import Path

import msgspec
import torch

from attnconform.conformance.judge.verdict import CaseResult, Finding, State, worst_state

# types and texts in which torch, numpy, Triton, the CUDA runtime and its libraries say that memory ran out
OUT_OF_MEMORY = re.compile(
    r"\b\w*(OutOfMemoryError|MemoryError)\b|out of memory|can't allocate memory|_STATUS_ALLOC_FAILED\b"
)
# after these a context answers every later call with an error, whoever makes it
DEVICE_FAULT = re.compile(
    r"\bAcceleratorError\b|\b(CUDA|HIP|XPU) (driver )?error\b|\[(CUDA|HIP)\]: (an illegal|unspec|misal)"
)
# what the adapter of programs raises, by the name of its type
PROGRAM_ERRORS: tuple[tuple[str, State], ...] = (
    ("raised ProgramTimeout", "HANG"),
    ("raised ProtocolError", "FAIL_protocol"),
)
RAISED: frozenset[State] = frozenset({"CRASH", "HARNESS_ERROR"})
SPOILS: frozenset[State] = frozenset({"OOM"})  # what a backend still holds would starve the next case
KERNEL_COUNTERS = (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat"))


def is_device_fault(error: BaseException | None) -> bool:
    """Whether an error says that the device, or this process's context on it, is lost."""
    return error is not None and DEVICE_FAULT.search(f"{type(error).__name__}: {error}") is not None


def settled(result: CaseResult) -> CaseResult:
    """The result with OOM for memory that ran out, CRASH for a device fault, HANG and FAIL_protocol for programs.

    A fault of the device surfaces at the next synchronization, which may be the judge's own: it is no HARNESS_ERROR.
    """
    findings = tuple(settled_finding(finding) for finding in result.findings)
    if findings == result.findings:
        return result
    return msgspec.structs.replace(result, findings=findings, state=worst_state(list(findings)))


def settled_finding(finding: Finding) -> Finding:
    """One finding, likewise."""
    if finding.state not in RAISED:
        return finding
    clauses = finding.clauses or ("SAFE-PATH",)
    if OUT_OF_MEMORY.search(finding.message):
        return msgspec.structs.replace(finding, state="OOM", clauses=clauses)
    if DEVICE_FAULT.search(finding.message):
        return msgspec.structs.replace(finding, state="CRASH", clauses=clauses)
    for beginning, state in PROGRAM_ERRORS:
        if finding.message.startswith(beginning):
            return msgspec.structs.replace(finding, state=state, clauses=clauses)
    return finding


def is_spoilt(result: CaseResult) -> bool:
    """Whether the process should not judge another case after this one.

    A program of its own is started again without the worker's help.
    """
    if result.state in SPOILS:
        return not any(finding.message.startswith("raised ProgramOutOfMemory") for finding in result.findings)
    return any(finding.state == "CRASH" and DEVICE_FAULT.search(finding.message) for finding in result.findings)


def with_device_state(result: CaseResult, device: str) -> CaseResult:
    """The result, and a CRASH where the device has failed since, which only a synchronization shows."""
    if not device.startswith("cuda"):
        return result
    try:
        torch.cuda.synchronize(device)
    except Exception as error:
        message = f"the device failed: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
        finding = Finding(state="CRASH", clauses=("SAFE-PATH",), message=message, check="isolation")
        findings = (*result.findings, finding)
        return msgspec.structs.replace(result, findings=findings, state=worst_state(list(findings)))
    return result


def prefer_as_victim() -> None:
    """Asks the kernel to kill this process, and not the one that keeps the record, where memory runs out."""
    try:
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        return  # no Linux, or not allowed: then the kernel chooses


def count_kernel_kills() -> int | None:
    """How many processes the kernel killed for want of memory so far; None where it does not say."""
    for path in KERNEL_COUNTERS:
        try:
            fields = dict(line.split() for line in path.read_text().splitlines() if len(line.split()) == 2)
        except OSError:
            continue
        if "oom_kill" in fields:
            return int(fields["oom_kill"])
    return None


def death_of(returncode: int | None, *, kernel_killed: bool | None) -> tuple[State, str]:
    """State and words for the end of a worker that reported nothing.

    kernel_killed: whether the kernel killed a process for want of memory meanwhile; None where it does not say.
    """
    if returncode is None:
        return "CRASH", "the process died before it reported anything"
    if returncode >= 0:
        return "CRASH", f"the process ended with exit code {returncode}"
    name = signal_name(-returncode)
    if -returncode == signal.SIGKILL and kernel_killed:
        return "OOM", "the kernel killed the process for want of memory"
    if -returncode == signal.SIGKILL and kernel_killed is None:
        return "OOM", "the process was killed by SIGKILL, as a kernel does for want of memory"
    return "CRASH", f"the process was killed by {name}"


def signal_name(number: int) -> str:
    """SIGSEGV for 11."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def end_process(exit_code: int) -> None:
    """Ends this process at once: handlers and destructors may need what is broken."""
    os._exit(exit_code)
