"""Suite sweep: sparse against dense over length, batch, query length, candidate rate, clustering and block size.

One axis is varied at a time around one base, but rate and block size together, since the best block depends on the
rate. Every point has the index inside its total, from candidates to output.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from attnconform.conformance.bench.bundled import PlanRun, TierRun
from attnconform.conformance.bench.crossing import crossing
from attnconform.conformance.bench.decode_work import TINY, DecodeShape, DecodeWork, geometry_of, make_sets, make_work
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.sdpa import attend, logical
from attnconform.conformance.bench.row import SweepPoint
from attnconform.conformance.bench.timing import measure

RATES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
BLOCKS = (16, 32, 64)
LENGTHS = (256, 1_024, 4_096, 16_384, 65_536, 131_072)
BATCH_SIZES = (1, 4, 16, 64)
RUN_LENGTHS = (1, 4, 16)
QUERY_LENGTHS = (1, 4, 16)
BASE = DecodeShape(batch=8)
BASE_RATE = 1 / 16
POINT_SECONDS = 0.05


@dataclass(frozen=True)
class Point:
    """One shape to time."""

    axis: str
    shape: DecodeShape
    seqlen_q: int = 1


def shape_at(base: DecodeShape, rate: float, **changes: Any) -> DecodeShape:
    """The base with other sizes, and as many candidates as the rate asks, in whole blocks."""
    shape = replace(base, **changes)
    blocks = max(1, round(rate * shape.seqlen_kv / shape.page_size))
    return replace(shape, candidates=blocks * shape.page_size)


def points(machine: Machine) -> list[Point]:
    """All points on a GPU; two of each axis in the interpreter."""
    base, real = (BASE, True) if machine.is_real else (replace(TINY, batch=1, seqlen_kv=64, page_size=8), False)

    def some(values: tuple[Any, ...], tiny: tuple[Any, ...]) -> tuple[Any, ...]:
        return values if real else tiny

    rate = BASE_RATE if real else 1 / 4
    axes = {
        "rate and block": [
            shape_at(base, r, page_size=b) for b in some(BLOCKS, (8, 16)) for r in some(RATES, (1 / 4, 1 / 2))
        ],
        "length": [shape_at(base, rate, seqlen_kv=n) for n in some(LENGTHS, (32, 64))],
        "batch": [shape_at(base, rate, batch=n) for n in some(BATCH_SIZES, (1, 2))],
        "clustering": [shape_at(base, rate, run_length=n) for n in some(RUN_LENGTHS, (1, 2))],
    }
    rows = [Point("query length", shape_at(base, rate), n) for n in some(QUERY_LENGTHS, (1, 2))]
    return [Point(axis, shape) for axis, shapes in axes.items() for shape in shapes] + rows


def sweep_points(machine: Machine) -> Iterator[SweepPoint]:
    """Times of every point; dense is timed once per batch, length and query length."""
    dense: dict[tuple[int, ...], float] = {}
    for point in points(machine):
        work = make_work(point.shape, machine)
        key = (point.shape.batch, point.shape.seqlen_kv, point.shape.page_size, point.seqlen_q)
        if key not in dense:
            dense[key] = dense_time(work, point.seqlen_q, machine)
        yield time_point(point, work, dense[key], machine)
        del work
        machine.release()


def time_point(point: Point, work: DecodeWork, dense: float, machine: Machine) -> SweepPoint:
    """Index and attention of one shape."""
    shape = point.shape
    if point.axis == "query length":  # a tier has one row a request, so that no point of this axis has an index
        attention, index = rows_time(work, point.seqlen_q, machine), None
    else:
        sets = make_sets(work, machine)
        tier = TierRun(work, capacity=shape.candidates)
        tier.from_candidates(work)
        tier.tier.raise_if_refused()
        index = timed([lambda w=w: tier.index(w) for w in sets], machine)
        attention = timed([lambda w=w: tier.attend(w) for w in sets], machine)
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


def timed(calls: Any, machine: Machine) -> float:
    return measure(calls, machine, seconds=POINT_SECONDS, host_events=5).timing.median


def dense_time(work: DecodeWork, seqlen_q: int, machine: Machine) -> float:
    """Every key of the same batch: one row by the faster of the same kernels and torch's, which reads no pages."""
    if seqlen_q > 1:
        return timed(rows_call(work, seqlen_q, is_sparse=False), machine)
    k, v = logical(work, work.k_cache), logical(work, work.v_cache)
    return min(timed(PlanRun.dense(work), machine), timed(lambda: attend(work, k, v), machine))


def rows_time(work: DecodeWork, seqlen_q: int, machine: Machine) -> float:
    """Attention of several query rows a request, each with its own list."""
    return timed(rows_call(work, seqlen_q, is_sparse=True), machine)


def rows_call(work: DecodeWork, seqlen_q: int, *, is_sparse: bool) -> Any:
    """A planned run of seqlen_q rows a request: each row has a list of its own, and sees no key after it."""
    from attnconform.kernels import sparse_attention
    from attnconform.kernels.sparse_attention import rules

    s, device = work.shape, work.q.device
    ids, count = s.seqlen_kv // s.block_size, s.candidates // s.block_size
    lists = s.batch * seqlen_q * s.num_kv_heads
    candidates = None
    if is_sparse:
        chosen = torch.rand(lists, ids, device=device).topk(count, dim=-1).indices.int()
        candidates = sparse_attention.CandidateLists(
            granularity=s.granularity,
            block_size=s.block_size,
            sharing="kv_head",
            indptr=torch.arange(0, chosen.numel() + 1, count, device=device, dtype=torch.int32),
            indices=chosen.reshape(-1),
        )
    plan = sparse_attention.plan(
        qo_indptr=torch.arange(s.batch + 1, device=device) * seqlen_q,
        seqlen_kv=torch.full((s.batch,), s.seqlen_kv, device=device),
        page_table=work.page_table,
        mask_rule=rules.Causal(),
        candidates=candidates,
        **geometry_of(work),
    )
    q = torch.randn(s.batch * seqlen_q, s.num_qo_heads, s.head_dim, dtype=s.dtype, device=device)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    return lambda: sparse_attention.run(plan, q, work.k_cache, work.v_cache, out=out, lse=lse)


def rate_crossings(found: list[SweepPoint]) -> dict[int, float | None]:
    """Block size -> the rate from which on dense is faster; None where one of them always is."""
    crossings = {}
    for block in sorted({p.block_size for p in found if p.axis == "rate and block"}):
        line = sorted((p for p in found if p.axis == "rate and block" and p.block_size == block), key=lambda p: p.rate)
        crossings[block] = crossing([p.rate for p in line], [p.total for p in line], [p.dense for p in line])
    return crossings


def length_crossing(found: list[SweepPoint]) -> float | None:
    """The length from which on sparse is faster."""
    line = sorted((p for p in found if p.axis == "length"), key=lambda p: p.seqlen_kv)
    return crossing([p.seqlen_kv for p in line], [p.total for p in line], [p.dense for p in line])


def choices(found: list[SweepPoint]) -> dict[float, str]:
    """Rate -> what to run there, as a scheduler's table says it."""
    table = {}
    for rate in sorted({p.rate for p in found if p.axis == "rate and block"}):
        here = [p for p in found if p.axis == "rate and block" and p.rate == rate]
        best = min(here, key=lambda p: p.total)
        table[rate] = "dense" if min(p.dense for p in here) < best.total else f"block {best.block_size}"
    return table
