"""report.html: one self-contained page made from results.jsonl."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path

from jinja2 import Environment

from attnconform.conformance.clauses import CLAUSES
from attnconform.conformance.judge.ratio import ratio_text
from attnconform.conformance.judge.verdict import NOT_RUN, CaseResult
from attnconform.conformance.report.text import repro_command, state_text
from attnconform.conformance.results import Run, standing, verdict_of

CLASSES = {"conforming": "good", "failing": "bad", "expected": "due", "unsupported": "off"}  # of the page's style sheet


@dataclass(frozen=True)
class ClauseRow:
    """How one clause fared."""

    id: str
    title: str
    good: int  # cases that exercise it and conform
    broken: int  # cases with a finding that names it first, whether they are said to exercise it or not
    not_shown: int  # cases that exercise it and fail by other clauses: they say nothing of this one
    ran: int  # cases that exercise it and were run
    unsupported: int


def clause_rows(run: Run) -> list[ClauseRow]:
    """Every clause that a case exercises or that a finding names, in the order of SPEC.md."""
    good, broken, not_shown, ran, off = (Counter[str]() for _ in range(5))
    for result in run.results:
        broken.update(result.named_clauses)
        if result.state in NOT_RUN:
            off.update(result.clauses)
            continue
        ran.update(result.clauses)
        (good if result.is_conforming else not_shown).update(set(result.clauses) - result.named_clauses)
    counters = (good, broken, not_shown, ran, off)
    used = [c for c in CLAUSES.values() if ran[c.id] or off[c.id] or broken[c.id]]
    return [ClauseRow(c.id, c.title, *(counter[c.id] for counter in counters)) for c in used]


def largest_usage(results: Iterable[CaseResult]) -> dict[str, tuple[float, float]]:
    """Largest error / bound of every output, in both forms."""
    usage: dict[str, tuple[float, float]] = {}
    for result in results:
        for name, worst in result.usage.items():
            before = usage.get(name, (0.0, 0.0))
            usage[name] = (max(before[0], worst), max(before[1], result.usage_probable.get(name, 0.0)))
    return usage


def write_html(run: Run, path: Path) -> None:
    """The page of a run; text from backends is escaped."""
    template = resources.files("attnconform.conformance.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    ran = [result for result in run.results if result.state not in NOT_RUN]
    text = page.render(
        header=run.header,
        footer=run.footer,
        verdict=verdict_of(run.results),
        clauses=clause_rows(run),
        usage=largest_usage(run.results),
        ratio_text=ratio_text,
        unnamed=sum(not (result.is_conforming or result.named_clauses) for result in ran),
        expected=[result for result in run.results if result.is_expected_failure],
        lines=sorted(run.lines, key=lambda line: (not line.result.is_failing, line.result.state, line.case.id)),
        standing=standing,
        classes=CLASSES,
        state_text=state_text,
        repro=partial(repro_command, folder=path.parent),
    )
    path.write_text(text, encoding="utf-8")
