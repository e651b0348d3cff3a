"""What a peer gives to a suite: its stages as calls, and its answer."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.row import Peer
from attnconform.conformance.bench.timing import Call, measure

TIMED_LONG, SHORT = ("attention", "backward"), 0.3  # seconds of a timing; other stages run on the host


@dataclass(frozen=True, eq=False)
class PeerRun:
    """A peer, built for one piece of work."""

    name: str
    stages: dict[str, list[Call]]  # our stage's name -> its calls, one for each input set
    answer: Callable[[], tuple[torch.Tensor, torch.Tensor | None]]  # of the first set: out, natural-log lse
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


def time_peer(
    name: str,
    build: Callable[[], PeerRun],
    machine: Machine,
    ours: tuple[torch.Tensor, torch.Tensor | None],
    *,
    seconds: float = 1.0,
) -> dict[str, Peer]:
    """A peer's times by stage; where it does not run here, one entry under "" says why."""
    try:
        run = build()
        difference = describe(run.answer(), ours)
        peers = {}
        for stage, calls in run.stages.items():
            peers[stage] = Peer(
                name=run.name,
                timing=measure(calls, machine, seconds=seconds if stage in TIMED_LONG else min(SHORT, seconds)).timing,
                outputs=run.outputs,
                workspace_bytes=run.workspace_bytes,
                first_call_seconds=run.first_call_seconds,
                difference=difference,
            )
        return peers | {stage: peers[same] for stage, same in run.same_as.items()}
    except Exception as failure:  # a peer that does not run here is reported, not hidden
        return {"": Peer(name=name, error=f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}")}


def describe(theirs: tuple[torch.Tensor, torch.Tensor | None], ours: tuple[torch.Tensor, torch.Tensor | None]) -> str:
    """How far apart two answers are."""
    out = (theirs[0].float() - ours[0].float()).abs().max().item()
    if theirs[1] is None or ours[1] is None:
        return f"max |difference|: out {out:.2e}"
    lse = (theirs[1].float() - ours[1].float()).abs().max().item()
    return f"max |difference|: out {out:.2e}, lse {lse:.2e}"
