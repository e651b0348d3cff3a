"""Is the adapter right? A dozen tiny cases under every combination of conventions: the one that fits is printed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.console import Console

from attnconform.conformance.adapters.conventions import (
    CONTRACT,
    CONVENTIONS,
    Combination,
    attend,
    combinations,
)
from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.explain.answer import Make
from attnconform.conformance.explain.rank import ROUNDINGS, gap_of, unit_of
from attnconform.conformance.explain.smoke_cases import TinyCase, sizes_of, tiny_cases
from attnconform.conformance.judge.judge import undeclared
from attnconform.conformance.judge.trial import BackendCrash, Observed, Trial
from attnconform.conformance.judge.values import compare_forward
from attnconform.reference.coordinates import FloatArray


@dataclass(frozen=True)
class Tried:
    """A case that was run, and how far every combination of its axes is from what the backend gave, in bounds."""

    tiny: TinyCase
    distances: dict[tuple[str, ...], float]  # by the values of its axes

    def distance(self, combination: Combination) -> float:
        return self.distances[tuple(combination[axis] for axis in self.tiny.axes)]


@dataclass(frozen=True)
class Diagnosis:
    """What a backend's conventions are."""

    fitting: tuple[Combination, ...]  # every combination that fits all cases, nearest to the contract first
    nearest: Combination  # the first of them, or the one that fits most cases
    misfits: tuple[Tried, ...]  # cases that the nearest one does not fit
    told: tuple[str, ...]  # axes that some case was run for
    not_run: dict[str, str]  # case -> why

    @property
    def broken(self) -> tuple[str, ...]:
        """Axes on which the nearest combination is not the contract's."""
        return tuple(axis for axis in CONVENTIONS if self.nearest[axis] != CONTRACT[axis])

    @property
    def conforms(self) -> bool:
        return bool(self.told) and not self.misfits and not self.broken


def diagnose(make: Make) -> Diagnosis:
    """Which combination of conventions a backend follows. Raises nothing that the backend raises."""
    tried, not_run = [], {}
    for tiny in tiny_cases(sizes_of(make().capabilities)):
        outside = undeclared(tiny.case, make())
        if outside is not None:
            not_run[tiny.case.id] = outside.reason
            continue
        try:
            tried.append(try_case(tiny, make))
        except BackendCrash as crash:
            not_run[tiny.case.id] = str(crash)
    told = tuple(axis for axis in CONVENTIONS if any(axis in t.tiny.axes for t in tried))
    every = list(combinations(told))
    fitting = sorted((c for c in every if all(t.distance(c) <= 1 for t in tried)), key=num_changed)
    nearest = fitting[0] if fitting else min(every, key=partial(badness, tried))
    misfits = tuple(t for t in tried if t.distance(nearest) > 1)
    return Diagnosis(tuple(fitting) if tried else (), nearest, misfits, told, not_run)


def try_case(tiny: TinyCase, make: Make) -> Tried:
    """Runs a case once, and lays every combination of its axes beside the answer."""
    trial = Trial(tiny.case, make())
    seen = trial.run(trial.values, unowned=0.0, poison=0.0)
    limits = limits_of(trial, seen)
    distances = {}
    for combination in combinations(tiny.axes):
        out, lse = attend(combination, trial.problem, trial.values)
        gaps = [gap_of(seen.out, out, limits["out"])]
        if seen.lse is not None:
            gaps.append(gap_of(seen.lse, lse, limits["lse"]))
        distances[tuple(combination[axis] for axis in tiny.axes)] = max(gaps)
    return Tried(tiny, distances)


def limits_of(trial: Trial, seen: Observed) -> dict[str, FloatArray]:
    """How far an answer may be from a combination's: the largest bound of the case, for every element.

    A bound belongs to one element of the contract's answer, and another combination has other elements.
    """
    limits = {}
    for compared in compare_forward(trial, trial.values, seen, trial.oracle):
        bounds = compared.worst[np.isfinite(compared.worst)]
        finite = np.abs(compared.want[np.isfinite(compared.want)])
        least = ROUNDINGS * unit_of("float32") * finite.max(initial=0.0)
        limits[compared.name] = np.full(compared.want.shape, max(float(bounds.max(initial=0.0)), least))
    return limits


def num_changed(combination: Combination) -> int:
    """On how many axes a combination is not the contract's."""
    return sum(combination[axis] != CONTRACT[axis] for axis in CONVENTIONS)


def badness(tried: Sequence[Tried], combination: Combination) -> tuple[int, int, float]:
    """Sorts the combination that fits most cases first, and of those the one nearest to the contract."""
    distances = [t.distance(combination) for t in tried]
    return sum(d > 1 for d in distances), num_changed(combination), sum(min(d, 1e6) for d in distances)


def smoke_command(console: Console, *, backend: str, device: str) -> int:
    """Prints which conventions the backend follows; 0 where they are the contract's, 1 where not, 3 where none ran."""
    diagnosis = diagnose(partial(load_backend, backend, device))
    for line in lines_of(diagnosis):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if not diagnosis.told:
        return 3
    return int(not diagnosis.conforms)


def lines_of(diagnosis: Diagnosis) -> list[str]:
    """What a person reads."""
    lines = [f"not run: {case}: {why}" for case, why in diagnosis.not_run.items()]
    untold = [axis for axis in CONVENTIONS if axis not in diagnosis.told]
    if untold:
        lines.append(f"not tried, for want of a case that runs: {', '.join(untold)}")
    if not diagnosis.told:
        return [*lines, "no case ran"]
    if diagnosis.conforms:
        return [*lines, f"conventions: the contract's, on {len(diagnosis.told)} axes"]
    lines += [
        f"convention: {axis} is {diagnosis.nearest[axis]!r}, where the contract has {CONTRACT[axis]!r} "
        f"[{CONVENTIONS[axis].clause}]"
        for axis in diagnosis.broken
    ]
    if not diagnosis.misfits:
        return [*lines, "these conventions fit every case that ran"]
    worst = max(diagnosis.misfits, key=lambda t: t.distance(diagnosis.nearest))
    count, distance = len(diagnosis.misfits), worst.distance(diagnosis.nearest)
    clauses = ", ".join(worst.tiny.case.clauses)
    nearest = "the conventions above" if diagnosis.broken else "the contract's conventions"
    return [
        *lines,
        f"no combination fits; nearest: {nearest}, which leave {count} case(s) unexplained, the worst "
        f"{worst.tiny.case.id}, {distance:.3g} bounds away [{clauses}]",
    ]
