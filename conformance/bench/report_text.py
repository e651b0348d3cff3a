"""A report as text: rows while they come, then times, what they are made of, targets, and where the curves cross."""

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from attnconform.conformance.bench.cold_starts import MOST_SECONDS, ColdStart
from attnconform.conformance.bench.figure_text import figure_lines, tail_lines
from attnconform.conformance.bench.machine import Environment
from attnconform.conformance.bench.reuse import reuse_lines
from attnconform.conformance.bench.row import BenchReport, BenchRow, LineRun, SweepPoint, Target, Weighted
from attnconform.conformance.bench.sweep import crossing_text

FILE_WIDTH = 200  # of a table that is written to a file
LEFT = ("work", "stage", "clock", "peer", "target", "met", "kernel")
COLUMNS = (
    "work", "stage", "clock", "us", "±", "P95", "P99", "other us", "peer", "us ", "ratio", "in blocks", "roof",
    "error",
)  # fmt: skip


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


def line_of_run(run: LineRun) -> str:
    """How a line with a process of its own went."""
    warm = "" if run.warm_seconds is None else f", ready after {run.warm_seconds:.0f} s"
    timed = "" if run.timed_seconds is None else f", measured in {run.timed_seconds:.1f} s"
    beside = f", {run.beside} others still warming" if run.beside else ""
    clocks = run.environment.clocks_loaded if run.environment else {}
    told = "".join(f", {name} {value}" for name, value in clocks.items() if not name.startswith("clocks.max"))
    return f"  {run.name}: {run.state}{warm}{timed}{beside}{told}{f': {run.note}' if run.note else ''}"


def line_of_start(start: ColdStart) -> str:
    """A cold start while the suite runs."""
    if start.error:
        return f"{start.work}: {start.error}"
    again = ", ".join(f"{what}: {count}" for what, count in start.changed.items())
    return f"{start.work}: first call {start.first:.2f} s, warm {start.warm:.4f} s, compiled for other {again}"


def print_report(console: Console, report: BenchReport) -> None:
    """Where it ran, times, what they are made of, what was reached, and where the curves cross."""
    if report.rows:
        print_table(console, table_of(report))
    if report.targets:
        print_table(console, target_table(report.targets))
    if report.starts:
        print_table(console, start_table(report.starts))
    for line in report_lines(report):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for note in report.notes:
        console.print(note, style="bold", highlight=False)


def print_table(console: Console, table: Table) -> None:
    """As wide as the terminal; in a file, wide enough to be read."""
    before = console.width
    if not console.is_terminal:
        console.width = max(before, FILE_WIDTH)
    console.print(table)
    console.width = before


def report_lines(report: BenchReport) -> Iterator[str]:
    """All that is no table."""
    for row in report.rows:
        if row.is_attention:
            yield from figure_lines(row, report.ceilings)
        elif row.slices:
            yield from tail_lines(row)
    yield from reuse_lines(report)
    if report.targets:
        yield target_summary(report.targets)
    if report.lines:
        yield lines_summary(report.lines)
    if report.starts:
        yield start_summary(report.starts)
    if report.sweep:
        yield crossing_text(report.sweep)
    for weighted in report.weighted:
        yield weighted_line(weighted)
    yield from environment_lines(report.environment)


def weighted_line(w: Weighted) -> str:
    return (
        f"weighted by lengths of {w.trace} ({w.phase}): sparse {w.sparse:.1f} us, dense {w.dense:.1f} us, "
        f"the faster of the two {w.best:.1f} us; {w.outside:.0%} of its lengths lie outside the sweep"
    )


def environment_lines(e: Environment) -> Iterator[str]:
    """What has to be equal for two reports to be compared, and what may explain a difference."""
    versions = ", ".join(f"{name} {version}" for name, version in e.versions.items())
    yield f"on {e.device} {e.capability}, driver {e.driver or '-'}; {versions}"
    for when, clocks in (("before", e.clocks), ("under load", e.clocks_loaded)):
        if clocks:
            yield f"  {when}: " + ", ".join(f"{name} {value}" for name, value in clocks.items())
    if e.compile_caches:
        caches = (
            f"{name} {c.entries} entries" if c.entries else f"{name} cold" for name, c in e.compile_caches.items()
        )
        yield "  compile caches: " + ", ".join(caches)
    if e.host:
        yield "  host: " + ", ".join(f"{name} {value}" for name, value in e.host.items())


