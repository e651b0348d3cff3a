"""One line of a benchmark: the same work by us and by a peer, in one process."""

import msgspec

from attnconform.conformance.bench.timing import Ceilings, Timing


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one piece of work, and what the work is made of."""

    suite: str
    work: str
    stage: str  # attention, plan, end to end, ...: ours and the peer's are the same stage
    ours: Timing
    peer: Timing | None = None
    peer_name: str = ""
    peer_error: str = ""  # why there is no peer's time
    bytes: int = 0  # that must move at least
    flops: int = 0
    workspace_bytes: int = 0
    check: str = ""  # how the two outputs were compared, and how far apart they are

    @property
    def speedup(self) -> float | None:
        """How many times faster than the peer."""
        return None if self.peer is None else self.peer.median / self.ours.median

    def copy_share(self, ceilings: Ceilings) -> float:
        """Bytes over time, as a share of the copy bandwidth."""
        return self.bytes / (self.ours.median * 1e-6) / ceilings.copy_bytes_per_second

    def matmul_share(self, ceilings: Ceilings) -> float:
        """FLOPs over time, as a share of the matrix rate."""
        return self.flops / (self.ours.median * 1e-6) / ceilings.matmul_flops_per_second


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """A benchmark run: where, with what, how fast."""

    date: str
    device: str
    driver: str
    versions: dict[str, str]
    ceilings: Ceilings
    rows: list[BenchRow]
    notes: list[str] = []
