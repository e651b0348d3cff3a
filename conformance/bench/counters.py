"""Hardware counters of a work's kernels, from Nsight Compute where it is installed: one process for all works."""

import csv
import io
import shutil
import subprocess
import sys
from dataclasses import dataclass, field

from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.probe import MARK
from attnconform.conformance.process import run_within

BYTES_READ, BYTES_WRITTEN, HIT_RATE = "dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_sector_hit_rate.pct"
DURATION = "gpu__time_duration.sum"
BUSY_MEAN, BUSY_MOST = "sm__cycles_active.avg", "sm__cycles_active.max"
REGISTERS = "launch__registers_per_thread"
# the tensor cores' share of the cycles has another name on every architecture; the first that the tool knows is taken
TENSOR_NAMES = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
)
ALWAYS = (BYTES_READ, BYTES_WRITTEN, HIT_RATE, DURATION, BUSY_MEAN, BUSY_MOST, REGISTERS)


@dataclass(frozen=True)
class KernelCount:
    """Counters of one kernel launch, by metric."""

    name: str
    grid: int
    values: dict[str, float]


@dataclass
class Counters:
    """Figures by work, as far as they were measured."""

    figures: dict[str, Figures] = field(default_factory=dict)
    kernels: dict[str, list[KernelCount]] = field(default_factory=dict)
    note: str = ""  # why there are none

    def of(self, work: str) -> Figures | None:
        return self.figures.get(work)


def collect(works: dict[str, str], *, timeout: float) -> Counters:
    """Counters of some works, given as name -> what the probe calls it; a note instead where the tool fails."""
    tool = shutil.which("ncu")
    if tool is None:
        return Counters(note="ncu is not installed: DRAM bytes, L2 hits and tensor core use were not measured")
    if not works:
        return Counters()
    metrics = [*ALWAYS, *known_tensor_metric(tool)]
    command = [
        tool, "--clock-control", "none", "--profile-from-start", "off", "--csv", "--print-units", "base",
        "--metrics", ",".join(metrics), sys.executable, "-m", "attnconform.conformance.bench.probe", *works.values(),
    ]  # fmt: skip
    try:
        done = run_within(command, timeout)
    except subprocess.TimeoutExpired:
        return Counters(note=f"ncu took longer than {timeout:.0f} s")
    launches = parse(done.stdout)
    if done.returncode or not launches:
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        return Counters(note=f"ncu ended with {done.returncode}: {' '.join(last)[:200]}")
    by_work = split_works(launches, list(works))
    return Counters({name: figures_of(kernels) for name, kernels in by_work.items() if kernels}, by_work)


def known_tensor_metric(tool: str) -> list[str]:
    """The first name for tensor core use that this version knows for this device; none where it knows none."""
    try:
        listing = run_within([tool, "--query-metrics"], 60.0).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    known = {line.split()[0] for line in listing.splitlines() if line.split()}
    return [name for name in TENSOR_NAMES if name.split(".")[0] in known][:1]


def parse(text: str) -> list[KernelCount]:
    """Kernel launches of the tool's CSV, in the order of their launch; whatever else was printed is passed over."""
    lines = text.splitlines()
    start = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    found: dict[str, KernelCount] = {}
    for record in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        launch = found.setdefault(
            record["ID"], KernelCount(record["Kernel Name"], grid_x(record.get("Grid Size", "")), {})
        )
        value = to_number(record.get("Metric Value", ""))
        if value is not None:
            launch.values[record["Metric Name"]] = value
    return list(found.values())


def grid_x(text: str) -> int:
    """The first of "(8, 1, 1)"."""
    digits = text.strip("() ").split(",")[0].strip()
    return int(digits) if digits.isdigit() else 0


def to_number(text: str) -> float | None:
    """A figure with thousands separators; None for n/a."""
    try:
        return float(text.replace(",", ""))
    except (ValueError, AttributeError):
        return None


def split_works(launches: list[KernelCount], names: list[str]) -> dict[str, list[KernelCount]]:
    """Launches of every work: the probe launches a kernel of n programs before work number n, from 1."""
    by_work: dict[str, list[KernelCount]] = {name: [] for name in names}
    current = 0
    for launch in launches:
        if MARK in launch.name:
            current = launch.grid
        elif 1 <= current <= len(names):
            by_work[names[current - 1]].append(launch)
    return by_work


def figures_of(kernels: list[KernelCount]) -> Figures:
    """Counters of one call: bytes add up, shares are means over the time."""
    time = sum(k.values.get(DURATION, 0.0) for k in kernels)
    longest = max(kernels, key=lambda k: k.values.get(DURATION, 0.0))

    def over_time(metric: str) -> float | None:
        weighed = [(k.values[metric], k.values.get(DURATION, 0.0)) for k in kernels if metric in k.values]
        return sum(v * t for v, t in weighed) / time if weighed and time else None

    read, written = (sum(k.values.get(metric, 0.0) for k in kernels) for metric in (BYTES_READ, BYTES_WRITTEN))
    hit = over_time(HIT_RATE)
    tensor = next((over_time(name) for name in TENSOR_NAMES if any(name in k.values for k in kernels)), None)
    most = longest.values.get(BUSY_MOST, 0.0)
    registers = longest.values.get(REGISTERS)
    return Figures(
        bytes_dram=round(read + written),
        bytes_written_dram=round(written),
        l2_hit_rate=None if hit is None else hit / 100,
        tensor_core_share=None if tensor is None else tensor / 100,
        processors_busy=longest.values.get(BUSY_MEAN, 0.0) / most if most else None,
        registers=None if registers is None else int(registers),
    )
