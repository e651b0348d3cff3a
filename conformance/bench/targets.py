"""Suite targets: one line for everything the bundled kernels are to reach, each beside its peer in one process.

The lines may share a process, one after the other, or have one each (`bench -n`, `turns.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from msgspec.structs import replace as replaced

from attnconform.conformance.bench.backward import DETERMINISTIC, REPEATS
from attnconform.conformance.bench.backward_lines import HYBRID, beside_modes, beside_peer, hot_shapes, stage_of
from attnconform.conformance.bench.backward_subjects import Make, blocks_per_token, chosen_blocks, hot_pages, prompt
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

SUITE = "targets"
ATTENTION, CANDIDATES = "attention", "from candidates"
ON_DEVICE = ("attention", "backward")  # stages whose times have no host in them


@dataclass(frozen=True)
class Wanted:
    """What a stage of a work is to reach."""

    measure: Measure
    value: float
    stage: str = ATTENTION


@dataclass(frozen=True)
class Line:
    """A work of a table, how to time it, and what it is to reach, if anything."""

    name: str  # kind and work, as `--line` looks for it
    peer: str | None
    rows: Callable[[Machine, BenchOptions], Iterator[BenchRow]]
    wanted: tuple[Wanted, ...]

    @property
    def title(self) -> str:
        return f"{self.name}, against {self.peer}" if self.peer else self.name

    @property
    def needs_quiet(self) -> bool:
        """Whether a time by the host's clock counts: other processes at work would be in it."""
        return not all(wanted.stage.startswith(ON_DEVICE) for wanted in self.wanted)


def faster(factor: float, stage: str = ATTENTION) -> Wanted:
    return Wanted("times as fast", factor, stage)


def lines(machine: Machine) -> Iterator[Line]:
    """The whole table."""
    yield from decode_lines(machine)
    yield Line("index", None, index_rows, (Wanted("us on the device", 15.0, "index"),))
    yield from prefill_lines(machine)
    for shape, factor in zip(nsa_shapes(machine), (1.2, 2.5), strict=True):
        yield Line(f"nsa: {shape.name}", "fla", partial(shape_rows, shape), (faster(factor),))
    yield Line("block mask", "flex", block_mask_rows, (faster(100.0, "block mask"),))
    yield from backward_lines(machine)
    # It holds a large cache three times, and would not fit beside others of such caches that warm up: last.
    yield Line("decode from float8 codes", None, fp8_rows, (faster(1.75),))


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

    return Line(f"decode: {shape.name}", peer, rows, wanted)


def prefill_lines(machine: Machine) -> Iterator[Line]:
    """Rules and chosen blocks against FlexAttention; a dense causal prompt against cuDNN too."""
    *ruled, causal = works(machine)
    pairs = [(work, "flex", factor) for work, factor in zip(ruled, (1.15, 1.25, 1.4, 2.0), strict=True)]
    for work, peer, factor in [*pairs, (causal, "flex", 1.15), (causal, "cudnn", 0.85)]:
        yield Line(f"prefill: {work.name}", peer, partial(work_rows, work), (faster(factor),))
    yield Line("prefill: random blocks", "flex", block_sparse_rows, (faster(1.15),))


def backward_lines(machine: Machine) -> Iterator[Line]:
    """Prompts and chosen blocks against FlexAttention, lists per token against both of fla's, modes by themselves."""
    *ruled, _ = works(machine)
    for work, factor in zip(ruled, (1.15, 1.25, 1.3, 2.0), strict=True):
        yield backward_line(work.name, "flex", partial(prompt, work, machine), factor)
    yield backward_line("random blocks", "flex", partial(chosen_blocks, machine), 1.15)
    for shape in nsa_shapes(machine):
        for peer in ("fla", "fla-public"):
            yield backward_line(shape.name, peer, partial(blocks_per_token, shape, machine), 3.0)
    for name, make in (
        (ruled[0].name, partial(prompt, ruled[0], machine)),
        (nsa_shapes(machine)[0].name, partial(blocks_per_token, nsa_shapes(machine)[0], machine)),
    ):
        yield modes_line(name, make)
    for hot in hot_shapes(machine):
        yield modes_line(hot.name, partial(hot_pages, machine, hot), faster(3.0, stage_of(HYBRID)))


def backward_line(work: str, peer: str, make: Make, factor: float) -> Line:
    """The deterministic mode is to be this much faster than the peer, and the same every time."""
    stage = stage_of(DETERMINISTIC)
    wanted = (faster(factor, stage), Wanted("runs bit-equal", REPEATS, stage))
    return Line(f"backward: {work}", peer, partial(beside_peer, make), wanted)


def modes_line(work: str, make: Make, *wanted: Wanted) -> Line:
    """The deterministic mode is to be little slower than the fastest, and the same every time."""
    stage = stage_of(DETERMINISTIC)
    always = (Wanted("of the peer's time", 1.3, stage), Wanted("runs bit-equal", REPEATS, stage))
    return Line(f"backward modes: {work}", None, partial(beside_modes, make), (*always, *wanted))


def chosen_lines(table: list[Line], parts: tuple[str, ...]) -> list[Line]:
    """Lines whose name has one of these parts in it; all where none is given. Raises ValueError where none has."""
    found = [line for line in table if not parts or any(part.lower() in line.title.lower() for part in parts)]
    if not found:
        names = "; ".join(line.title for line in table)
        raise ValueError(f"no line has {' or '.join(parts)} in its name, and there are {names}")
    return found


def target_rows(
    line: Line, machine: Machine, options: BenchOptions, ceilings: Ceilings
) -> Iterator[tuple[BenchRow, list[Target]]]:
    """Every row that a line asks for, with what of it was reached."""
    for row in line_rows(line, machine, options):
        yield row, judged(line, row, ceilings, is_real=machine.is_real)


def line_rows(line: Line, machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """The rows that a line asks for, named for this table; of a line that wants nothing, all as they are."""
    stages = {wanted.stage for wanted in line.wanted}
    for row in line.rows(machine, replace(options, peer=line.peer)):
        if not stages:
            yield row
        elif row.stage in stages:
            yield replaced(row, suite=SUITE, work=row.work + against(row))


def judged(line: Line, row: BenchRow, ceilings: Ceilings, *, is_real: bool) -> list[Target]:
    return [judge(row, wanted, ceilings, is_real=is_real) for wanted in line.wanted if wanted.stage == row.stage]


def missed(line: Line, rows: list[BenchRow], why: str) -> list[Target]:
    """What a line was to reach where it has no row for it."""
    measured = {row.stage for row in rows}
    return [
        Target(key=f"{SUITE}: {line.title}: {w.stage}", measure=w.measure, wanted=w.value, got=None, note=why)
        for w in line.wanted
        if w.stage not in measured
    ]


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
    if measure == "runs bit-equal":
        return row.equal_runs
    if row.speedup is None:
        return None
    return row.speedup if measure == "times as fast" else 1 / row.speedup
