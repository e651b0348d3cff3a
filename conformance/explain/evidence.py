"""What a backend shows on a case: every answer of a fixed script of calls, with what else can be seen of each.

The script repeats what the judge's checks call: other poison, other bytes in memory that nobody attends, the same call
again, other numbers. A mistake that changes no number of a first call then still leaves a trace. For structures the
script is the checks themselves, and what is kept is every answer they got.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass

import msgspec
import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import Values
from attnconform.conformance.judge.judge import run_checks
from attnconform.conformance.judge.membership import one_hot_values
from attnconform.conformance.judge.refusal import corrupted_tensors
from attnconform.conformance.judge.storage import store_inputs
from attnconform.conformance.judge.structures import STRUCTURE_CHECKS
from attnconform.conformance.judge.trial import (
    HUGE,
    NAN,
    SECOND_POISON,
    BackendCrash,
    Observed,
    ObservedGradients,
    Trial,
    as_float64,
    overwrite,
    with_values,
)
from attnconform.conformance.structures import METHODS, offers
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import FloatArray

Make = Callable[[], Backend]  # a fresh backend, so that what an earlier case left behind is gone
Numbers = dict[str, FloatArray]
OTHER_SEED = 1 << 40
SIGNIFICANT = 10  # digits to which a structure's figures are compared


@dataclass(frozen=True)
class Answer:
    """What one call gave and did."""

    call: str
    numbers: Numbers  # by output name, in float64
    marks: tuple[object, ...] = ()  # inputs changed, guards broken, path, error: all that is no number
    seen: Observed | ObservedGradients | None = field(default=None, repr=False)
    values: Values | None = field(default=None, repr=False)  # what it was asked with; None where no bound applies

    def same_bits(self, other: "Answer") -> bool:
        """Whether nothing tells the two apart, signs of zero included."""
        if self.marks != other.marks or self.numbers.keys() != other.numbers.keys():
            return False
        return all(same_numbers(self.numbers[name], other.numbers[name]) for name in self.numbers)


def same_numbers(a: FloatArray, b: FloatArray) -> bool:
    """Equal shapes and numbers, NaN where NaN, -0 apart from 0."""
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=True) and np.array_equal(np.signbit(a), np.signbit(b))


class Script:
    """The calls of one case; what does not depend on the backend is made once."""

    def __init__(self, case: Case, only_check: str = "") -> None:
        self.case = case
        self.only_check = only_check  # the only structure check that is run; empty: all of them
        self.template = Trial(case, StepsBackend())
        self.other = self.template.with_seed(case.seed + OTHER_SEED)
        if case.operation in ("forward", "backward"):
            self.template.oracle, self.template.owned, self.template.selected  # noqa: B018  shared by every copy

    def trial(self, backend: Backend) -> Trial:
        """A trial that shares numbers and oracle with the others, and nothing that a backend could change."""
        trial = copy(self.template)
        trial.usage, trial.usage_probable, trial.rewritten = {}, {}, set()
        trial.backend, trial.problem = backend, build_problem(self.case.structure)
        trial.view = ProblemView(trial.problem, self.case.structure.hints, backend.device)
        return trial

    def answers(self, make: Make) -> Iterator[Answer]:
        """Answer after answer, made when it is asked for; ends after the first call that raises."""
        trial = self.trial(make())
        calls = {"forward": self.forward, "backward": self.backward, "refusal": refusal, "structure": self.structure}
        name = "first"
        try:
            for answer in calls[self.case.operation](trial):
                name = answer.call
                yield answer
        except BackendCrash as crash:
            yield Answer(f"after {name}", {}, ("raised", type(crash.__cause__).__name__, crash.clause))

    def forward(self, trial: Trial) -> Iterator[Answer]:
        """The judge's forward calls."""
        values, problem = trial.values, trial.problem
        yield of_forward("first", trial.base, values)
        yield of_forward("other poison", trial.run(values, unowned=HUGE, poison=SECOND_POISON), values)
        yield of_forward("other numbers", trial.run(self.other), self.other)
        if not trial.selected.all():
            fill = NAN if trial.backend.capabilities.tolerates_nonfinite else HUGE
            yield of_forward("unselected", trial.run(overwrite(values, ~trial.selected, fill)), values)
        if problem.total_q:
            slots = np.arange(min(problem.cache.num_slots, problem.head_dim_vo))
            probe = one_hot_values(values, slots)
            yield of_forward("one-hot", trial.run(probe, unowned=0.0), probe)
        yield of_forward("again", trial.run(values), values)

    def backward(self, trial: Trial) -> Iterator[Answer]:
        """The judge's forward and backward calls."""
        values = trial.values
        yield of_forward("first", trial.base, values)
        yield of_backward("backward", trial.run_backward(values, trial.base), values)
        yield of_backward("backward again", trial.run_backward(values, trial.base), values)
        yield of_backward("other numbers", trial.run_backward(self.other), self.other)
        flat = with_values(values, q=np.zeros_like(values.q), dlse=np.zeros_like(values.dlse))
        yield of_backward("zero q", trial.run_backward(flat, trial.run(flat, unowned=0.0)), flat)

    def structure(self, trial: Trial) -> Iterator[Answer]:
        """Every answer that each check of structures got."""
        log = record(trial.backend)
        for check in STRUCTURE_CHECKS:
            if self.only_check not in ("", check.__name__):
                continue
            run_checks(trial, [check])
            yield Answer(check.__name__, {}, tuple(log))
            log.clear()


