"""One draw of a decode batch: its stages as calls, timed one after the other, and what there is to say beside times."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from attnconform.conformance.bench.autotuning import Tuned, autotune
from attnconform.conformance.bench.blocks import Block, Taken
from attnconform.conformance.bench.bundled import PlanRun, TierRun, has_merge, path_of
from attnconform.conformance.bench.compiles import Starts, start_times
from attnconform.conformance.bench.decode_work import DecodeShape, DecodeWork, our_plan
from attnconform.conformance.bench.figures import Figures, plan_figures, with_counters
from attnconform.conformance.bench.honesty import output_error, poisoned_error
from attnconform.conformance.bench.kernel_times import look_inside
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.selector import Selector
from attnconform.conformance.bench.timing import Call, Samples, Timing, measure

LONG_STAGES, SHORT = ("attention", "attention of a tier"), 0.2  # seconds of a timing of any other stage
CANDIDATES, LAUNCHED = "from candidates", "from candidates, launched"  # one graph, and launch by launch
SELECTING = ("route", "top-k", "end to end")


@dataclass(eq=False)
class Batch:
    """One draw of a batch: its input sets, and the bundled kernels over them."""

    sets: list[DecodeWork]

    def __post_init__(self) -> None:
        self.runs = [PlanRun.sparse(work) for work in self.sets]
        self.tier = TierRun(self.sets[0], capacity=max(int(w.list_lengths.max()) for w in self.sets))
        self.tier.from_candidates(self.sets[0])
        self.tier.tier.raise_if_refused()


def time_stages(batch: Batch, block: Block, taken: Taken, options: BenchOptions) -> None:
    """One block of every stage that is wanted; attention always is."""
    for stage, calls in stages(batch, options):
        limit = options.seconds if stage in LONG_STAGES else min(options.seconds, SHORT)
        taken.add(stage, block.measure(calls, limit))
    attention = taken.parts["attention"][-1]
    merge = look_inside(batch.runs, block.machine).time_of("merge_kernel") if has_merge(batch.runs[0].plan) else 0.0
    if merge:
        taken.add("merge", one_time(merge, attention))
    taken.add("launch", issue_samples(attention))


def stages(batch: Batch, options: BenchOptions) -> Iterator[tuple[str, list[Call]]]:
    """Calls of every wanted stage, one for each input set."""
    sets, tier = batch.sets, batch.tier
    tier.index(sets[0])
    yield "attention", list(batch.runs)
    yield from (s for s in planning_stages(sets, tier) if options.wants(s[0]))
    lengths = {int(n) for w in sets for n in w.list_lengths}
    if len(lengths) == 1 and any(options.wants(stage) for stage in SELECTING):
        yield from (s for s in selector_stages(sets, tier, lengths.pop()) if options.wants(s[0]))


def planning_stages(sets: list[DecodeWork], tier: TierRun) -> Iterator[tuple[str, list[Call]]]:
    """What stands around attention once candidates are there."""

    def each(call: Callable[[DecodeWork], object]) -> list[Call]:
        return [partial(call, work) for work in sets]

    # a tier holds one set's lists: its rows all read them, and only queries rotate
    yield "attention of a tier", each(tier.attend)
    yield "index", each(tier.index)
    yield CANDIDATES, each(tier.from_candidates)
    yield LAUNCHED, each(tier.launched)
    yield "one-off plan", each(our_plan)


def selector_stages(sets: list[DecodeWork], tier: TierRun, tokens: int) -> Iterator[tuple[str, list[Call]]]:
    """Route, top-k, and a whole step from queries to output."""
    selector = Selector.of(sets[0], tokens // sets[0].shape.block_size)
    scores = selector.route(sets[0].q)
    yield "route", [partial(selector.route, w.q) for w in sets]
    yield "top-k", [partial(selector.topk, scores)] * len(sets)

    kept = [replace(w, indices=w.indices.clone()) for w in sets]  # where a step's choice is put, the same every time

    def step(w: DecodeWork) -> None:
        w.indices.copy_(selector.topk(selector.route(w.q)).view(-1))
        tier.from_candidates(w)

    yield "end to end", [partial(step, w) for w in kept]


@dataclass(frozen=True)
class Told:
    """What is said of a batch beside its times, read from its first block."""

    shape: DecodeShape
    rate: float
    num_sets: int
    figures: Figures
    dense: Timing
    error: float
    poisoned_error: float
    run_path: str
    tier_path: str
    kernels: dict[str, float]
    starts: Starts | None
    tuned: Tuned | None


def tell(batch: Batch, machine: Machine, options: BenchOptions, *, with_starts: bool) -> Told:
    """Counts, the answer's error, a dense time and first calls; it comes last, since poison spoils the cache."""
    work, run = batch.sets[0], batch.runs[0]
    counted = options.counters.of(work.shape.name) if options.counters else None
    return Told(
        shape=work.shape,
        rate=work.rate,
        num_sets=len(batch.sets),
        figures=with_counters(decode_figures(work, run, machine, batch.tier), counted),
        dense=measure(PlanRun.dense(work), machine, seconds=min(0.2, options.seconds)).timing,
        error=max(answer_error(r, w) for r, w in zip(batch.runs, batch.sets, strict=True)),
        run_path=path_of(run.plan),
        tier_path=path_of(batch.tier.tier.plan),
        kernels=look_inside(batch.runs, machine).kernels,
        starts=start_times(lambda: PlanRun.sparse(work)) if with_starts else None,
        tuned=autotune(work, machine) if with_starts else None,
        poisoned_error=poisoned_answer(run, work),
    )


def answer_error(run: PlanRun, work: DecodeWork) -> float:
    """How far a run's output is from float32."""

    def call() -> torch.Tensor:
        run()
        return run.out

    return output_error(call, work)


def poisoned_answer(run: PlanRun, work: DecodeWork) -> float:
    """The same with NaN wherever no list points; the cache is lost to other sets."""

    def call() -> torch.Tensor:
        run()
        return run.out

    return poisoned_error(call, work)


def decode_figures(work: DecodeWork, run: PlanRun, machine: Machine, tier: TierRun) -> Figures:
    """Counts of the attention of one set."""
    return plan_figures(
        run.plan,
        processors=machine.processors,
        lengths=work.list_lengths,
        edges=work.edges,
        bytes_ideal=work.bytes,
        reserved=tier.reserved_bytes,
    )


def one_time(microseconds: float, like: Samples) -> Samples:
    """A time that only a profiler gives, as one event of its block."""
    one = np.array([microseconds])
    return replace(
        like, device=one, sets=np.zeros(1, dtype=np.int64), host=one, issue=one, recompiles=0,
        device_blocks=None, host_blocks=None,
    )  # fmt: skip


def issue_samples(taken: Samples) -> Samples:
    """The host's time to hand a call over, as a stage of its own."""
    return replace(taken.by_host(), device=taken.issue, host=taken.issue, recompiles=0)


def figures_of(stage: str, figures: Figures) -> Figures:
    """The figures that a stage has: all of them belong to attention, only memory to the others."""
    if stage.startswith("attention"):
        return figures
    return Figures(
        workspace_reserved=figures.workspace_reserved,
        workspace_used=figures.workspace_used,
        metadata_bytes=figures.metadata_bytes,
        valid_tokens=figures.valid_tokens,
        processed_tokens=figures.processed_tokens,
    )
