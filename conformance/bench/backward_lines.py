"""The backward's rows of the table: beside a peer, beside the other modes, and again and again on the same tensors.

In every block the subject is drawn anew, and each side of a comparison is timed once more after the other.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from msgspec.structs import replace as replaced

from attnconform.conformance.bench.backward import DETERMINISTIC, REPEATS, Repeats, backward_figures
from attnconform.conformance.bench.backward_parts import OurBackward
from attnconform.conformance.bench.backward_subjects import TINY_HOT, HotShape, Make, Subject
from attnconform.conformance.bench.blocks import Block, Taken, blocks
from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.peer import PeerBench, PeerRun
from attnconform.conformance.bench.row import BenchRow, Peer

HYBRID, ATOMIC = "hybrid", "atomic"
SHARE = 0.5  # of a timing's seconds: a mode that adds takes several times as long as one that gathers


def stage_of(mode: str) -> str:
    return f"backward {mode}"


@dataclass(frozen=True, kw_only=True)
class Told:
    """What is said of a mode beside its times, read from the first block."""

    figures: Figures
    error: float
    repeats: Repeats
    path: str

    @classmethod
    def of(cls, ours: OurBackward, machine: Machine) -> "Told":
        ours.run()
        error = ours.subject.want.error_of(ours.gradients)
        repeats = Repeats.of(ours, REPEATS if machine.is_real else 2)
        return cls(
            figures=backward_figures(ours, machine), error=error, repeats=repeats, path=f"{ours.path}; {repeats.text}"
        )


@dataclass
class Modes:
    """Some modes of a subject over the blocks, the first of them beside a peer."""

    names: tuple[str, ...]
    machine: Machine
    options: BenchOptions
    taken: Taken = field(default_factory=Taken)
    told: dict[str, Told] = field(default_factory=dict)
    work: str = ""

    def __post_init__(self) -> None:
        self.peer = PeerBench(self.options.peer, self.machine)

    def time(self, make: Make) -> None:
        """Every block."""
        for block in blocks(self.machine):
            self.time_block(make(), block)

    def time_block(self, subject: Subject, block: Block) -> None:
        """Every mode and the peer, one after the other; in the first block, what else there is to say."""
        from attnconform.kernels.sparse_attention.backward_hints import BackwardHints

        self.work, seconds = subject.name, SHARE * self.options.seconds
        for mode in self.names:
            ours = OurBackward(subject, BackwardHints(mode=mode))
            if block.is_first:
                self.told[mode] = Told.of(ours, self.machine)
            self.taken.add(mode, block.measure(ours.run, seconds))
            if mode == self.names[0]:
                dq = ours.gradients.dq
                self.peer.time(block, build_of(subject, self.options.peer), (dq, None), seconds=seconds)

    def rows(self) -> dict[str, BenchRow]:
        """One of every mode; the peer beside the first."""
        samples, peers = self.taken.joined(), self.peer.by_stage()
        found = {
            mode: BenchRow(
                suite="backward",
                phase="prefill",
                work=self.work,
                stage=stage_of(mode),
                ours=samples[mode].timing,
                figures=replaced(told.figures, recompiles=samples[mode].recompiles),
                error=told.error,
                equal_runs=told.repeats.num_equal,
                path=told.path,
            )
            for mode, told in self.told.items()
        }
        first = self.names[0]
        return found | {first: replaced(found[first], peer=peers.get("backward", peers.get("")))}


def build_of(subject: Subject, peer: str | None) -> Callable[[], PeerRun]:
    """The peer's gradients of the same forward."""
    return lambda: subject.peers[peer or ""](subject.dout)


def beside_peer(make: Make, machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """The deterministic mode and the peer."""
    modes = Modes((DETERMINISTIC,), machine, options)
    modes.time(make)
    yield from modes.rows().values()


def beside_modes(make: Make, machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """The deterministic mode beside the fastest of the others, and hybrid beside atomic."""
    modes = Modes((DETERMINISTIC, HYBRID, ATOMIC), machine, options)
    modes.time(make)
    rows = modes.rows()
    fastest = min((rows[HYBRID], rows[ATOMIC]), key=lambda row: row.time.median)
    yield replaced(rows[DETERMINISTIC], peer=as_peer(fastest))
    yield replaced(rows[HYBRID], peer=as_peer(rows[ATOMIC]))


def as_peer(row: BenchRow) -> Peer:
    """A mode of ours as what another is compared with."""
    return Peer(
        name=f"our {row.stage}", timing=row.ours, outputs="dq, dk, dv", workspace_bytes=row.figures.workspace_used,
        difference=f"error {row.error:.1e}",
    )  # fmt: skip


def hot_shapes(machine: Machine) -> list[HotShape]:
    """Pages that every row selects, alone, and beside some of each row's own."""
    hot = HotShape() if machine.is_real else TINY_HOT
    return [replace(hot, num_cold=0), hot]
