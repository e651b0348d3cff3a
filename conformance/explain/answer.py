"""One answer of a backend, and when two answers are the same."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.values import Values
from attnconform.conformance.judge.trial import Observed, ObservedGradients
from attnconform.reference.coordinates import FloatArray

Make = Callable[[], Backend]  # a fresh backend, so that what an earlier case left behind is gone
Numbers = dict[str, FloatArray]


@dataclass(frozen=True)
class Answer:
    """What one call gave and did."""

    call: str
    numbers: Numbers  # by output name, in float64
    marks: tuple[object, ...] = ()  # inputs changed, guard bands written to, path, error: all that is no number
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
