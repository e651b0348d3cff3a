"""Tiers of one shape in turn: an update writes storage that no run in flight reads. [PLAN-STORAGE]

One tier alone would have the next update wait for the run before it, or overwrite what that run reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.tier import Tier, plan_tier


@dataclass(eq=False)
class Buffers:
    """Which storage an update may write while runs still read other storage. [PLAN-STORAGE]

    An update takes storage that no run in flight reads, or has to wait; a launch reads what was written last, until it
    has finished.
    """

    count: int
    latest: int | None = None
    reading: list[set[int]] = field(default_factory=list)  # per buffer, the runs in flight

    def __post_init__(self) -> None:
        if self.count < 1:
            raise PlanError("PLAN-STORAGE", "num_buffers", self.count, "must be at least 1")
        self.reading = [set() for _ in range(self.count)]

    def update(self) -> int | None:
        """The buffer to write, or None where every one is being read."""
        free = next((b for b, runs in enumerate(self.reading) if not runs), None)
        self.latest = self.latest if free is None else free
        return free

    def launch(self, run: int) -> int:
        """The buffer that a run reads."""
        if self.latest is None or any(run in runs for runs in self.reading):
            raise PlanError("PLAN-STORAGE", "run", run, "there is nothing new for it to read")
        self.reading[self.latest].add(run)
        return self.latest

    def finish(self, run: int) -> int:
        """The buffer that a finished run lets go."""
        for b, runs in enumerate(self.reading):
            if run in runs:
                runs.remove(run)
                return b
        raise PlanError("PLAN-STORAGE", "run", run, "it is not in flight")


class Event:
    """The end of a run on the device; without a device a run has ended when its call returns."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.cuda.Event() if device.type == "cuda" else None
        if self.event is not None:
            self.event.record()

    def is_over(self) -> bool:
        return self.event is None or self.event.query()

    def wait(self) -> None:
        """Later work of the current stream begins after it; the host does not wait."""
        if self.event is not None:
            self.event.wait()


class TierRing:
    """Tiers of one shape in turn, so that an update on one stream need not wait for a run on another. [PLAN-STORAGE]"""

    def __init__(self, count: int = 2, *, event: type[Event] = Event, **arguments: Any) -> None:
        self.buffers = Buffers(count)
        self.tiers = [plan_tier(**arguments) for _ in range(count)]
        self.make_event = event
        self.events: dict[int, Event] = {}  # by run
        self.num_runs = self.num_waits = 0

    def update(self, **inputs: Tensor) -> Tier:
        """New candidates in a tier that no run reads; where there is none, the stream waits for the oldest run."""
        for run in [run for run, event in self.events.items() if event.is_over()]:
            self._finish(run)
        free = self.buffers.update()
        while free is None:
            oldest = next(iter(self.events))
            self.events[oldest].wait()
            self._finish(oldest)
            self.num_waits += 1
            free = self.buffers.update()
        self.tiers[free].update(**inputs)
        return self.tiers[free]

    def run(self, attend: Callable[[Plan], object]) -> None:
        """Calls attend(tier.plan) on what was written last, and marks its end."""
        number = self.num_runs
        tier = self.tiers[self.buffers.launch(number)]
        self.num_runs += 1
        attend(tier.plan)
        self.events[number] = self.make_event(tier.plan.device)

    def _finish(self, run: int) -> None:
        self.buffers.finish(run)
        del self.events[run]
