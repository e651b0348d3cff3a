"""What the four runs of one batch measured, in four groups; a figure that could not be measured is None."""

import msgspec

from attnconform.conformance.bench.slices import Slice


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What moved, of the fixed-candidate run."""

    bytes_ideal: int  # keys and values once, queries, ids, outputs
    bytes_output: int
    bytes_dram: int | None = None  # read and written
    bytes_written_dram: int | None = None
    copy_bytes_per_second: float
    l2_hit_rate: float | None = None


class Compute(msgspec.Struct, frozen=True, kw_only=True):
    """What was computed, of the fixed-candidate run."""

    flops: int
    matmul_flops_per_second: float
    tensor_core_share: float | None = None  # of the cycles
    tile_efficiency: float = 1.0  # keys wanted over keys computed


class Scheduling(msgspec.Struct, frozen=True, kw_only=True):
    """How the work was dealt out, of the fixed-candidate run."""

    processors_busy: float | None = None  # mean over the busiest, measured
    longest_over_fair: float | None = None  # the longest program over an equal share, from the task table
    row_mean: float = 0.0
    row_max: int = 0


class FixedCost(msgspec.Struct, frozen=True, kw_only=True):
    """What is around the kernel, of the end-to-end run; counts are per call."""

    waits: float = 0.0  # of the host for the device, inside a call
    device_allocations: int = 0  # by the driver, over all calls
    replans: int = 0  # over all calls
    graph_exits: int = 0  # over all calls
    fallbacks: dict[str, int] = {}  # by reason, over all calls


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds."""

    dense: float
    index: float
    attention: float  # fixed candidates
    merge: float = 0.0  # of it
    selector: float = 0.0  # route and top-k
    end_to_end: float  # selector, index and attention
    host_median: float  # a step from candidates to output, by the host's clock
    host_p99: float


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """One subject on one batch."""

    subject: str
    times: Times
    memory: Memory
    compute: Compute
    scheduling: Scheduling
    fixed: FixedCost
    slices: list[Slice] = []  # of the end-to-end run
    kernels: dict[str, float] = {}  # microseconds a call, by name

    @property
    def bandwidth_share(self) -> float:
        """Bytes that must move over time, as a share of the copy bandwidth."""
        return self.memory.bytes_ideal / (self.times.attention * 1e-6) / self.memory.copy_bytes_per_second

    @property
    def moved_share(self) -> float:
        """Bytes that did move over time, as a share of the copy bandwidth; those that must where none were counted."""
        moved = self.memory.bytes_ideal if self.memory.bytes_dram is None else self.memory.bytes_dram
        return moved / (self.times.attention * 1e-6) / self.memory.copy_bytes_per_second

    @property
    def compute_share(self) -> float:
        """Wanted FLOPs over time, as a share of the matrix rate."""
        return self.compute.flops / (self.times.attention * 1e-6) / self.compute.matmul_flops_per_second
