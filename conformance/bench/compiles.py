"""Compilations while a bench runs: how many, how long, and what a first call costs with and without a cache."""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

KERNELS = "attnconform.kernels"


@dataclass(frozen=True)
class Compilation:
    """One specialization of a kernel, made by Triton."""

    kernel: str
    seconds: float  # from its source to machine code in the cache folder


class CompileLog:
    """Triton's compilations and cache hits in this process, and Dynamo's graphs."""

    def __init__(self) -> None:
        self.compilations: list[Compilation] = []
        self.loaded = 0

    @classmethod
    def listening(cls, device: str) -> "CompileLog":
        """A log that Triton reports to; in the interpreter nothing is compiled."""
        log = cls()
        if device.startswith("cuda"):
            import triton

            triton.knobs.compilation.listener = log.hear
        return log

    def hear(self, *, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: object) -> None:
        """What Triton calls after each kernel that it compiled or found in its cache folder."""
        if cache_hit:
            self.loaded += 1
        else:
            self.compilations.append(Compilation(metadata["name"], 1e-6 * times.total))

    @property
    def compiled(self) -> int:
        return len(self.compilations)

    @property
    def total(self) -> int:
        """Compilations so far, of any compiler; a difference of two totals counts recompiles."""
        return self.compiled + self.loaded + dynamo_graphs()


def dynamo_graphs() -> int:
    """Graphs that torch.compile has made; 0 where it was never used."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return int(sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"])


class Starts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a first call, apart from every timing."""

    compile: float  # nothing compiled before, an empty cache folder
    cached: float  # a new process's view: compiled kernels in the folder, none in memory
    warm: float  # the next call


def start_times(make_call: Callable[[], Callable[[], object]]) -> Starts:
    """Times first calls of what make_call plans anew, in a cache folder of its own."""
    import triton

    kernels = jit_functions()
    with triton.knobs.cache.scope(), tempfile.TemporaryDirectory() as folder:
        triton.knobs.cache.dir = folder
        forget(kernels)
        first = first_call(make_call())
        forget(kernels)
        cached = first_call(call := make_call())
        warm = first_call(call)
    forget(kernels)
    return Starts(compile=first, cached=cached, warm=warm)


def first_call(call: Callable[[], object]) -> float:
    """Seconds of one call and its device work."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def jit_functions() -> list[Any]:
    """Every kernel of the bundled ones that is loaded."""
    import triton

    modules = [module for name, module in list(sys.modules.items()) if name.startswith(KERNELS)]
    found = {id(v): v for module in modules for v in vars(module).values() if isinstance(v, triton.JITFunction)}
    return list(found.values())


def forget(kernels: list[Any]) -> None:
    """Drops compiled kernels from memory, as in a new process."""
    for kernel in kernels:
        kernel.device_caches.clear()
