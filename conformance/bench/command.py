"""`attnconform bench`: runs suites, prints a table, writes JSON and plots; `--diagnose` takes one batch apart."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from msgspec.structs import replace as replaced
from rich.console import Console
from rich.table import Table

from attnconform.conformance.bench.agreement import disagreements
from attnconform.conformance.bench.backward import backward_rows
from attnconform.conformance.bench.counters import Counters, collect
from attnconform.conformance.bench.decode import decode_rows, shapes
from attnconform.conformance.bench.diagnose import Diagnosis, diagnose_subject
from attnconform.conformance.bench.index import index_rows
from attnconform.conformance.bench.machine import (
    MEANINGLESS,
    Environment,
    Machine,
    open_machine,
    read_clocks,
    read_environment,
)
from attnconform.conformance.bench.nsa import nsa_rows
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.prefill import prefill_rows
from attnconform.conformance.bench.prefill_work import works
from attnconform.conformance.bench.quant import quant_rows
from attnconform.conformance.bench.reuse import reuse_lines
from attnconform.conformance.bench.row import BenchReport, BenchRow, SweepPoint, Weighted
from attnconform.conformance.bench.seeded.batch import make_batches
from attnconform.conformance.bench.seeded.subjects import SUBJECTS
from attnconform.conformance.bench.sweep import length_crossing, rate_crossings, sweep_points
from attnconform.conformance.bench.timing import Ceilings, measure_ceilings
from attnconform.conformance.bench.tree import Finding
from attnconform.conformance.bench.weighting import length_counts, weigh
from attnconform.conformance.gate import write_text
from attnconform.conformance.replay import open_trace
from attnconform.traces import Trace

SUITES: dict[str, Callable[[Machine, BenchOptions], Iterator[BenchRow]]] = {
    "seed64k": decode_rows,
    "prefill": prefill_rows,
    "nsa": nsa_rows,
    "index": index_rows,
    "quant": quant_rows,
    "backward": backward_rows,
}
SWEEP = "sweep"
PEERS_OF = {
    "seed64k": ("flashinfer", "sdpa", "dense-mask"),
    "prefill": ("flex", "sdpa", "dense-mask"),
    "nsa": ("fla",),
    "backward": ("flex", "sdpa"),
}
DEFAULT_TRACE = Path("gemma3_270m")
Item = TypeVar("Item")


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


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
) -> int:
    """Runs suites; 1 where an earlier report of the same version was asked for and does not agree."""
    check_choices(suites, backend, peer)
    report = run_suites(
        console,
        suites=suites,
        backend=backend,
        peer=peer,
        trace=open_trace(trace) if trace else None,
        with_counters=with_counters,
    )
    if json_path is not None:
        write_json(json_path, report)
    print_report(console, report)
    if plot is not None:
        from attnconform.conformance.bench.plot import write_plot

        for written in write_plot(report, plot):
            console.print(f"  {written}", highlight=False)
    return 0 if agrees_with is None else print_agreement(console, read_report(agrees_with), report)


def check_choices(suites: tuple[str, ...], backend: str, peer: str | None) -> None:
    """Refuses a peer or a backend that a suite does not have."""
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
    trace: Trace | None = None,
    with_counters: bool = True,
) -> BenchReport:
    """Everything that was measured."""
    machine = open_machine(default_device())
    environment = read_environment(machine)
    notes = [] if machine.is_real else [MEANINGLESS]
    for note in notes:
        console.print(note, style="bold", highlight=False)
    counters = collect(counted_works(suites, machine)) if machine.is_real and with_counters else Counters()
    notes += [counters.note] if counters.note else []
    ceilings = measure_ceilings(machine)
    environment = replaced(environment, clocks_loaded=read_clocks(machine))
    rows: list[BenchRow] = []
    sweep: list[SweepPoint] = []
    for suite in suites:
        if suite == SWEEP:
            sweep = list(printed(console, sweep_points(machine), line_of_point))
        else:
            has_peer = peer in PEERS_OF.get(suite, ())
            options = BenchOptions(backend=backend, peer=peer if has_peer else None, trace=trace, counters=counters)
            rows += printed(console, SUITES[suite](machine, options), line_of)
    return BenchReport(
        date=datetime.now(UTC).date().isoformat(),
        environment=environment,
        ceilings=ceilings,
        rows=rows,
        sweep=sweep,
        weighted=weighted_by(sweep, trace),
        notes=notes,
    )


def weighted_by(sweep: list[SweepPoint], trace: Trace | None) -> list[Weighted]:
    """The sweep's decode times under the lengths of a trace, the bundled one where none is given."""
    if not sweep:
        return []
    known = trace or open_trace(DEFAULT_TRACE)
    line = [p for p in sweep if p.axis == "length"]
    return [weigh(known.header.name, "decode", length_counts(known, "decode"), line)]


