"""The clauses of SPEC.md as data: which checks judge each, which deviations break it, and who cites it."""

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TypeVar

# an area has two letters or more, so that a regular expression's [A-Z] is no citation
ID = r"[A-Z]{2,}(?:-[A-Z]+)+"
HEADING = re.compile(rf"^### (?P<id>{ID}): (?P<title>.+)$", re.MULTILINE)
ANY_HEADING = re.compile(r"^#{1,3} ", re.MULTILINE)
REFERENCE = re.compile(r"^Reference: `?(?P<name>[\w.]+)`?$", re.MULTILINE)
EXAMPLE = re.compile(r"^ +>>> ", re.MULTILINE)
CITATION = re.compile(rf"\[({ID}(?:,\s+{ID})*)\]|RefusedInput\(\s*\"({ID})\"")

Check = TypeVar("Check", bound=Callable[..., object])


@dataclass(frozen=True)
class Clause:
    """One heading of SPEC.md and what stands under it."""

    id: str
    title: str
    line: int  # of the heading in SPEC.md, from 1
    text: str  # from below the heading to the next one
    reference: str | None  # dotted name of the function that means it; None where the line is missing

    @property
    def has_example(self) -> bool:
        return EXAMPLE.search(self.text) is not None


@dataclass(frozen=True)
class ClauseCoverage:
    """A clause with everything that answers to it."""

    clause: Clause
    reference: str | None
    checks: tuple[str, ...]
    deviations: tuple[str, ...]


def read_clauses(spec: str) -> dict[str, Clause]:
    """Clauses of a spec's text by id, in its order. Raises ValueError where an id has two headings."""
    clauses: dict[str, Clause] = {}
    for heading in HEADING.finditer(spec):
        clause_id, line = heading["id"], spec.count("\n", 0, heading.start()) + 1
        if clause_id in clauses:
            raise ValueError(f"{clause_id} has two headings, at lines {clauses[clause_id].line} and {line} of SPEC.md")
        end = ANY_HEADING.search(spec, heading.end())
        text = spec[heading.end() : end.start() if end else len(spec)]
        reference = REFERENCE.search(text)
        clauses[clause_id] = Clause(clause_id, heading["title"], line, text, reference["name"] if reference else None)
    return clauses


def spec_text() -> str:
    """SPEC.md, as it is shipped beside this module."""
    return (files("attnconform.conformance") / "SPEC.md").read_text(encoding="utf-8")


CLAUSES = read_clauses(spec_text())
CHECKS: dict[str, tuple[str, ...]] = {}  # dotted name of a check -> the clauses it judges


def checks(*ids: str) -> Callable[[Check], Check]:
    """Marks a function as a check of the clauses. Raises ValueError on an unknown id, and on none."""
    if not ids:
        raise ValueError("checks() names no clause")
    for clause_id in ids:
        if clause_id not in CLAUSES:
            raise ValueError(f"checks() names {clause_id!r}, which has no heading in SPEC.md")

    def register(check: Check) -> Check:
        CHECKS[f"{check.__module__}.{check.__qualname__}"] = ids
        return check

    return register


def cited_ids(path: Path) -> dict[str, list[str]]:
    """Ids that Python files cite, each with its places, as `file:line`; path is a file or a folder."""
    places: dict[str, list[str]] = {}
    for source in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        text = source.read_text(encoding="utf-8")
        for citation in CITATION.finditer(text):
            line = text.count("\n", 0, citation.start()) + 1
            for clause_id in re.findall(ID, citation[1] or citation[2]):
                places.setdefault(clause_id, []).append(f"{source}:{line}")
    return places


def resolve(name: str) -> object:
    """What a dotted name stands for. Raises ValueError where it stands for nothing."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        module = ".".join(parts[:split])
        try:
            found: object = importlib.import_module(module)
        except ModuleNotFoundError as missing:
            if missing.name is None or not f"{module}.".startswith(f"{missing.name}."):
                raise
            continue
        for attribute in parts[split:]:
            if not hasattr(found, attribute):
                raise ValueError(f"{name} does not exist: {module} has no {'.'.join(parts[split:])}")
            found = getattr(found, attribute)
        return found
    raise ValueError(f"{name} does not exist: no module named {parts[0]}")


def coverage(deviations: Mapping[str, set[str]]) -> list[ClauseCoverage]:
    """Every clause in the order of SPEC.md, with its checks and deviations; deviations: clause id -> names.

    Counts the checks of modules that are imported by now.
    """
    return [
        ClauseCoverage(
            clause,
            clause.reference,
            tuple(sorted(name for name, ids in CHECKS.items() if clause.id in ids)),
            tuple(sorted(deviations.get(clause.id, ()))),
        )
        for clause in CLAUSES.values()
    ]


def problems(deviations: Mapping[str, set[str]], sources: Iterable[Path] = ()) -> list[str]:
    """Everything that keeps the clauses from being covered, a line each; sources are searched for citations."""
    found = [problem for covered in coverage(deviations) for problem in _clause_problems(covered)]
    found += [
        f"deviations break {name}, which has no heading in SPEC.md" for name in sorted(deviations.keys() - CLAUSES)
    ]
    for path in sources:
        for clause_id, places in cited_ids(path).items():
            if clause_id not in CLAUSES:
                found += [f"{place} cites {clause_id}, which has no heading in SPEC.md" for place in places]
    return found


def _clause_problems(covered: ClauseCoverage) -> list[str]:
    clause, found = covered.clause, []
    if not covered.checks:
        found.append(f"{clause.id} has no check")
    if not covered.deviations:
        found.append(f"{clause.id} has no deviation")
    if not clause.has_example:
        found.append(f"{clause.id} has no example")
    if clause.reference is None:
        found.append(f"{clause.id} names no reference function")
        return found
    try:
        resolve(clause.reference)
    except ValueError as error:
        found.append(f"{clause.id}: {error}")
    return found
