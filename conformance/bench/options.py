"""What a bench was asked for."""

from collections.abc import Callable
from dataclasses import dataclass

from attnconform.conformance.bench.counters import Counters
from attnconform.traces import Trace


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Choices that every suite sees."""

    backend: str = "triton"
    peer: str | None = None
    trace: Trace | None = None
    counters: Counters | None = None  # None: no hardware counters here, or none wanted
    seconds: float = 1.0  # of device time, at most, for one timing
    with_starts: bool = False  # time first calls and tuning too
    tell: Callable[[str], object] = lambda note: None  # takes what a report is to say beside its rows
    stages: tuple[str, ...] = ()  # those to time; all where none is named

    def wants(self, stage: str) -> bool:
        return not self.stages or stage in self.stages
