"""report.html: one self-contained page made from results.jsonl."""

from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment

from attnconform.conformance.clauses import CLAUSES
from attnconform.conformance.judge.verdict import NOT_RUN
from attnconform.conformance.report.text import repro_command, state_text
from attnconform.conformance.results import Run, standing, verdict_of

CLASSES = {"conforming": "good", "failing": "bad", "expected": "due", "unsupported": "off"}  # of the page's style sheet


@dataclass(frozen=True)
class ClauseRow:
    """How one clause fared."""

    id: str
    title: str
    good: int
    ran: int
    unsupported: int


def clause_rows(run: Run) -> list[ClauseRow]:
    """Every clause that a case exercises, in the order of SPEC.md."""
    good, ran, off = Counter[str](), Counter[str](), Counter[str]()
    for result in run.results:
        for clause in result.clauses:
            if result.state in NOT_RUN:
                off[clause] += 1
            else:
                ran[clause] += 1
                good[clause] += result.is_conforming
    used = [c for c in CLAUSES.values() if ran[c.id] or off[c.id]]
    return [ClauseRow(c.id, c.title, good[c.id], ran[c.id], off[c.id]) for c in used]


def largest_usage(run: Run) -> dict[str, tuple[float, float]]:
    """Largest error / bound of every output, in both forms."""
    usage: dict[str, tuple[float, float]] = {}
    for result in run.results:
        for name, worst in result.usage.items():
            before = usage.get(name, (0.0, 0.0))
            usage[name] = (max(before[0], worst), max(before[1], result.usage_probable.get(name, 0.0)))
    return usage


def write_html(run: Run, path: Path) -> None:
    """The page of a run; text from backends is escaped."""
    template = resources.files("attnconform.conformance.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    text = page.render(
        header=run.header,
        footer=run.footer,
        verdict=verdict_of(run.results),
        clauses=clause_rows(run),
        usage=largest_usage(run),
        expected=[result for result in run.results if result.is_expected_failure],
        lines=sorted(run.lines, key=lambda line: (not line.result.is_failing, line.result.state, line.case.id)),
        standing=standing,
        classes=CLASSES,
        state_text=state_text,
        repro=repro_command,
    )
    path.write_text(text, encoding="utf-8")
