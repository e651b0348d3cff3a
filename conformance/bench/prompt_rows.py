"""Rows of a long prompt: attention and its plan, ours and the peer's, whatever chose the keys."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from msgspec.structs import replace

from attnconform.conformance.bench.decode_stages import figures_of
from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.row import BenchRow, Peer
from attnconform.conformance.bench.timing import Samples, Timing

SHORT = 0.2  # seconds of the timing of a plan, or of a dense pass


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is said of a prompt beside its times, read from its first block."""

    suite: str
    work: str
    rate: float  # of the pairs of a dense pass
    num_sets: int
    figures: Figures
    error: float
    path: str
    kernels: dict[str, float] = field(default_factory=dict)
    dense: Timing | None = None


def prompt_rows(told: Told, samples: dict[str, Samples], peers: dict[str, Peer]) -> Iterator[BenchRow]:
    """One row for each stage that was timed."""
    for stage, taken in samples.items():
        is_attention = stage == "attention"
        yield BenchRow(
            suite=told.suite,
            phase="prefill",
            work=told.work,
            stage=stage,
            ours=taken.timing,
            figures=replace(figures_of(stage, told.figures), recompiles=taken.recompiles),
            peer=peers.get(stage, peers.get("")),
            dense=told.dense if is_attention else None,
            rate=told.rate,
            error=told.error if is_attention else None,
            path=told.path,
            sets=told.num_sets,
            kernels=told.kernels if is_attention else {},
        )
