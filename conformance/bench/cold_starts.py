"""Suite starts: what a first call costs where nothing was compiled before, by kernel, and what compiles again later.

Every work has a process of its own with an empty cache folder (`start_process.py`), so that no kernel is found that
another work compiled. Lengths, candidates and batches then change, for which nothing may be compiled; and last
something that is compiled in, so that a count that cannot rise is seen. [PLAN-VALUES, PLAN-KEY]
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from attnconform.conformance.bench.compiles import Compilation
from attnconform.conformance.bench.machine import Machine, TimeUp
from attnconform.conformance.process import last_words, run_within

MOST_SECONDS = 10.0  # of one kernel's compilation
TIMEOUT, GRACE = 150.0, 10.0  # seconds of one work's process, and past the machine's limit
MOST_AT_ONCE, CORES_EACH = 4, 4  # a compiler keeps one core busy; the others are for what it starts


class KernelStart(msgspec.Struct, frozen=True, kw_only=True):
    """Compilations of one kernel."""

    kernel: str
    specializations: int
    longest: float  # seconds of one
    total: float  # seconds of all


class ColdStart(msgspec.Struct, frozen=True, kw_only=True):
    """A work's first call in a new process, and what was compiled after it."""

    work: str
    error: str = ""  # why nothing else is known
    first: float | None = None  # seconds of making inputs, planning and the first call, compilation included
    warm: float | None = None  # seconds of the next call
    kernels: list[KernelStart] = []
    changed: dict[str, int] = {}  # specializations asked for by each change of numbers alone
    other_code: int | None = None  # and by a change of what is compiled in

    @property
    def longest(self) -> float | None:
        """Seconds of the kernel that took longest; None where nothing was compiled."""
        return max((kernel.longest for kernel in self.kernels), default=None)

    @property
    def recompiled(self) -> int:
        """Specializations that changed numbers asked for; there should be none."""
        return sum(self.changed.values())

    @property
    def is_met(self) -> bool:
        """Every kernel within its seconds, nothing compiled again for other numbers, and a count that does rise."""
        is_quick = self.longest is not None and self.longest < MOST_SECONDS
        return is_quick and not self.recompiled and self.other_code != 0


def by_kernel(compilations: list[Compilation]) -> list[KernelStart]:
    """Longest first.

    >>> [k.kernel for k in by_kernel([Compilation("a", 1.0), Compilation("b", 3.0), Compilation("a", 2.5)])]
    ['b', 'a']
    """
    seconds: dict[str, list[float]] = {}
    for one in compilations:
        seconds.setdefault(one.kernel, []).append(one.seconds)
    found = [
        KernelStart(kernel=name, specializations=len(taken), longest=max(taken), total=sum(taken))
        for name, taken in seconds.items()
    ]
    return sorted(found, key=lambda kernel: -kernel.longest)


def cold_starts(machine: Machine, names: tuple[str, ...] = ()) -> Iterator[ColdStart]:
    """Every work, or those named, in the order in which they are listed; some at a time.

    Raises TimeUp where the machine's time is up before all began.
    """
    from attnconform.conformance.bench.start_works import WORKS

    chosen = names or tuple(WORKS)
    with ThreadPoolExecutor(processes_at_once()) as pool:
        starting = [pool.submit(cold_start, name, machine) for name in chosen]
        for future in starting:
            found = future.result()
            if found is None:
                raise TimeUp
            yield found


def processes_at_once() -> int:
    return max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) // CORES_EACH))


def seconds_for(machine: Machine) -> float:
    """How long a work's process may take: one that hangs must not outlive whoever ends this process at its limit."""
    return TIMEOUT if machine.deadline is None else min(TIMEOUT, machine.deadline - time.monotonic() + GRACE)


def cold_start(name: str, machine: Machine) -> ColdStart | None:
    """One work in its own process and cache folder; None where no time is left to begin."""
    if machine.is_time_up:
        return None
    command = [sys.executable, "-m", "attnconform.conformance.bench.start_process", name, machine.device]
    timeout = seconds_for(machine)
    # a process that took too long, and is not gone yet, may still write there
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            done = run_within(command, timeout, env=os.environ | {"TRITON_CACHE_DIR": folder})
        except subprocess.TimeoutExpired:
            return ColdStart(work=name, error=f"took longer than {timeout:.0f} s")
    if done.returncode:
        return ColdStart(work=name, error=f"the process ended with {done.returncode}: {last_words(done.stderr)}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=ColdStart)
