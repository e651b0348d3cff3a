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
from attnconform.conformance.bench.backward_tuning import tuning_rows
from attnconform.conformance.bench.block_mask import block_mask_rows
from attnconform.conformance.bench.counters import Counters, collect
from attnconform.conformance.bench.decode import decode_rows, shapes
from attnconform.conformance.bench.index import index_rows
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
from attnconform.conformance.bench.prefill import prefill_rows
from attnconform.conformance.bench.prefill_work import works
from attnconform.conformance.bench.quant import quant_rows
from attnconform.conformance.bench.report_text import line_of, line_of_point, print_report
from attnconform.conformance.bench.row import CHUNK, BenchReport, BenchRow, Phase, SweepPoint, Target, Weighted
from attnconform.conformance.bench.sweep import sweep_points
from attnconform.conformance.bench.targets import target_rows
from attnconform.conformance.bench.timing import Ceilings, measure_ceilings
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
    "backward-tuning": tuning_rows,
    "training": training_rows,
}
SWEEP, TARGETS = "sweep", "targets"
PEERS_OF = {
    "seed64k": ("flashinfer", "flex", "sdpa", "dense-mask"),
    "prefill": ("flex", "sdpa", "cudnn", "dense-mask"),
    "nsa": ("fla",),
    "block-mask": ("flex",),
    "backward": ("flex", "sdpa", "fla"),
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
) -> int:
    """Runs suites; 1 where an earlier report of the same version was asked for and does not agree."""
    check_choices(suites, backend, peer)
    earlier = None if agrees_with is None else read_report(agrees_with)
    if earlier is not None and default_device() == "cpu":
        raise ValueError(f"{agrees_with} cannot be agreed with: without a GPU, times mean nothing")
    request = Request(
        suites=suites, backend=backend, peer=peer, trace=open_trace(trace) if trace else None,
        with_counters=with_counters, limit=limit, with_starts=agrees_with is None,
    )  # fmt: skip
    report = run(console, request)
    if json_path is not None:
        write_json(json_path, report)
    print_report(console, report)
    if plot is not None:
        from attnconform.conformance.bench.plot import write_plot

        for written in write_plot(report, plot):
            console.print(f"  {written}", highlight=False)
    return 0 if earlier is None else print_agreement(console, earlier, report)


def check_choices(suites: tuple[str, ...], backend: str, peer: str | None) -> None:
    """Refuses a suite that there is not, and a peer or a backend that a suite does not have."""
    for suite in suites:
        if suite not in (*SUITES, SWEEP, TARGETS):
            raise ValueError(f"suite is {suite}, but must be one of {', '.join((*SUITES, SWEEP, TARGETS))}")
    if peer is not None and not any(peer in PEERS_OF.get(suite, ()) for suite in suites):
        known = "; ".join(f"{suite}: {', '.join(PEERS_OF.get(suite, ())) or 'none'}" for suite in suites)
        raise ValueError(f"peer is {peer}, but the suites have {known}")
    for suite in suites:
        if backend != "triton" and suite != "seed64k":
            raise ValueError(f"backend is {backend}, but suite {suite} times the bundled kernels only: use seed64k")


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
    environment = read_environment(machine)
    found = Found([] if machine.is_real else [MEANINGLESS])
    for note in found.notes:
        console.print(note, style="bold", highlight=False)
    counters = counted(request, machine)
    found.notes += [counters.note] if counters.note else []
    ceilings = measure_ceilings(machine)
    environment = replaced(environment, clocks_loaded=read_clocks(machine))
    for suite in request.suites:
        try:
            run_suite(console, suite, request, machine, counters, ceilings, found)
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
        notes=found.notes,
    )


@dataclass
class Found:
    """What the suites of one run gave so far."""

    notes: list[str]
    rows: list[BenchRow] = field(default_factory=list)
    sweep: list[SweepPoint] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)


def run_suite(
    console: Console, suite: str, request: Request, machine: Machine, counters: Counters, ceilings: Ceilings,
    found: Found,
) -> None:  # fmt: skip
    """One suite, line by line."""
    peer = request.peer if request.peer in PEERS_OF.get(suite, ()) else None
    options = BenchOptions(
        backend=request.backend, peer=peer, trace=request.trace, counters=counters,
        with_starts=request.with_starts and suite != TARGETS,
    )  # fmt: skip
    if suite == SWEEP:
        for point in sweep_points(machine, found.notes):
            found.sweep.append(point)
            print_line(console, line_of_point(point))
    elif suite == TARGETS:
        for row, targets in target_rows(machine, options, ceilings):
            found.rows.append(row)
            found.targets += targets
            print_line(console, line_of(row))
    else:
        for row in SUITES[suite](machine, options):
            found.rows.append(row)
            print_line(console, line_of(row))


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
