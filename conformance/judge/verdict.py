"""What the judge can say of a case."""

from datetime import date
from typing import Literal

import msgspec

State = Literal[
    "PASS", "QUALITY", "FAIL_value", "FAIL_membership", "FAIL_interference", "FAIL_nonfinite", "FAIL_unwritten",
    "FAIL_oob_write", "FAIL_input_mutated", "FAIL_race", "FAIL_determinism", "FAIL_gradient", "REFUSED_OK",
    "REFUSED_LATE", "NOT_REFUSED", "UNSUPPORTED", "FALLBACK_DECLARED", "FALLBACK_UNDECLARED", "UNRESOLVED", "CRASH",
    "HANG", "OOM", "FAIL_leak", "FAIL_protocol", "VACUOUS", "HARNESS_ERROR",
]  # fmt: skip
CONFORMING: frozenset[State] = frozenset({"PASS", "QUALITY", "REFUSED_OK", "FALLBACK_DECLARED"})
NOT_RUN: frozenset[State] = frozenset({"UNSUPPORTED"})

# where several findings stand against one case, the first of these is its state
SEVERITY: tuple[State, ...] = (
    "HARNESS_ERROR", "CRASH", "OOM", "HANG", "FAIL_protocol", "NOT_REFUSED", "REFUSED_LATE", "FAIL_oob_write",
    "FAIL_input_mutated", "FALLBACK_UNDECLARED", "FAIL_unwritten", "FAIL_race", "FAIL_determinism", "FAIL_membership",
    "FAIL_interference", "FAIL_nonfinite", "FAIL_gradient", "FAIL_value", "FAIL_leak", "VACUOUS", "UNRESOLVED",
    "QUALITY", "FALLBACK_DECLARED",
)  # fmt: skip


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong, in the words of the contract."""

    state: State
    clauses: tuple[str, ...]  # the clauses that explain it, likeliest first
    message: str  # one line: what, where, got, want, bound
    check: str = ""  # the check that found it


class ExpectedFailure(msgspec.Struct, frozen=True, kw_only=True):
    """What an entry of an expectations file says of a case."""

    state: State
    reason: str
    tracker: str
    expires: date


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one case."""

    case_id: str
    state: State
    clauses: tuple[str, ...] = ()  # what the case exercises
    findings: tuple[Finding, ...] = ()
    reason: str = ""  # why it did not run
    path: str = ""  # the path the backend reported
    usage: dict[str, float] = {}  # output name -> largest error / bound, worst-case form
    usage_probable: dict[str, float] = {}  # likewise, probabilistic form
    unresolved: int = 0  # edges that the membership probe could not tell
    void: int = 0  # elements that the declared arithmetic does not bound
    seconds: float = 0.0
    calls: int = 0  # backend calls made
    expected: ExpectedFailure | None = None  # where the run was given expectations, and one is of this case

    @property
    def is_conforming(self) -> bool:
        return self.state in CONFORMING

    @property
    def named_clauses(self) -> frozenset[str]:
        """The likeliest clause of each finding against it; none of a case that conforms."""
        if self.is_conforming:
            return frozenset()
        return frozenset(f.clauses[0] for f in self.findings if f.clauses and f.state not in CONFORMING)

    @property
    def is_expected_failure(self) -> bool:
        return self.expected is not None and self.state == self.expected.state

    @property
    def is_unexpected_pass(self) -> bool:
        return self.expected is not None and self.is_conforming

    @property
    def is_failing(self) -> bool:
        """Whether it counts against the run: a failure that nobody expected, or a pass where a failure was."""
        if self.is_conforming:
            return self.is_unexpected_pass
        return self.state not in NOT_RUN and not self.is_expected_failure


def worst_state(findings: list[Finding]) -> State:
    """The state of a case with these findings."""
    states = {finding.state for finding in findings}
    return next((state for state in SEVERITY if state in states), "PASS")
