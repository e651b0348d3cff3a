"""A failure in words: clause, coordinates, got, want, bound, and the line that reproduces it."""

import shlex
from pathlib import Path

from attnconform.conformance.cases.structure import Case, is_replayed
from attnconform.conformance.judge.verdict import CaseResult, Finding
from attnconform.conformance.selection import level_of

MAX_CLAUSES = 4


def repro_command(case_id: str, backend: str, folder: Path | None = None) -> str:
    """The command that judges this one case again; one of a trace from the run's folder, since no matrix holds it."""
    if is_replayed(case_id):
        name = case_id if folder is None else str(folder / case_id)
        return f"attnconform explain {shlex.quote(name)} -b {shlex.quote(backend)}"
    level = level_of(case_id)
    at_level = "" if level == "L1" else f" --level {level}"
    return f"attnconform run -b {shlex.quote(backend)} --select {case_id}{at_level}"


def finding_text(finding: Finding) -> str:
    """One finding: state, the likeliest clauses, message."""
    return f"{finding.state} [{', '.join(finding.clauses[:MAX_CLAUSES])}] {finding.message}"


def state_text(result: CaseResult) -> str:
    """A result's state; where a failure was expected of a case that conforms, that."""
    return f"UNEXPECTED {result.state}" if result.is_unexpected_pass else result.state


def expected_text(result: CaseResult) -> str:
    """An expected failure: state, case, why, where it is followed up, until when."""
    assert result.expected is not None
    entry = result.expected
    return f"{result.state} {result.case_id}: {entry.reason} ({entry.tracker}, until {entry.expires})"


def failure_text(case: Case, result: CaseResult, backend: str) -> str:
    """Everything a kernel engineer needs to start on a failed case."""
    axes = " ".join(f"{axis}={value}" for axis, value in case.axes.items())
    lines = [f"{case.id}: {state_text(result)}", f"  {axes}", *(f"  {finding_text(f)}" for f in result.findings)]
    if result.is_unexpected_pass and result.expected is not None:
        lines.append(f"  {result.expected.state} was expected: {result.expected.reason} ({result.expected.tracker})")
    return "\n".join([*lines, f"  reproduce: {repro_command(case.id, backend)}"])
