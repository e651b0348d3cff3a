"""Which deviations reproduce a backend's wrong numbers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from attnconform.conformance.adapters.reference_structures import ReferenceStructures
from attnconform.conformance.cases.structure import Case, Dtype
from attnconform.conformance.deviations import DEVIATIONS, Deviation
from attnconform.conformance.deviations.structures import is_structural
from attnconform.conformance.explain.answer import Answer, Make, Numbers
from attnconform.conformance.explain.evidence import Script
from attnconform.conformance.judge.gradient_bounds import compare_gradients
from attnconform.conformance.judge.storage import TORCH_DTYPES
from attnconform.conformance.judge.trial import ObservedGradients, Trial
from attnconform.conformance.judge.values import Comparison, compare_forward
from attnconform.reference.coordinates import FloatArray

MATCH = 2.0  # two honest roundings of one wrong answer lie within two bounds of each other
ROUNDINGS = 64.0  # where no bound is known, two answers may differ by so many float32 roundings of their largest number

KEPT_IN_FLOAT32 = ("lse", "dsink")


@dataclass(frozen=True)
class Match:
    """A deviation, and how far what it shows is from what the backend showed."""

    deviation: Deviation
    distance: float  # in bounds, over the calls that both made; up to the first call that differs
    agreed: int  # calls up to the first one that differs
    is_exact: bool  # bit for bit the same, on every call
    reproduces: bool
    agreed_cases: int = 1  # cases on which it reproduces; more than one where several deviations did on the first

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts the likeliest first; two that nothing seen tells apart are equal."""
        return not self.reproduces, -self.agreed_cases, -self.agreed, not self.is_exact, self.distance


def candidates_for(case: Case, deviations: Iterable[Deviation] | None = None) -> list[Deviation]:
    """Deviations that a case could show at all: structures are another matter than attention."""
    every = DEVIATIONS.values() if deviations is None else deviations
    return [d for d in every if is_structural(d) == (case.operation == "structure")]


def rank_deviations(
    case: Case, make: Make, deviations: Iterable[Deviation] | None = None, *, check: str = ""
) -> list[Match]:
    """Every deviation, the likeliest first; those that leave this case right are left out."""
    script = Script(case, (check,) if check else ())
    seen, bounds = list(script.answers(make)), Scales(script.trial(make()))
    right = list(script.answers(ReferenceStructures))
    scales = [bounds.of(answer) for answer in seen]
    matches = []
    for deviation in candidates_for(case, deviations):
        shown: list[Answer] = []
        match = compare(deviation, script, seen, scales, shown)
        # what gave the right bits up to where the backend did not is no explanation
        if len(shown) > len(right) or not all(a.same_bits(b) for a, b in zip(shown, right, strict=False)):
            matches.append(match)
    return sorted(matches, key=lambda match: match.order)


def compare(
    deviation: Deviation, script: Script, seen: Sequence[Answer], scales: Sequence[Numbers], shown: list[Answer]
) -> Match:
    """How far a deviation is from the answers seen; adds to `shown` what it gave, up to the first that differs."""
    largest, is_exact = 0.0, True
    for i, answer in enumerate(script.answers(deviation.build)):
        shown.append(answer)
        gap = distance(seen[i], answer, scales[i]) if i < len(seen) else float("inf")
        if gap > MATCH:
            return Match(deviation, gap, i, False, False)
        largest, is_exact = max(largest, gap), is_exact and seen[i].same_bits(answer)
    reproduces = len(shown) == len(seen)
    return Match(deviation, largest if reproduces else float("inf"), len(shown), is_exact and reproduces, reproduces)


def distance(seen: Answer, other: Answer, scale: Numbers) -> float:
    """The largest difference between two answers, in units of the bound; inf where more than numbers differs."""
    if seen.marks != other.marks:
        return float("inf")
    gaps = [
        gap_of(seen.numbers[name], other.numbers[name], scale[name]) for name in seen.numbers if name in other.numbers
    ]
    return max(gaps, default=0.0)


def gap_of(a: FloatArray, b: FloatArray, scale: FloatArray) -> float:
    """The largest |a - b| / scale; inf where one is finite and one is not, or where the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    same = (a == b) | (np.isnan(a) & np.isnan(b)) | np.isposinf(scale)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        # where the bound is 0 the answer is exact, and any difference is a whole one
        gap = np.where(same, 0.0, np.abs(a - b) / np.maximum(scale, np.finfo(np.float32).tiny))
    return float(np.where(np.isnan(gap), np.inf, gap).max(initial=0.0))


class Scales:
    """The bounds of a backend's answers, by the arithmetic that it declares."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.known: dict[tuple[int, bool], Numbers] = {}  # by the numbers asked with, and whether gradients were asked

    def of(self, answer: Answer) -> Numbers:
        """The bound of every number of an answer; some roundings of the largest where the contract gives none."""
        key = id(answer.values), isinstance(answer.seen, ObservedGradients)
        if key not in self.known:
            self.known[key] = {c.name: c.worst for c in comparisons(self.trial, answer)}
        bounds, stored = self.known[key], self.trial.case.structure.dtype
        scales = {}
        for name, numbers in answer.numbers.items():
            # a wrong number is not the one that the bound is of, and is rounded like any other when it is stored
            unit = unit_of("float32" if name in KEPT_IN_FLOAT32 else stored) * np.abs(numbers)
            scales[name] = np.maximum(bounds[name], unit) if name in bounds else plain_scale(numbers, stored)
        return scales


def unit_of(dtype: Dtype) -> float:
    """The distance from 1 to the next number of a storage dtype."""
    return float(torch.finfo(TORCH_DTYPES[dtype]).eps)


def plain_scale(numbers: FloatArray, stored: Dtype) -> FloatArray:
    """Some roundings of the largest finite number, everywhere."""
    largest = np.abs(numbers[np.isfinite(numbers)]).max(initial=0.0)
    return np.full(numbers.shape, max(ROUNDINGS * unit_of("float32"), unit_of(stored)) * largest)


def comparisons(trial: Trial, answer: Answer) -> list[Comparison]:
    """The outputs of one answer beside the oracle's, with their bounds; none where the contract has no right answer."""
    if answer.seen is None or answer.values is None:
        return []
    values, oracle = answer.values, trial.oracle_of(answer.values)
    if isinstance(answer.seen, ObservedGradients):
        return compare_gradients(trial, values, answer.seen, trial.oracle_gradients(values, oracle), oracle)
    return compare_forward(trial, values, answer.seen, oracle)
