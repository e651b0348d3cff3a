"""A workload whose batches do not all stay on the sparse path: how often, why, and what it does to the tail."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.blocks import Taken, blocks
from attnconform.conformance.bench.decode_work import (
    TINY,
    DecodeShape,
    DecodeWork,
    draw_lists,
    draw_queries,
    make_work,
    plan_arguments,
)
from attnconform.conformance.bench.figures import Figures, Lengths
from attnconform.conformance.bench.honesty import output_error
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.slices import NO_FALLBACK, SetFacts, slice_events

STAGE = "step with fallbacks"
RATES = (1 / 16, 1 / 16, 1 / 16, 1 / 16, 1 / 16, 5 / 8)  # of the batches that take turns
SECONDS = 0.6


def base_shape(machine: Machine) -> DecodeShape:
    return DecodeShape(batch=8, seqlen_kv=8_192) if machine.is_real else replace(TINY, page_size=8, seqlen_kv=128)


def make_mixed(machine: Machine) -> list[DecodeWork]:
    """Batches over one cache, most of them sparse, one not."""
    shape = base_shape(machine)
    first, sets = make_work(shape, machine), []
    for rate in RATES:
        blocks_listed = max(1, round(rate * shape.pages))
        drawn = replace(shape, candidates=blocks_listed * shape.page_size)
        indptr, indices = draw_lists(drawn, machine.device)
        q = draw_queries(shape, machine.device)
        sets.append(replace(first, shape=drawn, q=q, indptr=indptr, indices=indices))
    return sets


@dataclass(eq=False)
class Step:
    """One batch through the layer that chooses a path, from candidates to output."""

    attention: Any
    work: DecodeWork
    reason: str | None = None

    def __call__(self) -> torch.Tensor:
        w = self.work
        attended = self.attention(plan_arguments(w), w.q, w.k_cache, w.v_cache)
        self.reason = attended.reason
        return attended.out

    @property
    def facts(self) -> SetFacts:
        return replaced(self.work.facts, fallback=self.reason) if self.reason else self.work.facts


def fallback_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """One row, by the host's clock: what is around the kernels is what differs."""
    taken, facts, errors = Taken(), list[SetFacts](), list[float]()
    for block in blocks(machine):
        steps = make_steps(make_mixed(machine))
        errors += [output_error(step, step.work) for step in steps] if block.is_first else []
        samples = taken.add(STAGE, block.measure(steps, min(SECONDS, options.seconds)))
        taken.add("by host", samples.by_host())
        facts += [step.facts for step in steps]
        del steps
    yield row_of(taken, facts, max(errors))


def make_steps(sets: list[DecodeWork]) -> list[Step]:
    """All batches go through one layer, which remembers the path of the one before."""
    from attnconform.kernels.sparse_attention.fallback import Attention

    attention = Attention()
    steps = [Step(attention, work) for work in sets]
    for step in steps:
        step()
    return steps


def row_of(taken: Taken, facts: list[SetFacts], error: float) -> BenchRow:
    """Fallbacks are of the input sets, each counted once; how often a set came is in the slices."""
    joined = taken.joined()
    samples = joined[STAGE]
    lengths = Lengths(max=max(fact.longest_row for fact in facts))
    reasons = Counter(fact.fallback for fact in facts if fact.fallback != NO_FALLBACK)
    return BenchRow(
        suite="seed64k",
        phase="decode",
        work=f"{len(RATES)} batches in turn, rates {min(RATES):.2%} to {max(RATES):.1%}",
        stage=STAGE,
        ours=samples.timing,
        figures=Figures(recompiles=samples.recompiles, fallbacks=dict(reasons), row_lengths=lengths),
        error=error,
        path="sparse_attention.fallback.Attention",
        sets=len(RATES),
        slices=slice_events(joined["by host"], facts),
    )
