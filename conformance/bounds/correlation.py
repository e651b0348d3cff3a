"""How roundings add up when they are neither independent nor all one way. [BOUND-PROBABILISTIC]

Equal or nearly equal numbers round equally. Numbers that lie within a quarter ulp are put into one cell; inside a cell
errors add up, between cells their squares do.
"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from collections.abc import Iterable, Iterator
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


def split_evenly(length: int, blocks: int) -> Iterator[slice]:
    """So many blocks of an axis, fewer where it is shorter."""
    edges = np.linspace(0, length, min(blocks, length) + 1).astype(int)
    return (slice(start, stop) for start, stop in pairwise(edges.tolist()))


def block_prefixes(a: Array, b: Array, blocks: int) -> Iterator[Array]:
    """Partial sums of a @ b after each of so many blocks of its inner axis."""
    prefix = np.zeros((len(a), b.shape[1]))
    for block in split_evenly(a.shape[1], blocks):
        prefix = prefix + a[:, block] @ b[block]
        yield prefix


def bound_partial_sums(prefixes: Iterable[Array], squares: Array, sizes: Array) -> Array:
    """Size of any contiguous partial sum, from prefixes and three deviations between them; at most the whole."""
    high = low = np.zeros(squares.shape)
    for prefix in prefixes:
        high, low = np.maximum(high, prefix), np.minimum(low, prefix)
    return np.minimum(sizes, high - low + 3 * np.sqrt(squares))


def average_partial_sums(prefixes: Iterable[Array], squares: Array, sizes: Array) -> Array:
    """v^: root mean square of the partial sums that a sum goes through, and one deviation for another order.

    In order its partial sums are the prefixes, reversed they are what the prefixes leave.
    """
    count, total, first, second = 0, np.zeros(squares.shape), np.zeros(squares.shape), np.zeros(squares.shape)
    for prefix in prefixes:
        left = total  # before this block
        count, total, first, second = count + 1, prefix, first + left, second + left**2
    in_order = (second + total**2) / max(count, 1)
    reversed_order = total**2 + (second - 2 * total * first) / max(count, 1)
    return np.minimum(sizes, np.sqrt(np.maximum(np.maximum(in_order, reversed_order), 0) + squares))


def compute_average_partial(a: Array, b: Array) -> Array:
    """v^ of a @ b, from 16 prefixes."""
    return average_partial_sums(block_prefixes(a, b, 16), a**2 @ b**2, np.abs(a) @ np.abs(b))


def compute_typical_partial(a: Array, b: Array) -> Array:
    """x~: mean size of the partial sums of a @ b, from prefixes of 16 terms and one deviation inside a block."""
    blocks = -(-a.shape[1] // 16)
    mean = sum(np.abs(prefix) for prefix in block_prefixes(a, b, blocks)) / blocks
    return np.minimum(np.abs(a) @ np.abs(b), mean + np.sqrt(a**2 @ b**2 / blocks))


def compute_row_similarity(weights: Array, u: float) -> Array:
    """same_ii': 1 where two rows of P are equal and share their errors, 0 from a relative distance of 4u on."""
    norms = sum_squares(weights)
    distance = np.sqrt(np.maximum(norms + norms.T - 2 * weights @ weights.T, 0) / norms)
    return np.maximum(1 - distance / (4 * u), 0)


def sum_squares(x: Array) -> Array:
    return np.asarray((x**2).sum(1, keepdims=True))


def count_later_rises(x: Array) -> Array:
    """How often the running maximum of a row still rises after each of its elements."""
    running = np.maximum.accumulate(x, 1)
    rises = np.cumsum(np.c_[np.zeros(len(x)), x[:, 1:] > running[:, :-1]], axis=1)
    return np.asarray(rises[:, -1:] - rises)
