"""Suite seed64k: one decode row a request over 264 pages of 16, or 4,224 tokens, of a 64K cache, per KV head.

The step's parts are timed apart and together (article 1, formula 10): route, top-k, index, attention with its merge,
launch, and all of them end to end.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

from msgspec.structs import replace as replaced

from attnconform.conformance.bench.blocks import Block, Taken, blocks
from attnconform.conformance.bench.decode_stages import (
    CANDIDATES,
    LAUNCHED,
    Batch,
    Told,
    figures_of,
    tell,
    time_stages,
)
from attnconform.conformance.bench.decode_work import (
    TINY,
    DecodeShape,
    DecodeWork,
    make_sets,
    make_trace_sets,
    make_work,
)
from attnconform.conformance.bench.fallbacks import fallback_rows
from attnconform.conformance.bench.foreign import foreign_rows
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.flashinfer import flashinfer_run
from attnconform.conformance.bench.peers.flex_decode import flex_decode
from attnconform.conformance.bench.peers.peer import PeerBench, PeerRun
from attnconform.conformance.bench.peers.sdpa import dense_mask_decode, sdpa_decode
from attnconform.conformance.bench.row import BenchRow, Peer
from attnconform.conformance.bench.slices import SetFacts, slice_events
from attnconform.conformance.bench.timing import Samples
from attnconform.traces import Trace

BATCHES = (1, 8, 64)
TRACE_BATCH, TRACE_SETS = 8, 4
TIER_STAGES = ("attention of a tier", "index", CANDIDATES, LAUNCHED, "end to end")
PEER_STAGES = {  # ours -> the peer's
    **{stage: stage for stage in ("attention", "attention of a tier", "index", "one-off plan", CANDIDATES)},
    LAUNCHED: CANDIDATES,
}
PEERS: dict[str, Callable[[list[DecodeWork], Machine], PeerRun]] = {
    "flashinfer": flashinfer_run,
    "flex": flex_decode,
    "sdpa": sdpa_decode,
    "dense-mask": dense_mask_decode,
}
Draw = Callable[[int], list[DecodeWork]]  # the input sets of a block, by its number


def shapes(machine: Machine) -> list[DecodeShape]:
    """Pages and tokens at every batch size; one small shape of each in the interpreter."""
    if not machine.is_real:
        return [TINY, replace(TINY, granularity="token")]
    return [DecodeShape(batch=batch, granularity=g) for g in ("block", "token") for batch in BATCHES]


def decode_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Every stage of every shape, of lists drawn from a trace where one is given, and of batches that fall back."""
    rows = bundled_rows if options.backend == "triton" else foreign_rows
    for shape in shapes(machine):
        yield from rows(draw_of(shape, machine), machine, options)
    if options.trace is not None:
        for selector in options.trace.header.selectors:
            if options.trace.recorded("decode", selector.name):
                yield from rows(trace_draw(options.trace, selector.name, machine), machine, options)
    if options.backend == "triton":
        yield from fallback_rows(machine, options)


def draw_of(shape: DecodeShape, machine: Machine) -> Draw:
    """Fresh inputs of one shape for every block."""
    return lambda number: make_sets(make_work(shape, machine), machine)


def trace_draw(trace: Trace, selector: str, machine: Machine) -> Draw:
    """Fresh lists of one selector of a trace for every block."""
    batch = TRACE_BATCH if machine.is_real else 1
    return lambda number: make_trace_sets(
        trace, selector, machine, batch=batch, sets=TRACE_SETS, first_seed=number * TRACE_SETS
    )


def bundled_rows(draw: Draw, machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Rows of one batch, each with the peer's same stage."""
    taken, peer, facts, told = Taken(), PeerBench(options.peer, machine), list[SetFacts](), list[Told]()
    for block in blocks(machine):
        told += time_block(Batch(draw(block.number)), block, taken, peer, facts, options)
    yield from rows_of(told[0], taken.joined(), peer.by_stage(), facts)


def time_block(
    batch: Batch, block: Block, taken: Taken, peer: PeerBench, facts: list[SetFacts], options: BenchOptions
) -> list[Told]:
    """Every stage of ours and of the peer's once more; in the first block, what else there is to say."""
    machine, run = block.machine, batch.runs[0]
    time_stages(batch, block, taken, options)
    facts += [work.facts for work in batch.sets]
    if options.peer is not None:
        build = PEERS[options.peer]
        peer.time(block, lambda: build(batch.sets, machine), (run.out, run.lse), seconds=options.seconds)
    if not block.is_first:
        return []
    with_starts = options.with_starts and machine.is_real and run.work.shape == shapes(machine)[0]
    return [tell(batch, machine, options, with_starts=with_starts)]


def rows_of(
    told: Told, samples: dict[str, Samples], peers: dict[str, Peer], facts: list[SetFacts]
) -> Iterator[BenchRow]:
    """One row for each stage that was timed."""
    for stage, taken in samples.items():
        is_attention, is_plain = stage.startswith("attention"), stage == "attention"
        yield BenchRow(
            suite="seed64k",
            phase="decode",
            work=told.shape.name,
            stage=stage,
            ours=taken.timing,
            figures=replaced(figures_of(stage, told.figures), recompiles=taken.recompiles),
            peer=peers.get(PEER_STAGES[stage], peers.get("")) if stage in PEER_STAGES else None,
            dense=told.dense if is_attention else None,
            rate=told.rate,
            error=told.error if is_attention else None,
            poisoned_error=told.poisoned_error if is_attention else None,
            path=told.tier_path if stage in TIER_STAGES else told.run_path,
            sets=told.num_sets,
            starts=told.starts if is_plain else None,
            tuned=told.tuned if is_plain else None,
            slices=slice_events(taken, facts) if is_plain else [],
            kernels=told.kernels if is_plain else {},
        )