def counted_works(suites: tuple[str, ...], machine: Machine) -> dict[str, str]:
    """Works whose kernels the hardware profiler counts, as name -> what the probe calls it."""
    found: dict[str, str] = {}
    if "seed64k" in suites:
        found |= {shape.name: f"seed64k:{n}" for n, shape in enumerate(shapes(machine))}
    if "prefill" in suites:
        found |= {work.name: f"prefill:{n}" for n, work in enumerate(works(machine))}
    return found


def printed(console: Console, items: Iterator[Item], line: Callable[[Item], str]) -> list[Item]:
    """Items as they come, each printed when it is there."""
    found = []
    for item in items:
        found.append(item)
        console.print(line(item), highlight=False, markup=False, soft_wrap=True)
    return found


def line_of(row: BenchRow) -> str:
    """A row while the suite runs."""
    peer = ""
    if row.peer is not None:
        told = f"{row.peer_time.median:.1f} us" if row.peer_time else row.peer.error
        peer = f", {row.peer.name} {told} {row.peer.difference}"
    return f"{row.key}: {row.time.median:.1f} us by the {row.clock}'s clock{peer}"


def line_of_point(point: SweepPoint) -> str:
    """A point while the sweep runs."""
    return f"{point.key}: {point.total:.1f} us {point.stage}, dense {point.dense:.1f} us"


def print_report(console: Console, report: BenchReport) -> None:
    """Times, then what they are made of, then where the curves cross."""
    if report.rows:
        console.print(table_of(report))
        for row in report.rows:
            if row.is_attention:
                for line in figure_lines(row, report.ceilings):
                    console.print(line, highlight=False, markup=False, soft_wrap=True)
        for line in reuse_lines(report):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    if report.sweep:
        crossings = {
            f"rate, block {block}": f"{rate:.1%}" if rate else "none"
            for block, rate in rate_crossings(report.sweep).items()
        }
        length = length_crossing(report.sweep)
        crossings["length"] = f"{length:,.0f} tokens" if length else "none"
        console.print("crossing with dense: " + "; ".join(f"{k}: {v}" for k, v in crossings.items()), highlight=False)
    for w in report.weighted:
        console.print(
            f"weighted by lengths of {w.trace} ({w.phase}): sparse {w.sparse:.1f} us, dense {w.dense:.1f} us, "
            f"the faster of the two {w.best:.1f} us; {w.outside:.0%} of its lengths lie outside the sweep",
            highlight=False,
        )
    for note in report.notes:
        console.print(note, style="bold", highlight=False)


def table_of(report: BenchReport) -> Table:
    """All rows by the clock that compares them, with the other's median, the ratio and the share of the roofline."""
    c = report.ceilings
    title = (
        f"{report.environment.device}: copy {c.copy_bytes_per_second / 1e12:.2f} TB/s, bf16 matmul "
        f"{c.matmul_flops_per_second / 1e12:.0f} TFLOP/s"
    )
    table = Table(title=title)
    left = ("work", "stage", "clock", "peer")
    for column in (
        "work",
        "stage",
        "clock",
        "us",
        "±",
        "P95",
        "P99",
        "other us",
        "peer",
        "us ",
        "ratio",
        "roof",
        "error",
    ):
        table.add_column(column, justify="left" if column in left else "right")
    for r in report.rows:
        other = r.ours.host if r.clock == "device" else r.ours.device
        table.add_row(
            r.work, r.stage, r.clock, f"{r.time.median:.1f}", f"{r.time.spread:.0%}", f"{r.time.p95:.1f}",
            f"{r.time.p99:.1f}", f"{other.median:.1f}", r.peer.name if r.peer else "",
            f"{r.peer_time.median:.1f}" if r.peer_time else "", f"{r.speedup:.2f}" if r.speedup else "",
            f"{r.roofline_share(c):.0%}" if r.figures.bytes_ideal else "", "" if r.error is None else f"{r.error:.1e}",
        )  # fmt: skip
    return table


