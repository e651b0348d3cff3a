"""Blocks: every stage of a work is timed in several, each with inputs, memory and a processor core of its own.

Two runs of one version differ by what differs between two processes: the draw of the inputs, where in memory they lie,
the core that the host runs on, how fast clocks and neighbours let it run at that time. The events of one uninterrupted
measurement share all of these, so their scatter says nothing of the next run. A block draws them anew: inputs are made
again in memory that was given back, the host moves to another core, and every other stage lies between a stage's block
and its next. The spread of a row is how far apart its blocks are. A peer is timed in the same blocks, after ours, so
that both see the same machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from attnconform.conformance.bench.machine import Machine, TimeUp
from attnconform.conformance.bench.timing import EVENTS, HOST_EVENTS, Call, Samples, measure

BLOCKS = 6


@dataclass(frozen=True)
class Block:
    """One of some blocks of a work."""

    number: int
    machine: Machine
    of: int = 1

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def measure(self, calls: Call | Sequence[Call], seconds: float) -> Samples:
        """This block's part of the events, in its part of the time."""
        return measure(
            calls,
            self.machine,
            seconds=seconds / self.of,
            events=-(-EVENTS // self.of),
            host_events=-(-HOST_EVENTS // self.of),
            core=self.number if self.machine.is_real else None,
        )


def blocks(machine: Machine) -> Iterator[Block]:
    """All blocks of a work, memory given back after each; one where times mean nothing: interpreted, or warming up.

    A work that is under way when the time is up ends with fewer blocks. Raises TimeUp where it had not begun.
    """
    of = BLOCKS if machine.is_real and not machine.is_warming else 1
    for number in range(of):
        if machine.is_time_up:
            if number == 0:
                raise TimeUp
            return
        yield Block(number, machine, of)
        machine.release()


@dataclass
class Taken:
    """What the blocks of a work gave, by stage."""

    parts: dict[str, list[Samples]] = field(default_factory=dict)

    def add(self, stage: str, samples: Samples) -> Samples:
        self.parts.setdefault(stage, []).append(samples)
        return samples

    def joined(self) -> dict[str, Samples]:
        """Every stage's events over all blocks."""
        return {stage: Samples.join(parts) for stage, parts in self.parts.items()}
