"""Exact gradients of one block, over the rows that see something. [BOUND-GRAD]

dP = dO.V, D = dO.out - dlse, dS = P (dP - D) times a soft cap's slope, dQ = sm_scale dS K, dK = sm_scale dS^T Q,
dV = P^T dO. Shapes are (rows, keys), keys with the sink if there is one.
"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnconform.conformance.bounds.block import Array
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.rounding import largest, operand_changes, sum_row
from attnconform.conformance.bounds.softmax import Softmax


@dataclass(frozen=True)
class Gradients:
    """What a backward pass computes, and the change of dO by its declared roundings."""

    softmax: Softmax
    do: Array
    do_changes: list[Array]
    do_error: Array  # of a do that a kernel computes: of unknown sign
    dlse: Array  # a column

    @cached_property
    def largest_do_change(self) -> Array:
        return largest(self.do_changes) + self.do_error

    @cached_property
    def dp(self) -> Array:
        return self.do @ self.softmax.v.T * self.softmax.keep

    @cached_property
    def dp_size(self) -> Array:
        """Ad = |dO||V|^T."""
        return np.abs(self.do) @ np.abs(self.softmax.v).T * self.softmax.keep

    @cached_property
    def row_dot(self) -> Array:
        """D without dlse: what the error of out acts on."""
        return sum_row(self.do * self.softmax.out)

    @cached_property
    def row_term(self) -> Array:
        """D."""
        return self.row_dot - self.dlse

    @cached_property
    def out_share(self) -> Array:
        """|dP - dO.out|: effect of key j's weight on dO.out."""
        return np.abs(self.dp - self.row_dot)

    @cached_property
    def score_gradient_size(self) -> Array:
        """|dP - D|, before the weight and the slope."""
        return np.abs(self.dp - self.row_term)

    @cached_property
    def slope_weights(self) -> Array:
        """P times a soft cap's slope: what dP - D is multiplied by."""
        return self.softmax.weights * self.softmax.slope

    @cached_property
    def ds(self) -> Array:
        return self.slope_weights * (self.dp - self.row_term)

    @cached_property
    def dq(self) -> Array:
        return self.softmax.sm_scale * self.ds @ self.softmax.k

    @cached_property
    def dk(self) -> Array:
        return self.softmax.sm_scale * self.ds.T @ self.softmax.q

    @cached_property
    def dv(self) -> Array:
        return self.softmax.value_weights.T @ self.do

    @cached_property
    def lse_gap(self) -> Array:
        """|s - lse|, the exponent of the recomputed P."""
        return np.abs(self.softmax.scores - self.softmax.lse) * self.softmax.mask

    @cached_property
    def rows_of_key(self) -> Array:
        """cols_j: how many rows see key j, a column over keys."""
        return self.softmax.mask.sum(0, dtype=np.float64)[:, None]


def compute_gradients(
    x: Softmax, do: Array, dlse: Array | None, numerics: Numerics, do_error: Array | None = None
) -> Gradients:
    """Exact gradients for the upstream gradients do (rows, head_dim_vo) and dlse (rows,)."""
    visible_do = do[x.visible]
    if not np.isfinite(visible_do).all():
        raise ValueError("do has a non-finite value in a row that attends something")
    column = np.zeros((len(visible_do), 1)) if dlse is None else dlse[x.visible][:, None]
    changes = operand_changes(visible_do, numerics.operand_bits, numerics.truncates)
    error = np.zeros_like(visible_do) if do_error is None else do_error[x.visible]
    return Gradients(softmax=x, do=visible_do, do_changes=changes, do_error=error, dlse=column)
