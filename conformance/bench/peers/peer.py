"""What a peer gives to a suite: its stages as calls, and its answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from msgspec.structs import replace

from attnconform.conformance.bench.blocks import Block, Taken
from attnconform.conformance.bench.kernel_times import look_inside
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.row import Peer
from attnconform.conformance.bench.timing import Call

TIMED_LONG, SHORT = ("attention", "backward"), 0.2  # seconds of a timing; other stages run on the host
NAMED_KERNELS = 3
Answer = tuple[torch.Tensor, torch.Tensor | None]  # out, natural-log lse


@dataclass(frozen=True, eq=False)
class PeerRun:
    """A peer, built for one piece of work."""

    name: str
    stages: dict[str, list[Call]]  # our stage's name -> its calls, one for each input set
    answer: Callable[[], Answer] | None = None  # of the first set; None where there is none to compare
    outputs: str = "out, lse"
    workspace_bytes: int = 0
    first_call_seconds: float | None = None
    same_as: dict[str, str] = field(default_factory=dict)  # our stage -> the stage whose time stands for it


def timed_first(call: Callable[[], object], machine: Machine) -> float:
    """Seconds of a first call: imports, builds and tuning."""
    started = time.perf_counter()
    call()
    machine.synchronize()
    return time.perf_counter() - started


class PeerBench:
    """A peer over the blocks of a work: built anew in each and timed there, or the reason why it does not run here."""

    def __init__(self, name: str | None, machine: Machine) -> None:
        self.name, self.machine = name, machine
        self.taken = Taken()
        self.told = Peer(name=name or "")
        self.same_as: dict[str, str] = {}

    def time(self, block: Block, build: Callable[[], PeerRun], ours: Answer | None, *, seconds: float) -> None:
        """One block of every stage; after a failure nothing more is tried."""
        if self.name is None or self.told.error:
            return
        try:
            run = build()
            if block.is_first:
                self.told, self.same_as = self.look_at(run, ours), run.same_as
            for stage, calls in run.stages.items():
                long = stage.startswith(TIMED_LONG)
                self.taken.add(stage, block.measure(calls, seconds if long else min(SHORT, seconds)))
        except Exception as failure:  # a peer that does not run here is reported, not hidden
            reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
            self.told = Peer(name=self.name, error=reason)

    def look_at(self, run: PeerRun, ours: Answer | None) -> Peer:
        """What is said of a peer beside its times."""
        return Peer(
            name=run.name,
            outputs=run.outputs,
            workspace_bytes=run.workspace_bytes,
            first_call_seconds=run.first_call_seconds,
            difference="" if run.answer is None or ours is None else describe(run.answer(), ours),
            path=kernels_of(next(iter(run.stages.values())), self.machine),
        )

    def by_stage(self) -> dict[str, Peer]:
        """The peer's times by stage; where it did not run, one entry under "" says why."""
        if self.name is None:
            return {}
        if self.told.error:
            return {"": self.told}
        peers = {stage: replace(self.told, timing=taken.timing) for stage, taken in self.taken.joined().items()}
        return peers | {stage: peers[same] for stage, same in self.same_as.items()}


def kernels_of(calls: list[Call], machine: Machine) -> str:
    """The kernels that took the longest: the path that a library chose."""
    kernels = look_inside(calls[:1], machine).kernels
    return ", ".join(sorted(kernels, key=lambda name: -kernels[name])[:NAMED_KERNELS])


def time_peer(
    name: str, build: Callable[[], PeerRun], machine: Machine, ours: Answer, *, seconds: float = 1.0
) -> dict[str, Peer]:
    """A peer's times by stage, in one block."""
    peer = PeerBench(name, machine)
    peer.time(Block(0, machine), build, ours, seconds=seconds)
    return peer.by_stage()


def describe(theirs: Answer, ours: Answer) -> str:
    """How far apart two answers are."""
    out = (theirs[0].float() - ours[0].float()).abs().max().item()
    if theirs[1] is None or ours[1] is None:
        return f"max |difference|: out {out:.2e}"
    lse = (theirs[1].float() - ours[1].float()).abs().max().item()
    return f"max |difference|: out {out:.2e}, lse {lse:.2e}"
