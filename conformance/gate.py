"""The gate of a pull request: nothing that passed may fail, nothing declared may go, accuracy may not slip."""

from dataclasses import dataclass
from pathlib import Path

from attnconform.conformance.cases.coverage import undeclared_axes
from attnconform.conformance.cases.structure import is_own
from attnconform.conformance.judge.ratio import ratio_text
from attnconform.conformance.judge.verdict import NOT_RUN, CaseResult
from attnconform.conformance.report.text import finding_text, repro_command
from attnconform.conformance.results import Run, verdict_of

MARGIN = 1.25  # how far max(error / bound) may rise over the baseline, as a factor
FLOOR = 0.05  # below this share of the bound, a rise is noise
MAX_LISTED = 50


@dataclass(frozen=True)
class Rise:
    """An output that uses more of its bound than it did."""

    output: str
    before: float
    after: float


@dataclass(frozen=True)
class GateReport:
    """What changed for the worse between two runs of one suite on one backend."""

    newly_failing: list[CaseResult]
    undeclared: list[str]  # ids that ran before and are unsupported now
    rises: list[Rise]
    fixed: list[str]  # ids that failed before and conform now

    @property
    def is_open(self) -> bool:
        return not (self.newly_failing or self.undeclared or self.rises)


def compare_runs(baseline: Run, now: Run, margin: float = MARGIN) -> GateReport:
    """The report. Raises ValueError where the two runs cannot be compared."""
    for name in ("suite_hash", "level", "backend"):
        before, after = getattr(baseline.header, name), getattr(now.header, name)
        if before != after:
            raise ValueError(f"the baseline's {name} is {before}, but this run's is {after}; write a new baseline")
    before = {r.case_id: r for r in baseline.results}
    newly_failing, undeclared, fixed = [], [], []
    for result in now.results:
        old = before.get(result.case_id)
        if old is None or old.state in NOT_RUN:
            if not result.is_conforming and result.state not in NOT_RUN:
                newly_failing.append(result)
        elif result.state in NOT_RUN:
            undeclared.append(result.case_id)
        elif old.is_conforming and not result.is_conforming:
            newly_failing.append(result)
        elif not old.is_conforming and result.is_conforming:
            fixed.append(result.case_id)
    undeclared += gone(baseline, now)
    return GateReport(newly_failing, undeclared, rises(baseline, now, margin), fixed)


def gone(baseline: Run, now: Run) -> list[str]:
    """Cases of the domain that the baseline declared, and that this run's declaration no longer holds."""
    judged = {result.case_id for result in now.results}
    return [
        line.case.id
        for line in baseline.lines
        if is_own(line.case.id)
        and line.case.id not in judged
        and line.result.state not in NOT_RUN
        and undeclared_axes(line.case, now.header.capabilities)
    ]


def rises(baseline: Run, now: Run, margin: float) -> list[Rise]:
    """Outputs whose largest error / bound grew past the margin."""
    before, after = largest(baseline), largest(now)
    return [
        Rise(name, before[name], after[name])
        for name in before
        if name in after and after[name] > max(before[name] * margin, FLOOR)
    ]


def largest(run: Run) -> dict[str, float]:
    """Largest error / bound of every output over the cases that conform."""
    usage: dict[str, float] = {}
    for result in run.results:
        if result.is_conforming:
            for name, ratio in result.usage.items():
                usage[name] = max(usage.get(name, 0.0), ratio)
    return usage


def gate_markdown(report: GateReport, now: Run) -> str:
    """A summary for a pull request."""
    verdict = verdict_of(now.results)
    lines = [
        f"## attnconform: {now.header.backend} {'passes' if report.is_open else 'fails'} the gate",
        "",
        f"{verdict.conforming} of {verdict.ran} cases conform; declared: "
        f"{verdict.declared_text}; level {now.header.level}, {now.header.device}.",
        "",
    ]
    lines += section("Newly failing", [failing_line(r, now.header.backend) for r in report.newly_failing])
    lines += section("No longer declared", [f"`{case_id}`" for case_id in report.undeclared])
    lines += section(
        "Less accurate",
        [f"{r.output}: error / bound {ratio_text(r.before)} -> {ratio_text(r.after)}" for r in report.rises],
    )
    lines += section("Fixed", [f"`{case_id}`" for case_id in report.fixed])
    return "\n".join(lines)


def failing_line(result: CaseResult, backend: str) -> str:
    """A failing case with its first finding and the command that reproduces it."""
    first = finding_text(result.findings[0]) if result.findings else ""
    return f"`{result.case_id}` {result.state}: {first} `{repro_command(result.case_id, backend)}`"


def section(title: str, rows: list[str]) -> list[str]:
    """A heading with its rows, or nothing."""
    if not rows:
        return []
    more = [f"- ... and {len(rows) - MAX_LISTED} more"] if len(rows) > MAX_LISTED else []
    return [f"### {title} ({len(rows)})", "", *(f"- {row}" for row in rows[:MAX_LISTED]), *more, ""]


def write_text(path: Path, text: str) -> None:
    """Writes a whole file or none: a reader never sees half of it."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