def of_forward(call: str, seen: Observed, values: Values) -> Answer:
    """A forward call as an answer."""
    numbers = {"out": seen.out} | ({} if seen.lse is None else {"lse": seen.lse})
    return Answer(call, numbers, (seen.mutated, seen.guards_intact, seen.path.startswith("fallback")), seen, values)


def of_backward(call: str, seen: ObservedGradients, values: Values) -> Answer:
    """A backward call as an answer, whatever gradients it returned."""
    numbers = {"dq": seen.dq, "dk": seen.dk, "dv": seen.dv}
    for extra in fields(seen.raw):
        value = getattr(seen.raw, extra.name)
        parts = value if isinstance(value, tuple) else (value,)
        if extra.name not in numbers:
            is_one = not isinstance(value, tuple)
            names = {extra.name if is_one else f"{extra.name}{i}": part for i, part in enumerate(parts)}
            numbers |= {name: as_float64(part) for name, part in names.items() if isinstance(part, torch.Tensor)}
    return Answer(call, numbers, (seen.mutated,), seen, values)


def refusal(trial: Trial) -> Iterator[Answer]:
    """What a backend does with a problem that must be refused."""
    q, k, v = corrupted_tensors(trial)
    structure, device = trial.case.structure, trial.backend.device
    tensors, guards = store_inputs(structure, trial.problem, q, k, v, device=device, poison=SECOND_POISON)
    marks: tuple[object, ...] = ("accepted",)
    try:
        forward = trial.backend.forward(trial.view, tensors)
        lse = tensors.lse if forward.lse is None else forward.lse
        numbers = {"out": as_float64(forward.out), "lse": as_float64(lse)}
    except Exception as error:  # a backend may raise anything, and which error it is tells mistakes apart
        is_refusal = isinstance(error, trial.backend.refusals)
        one_line = bool(str(error).strip()) and "\n" not in str(error).strip()
        marks = ("refused", one_line) if is_refusal else ("raised", type(error).__name__)
        numbers = {"out": as_float64(tensors.out), "lse": as_float64(tensors.lse)}
    yield Answer("call", numbers, (*marks, all(guard.is_intact() for guard in guards)))


def record(backend: Backend) -> list[object]:
    """A log that every structure the backend builds from now on is added to, with whether it changed its inputs."""
    log: list[object] = []

    def recorded(name: str, method: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            before, length = plain(arguments), len(log)
            try:
                result = method(*arguments)
            except Exception as error:
                del log[length:]  # what it asked of itself is no answer
                log.append((name, "raised", type(error).__name__))
                raise
            del log[length:]
            log.append((name, plain(result), plain(arguments) == before))
            return result

        return call

    for name in METHODS:
        if offers(backend, name):
            setattr(backend, name, recorded(name, getattr(backend, name)))
    return log


def plain(value: object) -> object:
    """Nested tuples of a value's numbers, so that two answers compare with ==."""
    if isinstance(value, np.ndarray):
        return value.shape, tuple(plain(x) for x in value.ravel().tolist())
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        return int(value)
    if isinstance(value, float | np.floating):
        return f"{value:.{SIGNIFICANT}g}"
    if isinstance(value, list | tuple):
        return tuple(plain(x) for x in value)
    if is_dataclass(value):
        return tuple(plain(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, msgspec.Struct):
        return tuple(plain(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, dict):
        return tuple((str(key), plain(x)) for key, x in value.items())
    if value is None or isinstance(value, str):
        return value
    # a function, or an object of the backend's own: its address would be different every time
    return type(value).__name__
