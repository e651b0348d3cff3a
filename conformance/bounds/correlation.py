"""How roundings add up when they are neither independent nor all one way. [BOUND-PROBABILISTIC]

Equal or nearly equal numbers round equally. Numbers that lie within a quarter ulp are put into one cell; inside a cell
errors add up, between cells their squares do.
"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from attnconform.conformance.bounds.block import Array, Mask

MASKED_KEY = -(2.0**40)


@dataclass(frozen=True)
class Cells:
    """Which elements of each row of a matrix share their rounding error."""

    index: npt.NDArray[np.intp]

    @classmethod
    def from_keys(cls, keys: Array) -> "Cells":
        """Elements of one row with the same integer key share a cell."""
        offset = (keys - keys.min()).astype(np.int64)
        row_key = offset + np.arange(len(keys))[:, None] * (offset.max() + 1)
        return cls(np.unique(row_key, return_inverse=True)[1].reshape(keys.shape))

    def sum_coherent(self, w: Array) -> Array:
        """w_j times the sum of w over j's cell; its row sum is the sum over cells of (sum w)^2."""
        return w * np.bincount(self.index.ravel(), w.ravel())[self.index]


def absolute_cells(x: Array, width: float, mask: Mask) -> Cells:
    """Cells of constant width; what is masked has one of its own."""
    return Cells.from_keys(np.where(mask, np.floor(x / width), MASKED_KEY))


def relative_cells(x: Array, width: float) -> Cells:
    """Cells of constant relative width, apart for the two signs; zeros have one of their own."""
    logs = np.floor(np.log(np.maximum(np.abs(x), 1e-300)) / width)
    return Cells.from_keys(np.where(x == 0, 0, 2 * logs + (x > 0)))


def block_prefixes(a: Array, b: Array, blocks: int) -> Iterator[Array]:
    """Partial sums of a @ b after each of so many blocks of its inner axis."""
    edges = np.linspace(0, a.shape[1], min(blocks, a.shape[1]) + 1).astype(int)
    prefix = np.zeros((len(a), b.shape[1]))
    for start, stop in pairwise(edges):
        prefix = prefix + a[:, start:stop] @ b[start:stop]
        yield prefix


def compute_partial_range(a: Array, b: Array) -> Array:
    """v~: size of any contiguous partial sum of a @ b, from 16 prefixes and three deviations inside a block."""
    high = low = np.zeros((len(a), b.shape[1]))
    for prefix in block_prefixes(a, b, 16):
        high, low = np.maximum(high, prefix), np.minimum(low, prefix)
    return np.minimum(np.abs(a) @ np.abs(b), high - low + 3 * np.sqrt(a**2 @ b**2))


def compute_typical_partial(a: Array, b: Array) -> Array:
    """x~: mean size of the partial sums of a @ b, from prefixes of 16 terms and two deviations inside a block."""
    blocks = -(-a.shape[1] // 16)
    mean = sum(np.abs(prefix) for prefix in block_prefixes(a, b, blocks)) / blocks
    return np.minimum(np.abs(a) @ np.abs(b), mean + 2 * np.sqrt(a**2 @ b**2 / blocks))


def compute_row_similarity(weights: Array, u: float) -> Array:
    """same_ii': 1 where two rows of P are equal and share their errors, 0 from a relative distance of 4u on."""
    norms = sum_squares(weights)
    distance = np.sqrt(np.maximum(norms + norms.T - 2 * weights @ weights.T, 0) / norms)
    return np.maximum(1 - distance / (4 * u), 0)


def sum_squares(x: Array) -> Array:
    return np.asarray((x**2).sum(1, keepdims=True))


def count_rises(x: Array) -> Array:
    """How often the running maximum of a row rises."""
    running = np.maximum.accumulate(x, 1)
    return np.asarray((x[:, 1:] > running[:, :-1]).sum(1, keepdims=True, dtype=np.float64))
