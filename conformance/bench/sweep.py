"""Suite sweep: sparse against dense over length, batch, query length, candidate rate, clustering and block size.

One axis is varied at a time around one base, but rate and block size together, since the best block depends on the
rate. Every decode point has the index inside its total, from candidates to output; rows with lists of their own and
chunks of prompts come with lists ready made. The ends of every axis are timed first, then what lies between: where the
time is up, what is left out is only in between.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

from attnconform.conformance.bench.block_sparse import OurBlocks
from attnconform.conformance.bench.block_sparse_work import TINY_BLOCKS, BlockSparseShape, make_blocks
from attnconform.conformance.bench.bundled import TierRun
from attnconform.conformance.bench.crossing import crossing
from attnconform.conformance.bench.decode_work import TINY, DecodeShape, DecodeWork, make_sets, make_work
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.row import CHUNK, SweepPoint
from attnconform.conformance.bench.sweep_dense import dense_chunk_time, dense_time, rows_call, timed

RATES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
BLOCKS = (16, 32, 64)
LENGTHS = (256, 1_024, 4_096, 16_384, 65_536, 131_072)
BATCH_SIZES = (1, 4, 16, 64)
RUN_LENGTHS = (1, 4, 16)
QUERY_LENGTHS = (1, 4, 16, 64)
CHUNK_LENGTHS = (512, 2_048, 8_192, 32_768)  # committed keys of a request at the end of its chunk
CHUNK_ROWS = 512
BASE = DecodeShape(batch=8)
BASE_RATE = 1 / 16
SWEEP_SECONDS = 150.0  # after which no point is begun
Item = TypeVar("Item")


@dataclass(frozen=True)
class Point:
    """One shape to time."""

    axis: str
    shape: DecodeShape | BlockSparseShape
    seqlen_q: int = 1


def shape_at(base: DecodeShape, rate: float, **changes: Any) -> DecodeShape:
    """The base with other sizes, and as many candidates as the rate asks, in whole blocks."""
    shape = replace(base, **changes)
    blocks = max(1, round(rate * shape.seqlen_kv / shape.page_size))
    return replace(shape, candidates=blocks * shape.page_size)


def axes(machine: Machine) -> list[list[Point]]:
    """Every line of points; two of each in the interpreter."""
    real = machine.is_real
    base = BASE if real else replace(TINY, batch=1, seqlen_kv=64, page_size=8)
    rate = BASE_RATE if real else 1 / 4

    def line(axis: str, shapes: list[DecodeShape]) -> list[Point]:
        return [Point(axis, shape) for shape in shapes]

    return [
        *(
            line("rate and block", [shape_at(base, r, page_size=b) for r in (RATES if real else (1 / 4, 1 / 2))])
            for b in (BLOCKS if real else (8, 16))
        ),
        line("length", [shape_at(base, rate, seqlen_kv=n) for n in (LENGTHS if real else (32, 64))]),
        line("batch", [shape_at(base, rate, batch=n) for n in (BATCH_SIZES if real else (1, 2))]),
        line("clustering", [shape_at(base, rate, run_length=n) for n in (RUN_LENGTHS if real else (1, 2))]),
        [Point("query length", shape_at(base, rate), n) for n in (QUERY_LENGTHS if real else (1, 2))],
        chunks(machine),
    ]


def chunks(machine: Machine) -> list[Point]:
    """The last rows of prompts of growing length, over chosen blocks."""
    base = BlockSparseShape(is_causal=True) if machine.is_real else replace(TINY_BLOCKS, is_causal=True)
    rows, lengths = (CHUNK_ROWS, CHUNK_LENGTHS) if machine.is_real else (16, (16, 48))
    return [Point(CHUNK, replace(base, seqlen=n, rows=rows), rows) for n in lengths]


def ends_first(items: list[Item]) -> list[Item]:
    """The first, the last, then again and again the middle of what is widest apart.

    >>> ends_first([0, 1, 2, 3, 4])
    [0, 4, 2, 1, 3]
    """
    order, gaps = [0, len(items) - 1][: len(items)], [(0, len(items) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [items[n] for n in order]


def points(machine: Machine) -> list[Point]:
    """Every point, the axes in turn and the ends of each first."""
    turns = zip_longest(*(ends_first(line) for line in axes(machine)))
    return [point for turn in turns for point in turn if point is not None]


def sweep_points(machine: Machine, notes: list[str], seconds: float = SWEEP_SECONDS) -> Iterator[SweepPoint]:
    """Times of every point that the time allows; a note says how many it did not."""
    deadline = time.monotonic() + seconds
    dense: dict[tuple[int, ...], float] = {}
    wanted = points(machine)
    for done, point in enumerate(wanted):
        if machine.is_time_up or time.monotonic() > deadline:
            notes.append(f"the time was up: {len(wanted) - done} of {len(wanted)} points of the sweep were left out")
            return
        if isinstance(point.shape, BlockSparseShape):
            yield time_chunk(point.shape, machine)
        else:
            yield time_decode(point, point.shape, dense, machine)
        machine.release()


def time_chunk(shape: BlockSparseShape, machine: Machine) -> SweepPoint:
    """Rows of one prompt over chosen blocks, and over every block."""
    work = make_blocks(shape, machine)
    return SweepPoint(
        axis=CHUNK, seqlen_kv=shape.seqlen, batch=1, seqlen_q=shape.seqlen_q, rate=work.rate, run_length=1,
        block_size=shape.block_size, attention=timed(OurBlocks(work).run, machine), index=None,
        dense=dense_chunk_time(work, machine), stage="attention",
    )  # fmt: skip


def time_decode(point: Point, shape: DecodeShape, dense: dict[tuple[int, ...], float], machine: Machine) -> SweepPoint:
    """One decode point; dense is timed once per batch, length and query length."""
    work = make_work(shape, machine)
    key = (shape.batch, shape.seqlen_kv, shape.page_size, point.seqlen_q)
    if key not in dense:
        dense[key] = dense_time(work, point.seqlen_q, machine)
    return time_point(point, work, dense[key], machine)


def time_point(point: Point, work: DecodeWork, dense: float, machine: Machine) -> SweepPoint:
    """Index and attention of one shape."""
    shape = work.shape
    if point.axis == "query length":  # a tier has one row a request, so that no point of this axis has an index
        attention, index = timed(rows_call(work, point.seqlen_q, is_sparse=True), machine), None
    else:
        sets = make_sets(work, machine)
        tier = TierRun(work, capacity=shape.candidates)
        tier.from_candidates(work)
        tier.tier.raise_if_refused()
        index = timed([partial(tier.index, w) for w in sets], machine)
        attention = timed([partial(tier.attend, w) for w in sets], machine)
    return SweepPoint(
        axis=point.axis,
        seqlen_kv=shape.seqlen_kv,
        batch=shape.batch,
        seqlen_q=point.seqlen_q,
        rate=work.rate,
        run_length=shape.run_length,
        block_size=shape.page_size,
        attention=attention,
        index=index,
        dense=dense,
        stage="attention" if index is None else "index + attention",
    )


def rate_crossings(found: list[SweepPoint]) -> dict[int, float | None]:
    """Block size -> the rate from which on dense is faster; None where one of them always is."""
    crossings = {}
    for block in sorted({p.block_size for p in found if p.axis == "rate and block"}):
        line = sorted((p for p in found if p.axis == "rate and block" and p.block_size == block), key=lambda p: p.rate)
        crossings[block] = crossing([p.rate for p in line], [p.total for p in line], [p.dense for p in line])
    return crossings


def length_crossing(found: list[SweepPoint], axis: str = "length") -> float | None:
    """The length from which on sparse is faster."""
    line = sorted((p for p in found if p.axis == axis), key=lambda p: p.seqlen_kv)
    return crossing([p.seqlen_kv for p in line], [p.total for p in line], [p.dense for p in line])


def crossing_text(found: list[SweepPoint]) -> str:
    """Every crossing point with dense, in words."""
    known = {f"rate, block {block}": f"{rate:.1%}" if rate else "none" for block, rate in rate_crossings(found).items()}
    for axis in ("length", CHUNK):
        length = length_crossing(found, axis)
        known[axis] = f"{length:,.0f} tokens" if length else "none"
    return "crossing with dense: " + "; ".join(f"{name}: {where}" for name, where in known.items())


def choices(found: list[SweepPoint]) -> dict[float, str]:
    """Rate -> what to run there, as a scheduler's table says it."""
    table = {}
    for rate in sorted({p.rate for p in found if p.axis == "rate and block"}):
        here = [p for p in found if p.axis == "rate and block" and p.rate == rate]
        best = min(here, key=lambda p: p.total)
        table[rate] = "dense" if min(p.dense for p in here) < best.total else f"block {best.block_size}"
    return table
