"""The performance half of a pull request's gate: ratios measured in one run, never absolute times.

Its thresholds are its own: a right output says nothing of speed, and a fast one nothing of the keys. A run is compared
with a baseline by its share of the copy bandwidth and by its ratio to the peer, both measured in the same process; and
whatever the baseline says, a row closes the gate that is wrong, too fast for its bytes, as slow as dense, or reads what
it does not list.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from attnconform.conformance.bench.agreement import check_comparable
from attnconform.conformance.bench.honesty import ERROR_BOUND
from attnconform.conformance.bench.row import BenchReport, BenchRow
from attnconform.conformance.gate import section, write_text

MARGIN = 1.15  # how far a ratio may fall below the baseline's, as a factor
TAIL_MARGIN = 2.0  # how far P99 over median may rise
MEMORY_MARGIN = 1.1
TOO_FAST = 1.15  # of the copy bandwidth: nothing reads faster than that
AS_DENSE = 0.8  # of the time that every key takes
SPARSE_RATE = 0.5  # up to this share of the keys, a sparse pass has no excuse for a dense time


@dataclass
class PerformanceReport:
    """What closes the gate, by kind."""

    worse: list[str] = field(default_factory=list)
    dishonest: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        return not (self.worse or self.dishonest or self.missing)


def compare_performance(baseline: BenchReport, now: BenchReport, margin: float = MARGIN) -> PerformanceReport:
    """The report. Raises ValueError where the two cannot be compared."""
    check_comparable(baseline, now)
    before = {row.key: row for row in baseline.rows}
    report = PerformanceReport()
    report.missing = sorted(before.keys() - {row.key for row in now.rows})
    for row in now.rows:
        report.dishonest += [f"{row.key}: {fault}" for fault in dishonesties(row, now)]
        old = before.get(row.key)
        if old is not None:
            report.worse += [f"{row.key}: {fault}" for fault in losses(old, row, baseline, now, margin)]
    return report


def dishonesties(row: BenchRow, report: BenchReport) -> Iterator[str]:
    """Why a row's time counts for nothing, whatever it is."""
    if row.error is not None and not row.error <= ERROR_BOUND:  # NaN is above no bound and below none
        yield f"the output is off by {row.error:.1e}, more than {ERROR_BOUND:.0e}: keys were skipped or doubled"
    if row.poisoned_error is not None and not row.poisoned_error <= ERROR_BOUND:
        yield f"with NaN in slots that no list names the output is off by {row.poisoned_error:.1e}: it reads more keys"
    if report.environment.is_interpreted or not row.is_attention:
        return
    if row.copy_share(report.ceilings) > TOO_FAST:
        yield f"its bytes would need {row.copy_share(report.ceilings):.1f} times the copy bandwidth: keys were skipped"
    if row.dense is not None and row.rate <= SPARSE_RATE and row.ours.median >= AS_DENSE * row.dense.median:
        yield (
            f"{row.rate:.0%} of the keys take {row.ours.median / row.dense.median:.0%} of the time of all of them: "
            "a dense pass"
        )
    if row.figures.bytes_dram is not None and row.figures.bytes_dram * row.rate > row.figures.bytes_ideal * AS_DENSE:
        moved = row.figures.bytes_dram / row.figures.bytes_ideal
        yield f"DRAM moved {moved:.1f} times the bytes of its keys: a dense pass"


def losses(old: BenchRow, row: BenchRow, baseline: BenchReport, now: BenchReport, margin: float) -> Iterator[str]:
    """What got worse than the baseline by more than its margin; spreads widen the margin of a time."""
    if row.is_attention and not now.environment.is_interpreted:
        allowed = max(margin, 1 + old.time.spread, 1 + row.time.spread)
        before, after = old.roofline_share(baseline.ceilings), row.roofline_share(now.ceilings)
        if after * allowed < before:
            yield f"{before:.0%} of the roofline before, {after:.0%} now"
        yield from lost_ratio(old, row, allowed)
        if tail_of(row) > TAIL_MARGIN * tail_of(old):
            yield f"P99 is {tail_of(row):.1f} times the median, {tail_of(old):.1f} before"
    if row.figures.workspace_reserved > MEMORY_MARGIN * old.figures.workspace_reserved:
        yield f"reserves {row.figures.workspace_reserved} bytes, {old.figures.workspace_reserved} before"
    if row.figures.recompiles > old.figures.recompiles:
        yield f"{row.figures.recompiles} compilations after the warm-up, {old.figures.recompiles} before"
    if sum(row.figures.fallbacks.values()) > sum(old.figures.fallbacks.values()):
        yield f"falls back for {row.figures.fallbacks}, before for {old.figures.fallbacks or 'nothing'}"


def lost_ratio(old: BenchRow, row: BenchRow, allowed: float) -> Iterator[str]:
    """A ratio to the peer that fell, or that is no longer there to fall."""
    if old.peer is None or not old.speedup:
        return
    if row.peer is None or not row.speedup:
        why = row.peer.error if row.peer else "no peer was asked for"
        yield f"{old.speedup:.2f} times as fast as {old.peer.name} before, not compared now: {why}"
    elif row.speedup * allowed < old.speedup:
        yield f"{old.speedup:.2f} times as fast as {row.peer.name} before, {row.speedup:.2f} now"


def tail_of(row: BenchRow) -> float:
    """P99 over median."""
    return row.time.p99 / row.time.median


def performance_markdown(report: PerformanceReport, now: BenchReport) -> str:
    """A summary for a pull request."""
    where = "in the interpreter, whose times were not compared" if now.environment.is_interpreted else "by ratios"
    lines = [
        f"## attnconform: performance {'passes' if report.is_open else 'fails'} the gate",
        "",
        f"{len(now.rows)} rows on {now.environment.device}, {where}.",
        "",
    ]
    lines += section("Not what they seem", report.dishonest)
    lines += section("Slower or larger", report.worse)
    lines += section("No longer measured", report.missing)
    return "\n".join(lines)


def performance_gate(
    console: Console,
    *,
    baseline: Path,
    run: Callable[[], BenchReport],
    out: Path,
    margin: float | None = None,
    write_baseline: bool = False,
) -> int:
    """Measures, compares with the baseline, writes gate-performance.md; 0 where nothing got worse."""
    from attnconform.conformance.bench.command import read_report, write_json

    before = None if write_baseline else read_report(baseline)
    now = run()
    if not now.rows:
        raise ValueError("no row was measured: a gate over nothing would always be open")
    if before is None:
        write_json(baseline, now)
        console.print(f"performance baseline written to {baseline}", highlight=False)
        faults = [f"{row.key}: {fault}" for row in now.rows for fault in dishonesties(row, now)]
        for fault in faults:
            console.print(fault, highlight=False, markup=False)
        return int(bool(faults))
    report = compare_performance(before, now, MARGIN if margin is None else margin)
    text = performance_markdown(report, now)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "gate-performance.md", text)
    console.print(text, highlight=False, markup=False)
    return int(not report.is_open)
