"""Suite seed64k: one decode row a request over 264 pages of 16, or 4,224 tokens, of a 64K cache, per KV head.

The step's parts are timed apart and together (article 1, formula 10): route, top-k, index, attention with its merge,
launch, and all of them end to end.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.bundled import PlanRun, TierRun, path_of
from attnconform.conformance.bench.compiles import start_times
from attnconform.conformance.bench.decode_work import (
    TINY,
    DecodeShape,
    DecodeWork,
    make_sets,
    make_trace_sets,
    make_work,
    our_plan,
)
from attnconform.conformance.bench.figures import Figures, plan_figures
from attnconform.conformance.bench.foreign import foreign_rows
from attnconform.conformance.bench.honesty import output_error, poisoned_error
from attnconform.conformance.bench.kernel_times import look_inside
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.flashinfer import flashinfer_run
from attnconform.conformance.bench.peers.peer import PeerRun, time_peer
from attnconform.conformance.bench.peers.sdpa import dense_mask_decode, sdpa_decode
from attnconform.conformance.bench.row import BenchRow, Peer
from attnconform.conformance.bench.selector import Selector
from attnconform.conformance.bench.slices import slice_events
from attnconform.conformance.bench.timing import Call, Samples, measure

BATCHES = (1, 8, 64)
TRACE_BATCH, TRACE_SETS = 8, 4
LONG_STAGES, SHORT = ("attention", "attention of a tier"), 0.3  # seconds of a timing of any other stage
PEERS: dict[str, Callable[[list[DecodeWork], Machine], PeerRun]] = {
    "flashinfer": flashinfer_run,
    "sdpa": sdpa_decode,
    "dense-mask": dense_mask_decode,
}


def shapes(machine: Machine) -> list[DecodeShape]:
    """Pages and tokens at every batch size; one small shape of each in the interpreter."""
    if not machine.is_real:
        return [TINY, replace(TINY, granularity="token")]
    return [DecodeShape(batch=batch, granularity=g) for g in ("block", "token") for batch in BATCHES]


def decode_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Every stage of every shape, and of lists drawn from a trace where one is given."""
    rows = bundled_rows if options.backend == "triton" else foreign_rows
    for shape in shapes(machine):
        yield from rows(make_sets(make_work(shape, machine), machine), machine, options)
        machine.release()
    if options.trace is not None:
        for selector in options.trace.header.selectors:
            if options.trace.recorded("decode", selector.name):
                sets = make_trace_sets(
                    options.trace, selector.name, machine, batch=TRACE_BATCH if machine.is_real else 1, sets=TRACE_SETS
                )
                yield from rows(sets, machine, options)
                machine.release()


