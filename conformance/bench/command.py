"""`attnconform bench`: runs suites, prints a table, writes JSON and plots, and compares with an earlier run."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from msgspec.structs import replace as replaced
from rich.console import Console

from attnconform.conformance.bench.agreement import disagreements
from attnconform.conformance.bench.backward import backward_rows
from attnconform.conformance.bench.backward_training import training_rows
from attnconform.conformance.bench.backward_tuning import SUITE as TUNING
from attnconform.conformance.bench.backward_tuning import lines as tuning_lines
from attnconform.conformance.bench.backward_tuning import tuning_rows
from attnconform.conformance.bench.block_mask import block_mask_rows
from attnconform.conformance.bench.cold_starts import ColdStart, cold_starts
from attnconform.conformance.bench.counters import Counters, collect
from attnconform.conformance.bench.decode import decode_rows, shapes
from attnconform.conformance.bench.index import index_rows
from attnconform.conformance.bench.line_process import told
from attnconform.conformance.bench.machine import (
    MEANINGLESS,
    Machine,
    TimeUp,
    open_machine,
    read_clocks,
    read_environment,
)
from attnconform.conformance.bench.nsa import nsa_rows
from attnconform.conformance.bench.nsa_work import shapes as nsa_shapes
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.outgrown import tier_rows
from attnconform.conformance.bench.prefill import prefill_rows
from attnconform.conformance.bench.prefill_work import works
from attnconform.conformance.bench.quant import quant_rows
from attnconform.conformance.bench.report_text import (
    line_of,
    line_of_point,
    line_of_run,
    line_of_start,
    print_report,
)
from attnconform.conformance.bench.row import CHUNK, BenchReport, BenchRow, LineRun, Phase, SweepPoint, Target, Weighted
from attnconform.conformance.bench.sweep import sweep_points
from attnconform.conformance.bench.targets import Line, chosen_lines, judged, missed, target_rows
from attnconform.conformance.bench.targets import lines as target_lines
from attnconform.conformance.bench.timing import Ceilings, measure_ceilings
from attnconform.conformance.bench.turns import Process, Schedule, Turns
from attnconform.conformance.bench.weighting import length_counts, weigh
from attnconform.conformance.gate import write_text
from attnconform.conformance.replay import open_trace
from attnconform.traces import Trace

SUITES: dict[str, Callable[[Machine, BenchOptions], Iterator[BenchRow]]] = {
    "seed64k": decode_rows,
    "prefill": prefill_rows,
    "nsa": nsa_rows,
    "block-mask": block_mask_rows,
    "index": index_rows,
    "quant": quant_rows,
    "backward": backward_rows,
    TUNING: tuning_rows,
    "training": training_rows,
    "tiers": tier_rows,
}
SWEEP, TARGETS, STARTS = "sweep", "targets", "starts"
LINES: dict[str, Callable[[Machine], Iterator[Line]]] = {TARGETS: target_lines, TUNING: tuning_lines}
PEERS_OF = {
    "seed64k": ("flashinfer", "flex", "sdpa", "dense-mask"),
    "prefill": ("flex", "sdpa", "cudnn", "dense-mask"),
    "nsa": ("fla",),
    "block-mask": ("flex",),
    "backward": ("flex", "sdpa", "fla", "fla-public"),
}
DEFAULT_TRACE = Path("gemma3_270m")
COUNTERS_TIMEOUT = 120.0  # seconds
WEIGHED: tuple[tuple[Phase, str], ...] = (("decode", "length"), ("prefill", CHUNK))  # and the axis of lengths


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to run."""

    suites: tuple[str, ...]
    backend: str = "triton"
    peer: str | None = None
    trace: Trace | None = None
    with_counters: bool = True
    limit: float | None = None  # seconds after which no work is begun
    with_starts: bool = True  # first calls and tuning, which a run that only compares has no use for
    lines: tuple[str, ...] = ()  # by a part of their names; all where none is given
    processes: int | None = None  # at a time, a line in each; None: everything in this one


def bench_command(
    console: Console,
    *,
    suites: tuple[str, ...],
    backend: str = "triton",
    peer: str | None = None,
    trace: Path | None = None,
    json_path: Path | None = None,
    plot: Path | None = None,
    agrees_with: Path | None = None,
    with_counters: bool = True,
    limit: float | None = None,
    lines: tuple[str, ...] = (),
    processes: int | None = None,
) -> int:
    """Runs suites; 1 where an earlier report of the same version was asked for and does not agree."""
    check_choices(suites, backend, peer)
    check_lines(suites, lines, processes)
    if plot is not None:
        from attnconform.conformance.bench.plot import need_matplotlib, write_plot

        need_matplotlib()
    earlier = None if agrees_with is None else read_report(agrees_with)
    if earlier is not None and default_device() == "cpu":
        raise ValueError(f"{agrees_with} cannot be agreed with: without a GPU, times mean nothing")
    request = Request(
        suites=suites, backend=backend, peer=peer, trace=open_trace(trace) if trace else None,
        with_counters=with_counters, limit=limit, with_starts=agrees_with is None,
        lines=lines, processes=processes,
    )  # fmt: skip
    report = run(console, request)
    print_report(console, report)  # first: a file that cannot be written loses nothing
    if json_path is not None:
        write_json(json_path, report)
    if plot is not None:
        for written in write_plot(report, plot):
            console.print(f"  {written}", highlight=False)
    return 0 if earlier is None else print_agreement(console, earlier, report)


