"""How a call is timed: warm, cold in L2, by device events, beside the host's clock."""

import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

WARM_UPS, EVENTS = 100, 1000
FLUSH_BYTES = 256 << 20  # several times any L2, so that no call finds its inputs there
Call = Callable[[], object]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of one call."""

    median: float
    p95: float
    p99: float
    events: int
    host_median: float  # from the call to the end of its device work, by the host's clock


def measure(call: Call, *, seconds: float = 1.0) -> Timing:
    """Times one call, compiled and allocated before; at most about `seconds` of device time.

    Between two calls a buffer larger than L2 is cleared, which also lets the host run ahead, so that a short kernel
    is not timed together with its launch.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = max(time.perf_counter() - started, 1e-5) + 1e-4
    for _ in range(min(WARM_UPS, int(seconds / 4 / once) + 1)):
        call()
    count = min(EVENTS, max(20, int(seconds / once)))
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, end in pairs:
        flush.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    device = 1e3 * np.array([begin.elapsed_time(end) for begin, end in pairs])
    return Timing(
        median=float(np.median(device)),
        p95=float(np.quantile(device, 0.95)),
        p99=float(np.quantile(device, 0.99)),
        events=count,
        host_median=host_time(call, flush, min(count, 100)),
    )


def host_time(call: Call, flush: torch.Tensor, count: int) -> float:
    """Median microseconds by the host's clock, the device idle before and after."""
    times = []
    for _ in range(count):
        flush.zero_()
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(1e6 * (time.perf_counter() - started))
    return float(np.median(times))


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """What this GPU reaches in this process."""

    copy_bytes_per_second: float  # read and write counted
    matmul_flops_per_second: float  # bf16


def measure_ceilings() -> Ceilings:
    """A large copy and a large matrix product, on random data."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), seconds=0.3)
    n = 8192
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    c = torch.empty_like(a)
    product = measure(lambda: torch.matmul(a, b, out=c), seconds=0.5)
    return Ceilings(
        copy_bytes_per_second=(2 << 31) / (copy.median * 1e-6),
        matmul_flops_per_second=2 * n**3 / (product.median * 1e-6),
    )
