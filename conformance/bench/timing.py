"""How a call is timed: warm, cold in L2, by device events, beside the host's clock.

Compilation, tuning and first allocations happen before the first timed event. Inputs rotate: neighbouring events read
different sets, which together are larger than L2, and L2 is filled with something else between them. That filling
also keeps the device busy until the host has handed over the next call, so that a device time has no waiting for the
host in it. What a call does on the host is in the host's times only, which start with an idle device.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from attnconform.conformance.bench.machine import Machine

WARM_UPS, EVENTS, HOST_EVENTS = 100, 1000, 100
MIN_EVENTS, INTERPRETED_EVENTS = 5, 1
FILL_SECONDS, MAX_FILLS = 60e-6, 9  # one fill of L2 and more, on the fastest memory there is
Call = Callable[[], object]
Times = NDArray[np.float64]


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of one call by one clock."""

    median: float
    p5: float
    p95: float
    p99: float
    events: int

    @classmethod
    def of(cls, times: "Times") -> "Quantiles":
        p5, median, p95, p99 = (float(np.quantile(times, q)) for q in (0.05, 0.5, 0.95, 0.99))
        return cls(median=median, p5=p5, p95=p95, p99=p99, events=len(times))

    @property
    def spread(self) -> float:
        """How far apart nine tenths of the events are, as a share of the median."""
        return (self.p95 - self.p5) / self.median if self.median else 0.0

    def agrees_with(self, other: "Quantiles") -> bool:
        """Whether the medians are no farther apart than the events of one run are."""
        return abs(self.median - other.median) <= max(self.p95 - self.p5, other.p95 - other.p5)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One call by both clocks."""

    device: Quantiles  # between two device events
    host: Quantiles  # from the call to the end of its device work, by the host's clock
    issue_median: float  # until the call returned, its device work perhaps still going on
    warm_ups: int

    @property
    def median(self) -> float:
        """Of the device's clock."""
        return self.device.median


@dataclass(frozen=True)
class Samples:
    """Every event of one measurement, in microseconds."""

    device: Times  # (events,)
    sets: NDArray[np.int64]  # (events,) which input set each event read
    host: Times
    issue: Times
    warm_ups: int
    recompiles: int  # compilations after the warm-up

    @property
    def timing(self) -> Timing:
        return Timing(
            device=Quantiles.of(self.device),
            host=Quantiles.of(self.host),
            issue_median=float(np.median(self.issue)),
            warm_ups=self.warm_ups,
        )


def measure(
    calls: Call | Sequence[Call], machine: Machine, *, seconds: float = 1.0, host_events: int = HOST_EVENTS
) -> Samples:
    """Times calls in turn, one for each input set; at most about `seconds` of device time."""
    in_turn = [calls] if callable(calls) else list(calls)
    for call in in_turn:
        call()
    machine.synchronize()
    once = max(wall_time(in_turn[0], machine), 1e-5) + 1e-4 if machine.is_real else 1.0
    warm_ups = min(WARM_UPS, int(seconds / 4 / once) + 1) if machine.is_real else 0
    for n in range(warm_ups):
        in_turn[n % len(in_turn)]()
    machine.synchronize()
    fills = fills_needed(in_turn[0], machine)
    once += fills * FILL_SECONDS
    count = min(EVENTS, max(MIN_EVENTS, int(seconds / once))) if machine.is_real else INTERPRETED_EVENTS
    before = machine.compiles.total
    device, sets = device_times(in_turn, machine, count, fills)
    host, issue = host_times(in_turn, machine, min(count, host_events))
    return Samples(device, sets, host, issue, warm_ups + len(in_turn), machine.compiles.total - before)


def wall_time(call: Call, machine: Machine) -> float:
    """Seconds of one call and its device work."""
    started = time.perf_counter()
    call()
    machine.synchronize()
    return time.perf_counter() - started


def fills_needed(call: Call, machine: Machine) -> int:
    """How often to fill L2 before a call, so that the device is busy until the host has handed it over."""
    if not machine.is_real:
        return 1
    times = []
    for _ in range(5):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
        machine.synchronize()
    return 1 + min(MAX_FILLS, int(1.5 * float(np.median(times)) / FILL_SECONDS))


def device_times(calls: list[Call], machine: Machine, count: int, fills: int) -> tuple[Times, NDArray[np.int64]]:
    """Microseconds between two device events around each call, and the set that it read."""
    sets = np.arange(count) % len(calls)
    if not machine.is_real:
        return np.array([1e6 * wall_time(calls[n], machine) for n in sets]), sets
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for n, (begin, end) in zip(sets, pairs, strict=True):
        for _ in range(fills):
            machine.flush()
        begin.record()
        calls[n]()
        end.record()
    machine.synchronize()
    return 1e3 * np.array([begin.elapsed_time(end) for begin, end in pairs]), sets


def host_times(calls: list[Call], machine: Machine, count: int) -> tuple[Times, Times]:
    """Microseconds by the host's clock, the device idle before and after; and until each call returned."""
    done, issued = [], []
    for n in range(count):
        machine.flush()
        machine.synchronize()
        started = time.perf_counter()
        calls[n % len(calls)]()
        issued.append(1e6 * (time.perf_counter() - started))
        machine.synchronize()
        done.append(1e6 * (time.perf_counter() - started))
    return np.array(done), np.array(issued)


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """What this device reaches in this process."""

    copy_bytes_per_second: float  # read and write counted
    matmul_flops_per_second: float  # bf16


def measure_ceilings(machine: Machine) -> Ceilings:
    """A large copy and a large matrix product, on random data."""
    elements, n = (1 << 30, 8192) if machine.is_real else (1 << 12, 32)
    source = torch.empty(elements, dtype=torch.bfloat16, device=machine.device).normal_()
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), machine, seconds=0.3).timing
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=machine.device) for _ in range(2))
    c = torch.empty_like(a)
    product = measure(lambda: torch.matmul(a, b, out=c), machine, seconds=0.5).timing
    return Ceilings(
        copy_bytes_per_second=4 * elements / (copy.median * 1e-6),
        matmul_flops_per_second=2 * n**3 / (product.median * 1e-6),
    )
