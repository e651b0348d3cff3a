"""A failure in words: clause, coordinates, got, want, bound, and the line that reproduces it."""

from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.verdict import CaseResult, Finding

MAX_CLAUSES = 4


def repro_command(case_id: str, backend: str) -> str:
    """The command that judges this one case again."""
    return f"attnconform run -b {backend} --select {case_id}"


def finding_text(finding: Finding) -> str:
    """One finding: state, the likeliest clauses, message."""
    return f"{finding.state} [{', '.join(finding.clauses[:MAX_CLAUSES])}] {finding.message}"


def failure_text(case: Case, result: CaseResult, backend: str) -> str:
    """Everything a kernel engineer needs to start on a failed case."""
    axes = " ".join(f"{axis}={value}" for axis, value in case.axes.items())
    lines = [f"{case.id}: {result.state}", f"  {axes}", *(f"  {finding_text(f)}" for f in result.findings)]
    return "\n".join([*lines, f"  reproduce: {repro_command(case.id, backend)}"])
