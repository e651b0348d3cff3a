"""Calls of a backend's optional methods: what it offers, what it answers, what it refuses."""

from typing import Any

from attnconform.conformance.judge.trial import BackendCrash, Trial, first_line
from attnconform.conformance.judge.verdict import Finding, State
from attnconform.conformance.structures import offers

MAX_LISTED = 3  # findings of one kind that a report lists


def lacks(trial: Trial, *methods: str) -> bool:
    """Whether the backend leaves out any of these methods, so that a check of them has nothing to judge."""
    return not all(offers(trial.backend, method) for method in methods)


def ask(trial: Trial, method: str, *arguments: Any) -> Any:
    """What a method answers. Raises BackendCrash for whatever it raises: the arguments are sound."""
    return trial.call(getattr(trial.backend, method), *arguments)


def check_refuses(trial: Trial, clause: str, what: str, method: str, *arguments: Any) -> list[Finding]:
    """A finding where a method accepts what it must refuse. Raises BackendCrash for an error that is no refusal."""
    trial.calls += 1
    try:
        getattr(trial.backend, method)(*arguments)
    except trial.backend.refusals:
        return []
    except Exception as error:
        raise BackendCrash(f"{method} raised {type(error).__name__} for {what}: {first_line(error)}") from error
    return [Finding(state="NOT_REFUSED", clauses=(clause,), message=f"{method} accepted {what}")]


def wrong(message: str, *clauses: str, state: State = "FAIL_membership") -> Finding:
    """A finding about a structure."""
    return Finding(state=state, clauses=clauses, message=message)
