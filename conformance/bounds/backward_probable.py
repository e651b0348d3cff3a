"""Probable error of dQ, dK, dV and the sinks' gradient. [BOUND-GRAD] [BOUND-PROBABILISTIC]

As in the forward: variances from cells of elements that round alike, drifts beside them. Along dK and dV the cells run
over rows, and rows with equal P share their errors.
"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnconform.conformance.bounds.backward_worst import WorstBackward, round_heads, store_gradient
from attnconform.conformance.bounds.block import Array, Mask
from attnconform.conformance.bounds.correlation import (
    Cells,
    compute_average_partial,
    relative_cells,
)
from attnconform.conformance.bounds.forward_probable import (
    LAMBDA,
    LOGIT_CELL,
    ProbableForward,
)
from attnconform.conformance.bounds.gradients import Gradients
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.over_keys import TimesKeys
from attnconform.conformance.bounds.rounding import (
    accumulation_drift,
    accumulation_variance,
    any_in_column,
    largest,
    storage_error,
)
from attnconform.conformance.bounds.score_gradient_probable import ProbableScoreGradient
from attnconform.conformance.bounds.softmax import Softmax


@dataclass(frozen=True)
class ProbableBackward:
    """Probable terms of one block: (rows, keys), (rows, 1), or (keys, 1) for what a key's rows share."""

    ds: ProbableScoreGradient

    @property
    def softmax(self) -> Softmax:
        return self.ds.softmax

    @property
    def numerics(self) -> Numerics:
        return self.ds.numerics

    @property
    def grads(self) -> Gradients:
        return self.ds.grads

    @property
    def forward(self) -> ProbableForward:
        return self.ds.forward

    @property
    def worst(self) -> WorstBackward:
        return self.ds.worst

    @cached_property
    def dq(self) -> Array:
        """6 sqrt V + S over keys, and storage; never above the worst case."""
        error = self.softmax.sm_scale * (LAMBDA * np.sqrt(self.dq_variance) + self.dq_drift)
        bound = self._stored(error, self.grads.dq, self.worst.root_scaling)
        return np.where(self.ds.is_invalid_row, self.worst.dq, np.minimum(self.worst.dq, bound))

    @cached_property
    def dk(self) -> Array:
        """6 sqrt V + S over rows, heads that are rounded apart, and storage."""
        x, g = self.softmax, self.grads
        error = x.sm_scale * (LAMBDA * np.sqrt(self.dk_variance) + self.dk_drift)
        error = error + round_heads(g, x.sm_scale * g.ds, x.q, error, self.numerics)
        bound = self._stored(error, g.dk, self.worst.root_scaling)
        return np.where(self.is_invalid_key, self.worst.dk, np.minimum(self.worst.dk, bound))

    @cached_property
    def dv(self) -> Array:
        """Likewise, over P^T dO."""
        x, g = self.softmax, self.grads
        error = LAMBDA * np.sqrt(self.dv_variance) + self.dv_drift
        error = error + round_heads(g, x.value_weights, g.do, error, self.numerics)
        bound = self._stored(error, g.dv, 0.0)
        return np.where(self.is_invalid_key, self.worst.dv, np.minimum(self.worst.dv, bound))

    def _stored(self, error: Array, exact: Array, root_scaling: float) -> Array:
        return store_gradient(error * (1 + 2 * self.numerics.worst_u_ds), exact, root_scaling, self.numerics)

    @cached_property
    def is_invalid_key(self) -> Mask:
        """Keys that such a row sees."""
        return any_in_column(self.softmax.mask & self.ds.is_invalid_row)

    # Sums over keys: dQ.

    @cached_property
    def partial_dq(self) -> Array:
        """v^ of dS K."""
        return compute_average_partial(self.grads.ds, self.softmax.k)

    @cached_property
    def dq_variance(self) -> Array:
        """V of dQ."""
        return self.ds.variance_met(TimesKeys(self.softmax.k)) + self.forward.sum_variance * self.partial_dq**2

    @cached_property
    def dq_drift(self) -> Array:
        """S of dQ."""
        x, g, operands = self.softmax, self.grads, self.forward.operands
        sums = accumulation_drift(self.numerics, x.num_keys, len(x.k)) * self.partial_dq
        moved = largest([g.ds @ change for change in operands.k]) + np.abs(g.ds) @ operands.k_error
        return self.ds.drift_met(TimesKeys(x.k)) + sums + moved

    # Sums over rows: dK and dV.

    @cached_property
    def row_cells(self) -> Cells:
        """Per key, rows whose P and thereby logits are alike."""
        return relative_cells(self.softmax.weights.T, LOGIT_CELL)

    @cached_property
    def stored_row_cells(self) -> Cells:
        """Per key, rows whose stored P round alike."""
        return relative_cells(self.softmax.weights.T, (self.numerics.u_p or 1) / 2)

    @cached_property
    def row_sum_variance(self) -> Array:
        """var(cols, M) + U^2 heads / 3."""
        x, c = self.softmax, self.numerics
        return accumulation_variance(c, self.grads.rows_of_key, x.num_rows) + c.u**2 * x.num_heads / 3

    @cached_property
    def row_sum_drift(self) -> Array:
        """bias(cols, M)."""
        return accumulation_drift(self.numerics, self.grads.rows_of_key, self.softmax.num_rows)

    @cached_property
    def partial_dk(self) -> Array:
        """v^ of dS^T Q."""
        return compute_average_partial(self.grads.ds.T, self.softmax.q)

    @cached_property
    def partial_dv(self) -> Array:
        """v^ of P^T dO."""
        return compute_average_partial(self.softmax.value_weights.T, self.grads.do)

    @cached_property
    def dk_variance(self) -> Array:
        """V of dK: that of dQ, and rows with equal P that share dD. [4.9f]"""
        x, c, g = self.softmax, self.numerics, self.grads
        shared = self.ds.share_between_rows(g.slope_weights * self.ds.row_term.deviation)
        shared = shared + self.ds.share_between_rows(g.ds * self.ds.lse_deviation)
        ds_cells = relative_cells(g.ds.T, (c.u_ds or 1) / 2)
        stored = ds_cells.sum_coherent(self.ds.ds_rounding.T)
        reused = self.stored_row_cells.sum_coherent(self.ds.reused_p_rounding.T) if c.reuses_p else 0.0
        own = ((g.slope_weights * self.ds.dp_noise) ** 2 + shared).T + self.row_cells.sum_coherent(
            self.ds.ds_noise_size.T
        )
        return (own + (stored + reused) / 3) @ x.q**2 + self.row_sum_variance * self.partial_dk**2

    @cached_property
    def dk_drift(self) -> Array:
        """S of dK."""
        x, g, operands = self.softmax, self.grads, self.forward.operands
        own = self.ds.own_drift + g.slope_weights * self.ds.row_term.drift + np.abs(g.ds) * self.ds.lse_drift
        sums = self.row_sum_drift * self.partial_dk + self.ds.ds_cut * np.abs(g.ds.T @ x.q)
        changes = largest([g.ds.T @ change for change in operands.q]) + np.abs(g.ds).T @ operands.q_error
        common = sum(size * np.abs(drift.T @ x.q) for size, drift in self.ds.common_drifts(g.ds))
        return own.T @ np.abs(x.q) + sums + changes + common

    @cached_property
    def dv_variance(self) -> Array:
        """V of dV: logits, lse, and storage of P."""
        x, c, g = self.softmax, self.numerics, self.grads
        rounding = storage_error(x.weights, c.u_p, c.eta_p) * (c.u_p > 0)
        logit = self.row_cells.sum_coherent((x.value_weights * self.ds.noise).T)
        stored = self.stored_row_cells.sum_coherent((rounding * x.keep).T)
        shared = self.ds.share_between_rows(x.value_weights * self.ds.lse_deviation).T
        return (logit + shared + stored / 3) @ g.do**2 + self.row_sum_variance * self.partial_dv**2

    @cached_property
    def dv_drift(self) -> Array:
        """S of dV."""
        x, c, g = self.softmax, self.numerics, self.grads
        own = x.value_weights * (self.ds.own_weight_drift + self.ds.lse_drift + (x.weights < c.eta_p))
        common = sum(size * np.abs(drift.T @ g.do) for size, drift in self.ds.common_drifts(x.value_weights))
        cut = c.truncates * c.u_p * np.abs(g.dv)
        changes = largest([x.value_weights.T @ change for change in g.do_changes]) + x.value_weights.T @ g.do_error
        sums = self.row_sum_drift * self.partial_dv
        return own.T @ np.abs(g.do) + sums + cut + changes + common
