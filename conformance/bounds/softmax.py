"""Exact softmax of one block, and the magnitudes that every bound is made of. [BOUND-OUT]

Columns are keys, the sink (if any) the last of them; rows that see nothing are left out. What concerns a whole row
is a column vector.
"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from attnconform.conformance.bounds.block import Array, AttentionBlock, Mask
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.rounding import any_in_column, any_in_row, largest, operand_changes, sum_row


@dataclass(frozen=True)
class Operands:
    """What the declared roundings may add to q, k and v; each list holds one change per possible rounding.

    The errors are those of operands that are made on the way (turned, dequantized): of unknown sign, in any case
    below so much.
    """

    q: list[Array]
    k: list[Array]
    v: list[Array]
    q_error: Array
    k_error: Array
    v_error: Array

    @cached_property
    def largest_q(self) -> Array:
        return largest(self.q) + self.q_error

    @cached_property
    def largest_k(self) -> Array:
        return largest(self.k) + self.k_error

    @cached_property
    def largest_v(self) -> Array:
        return largest(self.v) + self.v_error


@dataclass(frozen=True)
class Softmax:
    """Rows with at least one key, their weights, and how large the numbers are that a kernel meets on its way."""

    q: Array
    k: Array
    v: Array
    q_error: Array
    k_error: Array
    v_error: Array
    mask: Mask
    scores: Array  # s, 0 where masked
    added: Array  # sum of |bias|
    slope: Array  # d score / d (sm_scale q.k)
    keep: Array  # dropout: keep mask / (1 - rate)
    sm_scale: float  # its size: every bound is one of sizes, and the sign is in the scores
    cap: float | None
    num_sinks: int  # 1 where the last column is one
    num_heads: int
    head_of_row: npt.NDArray[np.intp]
    visible: Mask  # which of the listed rows these are
    exps: Array  # p = e^(s - m)
    row_max: Array  # m

    @property
    def num_rows(self) -> int:
        """All listed rows, empty ones included."""
        return len(self.visible)

    @cached_property
    def has_rules(self) -> bool:
        """A score is more than sm_scale q.k."""
        return self.cap is not None or bool(self.added.any())

    @property
    def is_key(self) -> Mask:
        """False in the column of a sink, as a row."""
        return np.arange(len(self.k))[None] < len(self.k) - self.num_sinks

    @cached_property
    def num_keys(self) -> Array:
        """n."""
        return sum_row(self.mask.astype(np.float64))

    @cached_property
    def row_sum(self) -> Array:
        """l."""
        return sum_row(self.exps)

    @cached_property
    def weights(self) -> Array:
        """P."""
        return self.exps / self.row_sum

    @cached_property
    def value_weights(self) -> Array:
        """P as it multiplies V: after dropout."""
        return self.weights * self.keep

    @cached_property
    def out(self) -> Array:
        return self.value_weights @ self.v

    @cached_property
    def lse(self) -> Array:
        return self.row_max + np.log(self.row_sum)

    @cached_property
    def row_size(self) -> Array:
        """Z = max(|m|, |lse|)."""
        return np.maximum(np.abs(self.row_max), np.abs(self.lse))

    @cached_property
    def score_size(self) -> Array:
        """z = max(|s|, Z): the largest number that a logit passes through."""
        return np.maximum(np.abs(self.scores), self.row_size) * self.mask

    @cached_property
    def gap(self) -> Array:
        """|s - m|."""
        return (self.row_max - self.scores) * self.mask

    @cached_property
    def dot_size(self) -> Array:
        """A = sm_scale sum |q||k|, the size of a logit's dot product; biases count with it. [4.10]"""
        return self.sm_scale * (np.abs(self.q) @ np.abs(self.k).T) * self.mask + self.added

    @cached_property
    def value_size(self) -> Array:
        """sum P|v|: no partial sum of out exceeds it."""
        return self.value_weights @ np.abs(self.v)

    @cached_property
    def is_flat(self) -> Mask:
        """Every logit is exactly 0 (q = 0): every p is exactly 1 and sums of them are integers."""
        return ~any_in_row((self.dot_size > 0) | (self.scores != 0))

    @cached_property
    def spread(self) -> Array:
        """sd of v under P; the last term covers the cancellation in this line."""
        square = (self.value_weights * self.keep) @ self.v**2
        return np.sqrt(np.maximum(square - self.out**2, 0) + 1e-15 * square)

    @cached_property
    def hull(self) -> Array:
        """How far out can be from any convex combination of the values that some row sees."""
        seen = self.v[self.mask.any(0)]
        low, high = seen.min(0), seen.max(0)
        if (self.keep != 1).any():
            low, high = np.minimum(low * self.keep.max(), 0), np.maximum(high * self.keep.max(), 0)
        return np.maximum(high - self.out, self.out - low)

    def count_tiles(self, numerics: Numerics) -> Array:
        """T: how often a row's running maximum may be updated, merges included."""
        return np.minimum(self.num_keys, np.ceil(len(self.k) / numerics.min_tile)) + numerics.num_splits


