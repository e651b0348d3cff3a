"""One line of a benchmark: the same work by us and by a peer, in one process."""

from typing import Literal

import msgspec

from attnconform.conformance.bench.autotuning import Tuned
from attnconform.conformance.bench.cold_starts import ColdStart
from attnconform.conformance.bench.compiles import Starts
from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.machine import Environment
from attnconform.conformance.bench.slices import Slice
from attnconform.conformance.bench.timing import Ceilings, Quantiles, Timing

FORMAT = 3
DEVICE_STAGES = ("merge", "route", "top-k")  # and attention
Phase = Literal["prefill", "decode"]
CHUNK = "chunk"  # the sweep's axis of prompts


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """What stands beside our time."""

    name: str
    timing: Timing | None = None
    error: str = ""  # why there is no time
    outputs: str = "out, lse"
    workspace_bytes: int = 0  # reserved for it
    first_call_seconds: float | None = None  # build and tuning included
    difference: str = ""  # how far its answer is from ours
    path: str = ""  # its kernels that take the longest


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one piece of work, and what the work is made of."""

    suite: str
    phase: Phase  # the two are never averaged
    work: str
    stage: str  # attention, plan, end to end, ...: ours and the peer's are the same stage
    ours: Timing
    figures: Figures = Figures()
    peer: Peer | None = None
    dense: Timing | None = None  # every key of the same batch, in the same process
    rate: float = 1.0  # candidates over committed keys
    error: float | None = None  # |out - want| / |want| against float32, worst of the sets; NaN is never right
    equal_runs: int | None = None  # runs of one input that gave the same bits; 1 where a second differs
    poisoned_error: float | None = None  # the same with NaN in every slot that no list names
    path: str = ""  # the code that ran
    sets: int = 1  # input sets that rotate
    starts: Starts | None = None
    tuned: Tuned | None = None
    slices: list[Slice] = []
    kernels: dict[str, float] = {}  # microseconds a call, by kernel name

    @property
    def key(self) -> str:
        """Names the same row in another report."""
        return f"{self.suite}: {self.work}: {self.stage}"

    @property
    def is_attention(self) -> bool:
        """Whether it is a kernel over keys, whose bytes and FLOPs are counted."""
        return self.stage.startswith(("attention", "backward"))

    @property
    def clock(self) -> Literal["device", "host"]:
        """Whose clock compares two rows: stages around attention run on the host too, for some on nothing else."""
        return "device" if self.is_attention or self.stage in DEVICE_STAGES else "host"

    @property
    def time(self) -> Quantiles:
        """Ours, by that clock."""
        return self.ours.device if self.clock == "device" else self.ours.host

    @property
    def peer_time(self) -> Quantiles | None:
        """The peer's, by that clock."""
        if self.peer is None or self.peer.timing is None:
            return None
        return self.peer.timing.device if self.clock == "device" else self.peer.timing.host

    @property
    def speedup(self) -> float | None:
        """How many times faster than the peer."""
        return None if self.peer_time is None else self.peer_time.median / self.time.median

    @property
    def speedups(self) -> list[float]:
        """The same in every block, where both were timed one after the other."""
        if self.peer_time is None:
            return []
        return [theirs / ours for theirs, ours in zip(self.peer_time.blocks, self.time.blocks, strict=False)]

    def copy_share(self, ceilings: Ceilings) -> float:
        """Bytes that must move over time, as a share of the copy bandwidth."""
        return self.figures.bytes_ideal / (self.ours.median * 1e-6) / ceilings.copy_bytes_per_second

    def matmul_share(self, ceilings: Ceilings) -> float:
        """FLOPs that are wanted over time, as a share of the matrix rate."""
        return self.figures.flops_useful / (self.ours.median * 1e-6) / ceilings.matmul_flops_per_second

    def roofline_share(self, ceilings: Ceilings) -> float:
        """The least time that bytes and FLOPs allow, over the time it took."""
        return max(self.copy_share(ceilings), self.matmul_share(ceilings))

    @property
    def valid_tokens_per_second(self) -> float:
        """Query tokens that a request owns."""
        return self.figures.valid_tokens / (self.ours.median * 1e-6)

    @property
    def processed_tokens_per_second(self) -> float:
        """Query rows as tiles compute them, padding included."""
        return self.figures.processed_tokens / (self.ours.median * 1e-6)


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Sparse against dense for one shape."""

    axis: str  # which axis was varied
    seqlen_kv: int
    batch: int
    seqlen_q: int
    rate: float
    run_length: int  # neighbouring blocks chosen together: clustering
    block_size: int
    attention: float  # microseconds
    index: float | None  # None where the lists come ready made
    dense: float
    stage: str  # what the total includes

    @property
    def phase(self) -> Phase:
        """A chunk of a prompt is prefill, whatever else a sweep has is decode; the two are never averaged."""
        return "prefill" if self.axis == CHUNK else "decode"

    @property
    def total(self) -> float:
        return self.attention + (self.index or 0.0)

    @property
    def key(self) -> str:
        return (
            f"{self.axis}: kv {self.seqlen_kv}, batch {self.batch}, q {self.seqlen_q}, rate {self.rate:g}, "
            f"runs {self.run_length}, block {self.block_size}"
        )


class Weighted(msgspec.Struct, frozen=True, kw_only=True):
    """Times per length, weighted by how often a trace has that length."""

    trace: str
    phase: Phase
    shares: dict[int, float]  # swept length -> share of the trace's rows nearest to it
    outside: float  # share of rows below the shortest or above the longest length swept
    sparse: float  # microseconds
    dense: float
    best: float  # the faster of the two at each length
    sparse_from: int | None  # shortest swept length from which on sparse is faster; None where it never is


Measure = Literal["times as fast", "of the peer's time", "of the copy bandwidth", "us on the device", "runs bit-equal"]


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to reach, and what was reached."""

    key: str  # of the row
    measure: Measure
    wanted: float
    got: float | None  # None where the peer did not run
    is_met: bool | None = None  # None where times mean nothing, or nothing was measured
    note: str = ""  # why nothing was

    @property
    def is_upper(self) -> bool:
        """Whether less is better."""
        return self.measure in ("of the peer's time", "us on the device")


Ending = Literal["measured", "failed", "hung", "not ready", "out of time"]


class LineRun(msgspec.Struct, frozen=True, kw_only=True):
    """How a line of the table was measured, in a process of its own."""

    name: str
    state: Ending
    note: str = ""  # what went wrong, in the process's own words
    warm_seconds: float | None = None  # imports, compilation, first calls, beside other lines' processes
    timed_seconds: float | None = None  # its turn
    beside: int = 0  # processes that were still warming when its turn began
    environment: Environment | None = None  # of that process; clocks at the beginning and the end of its turn


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark run: where, with what, how fast."""

    format: int = FORMAT
    date: str
    environment: Environment
    ceilings: Ceilings
    rows: list[BenchRow]
    sweep: list[SweepPoint] = []
    weighted: list[Weighted] = []
    targets: list[Target] = []
    lines: list[LineRun] = []
    starts: list[ColdStart] = []
    notes: list[str] = []
