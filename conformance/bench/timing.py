"""How a call is timed: warm, cold in L2, by device events, beside the host's clock.

Compilation, tuning and first allocations happen before the first timed event. Inputs rotate: neighbouring events read
different sets, which together are larger than L2, and L2 is filled with something else between them. That filling
also keeps the device busy until the host has handed over the next call, so that a device time has no waiting for the
host in it. What a call does on the host is in the host's times only, which start with an idle device.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from attnconform.conformance.bench.cores import on_core
from attnconform.conformance.bench.machine import Machine

WARM_UPS, EVENTS, HOST_EVENTS = 100, 1000, 240
MIN_EVENTS, INTERPRETED_EVENTS = 5, 1
FILL_SECONDS, MAX_FILLS = 60e-6, 9  # one fill of L2 and more, on the fastest memory there is
STRETCHES = 6  # into which one uninterrupted measurement is cut, as a block of its own each
Call = Callable[[], object]
Times = NDArray[np.float64]
Ints = NDArray[np.int64]


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of one call by one clock."""

    median: float
    p5: float
    p95: float
    p99: float
    events: int
    blocks: list[float] = []  # medians of the blocks that the events were taken in

    @classmethod
    def of(cls, times: Times, blocks: Ints | None = None) -> "Quantiles":
        p5, median, p95, p99 = (float(np.quantile(times, q)) for q in (0.05, 0.5, 0.95, 0.99))
        groups = [] if blocks is None else [times[blocks == number] for number in np.unique(blocks)]
        medians = [float(np.median(group)) for group in groups]
        return cls(median=median, p5=p5, p95=p95, p99=p99, events=len(times), blocks=medians)

    @property
    def low(self) -> float:
        """The fastest block."""
        return min(self.blocks, default=self.median)

    @property
    def high(self) -> float:
        return max(self.blocks, default=self.median)

    @property
    def spread(self) -> float:
        """How far a block's median is from the median at most, as a share of it."""
        return max(self.high - self.median, self.median - self.low) / self.median if self.median else 0.0

    def agrees_with(self, other: "Quantiles") -> bool:
        """Whether the blocks of two runs overlap.

        Where nothing but chance tells them apart, all n blocks of one run lie beyond all n of the other once in
        C(2n, n) / 2 times: with six blocks, once in 462.
        """
        return self.low <= other.high and other.low <= self.high


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
    sets: Ints  # (events,) which input set each event read
    host: Times
    issue: Times
    warm_ups: int = 0
    recompiles: int = 0  # compilations after the warm-up
    num_sets: int = 1
    device_blocks: Ints | None = None  # (events,) which block each was taken in; None: none are told apart
    host_blocks: Ints | None = None

    @property
    def timing(self) -> Timing:
        return Timing(
            device=Quantiles.of(self.device, self.device_blocks),
            host=Quantiles.of(self.host, self.host_blocks),
            issue_median=float(np.median(self.issue)),
            warm_ups=self.warm_ups,
        )

    def by_host(self) -> "Samples":
        """The host's events in the place of the device's, of one measurement: its calls took turns."""
        sets = np.arange(len(self.host)) % self.num_sets
        return replace(self, device=self.host, sets=sets, device_blocks=self.host_blocks)

    @classmethod
    def join(cls, parts: "Sequence[Samples]") -> "Samples":
        """Measurements of one stage in several blocks, each with input sets of its own; one keeps its stretches."""
        if len(parts) == 1:
            return parts[0]
        before = np.cumsum([0, *(part.num_sets for part in parts)])
        return cls(
            device=np.concatenate([part.device for part in parts]),
            sets=np.concatenate([part.sets + first for part, first in zip(parts, before, strict=False)]),
            host=np.concatenate([part.host for part in parts]),
            issue=np.concatenate([part.issue for part in parts]),
            warm_ups=sum(part.warm_ups for part in parts),
            recompiles=sum(part.recompiles for part in parts),
            num_sets=int(before[-1]),
            device_blocks=np.repeat(np.arange(len(parts)), [len(part.device) for part in parts]),
            host_blocks=np.repeat(np.arange(len(parts)), [len(part.host) for part in parts]),
        )


def stretches(count: int) -> Ints:
    """Which of some equal stretches each of so many events belongs to.

    >>> stretches(12).tolist()
    [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    """
    return np.arange(count) * STRETCHES // max(count, 1)


def measure(
    calls: Call | Sequence[Call],
    machine: Machine,
    *,
    seconds: float = 1.0,
    events: int = EVENTS,
    host_events: int = HOST_EVENTS,
    core: int | None = None,
) -> Samples:
    """Times calls in turn, one for each input set; at most about `seconds` of device time."""
    in_turn = [calls] if callable(calls) else list(calls)
    for call in in_turn * (2 if machine.is_real else 1):  # a second call may capture what the first compiled
        call()
    machine.synchronize()
    if machine.is_warming:
        return warmed(in_turn, machine)
    once = max(wall_time(in_turn[0], machine), 1e-5) + 1e-4 if machine.is_real else 1.0
    warm_ups = min(WARM_UPS, int(seconds / 4 / once) + 1) if machine.is_real else 0
    for n in range(warm_ups):
        in_turn[n % len(in_turn)]()
    machine.synchronize()
    fills = fills_needed(in_turn[0], machine)
    once += fills * FILL_SECONDS
    count = min(events, max(MIN_EVENTS, int(seconds / once))) if machine.is_real else INTERPRETED_EVENTS
    before = machine.compiles.total
    with on_core(core):
        device, sets = device_times(in_turn, machine, count, fills)
        host, issue = host_times(in_turn, machine, min(count, host_events))
    return Samples(
        device,
        sets,
        host,
        issue,
        warm_ups=warm_ups + len(in_turn),
        recompiles=machine.compiles.total - before,
        num_sets=len(in_turn),
        device_blocks=stretches(len(device)),
        host_blocks=stretches(len(host)),
    )


def warmed(calls: list[Call], machine: Machine) -> Samples:
    """One event, which stands for none: what had to be compiled is, and that was all."""
    once = np.array([1e6 * wall_time(calls[0], machine)])
    return Samples(once, np.zeros(1, dtype=np.int64), once, once, warm_ups=len(calls))


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


def device_times(calls: list[Call], machine: Machine, count: int, fills: int) -> tuple[Times, Ints]:
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
    with no_collection():
        for n in range(count):
            machine.flush()
            machine.synchronize()
            started = time.perf_counter()
            calls[n % len(calls)]()
            issued.append(1e6 * (time.perf_counter() - started))
            machine.synchronize()
            done.append(1e6 * (time.perf_counter() - started))
    return np.array(done), np.array(issued)


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: whose event it falls into is chance."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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
