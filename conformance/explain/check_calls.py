"""What one of the judge's checks gets from a backend: every answer to its calls, and its verdict.

A check that asks about another batch, a plan or edited rules makes calls that no fixed list of calls has, and a mistake
that shows there alone shows in them.
"""

from collections.abc import Callable, Iterator

import torch

from attnconform.conformance.backend import Backend, Backward, Forward
from attnconform.conformance.explain.answer import Answer, Numbers
from attnconform.conformance.judge.judge import Check, run_checks
from attnconform.conformance.judge.trial import Trial, as_float64

OF_MEMORY = ("check_memory", "check_allocations")  # they count what is kept and asked for, and a log does both
CALLS = ("forward", "run", "backward")
OUTPUTS = ("out", "lse")
GRADIENTS = ("dq", "dk", "dv", "dsink", "dscore")


def check_answers(trial: Trial, check: Check) -> Iterator[Answer]:
    """Every answer that a check gets from the trial's backend, and last what it says of them."""
    log = [] if check.__name__ in OF_MEMORY else record_calls(trial.backend, check.__name__)
    findings = run_checks(trial, [check])
    yield from log
    yield Answer(f"verdict of {check.__name__}", {}, tuple(finding.state for finding in findings))


def record_calls(backend: Backend, check: str) -> list[Answer]:
    """A log that every call of the backend is added to from now on."""
    log: list[Answer] = []
    for name in CALLS:
        setattr(backend, name, recorded(log, f"{check}, {name}", getattr(backend, name)))
    return log


def recorded(log: list[Answer], call: str, method: Callable[..., object]) -> Callable[..., object]:
    """A method that adds what it gives to the log; what it asks of itself meanwhile is no answer."""

    def wrapper(*arguments: object) -> object:
        length = len(log)
        try:
            result = method(*arguments)
        except Exception as error:
            log[length:] = [Answer(call, {}, ("raised", type(error).__name__))]
            raise
        log[length:] = [Answer(call, numbers_of(result), (getattr(result, "path", "").startswith("fallback"),))]
        return result

    return wrapper


def numbers_of(result: object) -> Numbers:
    """Whatever tensors a call gave, by name."""
    numbers: Numbers = {}
    for name in OUTPUTS if isinstance(result, Forward) else GRADIENTS if isinstance(result, Backward) else ():
        value = getattr(result, name)
        parts = value if isinstance(value, tuple) else (value,)
        for i, part in enumerate(parts):
            if isinstance(part, torch.Tensor):
                numbers[f"{name}{i}" if isinstance(value, tuple) else name] = as_float64(part)
    return numbers