def check_choices(suites: tuple[str, ...], backend: str, peer: str | None) -> None:
    """Refuses a suite that there is not, and a peer or a backend that a suite does not have."""
    for suite in suites:
        if suite not in (*SUITES, SWEEP, TARGETS, STARTS):
            raise ValueError(f"suite is {suite}, but must be one of {', '.join((*SUITES, SWEEP, TARGETS, STARTS))}")
    if peer is not None and not any(peer in PEERS_OF.get(suite, ()) for suite in suites):
        known = "; ".join(f"{suite}: {', '.join(PEERS_OF.get(suite, ())) or 'none'}" for suite in suites)
        raise ValueError(f"peer is {peer}, but the suites have {known}")
    for suite in suites:
        if backend != "triton" and suite != "seed64k":
            raise ValueError(f"backend is {backend}, but suite {suite} times the bundled kernels only: use seed64k")


def check_lines(suites: tuple[str, ...], lines: tuple[str, ...], processes: int | None) -> None:
    """Refuses to choose lines, or to part them, of suites that have none."""
    if processes is not None and not LINES.keys() & set(suites):
        raise ValueError(f"suites are {', '.join(suites)}, but only {' and '.join(LINES)} have lines to part")
    if lines and processes is None and TARGETS not in suites:
        raise ValueError(f"suites are {', '.join(suites)}, but in one process only {TARGETS} has lines to choose")


def run_suites(
    console: Console,
    *,
    suites: tuple[str, ...],
    backend: str = "triton",
    peer: str | None = None,
) -> BenchReport:
    """Everything that was measured, as a gate needs it."""
    return run(console, Request(suites=suites, backend=backend, peer=peer))


def run(console: Console, request: Request) -> BenchReport:
    """Everything that was measured, within the limit."""
    machine = open_machine(default_device())
    machine.deadline = None if request.limit is None else time.monotonic() + request.limit
    chosen = lines_of(request, machine)
    environment = read_environment(machine)
    found = Found([] if machine.is_real else [MEANINGLESS])
    for note in found.notes:
        console.print(note, style="bold", highlight=False)
    counters = counted(request, machine)
    found.notes += [counters.note] if counters.note else []
    parted = [suite for suite in chosen if request.processes is not None]
    for suite in parted:
        measure_lines(console, suite, chosen[suite], request, machine, found)
    ceilings = found.ceilings or measure_ceilings(machine)
    environment = replaced(environment, clocks_loaded=read_clocks(machine))
    for suite in [suite for suite in request.suites if suite not in parted]:
        try:
            run_suite(console, suite, chosen.get(suite, []), request, machine, counters, ceilings, found)
        except TimeUp:
            found.notes.append(f"suite {suite} is not complete: its limit of {request.limit:g} s was reached")
    return BenchReport(
        date=datetime.now(UTC).date().isoformat(),
        environment=environment,
        ceilings=ceilings,
        rows=found.rows,
        sweep=found.sweep,
        weighted=weighted_by(found.sweep, request.trace),
        targets=found.targets,
        lines=found.lines,
        starts=found.starts,
        notes=found.notes,
    )


@dataclass
class Found:
    """What the suites of one run gave so far."""

    notes: list[str]
    rows: list[BenchRow] = field(default_factory=list)
    sweep: list[SweepPoint] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    lines: list[LineRun] = field(default_factory=list)
    starts: list[ColdStart] = field(default_factory=list)
    ceilings: Ceilings | None = None


def lines_of(request: Request, machine: Machine) -> dict[str, list[Line]]:
    """What is measured of every suite that is taken line by line.

    Raises ValueError, before anything is measured, where a suite has none of the lines asked for, or where a name that
    was asked for is in no suite.
    """
    by_line = LINES if request.processes is not None else (TARGETS,)
    tables = {suite: list(LINES[suite](machine)) for suite in request.suites if suite in by_line}
    for part in request.lines:
        chosen_lines([line for table in tables.values() for line in table], (part,))
    chosen = {}
    for suite, table in tables.items():
        try:
            chosen[suite] = chosen_lines(table, request.lines)
        except ValueError as error:
            raise ValueError(f"suite {suite}: {error}") from error
    return chosen


def run_suite(
    console: Console, suite: str, lines: list[Line], request: Request, machine: Machine, counters: Counters,
    ceilings: Ceilings, found: Found,
) -> None:  # fmt: skip
    """One suite, line by line."""
    peer = request.peer if request.peer in PEERS_OF.get(suite, ()) else None
    options = BenchOptions(
        backend=request.backend, peer=peer, trace=request.trace, counters=counters,
        with_starts=request.with_starts and suite != TARGETS, tell=found.notes.append,
    )  # fmt: skip
    if suite == SWEEP:
        for point in sweep_points(machine, found.notes):
            found.sweep.append(point)
            print_line(console, line_of_point(point))
    elif suite == STARTS:
        for start in cold_starts(machine):
            found.starts.append(start)
            print_line(console, line_of_start(start))
    elif suite == TARGETS:
        for line in lines:
            run_line(console, line, machine, options, ceilings, found)
    else:
        for row in SUITES[suite](machine, options):
            found.rows.append(row)
            print_line(console, line_of(row))


