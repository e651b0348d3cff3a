"""Time of every device kernel inside a call, and how often the host waited or allocated, from torch's profiler."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.timing import Call

CALLS = 20
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
ALLOCATIONS = ("cudaMalloc", "cudaFree")


@dataclass(frozen=True)
class Inside:
    """What one call is made of, on average."""

    kernels: dict[str, float] = field(default_factory=dict)  # microseconds a call
    launches: float = 0.0
    waits: float = 0.0  # of the host for the device
    allocations: float = 0.0  # of the driver, not of torch's cache

    def time_of(self, part: str) -> float:
        """Microseconds of the kernels whose name contains this."""
        return sum(time for name, time in self.kernels.items() if part in name)


def look_inside(calls: Sequence[Call], machine: Machine) -> Inside:
    """Profiles calls in turn; empty in the interpreter, which has no kernels."""
    if not machine.is_real:
        return Inside()
    from torch.profiler import ProfilerActivity, profile

    machine.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        for n in range(CALLS):
            calls[n % len(calls)]()
        machine.synchronize()
    events = profiler.key_averages()
    on_device = [e for e in events if e.device_type.name == "CUDA"]
    calls_of = {e.key: e.count for e in events if e.device_type.name == "CPU"}
    own_waits = 2  # the synchronize above, and the profiler's own at its end
    kernels: dict[str, float] = {}
    for event in on_device:
        name = short_name(event.key)
        kernels[name] = kernels.get(name, 0.0) + event.self_device_time_total / CALLS
    return Inside(
        kernels=kernels,
        launches=sum(e.count for e in on_device) / CALLS,
        waits=max(0, sum(calls_of.get(name, 0) for name in WAITS) - own_waits) / CALLS,
        allocations=sum(calls_of.get(name, 0) for name in ALLOCATIONS) / CALLS,
    )


def short_name(kernel: str) -> str:
    """A kernel's name without return type and the insides of its template and argument lists."""
    head = kernel.removeprefix("void ").split("(anonymous namespace)::")[-1]
    return head.split("<")[0].split("(")[0][:80]
