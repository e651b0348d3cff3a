"""Where a bench runs: a GPU, whose times count, or Triton's interpreter, whose times mean nothing."""

import gc
import os
import platform
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from attnconform.conformance.adapters.triton_kernels import interpreting
from attnconform.conformance.bench.compiles import CompileLog

FLUSH_BYTES = 256 << 20  # several times any L2, so that no call finds its inputs there
PACKAGES = ("torch", "triton", "numpy", "flashinfer-python", "fla-core", "attnconform")
MEANINGLESS = "no GPU: tiny shapes in Triton's interpreter, so the times mean nothing"
CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "temperature.gpu")


class CacheState(msgspec.Struct, frozen=True):
    """A folder of compiled kernels."""

    folder: str  # its environment variable, or "default": the path itself is the user's own
    entries: int

    @property
    def is_cold(self) -> bool:
        return self.entries == 0


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What has to be the same for two reports to be compared, and what may explain a difference."""

    device: str
    capability: str = ""
    driver: str = ""
    versions: dict[str, str] = {}
    clocks: dict[str, str] = {}  # as the driver's tool prints them, before the first timing
    clocks_loaded: dict[str, str] = {}  # and right after a large matrix product
    compile_caches: dict[str, CacheState] = {}  # before the first timing
    host: dict[str, str] = {}  # processor, cores that this process may use, load
    is_interpreted: bool = False


class TimeUp(Exception):
    """The limit was reached before a work began."""


@dataclass
class Machine:
    """A device and how to time on it."""

    device: str
    compiles: CompileLog
    deadline: float | None = None  # of the whole bench, by time.monotonic; None: as long as it takes
    is_warming: bool = False  # compile and touch everything once; the times are thrown away

    @property
    def is_time_up(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def check_time(self) -> None:
        """Raises TimeUp where nothing more may begin."""
        if self.is_time_up:
            raise TimeUp

    @property
    def is_real(self) -> bool:
        """Whether times mean anything."""
        return self.device.startswith("cuda")

    @cached_property
    def l2_bytes(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size) if self.is_real else 1 << 20

    @cached_property
    def processors(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count) if self.is_real else 1

    @cached_property
    def flush_buffer(self) -> torch.Tensor:
        return torch.empty(FLUSH_BYTES if self.is_real else 1, dtype=torch.int8, device=self.device)

    def flush(self) -> None:
        """Fills L2 with something else; on a GPU this also lets the host run ahead of short kernels."""
        self.flush_buffer.zero_()

    def synchronize(self) -> None:
        if self.is_real:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Gives back what the last work held."""
        if self.is_real:
            gc.collect()
            torch.cuda.empty_cache()


def open_machine(device: str) -> Machine:
    """A machine of this device. Raises Unavailable where the interpreter cannot work in this process."""
    interpreting(device)
    return Machine(device, CompileLog.listening(device))


def read_environment(machine: Machine) -> Environment:
    """What is installed and how the device is set, before anything is timed."""
    is_real = machine.is_real
    capability = ".".join(str(n) for n in torch.cuda.get_device_capability()) if is_real else ""
    return Environment(
        device=torch.cuda.get_device_name() if is_real else "interpreter",
        capability=capability,
        driver=query_driver("driver_version") if is_real else "",
        versions={"python": platform.python_version()} | installed_versions(),
        clocks=read_clocks(machine),
        compile_caches=compile_caches() if is_real else {},
        host=read_host(),
        is_interpreted=not is_real,
    )


def read_host() -> dict[str, str]:
    """What a time by the host's clock depends on."""
    load = ", ".join(f"{minutes:.1f}" for minutes in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"processor": processor_name(), "cores": f"{cores} of {os.cpu_count()}", "load": load}


def processor_name() -> str:
    """As the system calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def read_clocks(machine: Machine) -> dict[str, str]:
    """Clocks, power and temperature as they are now."""
    if not machine.is_real:
        return {}
    return dict(zip(CLOCKS, query_driver(",".join(CLOCKS)).split(", "), strict=False))


def compile_caches() -> dict[str, CacheState]:
    """Triton's, Inductor's and FlashInfer's caches of compiled kernels."""
    user = os.environ.get("USER") or "root"
    places = {
        "triton": ("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"),
        "inductor": ("TORCHINDUCTOR_CACHE_DIR", Path(tempfile.gettempdir()) / f"torchinductor_{user}"),
        "flashinfer": ("FLASHINFER_WORKSPACE_BASE", Path.home() / ".cache" / "flashinfer"),
    }
    return {name: cache_state(variable, default) for name, (variable, default) in places.items()}


def cache_state(variable: str, default: Path) -> CacheState:
    """How many entries the cache has that a variable names."""
    chosen = os.environ.get(variable)
    folder = Path(chosen) if chosen else default
    entries = sum(1 for _ in folder.iterdir()) if folder.is_dir() else 0
    return CacheState(folder=variable if chosen else "default", entries=entries)


def installed_versions() -> dict[str, str]:
    """Versions of what is timed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def driver_id() -> str:
    """What the driver's tool calls the GPU in use: its own numbers know nothing of CUDA_VISIBLE_DEVICES."""
    if not torch.cuda.is_available():
        return "0"
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def query_driver(field: str) -> str:
    """A field as the driver's tool names it."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader", f"--id={driver_id()}"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
