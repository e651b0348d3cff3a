"""What the score gradients of a row are summed up with: keys, to dQ, or coefficients, to a rule's parameters.

Both meet the same errors of dS; how they meet them is all that differs. [BOUND-GRAD] [BOUND-RULE]
"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from attnconform.conformance.bounds.block import Array


class OverKeys(Protocol):
    """A sum over keys of a (rows, keys) matrix and the other factor: of its signed, absolute and squared elements."""

    def signed(self, m: Array) -> Array:
        """What an error common to a row meets. [4.7]"""

    def absolute(self, m: Array) -> Array:
        """What errors of unknown signs meet."""

    def squared(self, m: Array) -> Array:
        """What variances meet."""


@dataclass(frozen=True)
class TimesKeys:
    """dS K, (rows, head_dim_qk)."""

    k: Array

    def signed(self, m: Array) -> Array:
        return m @ self.k

    def absolute(self, m: Array) -> Array:
        return m @ np.abs(self.k)

    def squared(self, m: Array) -> Array:
        return m @ self.k**2


@dataclass(frozen=True)
class TimesCoefficients:
    """Sums of dS c by the parameter that an edge counts towards, (rows, num_parameters)."""

    value: Array  # (rows, keys)
    parameter: npt.NDArray[np.intp]  # (rows, keys)
    num_parameters: int

    def gather(self, m: Array, keys: slice = slice(None)) -> Array:
        """Sums of a row's elements by parameter, of some of the keys."""
        shape = len(m), self.num_parameters
        place = np.arange(len(m))[:, None] * self.num_parameters + self.parameter[:, keys]
        sums = np.bincount(place.ravel(), m.ravel(), shape[0] * shape[1])
        return np.asarray(sums, dtype=np.float64).reshape(shape)

    def signed(self, m: Array) -> Array:
        return self.gather(m * self.value)

    def absolute(self, m: Array) -> Array:
        return self.gather(m * np.abs(self.value))

    def squared(self, m: Array) -> Array:
        return self.gather(m * self.value**2)