def table_of(report: BenchReport) -> Table:
    """All rows by the clock that compares them, with the other's median, the ratio and the share of the roofline.

    ± is how far the median of a block lies from the median of all, at most; a ratio is given over all blocks and in
    the worst and the best of them.
    """
    c = report.ceilings
    title = (
        f"{report.environment.device}: copy {c.copy_bytes_per_second / 1e12:.2f} TB/s, bf16 matmul "
        f"{c.matmul_flops_per_second / 1e12:.0f} TFLOP/s"
    )
    table = new_table(title, COLUMNS)
    for r in report.rows:
        other = r.ours.host if r.clock == "device" else r.ours.device
        table.add_row(
            r.work, r.stage, r.clock, f"{r.time.median:.1f}", f"{r.time.spread:.1%}", f"{r.time.p95:.1f}",
            f"{r.time.p99:.1f}", f"{other.median:.1f}", r.peer.name if r.peer else "",
            f"{r.peer_time.median:.1f}" if r.peer_time else "", f"{r.speedup:.2f}" if r.speedup else "",
            f"{min(r.speedups):.2f} to {max(r.speedups):.2f}" if r.speedups else "",
            f"{r.roofline_share(c):.0%}" if r.figures.bytes_ideal else "", "" if r.error is None else f"{r.error:.1e}",
        )  # fmt: skip
    return table


def target_table(targets: list[Target]) -> Table:
    """What is to be reached, what was, their ratio, and whether it was."""
    table = new_table("targets", ("work", "target", "measured", "measured / target", "met"))
    for t in targets:
        got = "-" if t.got is None else f"{t.got:.3g}"
        ratio = "-" if t.got is None else f"{t.got / t.wanted:.2f}"
        bound = "at most" if t.is_upper else "at least"
        table.add_row(t.key.removeprefix("targets: "), f"{bound} {t.wanted:g} {t.measure}", got, ratio, met_text(t))
    return table


def met_text(t: Target) -> str:
    if t.is_met is None:
        return f"not measured: {t.note}" if t.got is None else "times mean nothing"
    return ("yes" if t.is_met else "no") + (f", {t.note}" if t.note else "")


def start_table(starts: list[ColdStart]) -> Table:
    """Every kernel that a work's first call compiles; beside the first, the call, and what changes compiled again."""
    title = "cold starts: an empty cache folder, a process for every work"
    columns = (
        "work",
        "kernel",
        "compiled",
        "longest s",
        "all s",
        "first call s",
        "warm s",
        "again",
        "other code",
        "met",
    )
    table = new_table(title, columns)
    for start in starts:
        call = (f"{start.first:.2f}", f"{start.warm:.4f}") if start.first is not None else ("-", "-")
        other = "" if start.other_code is None else str(start.other_code)
        of_call = (*call, str(start.recompiled), other, start_met(start))
        table.add_row(start.work, *kernel_cells(start, 0), *of_call)
        for number in range(1, len(start.kernels)):
            table.add_row("", *kernel_cells(start, number), *[""] * len(of_call))
    return table


def start_met(start: ColdStart) -> str:
    if not start.kernels:
        return start.error or "nothing compiled"
    return "yes" if start.is_met else "no"


def kernel_cells(start: ColdStart, number: int) -> tuple[str, str, str, str]:
    if not start.kernels:
        return ("none", "0", "-", "-")
    kernel = start.kernels[number]
    return (kernel.kernel, str(kernel.specializations), f"{kernel.longest:.2f}", f"{kernel.total:.2f}")


def start_summary(starts: list[ColdStart]) -> str:
    """Over all works: how long a kernel takes at most, and whether numbers alone ever compile."""
    kernels = [kernel for start in starts for kernel in start.kernels]
    names = {kernel.kernel for kernel in kernels}
    longest = max((kernel.longest for kernel in kernels), default=0.0)
    return (
        f"cold starts: {len(names)} kernels, {sum(start.is_met for start in starts)} of {len(starts)} works met; the "
        f"longest compilation took {longest:.2f} s of {MOST_SECONDS:g} s; changed numbers compiled "
        f"{sum(start.recompiled for start in starts)} kernels again"
    )


def target_summary(targets: list[Target]) -> str:
    judged = [t for t in targets if t.is_met is not None]
    missing = len(targets) - len(judged)
    return f"{sum(t.is_met is True for t in judged)} of {len(targets)} targets met, {missing} not measured"


def lines_summary(runs: list[LineRun]) -> str:
    """How many lines were measured, and what became of the others, by name."""
    others = [line_of_run(run) for run in runs if run.state != "measured"]
    noisy = sum(run.beside > 0 for run in runs)
    beside = f", {noisy} of them while others still warmed up" if noisy else ""
    return "\n".join([f"{len(runs) - len(others)} of {len(runs)} lines measured{beside}", *others])


def new_table(title: str, columns: tuple[str, ...]) -> Table:
    """Words to the left, numbers to the right."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right", no_wrap=column not in LEFT)
    return table