def bundled_rows(sets: list[DecodeWork], machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Rows of one batch, each with the peer's same stage."""
    work = sets[0]
    runs = [PlanRun.sparse(w) for w in sets]
    dense = PlanRun.dense(work)
    tier = TierRun(work, capacity=max(int(w.list_lengths.max()) for w in sets))
    tier.from_candidates(work)
    tier.tier.raise_if_refused()
    error = max(answer_error(run, w) for run, w in zip(runs, sets, strict=True))
    samples = {
        stage: measure(calls, machine, seconds=options.seconds if stage in LONG_STAGES else min(options.seconds, SHORT))
        for stage, calls in stages(sets, runs, tier)
    }
    dense_timing = measure(dense, machine, seconds=min(0.3, options.seconds)).timing
    inside = look_inside(runs, machine)
    merge = inside.time_of("merge_kernel")
    if merge:
        samples["merge"] = one_time(merge, samples["attention"])
    samples["launch"] = issue_samples(samples["attention"])
    peers = peer_times(sets, machine, options, (runs[0].out, runs[0].lse))
    figures = decode_figures(work, runs[0], machine, tier)
    counted = options.counters.of(work.shape.name) if options.counters else None
    is_first = work.shape == shapes(machine)[0]
    starts = start_times(lambda: PlanRun.sparse(work)) if machine.is_real and is_first else None
    poisoned = poisoned_answer(runs[0], work)
    for stage, taken in samples.items():
        is_attention = stage.startswith("attention")
        yield BenchRow(
            suite="seed64k",
            phase="decode",
            work=work.shape.name,
            stage=stage,
            ours=taken.timing,
            figures=replaced(figures_of(stage, figures, counted), recompiles=taken.recompiles),
            peer=peers.get(stage, peers.get("")) if stage in PEER_STAGES else None,
            dense=dense_timing if is_attention else None,
            rate=work.rate,
            error=error if is_attention else None,
            poisoned_error=poisoned if is_attention else None,
            path=path_of(tier.tier.plan if "tier" in stage else runs[0].plan),
            sets=len(sets),
            starts=starts if stage == "attention" else None,
            slices=slice_events(taken, [w.facts for w in sets]) if stage == "attention" else [],
            kernels=inside.kernels if stage == "attention" else {},
        )


PEER_STAGES = ("attention", "attention of a tier", "index", "one-off plan", "from candidates")


def stages(sets: list[DecodeWork], runs: list[PlanRun], tier: TierRun) -> Iterator[tuple[str, list[Call]]]:
    """Calls of every stage, one for each input set."""

    def each(call: Callable[[DecodeWork], object]) -> list[Call]:
        return [partial(call, work) for work in sets]

    yield "attention", list(runs)
    tier.index(sets[0])
    # a tier holds one set's lists: its rows all read them, and only queries rotate
    yield "attention of a tier", each(tier.attend)
    yield "index", each(tier.index)
    yield "from candidates", each(tier.from_candidates)
    yield "one-off plan", each(our_plan)
    lengths = {int(n) for w in sets for n in w.list_lengths}
    if len(lengths) == 1:
        selector = Selector.of(sets[0], lengths.pop() // sets[0].shape.block_size)
        scores = selector.route(sets[0].q)
        yield "route", each(lambda w: selector.route(w.q))
        yield "top-k", each(lambda w: selector.topk(scores))

        def step(w: DecodeWork) -> None:
            chosen = selector.topk(selector.route(w.q))
            tier.from_candidates(replace(w, indices=chosen.reshape(-1)))

        yield "end to end", each(step)


def peer_times(
    sets: list[DecodeWork], machine: Machine, options: BenchOptions, ours: tuple[torch.Tensor, torch.Tensor]
) -> dict[str, Peer]:
    """The peer's times by stage, where one was asked for."""
    if options.peer is None:
        return {}
    build = PEERS[options.peer]
    return time_peer(options.peer, lambda: build(sets, machine), machine, ours, seconds=options.seconds)


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


def figures_of(stage: str, figures: Figures, counted: Figures | None) -> Figures:
    """The figures that a stage has: all of them belong to attention, only memory to the others."""
    if not stage.startswith("attention"):
        return Figures(
            workspace_reserved=figures.workspace_reserved,
            workspace_used=figures.workspace_used,
            metadata_bytes=figures.metadata_bytes,
            valid_tokens=figures.valid_tokens,
            processed_tokens=figures.processed_tokens,
        )
    if counted is None:
        return figures
    return replaced(
        figures,
        bytes_dram=counted.bytes_dram,
        bytes_written_dram=counted.bytes_written_dram,
        l2_hit_rate=counted.l2_hit_rate,
        tensor_core_share=counted.tensor_core_share,
        processors_busy=counted.processors_busy,
        registers=counted.registers,
    )


def one_time(microseconds: float, like: Samples) -> Samples:
    """A time that only a profiler gives, as samples that are all equal."""
    return replace(like, device=like.device * 0 + microseconds, host=like.host * 0, issue=like.issue * 0, recompiles=0)


def issue_samples(taken: Samples) -> Samples:
    """The host's time to hand a call over, as a stage of its own."""
    return replace(taken, device=taken.issue, host=taken.issue, sets=taken.sets[: len(taken.issue)], recompiles=0)
