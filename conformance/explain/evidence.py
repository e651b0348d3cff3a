"""What a backend shows on a case: every answer of a fixed script of calls, with what else can be seen of each.

The script repeats what the judge's checks call: other poison, other bytes in memory that nobody attends, the same call
again, other numbers. A mistake that changes no number of a first call then still leaves a trace. After them come all
calls of the check that failed, which may ask about another batch, plans or edited rules. For structures the script is
the checks themselves, and what is kept is every answer they got.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import fields

import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import Values
from attnconform.conformance.explain.answer import Answer, Make
from attnconform.conformance.explain.check_calls import check_answers
from attnconform.conformance.explain.structure_calls import record_structures
from attnconform.conformance.isolation import is_device_fault
from attnconform.conformance.judge.judge import CHECKS_OF, run_checks
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
from attnconform.conformance.views import ProblemView

OTHER_SEED = 1 << 40


class Script:
    """The calls of one case; what does not depend on the backend is made once."""

    def __init__(self, case: Case, checks: Sequence[str] = ()) -> None:
        self.case = case
        self.checks = checks  # whose calls come last; of structures they alone are run, or all where there are none
        self.template = Trial(case, StepsBackend())
        self.other = self.template.with_seed(case.seed + OTHER_SEED)
        if case.operation in ("forward", "backward"):
            self.template.oracle, self.template.owned, self.template.selected  # noqa: B018  shared by every copy

    def trial(self, backend: Backend) -> Trial:
        """A trial that shares numbers and oracle with the others, and nothing that a backend could change."""
        trial = copy(self.template)
        for name, value in vars(trial).items():
            if isinstance(value, list | dict | set):  # what earlier calls showed
                setattr(trial, name, type(value)())
        structure = self.case.structure
        trial.backend, trial.problem = backend, build_problem(structure)
        trial.view = ProblemView(trial.problem, structure.hints, backend.device, structure.interleaved)
        return trial

    def answers(self, make: Make) -> Iterator[Answer]:
        """Answer after answer, made when it is asked for; calls outside the check end after the first that raises."""
        trial = self.trial(make())
        calls = {"forward": self.forward, "backward": self.backward, "refusal": refusal, "structure": self.structure}
        name = "first"
        try:
            for answer in calls[self.case.operation](trial):
                name = answer.call
                yield answer
        except BackendCrash as crash:
            yield Answer(f"after {name}", {}, ("raised", type(crash.__cause__).__name__, crash.clause))
            if is_device_fault(crash.__cause__):
                return  # no call of this process is answered any more
        except Exception as error:
            if not is_device_fault(error):
                raise
            yield Answer(f"after {name}", {}, ("raised", type(error).__name__, "SAFE-PATH"))
            return
        if self.case.operation in ("forward", "backward"):
            yield from self.checked(make)

    def checked(self, make: Make) -> Iterator[Answer]:
        """What each of the checks gets from a backend that nothing was asked of before."""
        for check in CHECKS_OF[self.case.operation]:
            if check.__name__ in self.checks:
                yield from check_answers(self.trial(make()), check)

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
        log = record_structures(trial.backend)
        for check in STRUCTURE_CHECKS:
            if self.checks and check.__name__ not in self.checks:
                continue
            run_checks(trial, [check])
            yield Answer(check.__name__, {}, tuple(log))
            log.clear()


def of_forward(call: str, seen: Observed, values: Values) -> Answer:
    """A forward call as an answer."""
    numbers = {"out": seen.out} | ({} if seen.lse is None else {"lse": seen.lse})
    return Answer(call, numbers, (seen.mutated, seen.overruns, seen.path.startswith("fallback")), seen, values)


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
    yield Answer("call", numbers, (*marks, tuple(overrun for guard in guards for overrun in guard.overruns)))