def compute_softmax(block: AttentionBlock) -> Softmax:
    """Exact weights of the rows that see a key or a sink."""
    keys, mask = key_operands(block), block.mask
    maps = {
        "scores": np.where(mask, block.scores, 0.0),
        "added": _fill(mask, block.added, 0.0),
        "slope": _fill(mask, block.slope, 1.0),
        "keep": _fill(mask, block.dropout, 1.0),
    }
    num_sinks = int(block.sink is not None and bool(np.isfinite(block.sink).any()))
    if num_sinks and block.sink is not None:
        keys = {name: np.vstack([x, np.zeros((1, x.shape[1]))]) for name, x in keys.items()}
        maps, mask = append_sink(maps, block.sink), np.c_[mask, np.isfinite(block.sink)]
    visible = any_in_row(mask)[:, 0]
    mask, maps, q = mask[visible], {name: x[visible] for name, x in maps.items()}, block.q[visible]
    _check_finite(q=q, k=keys["k"], v=keys["v"], scores=maps["scores"])
    shifted = np.where(mask, maps["scores"], -np.inf)
    row_max = shifted.max(1, keepdims=True, initial=-np.inf)
    return Softmax(
        q=q,
        q_error=np.zeros_like(q) if block.q_error is None else block.q_error[visible],
        **keys,
        mask=mask,
        **maps,
        sm_scale=abs(block.sm_scale),
        cap=block.cap,
        num_sinks=num_sinks,
        num_heads=block.num_heads,
        head_of_row=np.flatnonzero(visible) // max(len(visible) // block.num_heads, 1),
        visible=visible,
        exps=np.exp(shifted - row_max),
        row_max=row_max,
    )


def key_operands(block: AttentionBlock) -> dict[str, Array]:
    """k, v and their errors, 0 where no row looks."""
    seen = any_in_column(block.mask)
    k_error, v_error = (
        np.zeros_like(x) if error is None else error
        for x, error in ((block.k, block.k_error), (block.v, block.v_error))
    )
    listed = {"k": block.k, "v": block.v, "k_error": k_error, "v_error": v_error}
    return {name: np.where(seen, x, 0.0) for name, x in listed.items()}


def append_sink(maps: dict[str, Array], sink: Array) -> dict[str, Array]:
    """One more key whose k and v are 0 and whose logit is given, -inf where a row has none. [4.10]"""
    columns = {"scores": np.where(np.isfinite(sink), sink, 0.0), "added": np.zeros(len(sink))}
    return {name: np.c_[x, columns.get(name, np.ones(len(sink)))] for name, x in maps.items()}


def compute_operands(x: Softmax, numerics: Numerics) -> Operands:
    """What the declared roundings of operands may do to q, k and v."""
    bits, kv_bits, cuts = numerics.operand_bits, numerics.kv_bits or numerics.operand_bits, numerics.truncates
    q, k = operand_changes(x.q, bits, cuts), operand_changes(x.k, kv_bits, cuts)
    if numerics.prescale == "q":
        factors = (x.sm_scale, x.sm_scale * np.log2(np.e))
        q = [change for factor in factors for change in _scaled_changes(x.q, factor, numerics)]
    if numerics.prescale == "q_and_k":
        q, k = (_scaled_changes(y, x.sm_scale**0.5, numerics) for y in (x.q, x.k))
    return Operands(q, k, operand_changes(x.v, kv_bits, cuts), x.q_error, x.k_error, x.v_error)


def _scaled_changes(x: Array, factor: float, numerics: Numerics) -> list[Array]:
    """What x gains when it is multiplied by a factor, which may be rounded before, and the product rounded."""
    if factor == 0:
        return [np.zeros_like(x)]  # products with 0 are exact
    used = factor + float(operand_changes(np.asarray(factor), numerics.factor_bits, False)[0])
    rounded = operand_changes(x * used, numerics.prescale_bits, numerics.truncates)
    return [(x * (used - factor) + change) / factor for change in rounded]


def _fill(mask: Mask, x: Array | None, default: float) -> Array:
    return np.full(mask.shape, default) if x is None else np.where(mask, x, default)


def _check_finite(**arrays: Array) -> None:
    # A NaN would turn every bound into one that no error exceeds.
    for name, x in arrays.items():
        if not np.isfinite(x).all():
            raise ValueError(f"{name} has a non-finite value that some row attends")