def run_line(
    console: Console, line: Line, machine: Machine, options: BenchOptions, ceilings: Ceilings, found: Found
) -> None:
    """One line of the targets in this process; what it was to reach stays in the report where it has no time left."""
    rows: list[BenchRow] = []
    try:
        for row, targets in target_rows(line, machine, options, ceilings):
            rows.append(row)
            found.targets += targets
            print_line(console, line_of(row))
    except TimeUp:
        found.notes.append(f"line {line.title} was not begun: the limit was reached")
        found.targets += missed(line, rows, "the limit was reached")
    except Exception as failure:  # one line's fault is no other's
        found.notes.append(f"line {line.title} failed: {told(failure)}")
        found.targets += missed(line, rows, told(failure))
    found.rows += rows


def measure_lines(
    console: Console, suite: str, lines: list[Line], request: Request, machine: Machine, found: Found
) -> None:
    """A suite's lines in processes of their own; the ceilings when all is quiet, before the first turn."""

    def measure_first() -> None:
        found.ceilings = found.ceilings or measure_ceilings(machine)
        machine.release()

    table = LINES[suite]
    left = None if machine.deadline is None else max(1.0, machine.deadline - time.monotonic())
    turns = Turns(
        lines, Schedule(processes=request.processes or 1, limit=left), machine.device,
        table=f"{table.__module__}:{table.__name__}", begin=measure_first,
    )  # fmt: skip
    over: list[Process] = []
    for process in turns.run():
        over.append(process)
        for text in lines_of_process(process):
            print_line(console, text)
    measure_first()
    for process in sorted(over, key=lambda process: turns.processes.index(process)):
        take(process, found, is_real=machine.is_real)


def take(process: Process, found: Found, *, is_real: bool) -> None:
    """What became of a line, into the report."""
    assert process.run is not None
    assert found.ceilings is not None
    run = process.run
    found.lines.append(run)
    found.rows += process.rows
    for row in process.rows:
        found.targets += judged(process.line, row, found.ceilings, is_real=is_real)
    found.targets += missed(process.line, process.rows, f"{run.state}: {run.note}" if run.note else run.state)


def lines_of_process(process: Process) -> Iterator[str]:
    """What a line that is over found, and how it went."""
    for row in process.rows:
        yield line_of(row)
    if process.run is not None:
        yield line_of_run(process.run)


def counted(request: Request, machine: Machine) -> Counters:
    """Hardware counters of the suites' kernels, in half of the time at most."""
    if not machine.is_real or not request.with_counters:
        return Counters()
    timeout = COUNTERS_TIMEOUT if request.limit is None else min(COUNTERS_TIMEOUT, request.limit / 2)
    return collect(counted_works(request.suites, machine), timeout=timeout)


def weighted_by(sweep: list[SweepPoint], trace: Trace | None) -> list[Weighted]:
    """Times of the sweep under the lengths of a trace, the bundled one where none is given; each phase apart."""
    lines = [(phase, [p for p in sweep if p.axis == axis]) for phase, axis in WEIGHED]
    if not any(line for _, line in lines):
        return []
    known = trace or open_trace(DEFAULT_TRACE)
    return [weigh(known.header.name, phase, length_counts(known, phase), line) for phase, line in lines if line]


def counted_works(suites: tuple[str, ...], machine: Machine) -> dict[str, str]:
    """Works whose kernels the hardware profiler counts, as name -> what the probe calls it."""
    found: dict[str, str] = {}
    if "seed64k" in suites:
        found |= {shape.name: f"seed64k:{n}" for n, shape in enumerate(shapes(machine))}
    if "prefill" in suites:
        found |= {work.name: f"prefill:{n}" for n, work in enumerate(works(machine))}
    if "nsa" in suites:
        found |= {shape.name: f"nsa:{n}" for n, shape in enumerate(nsa_shapes(machine))}
    return found


def print_line(console: Console, line: str) -> None:
    """Says a line as soon as it is known."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_agreement(console: Console, earlier: BenchReport, now: BenchReport) -> int:
    """Rows whose blocks lie apart; 1 where there are any."""
    found = disagreements(earlier, now)
    for line in found:
        console.print(line, highlight=False, markup=False)
    compared = len({r.key for r in now.rows} & {r.key for r in earlier.rows})
    console.print(
        f"{compared - len(found)} of {compared} rows agree within the spread of their blocks", highlight=False
    )
    return int(bool(found))


def write_json(path: Path, report: msgspec.Struct) -> None:
    """A report as a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")


def read_report(path: Path) -> BenchReport:
    """A report that `bench --json` wrote. Raises ValueError, naming the file, for anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=BenchReport)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is no bench report: {error}") from error
