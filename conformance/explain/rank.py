"""Which deviations reproduce a backend's wrong numbers."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.deviations import DEVIATIONS, Deviation
from attnconform.conformance.judge.gradients import compare_gradients
from attnconform.conformance.judge.trial import BackendCrash, Trial
from attnconform.conformance.judge.values import Comparison, compare_forward

MATCH = 2.0  # two honest roundings of one wrong answer lie within two bounds of each other


@dataclass(frozen=True)
class Match:
    """A deviation, and how far its numbers are from the backend's, in bounds."""

    deviation: Deviation
    distance: float

    @property
    def reproduces(self) -> bool:
        return self.distance <= MATCH


def rank_deviations(case: Case, backend: Backend, deviations: Iterable[Deviation] | None = None) -> list[Match]:
    """Every deviation by distance, nearest first; those that leave this case right are left out."""
    seen = comparisons(Trial(case, backend))
    matches = []
    for deviation in DEVIATIONS.values() if deviations is None else deviations:
        try:
            wrong = comparisons(Trial(case, deviation.build()))
        except BackendCrash:
            continue
        if any(c.worst_ratio > 1 for c in wrong):
            matches.append(Match(deviation, distance(seen, wrong)))
    return sorted(matches, key=lambda match: match.distance)


def comparisons(trial: Trial) -> list[Comparison]:
    """All outputs of a backend on one case, beside the oracle's and their bounds."""
    compared = compare_forward(trial, trial.values, trial.base, trial.oracle)
    if trial.case.operation == "backward":
        gradients = trial.run_backward(trial.values, trial.base)
        oracle = trial.oracle_gradients(trial.values, trial.oracle)
        compared += compare_gradients(trial, trial.values, gradients, oracle, trial.oracle)
    return compared


def distance(seen: list[Comparison], wrong: list[Comparison]) -> float:
    """The largest difference between two answers, in units of the bound; inf where one is finite and one is not."""
    theirs = {c.name: c for c in wrong}
    largest = 0.0
    for comparison in seen:
        if comparison.name not in theirs:
            continue
        other = theirs[comparison.name].got
        same = (comparison.got == other) | (np.isnan(comparison.got) & np.isnan(other))
        # where the bound is 0 the answer is exact, and any difference is a whole one
        scale = np.maximum(comparison.worst, np.finfo(np.float32).tiny)
        with np.errstate(invalid="ignore"):
            gap = np.where(same, 0.0, np.abs(comparison.got - other) / scale)
        largest = max(largest, float(np.where(np.isnan(gap), np.inf, gap).max(initial=0.0)))
    return largest
