"""Suite tiers: a step that fits its tier, one that outgrows it, and one that outgrows it where the next is not planned.

All go through TierCache, which asks after every update whether the lists fitted, and so waits for the device: by the
host's clock. What matters is the tail: an outgrown step is a step of the same stream of tokens. [PLAN-CAPACITY]
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from attnconform.conformance.bench.blocks import Block, Taken, blocks
from attnconform.conformance.bench.decode_work import TINY, DecodeShape, DecodeWork, draw_lists, geometry_of, make_work
from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.honesty import output_error
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import Call, Samples

FITS, THERE, PLANNED = "step that fits", "outgrown, next tier there", "outgrown, next tier planned"


@dataclass(eq=False)
class Outgrown:
    """Lists that fit a tier, and over the same cache lists that only the next one takes."""

    small: DecodeWork
    large: DecodeWork

    @classmethod
    def drawn(cls, machine: Machine) -> "Outgrown":
        shape = DecodeShape(batch=32) if machine.is_real else TINY
        large = make_work(shape, machine)
        fewer = replace(shape, candidates=shape.candidates // shape.page_size // 2 * shape.page_size)
        indptr, indices = draw_lists(fewer, machine.device)
        return cls(replace(large, shape=fewer, indptr=indptr, indices=indices), large)

    def __post_init__(self) -> None:
        q, shape = self.large.q, self.large.shape
        self.out = torch.full_like(q, float("nan"))
        self.lse = torch.full(q.shape[:2], float("nan"), device=q.device)
        self.seqlen_kv = torch.full((shape.batch,), shape.seqlen_kv, device=q.device, dtype=torch.int32)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """What makes a tier, but its capacity."""
        shape = self.large.shape
        sizes = {"batch_size": shape.batch, "max_seqlen_kv": shape.seqlen_kv, "block_size": shape.block_size}
        return geometry_of(self.large) | sizes | {"granularity": shape.granularity}

    @cached_property
    def both(self) -> Any:
        """A cache that has both tiers."""
        from attnconform.kernels.sparse_attention import TierCache

        cache = TierCache((self.small.shape.candidates, self.large.shape.candidates))
        for work in (self.small, self.large):
            cache.tier(work.shape.candidates, **self.arguments)
        return cache

    def small_only(self) -> Any:
        """A cache as it is before any list was long."""
        first = next(iter(self.both.tiers.items()))
        return replace(self.both, tiers=dict([first]))

    def step(self, cache: Any, work: DecodeWork) -> None:
        """Index and attention, from the small tier on."""
        from attnconform.kernels.sparse_attention import run

        fitting = cache.update(
            cache.tier(self.small.shape.candidates, **self.arguments), arguments=self.arguments,
            seqlen_kv=self.seqlen_kv, page_table=work.page_table, indptr=work.indptr, indices=work.indices,
        )  # fmt: skip
        run(fitting.plan, work.q, work.k_cache, work.v_cache, out=self.out, lse=self.lse)

    def stages(self) -> Iterator[tuple[str, Call]]:
        yield FITS, partial(self.step, self.both, self.small)
        yield THERE, partial(self.step, self.both, self.large)
        yield PLANNED, lambda: self.step(self.small_only(), self.large)

    def error_of(self, call: Call, work: DecodeWork) -> float:
        """How far a step's answer is from float32; NaN where it wrote none."""
        self.out.fill_(float("nan"))

        def answer() -> torch.Tensor:
            call()
            return self.out

        return output_error(answer, work)


def tier_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """One row for each kind of step, its lists drawn anew in every block."""
    taken, errors, shape = Taken(), dict[str, float](), None
    for block in blocks(machine):
        drawn = Outgrown.drawn(machine)
        shape = drawn.large.shape
        time_block(drawn, block, taken, errors, options)
        del drawn
    assert shape is not None
    for stage, samples in taken.joined().items():
        yield row_of(stage, shape, samples, errors[stage])


def time_block(drawn: Outgrown, block: Block, taken: Taken, errors: dict[str, float], options: BenchOptions) -> None:
    """Every kind of step once more, and the worst error of each so far."""
    for stage, call in drawn.stages():
        taken.add(stage, block.measure(call, options.seconds))
        keep_worst(errors, stage, drawn.error_of(call, drawn.small if stage == FITS else drawn.large))


def keep_worst(errors: dict[str, float], stage: str, error: float) -> None:
    """NaN, which no comparison is true of, is the worst there is, and stays."""
    known = errors.get(stage, 0.0)
    errors[stage] = known if error <= known or known != known else error


def row_of(stage: str, shape: DecodeShape, samples: Samples, error: float) -> BenchRow:
    return BenchRow(
        suite="tiers",
        phase="decode",
        work=shape.name,
        stage=stage,
        ours=samples.timing,
        figures=Figures(recompiles=samples.recompiles),
        error=error,
        path="sparse_attention.TierCache.update, run",
    )
