"""Suite backward: gradients of long prompts, chosen blocks and a hot page, in every mode, whole and in parts.

A row is a mode of a subject; its `kernels` are its parts, each timed by itself: planning and transposition, clearing,
dQ, dK and dV, reduction, rounding. Repeats of a mode are compared bit by bit, and some of its gradients with float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.backward_parts import TRANSPOSE, OurBackward, time_parts, time_whole
from attnconform.conformance.bench.backward_subjects import Subject, subjects
from attnconform.conformance.bench.figures import Figures, plan_figures
from attnconform.conformance.bench.honesty import relative_error
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.peer import time_peer
from attnconform.conformance.bench.row import BenchRow, Peer
from attnconform.conformance.bench.timing import measure

DETERMINISTIC, REPEATS = "kv_centric", 20


def backward_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Every mode of every subject."""
    for make in subjects(machine):
        machine.check_time()
        yield from subject_rows(make(), machine, options)
        machine.release()


def subject_rows(subject: Subject, machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """The deterministic mode first, and beside it the peer."""
    from attnconform.kernels.sparse_attention.backward_hints import MODES, BackwardHints

    for mode in sorted(MODES, key=lambda mode: mode != DETERMINISTIC):
        machine.check_time()
        ours = OurBackward(subject, BackwardHints(mode=mode))
        ours.run()
        error = subject.want.error_of(ours.gradients)
        peer = peer_of(subject, ours, machine, options) if mode == DETERMINISTIC else None
        yield mode_row(ours, machine, options, error=error, peer=peer)
        if mode == DETERMINISTIC:
            yield planning_row(ours, machine)


def mode_row(
    ours: OurBackward, machine: Machine, options: BenchOptions, *, error: float, peer: Peer | None
) -> BenchRow:
    """One mode, whole and in parts."""
    subject = ours.subject
    taken = time_whole(ours, machine, options.seconds)
    repeats = Repeats.of(ours, REPEATS if machine.is_real else 2)
    return BenchRow(
        suite="backward",
        phase="prefill",
        work=subject.name,
        stage=f"backward {ours.hints.mode}",
        ours=taken.timing,
        figures=replaced(backward_figures(ours, machine), recompiles=taken.recompiles),
        peer=peer,
        error=error,
        equal_runs=repeats.num_equal,
        path=f"{ours.path}; {repeats.text}",
        kernels=time_parts(ours, machine, options.seconds),
    )


def planning_row(ours: OurBackward, machine: Machine) -> BenchRow:
    """What a layer pays once for a plan: task tables and the transposition."""
    return BenchRow(
        suite="backward",
        phase="prefill",
        work=ours.subject.name,
        stage=TRANSPOSE,
        ours=measure(ours.make_work, machine, seconds=0.2).timing,
        figures=Figures(),
        path=ours.path,
    )


def peer_of(subject: Subject, ours: OurBackward, machine: Machine, options: BenchOptions) -> Peer | None:
    """The peer's gradients of the same forward; None where it was not asked for, or does not take the subject."""
    build = subject.peers.get(options.peer or "")
    if build is None:
        return None
    dq = ours.gradients.dq
    peers = time_peer(options.peer or "", lambda: build(subject.dout), machine, (dq, None), seconds=options.seconds)
    return peers.get("backward", peers.get(""))


@dataclass(frozen=True)
class Repeats:
    """Runs of one mode on the same tensors."""

    runs: int
    worst: float  # relative difference of a gradient from the first run's
    is_equal: bool

    @classmethod
    def of(cls, ours: OurBackward, runs: int) -> "Repeats":
        ours.run()
        first = [x.clone() for x in ours.gradients[:3]]
        worst, is_equal = 0.0, True
        for _ in range(runs - 1):
            ours.run()
            again = ours.gradients[:3]
            is_equal &= all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
            worst = max(worst, *(relative_error(a, b.float()) for a, b in zip(again, first, strict=True)))
        return cls(runs, worst, is_equal)

    @property
    def num_equal(self) -> int:
        """Runs that gave the same bits; 1 where one of them differs."""
        return self.runs if self.is_equal else 1

    @property
    def text(self) -> str:
        return f"{self.runs} runs bit-equal" if self.is_equal else f"{self.runs} runs differ by {self.worst:.1e}"


def backward_figures(ours: OurBackward, machine: Machine) -> Figures:
    """Five products where the forward has two; everything it reads, twice, and the gradients."""
    subject = ours.subject
    figures = plan_figures(
        subject.plan,
        processors=machine.processors,
        lengths=subject.lengths,
        edges=subject.edges,
        bytes_ideal=2 * subject.bytes,
    )
    return replaced(
        figures,
        flops_useful=figures.flops_useful * 5 // 2,
        flops_executed=figures.flops_executed * 5 // 2,
        workspace_reserved=ours.workspace_bytes,
        workspace_used=ours.workspace_bytes,
    )
