"""The kill matrix as one self-contained page, beside its JSON."""

from collections import Counter
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from attnconform.conformance.deviations.deviation import FAULT_CLASSES
from attnconform.conformance.deviations.judging import area
from attnconform.conformance.deviations.records import DeviationScore, KillMatrix, Outcome
from attnconform.conformance.deviations.tables import summary
from attnconform.conformance.policies import POLICIES

OUTCOMES: dict[Outcome, str] = {
    "killed": "killed",
    "unrelated_only": "caught by unrelated checks only",
    "survived": "survived",
}


@dataclass(frozen=True)
class AreaRow:
    """The deviations of one area of the spec."""

    name: str
    deviations: tuple[DeviationScore, ...]
    killed: int
    named: int  # with a finding that names the very clause
    unrelated: int
    survived: int


def area_rows(result: KillMatrix) -> list[AreaRow]:
    """Every area with its deviations, by clause."""
    rows = []
    for name in sorted({area(d.clause) for d in result.deviations}):
        own = sorted((d for d in result.deviations if area(d.clause) == name), key=lambda d: (d.clause, d.id))
        outcomes = Counter(d.outcome for d in own)
        named = sum(any(kill.is_named for kill in d.kills) for d in own)
        rows.append(
            AreaRow(name, tuple(own), outcomes["killed"], named, outcomes["unrelated_only"], outcomes["survived"])
        )
    return rows


def policies_missing(deviation: DeviationScore) -> str:
    """How many published policies accept the deviation on every designed case that shows it."""
    if not deviation.policy_cases.get("designed"):
        return "no number of one call shows it"
    missing = len(POLICIES) - len(deviation.rejected_by["designed"])
    return f"{missing} of {len(POLICIES)} published policies miss it"


def write_kill_html(result: KillMatrix, path: Path) -> None:
    """The page of a kill matrix; text from backends is escaped."""
    name = "kill_matrix.html.j2"
    template = resources.files("attnconform.conformance.report").joinpath(name).read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    page = environment.from_string(template).render(
        result=result,
        areas=area_rows(result),
        summary=summary(result),
        outcomes=OUTCOMES,
        classes=FAULT_CLASSES,
        policies_missing=policies_missing,
    )
    path.write_text(page, encoding="utf-8")
