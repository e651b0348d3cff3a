"""Suite targets: one line for everything the bundled kernels are to reach, each beside its peer in one process."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from msgspec.structs import replace as replaced

from attnconform.conformance.bench.block_mask import block_mask_rows
from attnconform.conformance.bench.block_sparse import block_sparse_rows
from attnconform.conformance.bench.decode import bundled_rows, draw_of
from attnconform.conformance.bench.decode_work import TINY, DecodeShape
from attnconform.conformance.bench.honesty import ERROR_BOUND
from attnconform.conformance.bench.index import index_rows
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.nsa import shape_rows
from attnconform.conformance.bench.nsa_work import shapes as nsa_shapes
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.prefill import work_rows
from attnconform.conformance.bench.prefill_work import works
from attnconform.conformance.bench.quant import quant_row
from attnconform.conformance.bench.row import BenchRow, Measure, Target
from attnconform.conformance.bench.timing import Ceilings

ATTENTION, CANDIDATES = "attention", "from candidates"


@dataclass(frozen=True)
class Wanted:
    """What a stage of a work is to reach."""

    measure: Measure
    value: float
    stage: str = ATTENTION


@dataclass(frozen=True)
class Line:
    """A work of the table, how to time it, and what it is to reach."""

    peer: str | None
    rows: Callable[[Machine, BenchOptions], Iterator[BenchRow]]
    wanted: tuple[Wanted, ...]


def faster(factor: float, stage: str = ATTENTION) -> Wanted:
    return Wanted("times as fast", factor, stage)


def lines(machine: Machine) -> Iterator[Line]:
    """The whole table."""
    yield from decode_lines(machine)
    yield Line(None, index_rows, (Wanted("us on the device", 15.0, "index"),))
    yield Line(None, fp8_rows, (faster(1.75),))
    yield from prefill_lines(machine)
    for shape, factor in zip(nsa_shapes(machine), (1.2, 2.5), strict=True):
        yield Line("fla", partial(shape_rows, shape), (faster(factor),))
    yield Line("flex", block_mask_rows, (faster(100.0, "block mask"),))


def fp8_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    yield quant_row("float8_e4m3", "tensor", machine, options)


def decode_lines(machine: Machine) -> Iterator[Line]:
    """Pages at three batches, tokens at the largest, and large blocks."""
    base = DecodeShape(batch=1) if machine.is_real else TINY
    for batch, share, factor in ((1, 0.9, 6.0), (8, 0.9, 5.0), (64, 0.98, 2.2)):
        wanted = [Wanted("of the peer's time", share), faster(factor, CANDIDATES)]
        wanted += [Wanted("of the copy bandwidth", 0.98)] if batch == 64 else []
        yield decode_line("flashinfer", replace(base, batch=batch if machine.is_real else 1), *wanted)
    tokens = replace(base, batch=64 if machine.is_real else 1, granularity="token")
    yield decode_line(
        "flashinfer", tokens, Wanted("of the copy bandwidth", 0.95), Wanted("of the peer's time", 1.0),
        faster(8.0, CANDIDATES),
    )  # fmt: skip
    blocks = DecodeShape(batch=32, page_size=128, candidates=33 * 128) if machine.is_real else TINY
    yield decode_line("flex", blocks, faster(5.0))


def decode_line(peer: str, shape: DecodeShape, *wanted: Wanted) -> Line:
    def rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
        chosen = replace(options, stages=tuple({w.stage for w in wanted}))
        return bundled_rows(draw_of(shape, machine), machine, chosen)

    return Line(peer, rows, wanted)


def prefill_lines(machine: Machine) -> Iterator[Line]:
    """Rules and chosen blocks against FlexAttention; a dense causal prompt against cuDNN too."""
    *ruled, causal = works(machine)
    pairs = [(work, "flex", factor) for work, factor in zip(ruled, (1.15, 1.25, 1.4, 2.0), strict=True)]
    for work, peer, factor in [*pairs, (causal, "flex", 1.15), (causal, "cudnn", 0.85)]:
        yield Line(peer, partial(work_rows, work), (faster(factor),))
    yield Line("flex", block_sparse_rows, (faster(1.15),))


def target_rows(machine: Machine, options: BenchOptions, ceilings: Ceilings) -> Iterator[tuple[BenchRow, list[Target]]]:
    """Every row that the table asks for, with what of it was reached."""
    for line in lines(machine):
        for row in line.rows(machine, replace(options, peer=line.peer)):
            wanted = [w for w in line.wanted if w.stage == row.stage]
            if wanted:
                named = replaced(row, suite="targets", work=row.work + against(row))
                yield named, [judge(named, w, ceilings, is_real=machine.is_real) for w in wanted]


def against(row: BenchRow) -> str:
    return f", against {row.peer.name}" if row.peer else ""


def judge(row: BenchRow, wanted: Wanted, ceilings: Ceilings, *, is_real: bool) -> Target:
    """What a row reached of what is wanted; a wrong answer reaches nothing."""
    target = Target(
        key=row.key, measure=wanted.measure, wanted=wanted.value, got=reached(row, wanted.measure, ceilings)
    )
    if not is_right(row):
        return replaced(target, is_met=False, note=f"the answer is off by {row.error}")
    if target.got is None:
        return replaced(target, note=row.peer.error if row.peer else "no peer")
    is_met = target.got <= target.wanted if target.is_upper else target.got >= target.wanted
    return replaced(target, is_met=is_met if is_real else None)


def is_right(row: BenchRow) -> bool:
    return row.error is None or row.error <= ERROR_BOUND


def reached(row: BenchRow, measure: Measure, ceilings: Ceilings) -> float | None:
    if measure == "of the copy bandwidth":
        return row.copy_share(ceilings)
    if measure == "us on the device":
        return row.ours.device.median
    if row.speedup is None:
        return None
    return row.speedup if measure == "times as fast" else 1 / row.speedup
