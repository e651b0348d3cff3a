"""Memory that calls keep: the same call, made again, must leave the process as large as it found it."""

import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.verdict import Finding

CONFIRMED = 24  # a cache that fills, such as an interpreter's, grows for some calls and then no more
KEPT_BYTES = 1024  # what each of CONFIRMED equal calls has to keep at least, after collection of garbage
PAGE_BYTES = 4096


@checks("SAFE-MEMORY")
def check_memory(trial: Trial) -> list[Finding]:
    """Equal calls keep no memory: not one of many may leave KEPT_BYTES more in use than it found.

    Earlier checks have called the backend already, so caches for this case's shapes are filled. On a GPU the bytes are
    those of torch's allocator; on a CPU those of malloc, or, where that does not tell, of the resident set.
    """
    if trial.growth and min(trial.growth) < KEPT_BYTES:
        return []
    kept: list[int] = []
    while len(kept) < CONFIRMED:
        with watched_memory(trial):
            trial.run(trial.values, unowned=0.0)
        kept.append(trial.growth[-1])
        if kept[-1] < KEPT_BYTES:
            return []
    message = f"each of {CONFIRMED} equal calls keeps memory, {min(kept)} to {max(kept)} bytes"
    return [Finding(state="FAIL_leak", clauses=("SAFE-MEMORY",), message=message)]


@contextmanager
def watched_memory(trial: Trial) -> Iterator[None]:
    """Notes by how many bytes memory grows over a call whose results are gone at the end.

    What exists before is set aside meanwhile, so that the collection of garbage goes through the call's own alone.
    """
    measure = bytes_in_use(trial.backend.device)
    gc.freeze()
    try:
        before = measure()
        yield
        gc.collect()
        trial.growth.append(measure() - before)
    finally:
        gc.unfreeze()


def bytes_in_use(device: str) -> Callable[[], int]:
    """What counts the bytes that a backend on this device has in use."""
    if device.startswith("cuda"):
        return lambda: int(torch.cuda.memory_allocated(device))
    return malloc_bytes if mallinfo2() is not None else resident_bytes


class MallInfo(ctypes.Structure):
    """struct mallinfo2 of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@cache
def mallinfo2() -> Callable[[], MallInfo] | None:
    """glibc's count of what malloc gave out, over all arenas; None where the C library has none."""
    if not sys.platform.startswith("linux"):
        return None
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        return None
    function.restype = MallInfo
    return lambda: function()


def malloc_bytes() -> int:
    """Bytes that malloc gave out and did not get back; torch's and numpy's arrays are among them."""
    read = mallinfo2()
    assert read is not None
    info = read()
    return int(info.uordblks + info.hblkhd)


def resident_bytes() -> int:
    """The resident set, in whole pages; 0 where the system does not tell, and then nothing is found."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0