def figure_lines(row: BenchRow, ceilings: Ceilings) -> Iterator[str]:
    """What an attention row is made of."""
    f = row.figures
    yield f"{row.key}: {row.path}"
    moved = f"bytes: needed {size(f.bytes_ideal)}, asked for {size(f.bytes_physical)}, DRAM {size(f.bytes_dram)}"
    hit = "-" if f.l2_hit_rate is None else f"{f.l2_hit_rate:.0%}"
    copied, multiplied = row.copy_share(ceilings), row.matmul_share(ceilings)
    yield f"  {moved}, L2 hits {hit}, line use {f.transaction_use:.0%}; {copied:.0%} of the copy bandwidth"
    tensor = "-" if f.tensor_core_share is None else f"{f.tensor_core_share:.0%}"
    yield (
        f"  FLOPs: wanted {f.flops_useful:.3g}, executed {f.flops_executed:.3g}; keys of tiles "
        f"{f.tile_efficiency:.0%}, rows of tiles {f.row_efficiency:.0%}, tensor cores {tensor}; {multiplied:.0%} of "
        "the matrix rate"
    )
    lengths, work = f.row_lengths, f.program_work
    busy = "-" if f.processors_busy is None else f"{f.processors_busy:.0%}"
    yield (
        f"  lists: mean {lengths.mean:.0f} keys, P50 {lengths.p50}, P95 {lengths.p95}, max {lengths.max}; {f.programs} "
        f"programs: P50 {work.p50} keys, P99 {work.p99}, max {work.max}, longest over fair {f.longest_over_fair:.2f}, "
        f"processors busy {busy}"
    )
    fallbacks = ", ".join(f"{reason}: {n}" for reason, n in f.fallbacks.items()) or "none"
    yield (
        f"  workspace: reserved {size(f.workspace_reserved)}, used {size(f.workspace_used)}, lists and tables "
        f"{size(f.metadata_bytes)}; recompiled {f.recompiles}; fallbacks {fallbacks}"
    )
    yield (
        f"  tokens per second: valid {row.valid_tokens_per_second:.3g}, processed {row.processed_tokens_per_second:.3g}"
    )
    if row.starts is not None:
        s = row.starts
        yield (
            f"  first call: {s.compile:.2f} s compiling, {s.cached:.2f} s from the cache folder, {s.warm:.4f} s warm; "
            f"{s.autotuned_kernels} kernels that tune themselves"
        )
    for one in row.slices:
        yield f"  {one.by} {one.group}: {one.events} events, median {one.median:.1f} us, P99 {one.p99:.1f} us"


def size(num_bytes: int | None) -> str:
    """In the unit that fits."""
    if num_bytes is None:
        return "-"
    exponent = min(3, max(0, (num_bytes.bit_length() - 1) // 10))
    return f"{num_bytes / 2 ** (10 * exponent):.4g} {('B', 'KiB', 'MiB', 'GiB')[exponent]}"


def print_agreement(console: Console, earlier: BenchReport, now: BenchReport) -> int:
    """Rows whose medians are farther apart than their spread; 1 where there are any."""
    found = disagreements(earlier, now)
    for line in found:
        console.print(line, highlight=False, markup=False)
    compared = len({r.key for r in now.rows} & {r.key for r in earlier.rows})
    console.print(
        f"{compared - len(found)} of {compared} rows agree within the spread of their events", highlight=False
    )
    return int(bool(found))


class DiagnosisReport(msgspec.Struct, frozen=True, kw_only=True):
    """Diagnoses of one run."""

    date: str
    environment: Environment
    ceilings: Ceilings
    diagnoses: list[Diagnosis]
    notes: list[str] = []


def diagnose_command(
    console: Console, *, subjects: tuple[str, ...], json_path: Path | None = None, with_counters: bool = True
) -> int:
    """Takes each subject apart on one batch and prints what the tree says."""
    machine = open_machine(default_device())
    environment = read_environment(machine)
    notes = [] if machine.is_real else [MEANINGLESS]
    chosen = {name: f"diagnose:{name}" for name in subjects}
    counters = collect(chosen) if machine.is_real and with_counters else Counters()
    notes += [counters.note] if counters.note else []
    ceilings = measure_ceilings(machine)
    environment = replaced(environment, clocks_loaded=read_clocks(machine))
    batches = make_batches(machine)
    found = []
    for name in subjects:
        found.append(diagnose_subject(name, SUBJECTS[name], batches, machine, ceilings, counters))
        print_diagnosis(console, found[-1])
        machine.release()
    for note in notes:
        console.print(note, style="bold", highlight=False)
    if json_path is not None:
        report = DiagnosisReport(
            date=datetime.now(UTC).date().isoformat(),
            environment=environment,
            ceilings=ceilings,
            diagnoses=found,
            notes=notes,
        )
        write_json(json_path, report)
    return 0


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """The conclusion with its evidence, and what else was found."""
    e = diagnosis.evidence
    t = e.times
    console.print(f"{diagnosis.subject}: {diagnosis.conclusion}", style="bold", highlight=False)
    console.print(
        f"  dense {t.dense:.0f} us; index only {t.index:.0f}; fixed candidates {t.attention:.0f}; end to end "
        f"{t.end_to_end:.0f}, of it selector {t.selector:.0f}; host {t.host_median:.0f}, P99 {t.host_p99:.0f}",
        highlight=False,
    )
    for finding in diagnosis.findings:
        print_finding(console, finding)


def print_finding(console: Console, finding: Finding) -> None:
    console.print(f"  - {finding.conclusion}", highlight=False)
    for line in finding.evidence:
        console.print(f"      {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"    next: {finding.look_next}", highlight=False, markup=False)


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
