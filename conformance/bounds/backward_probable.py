"""Probable error of dQ, dK, dV and the sinks' gradient. [BOUND-GRAD] [BOUND-PROBABILISTIC]

As in the forward: variances from cells of elements that round alike, drifts beside them. Along dK and dV the cells run
over rows, and rows with equal P share their errors.
"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from attnconform.conformance.bounds.backward_worst import WorstBackward, round_heads, store_gradient, sum_sink
from attnconform.conformance.bounds.block import Array, Mask
from attnconform.conformance.bounds.correlation import (
    Cells,
    compute_partial_range,
    compute_row_similarity,
    compute_typical_partial,
    relative_cells,
)
from attnconform.conformance.bounds.forward_probable import LAMBDA, LOGIT_CELL, ProbableForward, compute_growth
from attnconform.conformance.bounds.forward_worst import LARGEST_EXPONENT
from attnconform.conformance.bounds.gradients import Gradients
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.rounding import (
    accumulation_drift,
    accumulation_variance,
    any_in_column,
    any_in_row,
    largest,
    storage_error,
    sum_row,
)
from attnconform.conformance.bounds.softmax import Softmax


@dataclass(frozen=True)
class ProbableBackward:
    """Probable terms of one block: (rows, keys), (rows, 1), or (keys, 1) for what a key's rows share."""

    forward: ProbableForward
    worst: WorstBackward

    @property
    def softmax(self) -> Softmax:
        return self.forward.softmax

    @property
    def numerics(self) -> Numerics:
        return self.forward.numerics

    @property
    def grads(self) -> Gradients:
        return self.worst.grads

    @cached_property
    def dq(self) -> Array:
        """6 sqrt V + S over keys, and storage; never above the worst case."""
        error = self.softmax.sm_scale * (LAMBDA * np.sqrt(self.dq_variance) + self.dq_drift)
        bound = self._stored(error, self.grads.dq, self.worst.root_scaling)
        return np.where(self.is_invalid_row, self.worst.dq, np.minimum(self.worst.dq, bound))

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

    @cached_property
    def dsink(self) -> Array:
        """The last key's own noise and its row's, per row."""
        ds, weight = np.abs(self.grads.ds[:, -1:]), self.grads.slope_weights[:, -1:]
        variance = (ds * self.forward.noise[:, -1:]) ** 2 + (weight * self.row_deviation) ** 2
        drift = weight * self.row_drift + ds * (self.weight_drift[:, -1:] + 2 * self.numerics.u)
        bound = sum_sink(self.grads, LAMBDA * np.sqrt(variance) + drift, self.numerics)
        return np.where(self.is_invalid_row, self.worst.dsink, np.minimum(self.worst.dsink, bound))

    def _stored(self, error: Array, exact: Array, root_scaling: float) -> Array:
        return store_gradient(error * (1 + 2 * self.numerics.worst_u_ds), exact, root_scaling, self.numerics)

    @cached_property
    def is_invalid_row(self) -> Mask:
        """Rows where first order does not hold, here or in the forward."""
        unknown = (self.exponent > 1) & ~self.worst.vanishes
        return ~self.forward.is_valid | any_in_row(unknown)

    @cached_property
    def is_invalid_key(self) -> Mask:
        """Keys that such a row sees."""
        return any_in_column(self.softmax.mask & self.is_invalid_row)

    # D, which its row shares.

    @cached_property
    def row_variance(self) -> Array:
        """V_D: out's rounding, P's rounding, logits, sums, denominator; storage of dP where D is summed from it."""
        x, c, g, f = self.softmax, self.numerics, self.grads, self.forward
        rounding = self.worst.out_rounding
        out_cells = Cells.from_keys(np.floor(x.out / (rounding / 2)))
        stored = f.weight_rounding * (np.abs(g.dp) + c.l_from_p * np.abs(g.row_dot))
        variance = (
            sum_row(out_cells.sum_coherent(np.abs(g.do) * rounding)) / 3
            + sum_row(f.weight_cells.sum_coherent(stored)) / 3
            + sum_row(f.logit_cells.sum_coherent(x.weights * f.noise * g.out_share))
            + f.sum_variance * sum_row(g.do**2 * f.partial_out**2)
            + g.row_dot**2 * c.u**2 * f.chain_variance / 3
            + g.do.shape[1] / 3 * c.u**2 * sum_row(np.abs(g.do * x.out)) ** 2
        )
        if c.u_dp:
            variance = variance + c.u_dp**2 / 3 * sum_row(self.dp_cells.sum_coherent(x.weights * np.abs(g.dp)))
        return variance

    @cached_property
    def row_deviation(self) -> Array:
        """s_D."""
        return np.sqrt(self.row_variance) * self.forward.is_valid

    @cached_property
    def row_drift(self) -> Array:
        """S_D, never above the worst case."""
        x, c, g, f = self.softmax, self.numerics, self.grads, self.forward
        changes = [sum_row(x.value_weights * (g.do @ change.T)) for change in f.operands.v]
        drift = (
            sum_row(x.weights * f.drift * g.out_share)
            + sum_row(f.flushed * np.abs(g.dp))
            + largest(changes)
            + sum_row(x.value_weights * (np.abs(g.do) @ f.operands.v_error.T))
            + sum_row(g.do_error * np.abs(x.out))
            + accumulation_drift(c, x.num_keys, len(x.k)) * sum_row(np.abs(g.do) * f.partial_out)
            + np.abs(g.row_dot) * f.row_drift
            + np.abs(g.row_term) * (c.u_d + c.u * (g.dlse != 0))
        )
        return np.where(f.is_valid, np.minimum(drift, self.worst.row_error), self.worst.row_error)

    # dP, which is a key's own.

    @cached_property
    def dp_cells(self) -> Cells:
        """Keys whose stored dP round alike."""
        return relative_cells(self.grads.dp, self.numerics.u_dp / 2)

    @cached_property
    def typical_dp(self) -> Array:
        """x~ of dO.v."""
        return compute_typical_partial(self.grads.do, self.softmax.v.T) * self.softmax.keep

    @cached_property
    def dp_noise(self) -> Array:
        """r_dP."""
        c, head_dim = self.numerics, self.grads.do.shape[1]
        variance = accumulation_variance(c, head_dim, head_dim) * self.typical_dp**2 + (c.u_dp * self.grads.dp) ** 2 / 3
        return np.sqrt(variance) * self.softmax.mask

    @cached_property
    def dp_drift(self) -> Array:
        """b_dP: cuts, and the roundings of dO and v, which are data."""
        x, g, head_dim = self.softmax, self.grads, self.grads.do.shape[1]
        changes = [a @ x.v.T + (g.do + a) @ b.T for a, b in product(g.do_changes, self.forward.operands.v)]
        moved = largest(changes) + np.abs(g.do) @ self.forward.operands.v_error.T + g.do_error @ np.abs(x.v).T
        return accumulation_drift(self.numerics, head_dim, head_dim) * self.typical_dp + moved * x.keep

    # The recomputed P and dS.

    @cached_property
    def recompute_drift(self) -> Array:
        """bb before it is made relative: systematic part of the exponent s - lse."""
        x, c, f, head_dim = self.softmax, self.numerics, self.forward, self.softmax.q.shape[1]
        cuts = accumulation_drift(c, head_dim, head_dim) * f.typical_dot
        sizes = c.u * (2 * x.score_size + 4 * self.grads.lse_gap + 4)
        return (cuts + sizes + 2 * c.exp_error + f.known_change + f.worst.rule_error) * x.mask

    @cached_property
    def exponent(self) -> Array:
        """t = bb + 6 r."""
        return np.minimum(self.recompute_drift + LAMBDA * self.forward.noise, LARGEST_EXPONENT)

    @cached_property
    def own_weight_drift(self) -> Array:
        """bb, relative to P, and all of P where it underflows."""
        lost = np.minimum(1, self.numerics.tiny / np.maximum(self.softmax.weights, 1e-300)) * self.softmax.mask
        return self.recompute_drift * compute_growth(self.exponent) + lost

    @cached_property
    def lse_error(self) -> Array:
        """Lp = expm1(lse_prob)."""
        return np.expm1(np.minimum(self.forward.lse, LARGEST_EXPONENT))

    @cached_property
    def weight_drift(self) -> Array:
        """bb + Lp + bb Lp."""
        own, lse = self.own_weight_drift, self.lse_error
        return own + lse + own * lse

    @cached_property
    def slope_drift(self) -> Array:
        """A soft cap's slope is a function of the logit: equal logits err alike, so none of it is noise."""
        return self.softmax.weights * self.worst.slope_error * self.grads.score_gradient_size

    @cached_property
    def probable_ds(self) -> Array:
        """The largest dS that is stored, but for improbable errors."""
        error = LAMBDA * self.row_deviation + self.row_drift + self.dp_drift + LAMBDA * self.dp_noise
        return np.abs(self.grads.ds) + self.grads.slope_weights * error + self.slope_drift

    @cached_property
    def ds_rounding(self) -> Array:
        """rnd of a rounding to nearest."""
        return storage_error(self.probable_ds, self.numerics.u_ds, self.worst.ds_floor) * (self.numerics.u_ds > 0)

    @cached_property
    def reused_p_rounding(self) -> Array:
        """Rounding of the stored P in the dS that is computed from it."""
        return self.worst.reused_p_error(self.numerics.u_p)

    @cached_property
    def flushed_ds(self) -> Array:
        """dS where its storage, or that of the P it is made of, may give 0."""
        x, c = self.softmax, self.numerics
        flushed = self.probable_ds * (self.probable_ds < self.worst.ds_floor)
        if c.reuses_p:
            flushed = flushed + self.grads.slope_weights * (x.weights < c.eta_p) * self.grads.score_gradient_size
        return flushed

    @cached_property
    def ds_noise_size(self) -> Array:
        """|dS| r."""
        return np.abs(self.grads.ds) * self.forward.noise

    @cached_property
    def ds_cut(self) -> float:
        """Cutting dS shrinks all of it."""
        return self.numerics.truncates * self.numerics.u_ds

    # Sums over keys: dQ.

    @cached_property
    def partial_dq(self) -> Array:
        """v~ of dS K."""
        return compute_partial_range(self.grads.ds, self.softmax.k)

    @cached_property
    def dq_variance(self) -> Array:
        """V of dQ."""
        x, c, g, f = self.softmax, self.numerics, self.grads, self.forward
        own = (g.slope_weights * self.dp_noise) ** 2 + f.logit_cells.sum_coherent(self.ds_noise_size)
        stored = relative_cells(g.ds, (c.u_ds or 1) / 2).sum_coherent(self.ds_rounding)
        reused = f.weight_cells.sum_coherent(self.reused_p_rounding) if c.reuses_p else 0.0
        common = self.row_variance * f.is_valid * g.row_weight_key**2
        return (own + (stored + reused) / 3) @ x.k**2 + common + f.sum_variance * self.partial_dq**2

    @cached_property
    def dq_drift(self) -> Array:
        """S of dQ."""
        x, c, g, f = self.softmax, self.numerics, self.grads, self.forward
        weights = self.own_weight_drift * (1 + self.lse_error) + 2 * c.u
        own = g.slope_weights * self.dp_drift + np.abs(g.ds) * weights + self.flushed_ds + self.slope_drift
        common = self.row_drift * g.row_weight_key + (self.lse_error + self.ds_cut) * g.row_gradient_key
        sums = accumulation_drift(c, x.num_keys, len(x.k)) * self.partial_dq
        moved = largest([g.ds @ change for change in f.operands.k]) + np.abs(g.ds) @ f.operands.k_error
        return own @ np.abs(x.k) + common + sums + moved

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
        """v~ of dS^T Q."""
        return compute_partial_range(self.grads.ds.T, self.softmax.q)

    @cached_property
    def partial_dv(self) -> Array:
        """v~ of P^T dO."""
        return compute_partial_range(self.softmax.value_weights.T, self.grads.do)

    @cached_property
    def dk_variance(self) -> Array:
        """V of dK: that of dQ, and rows with equal P that share dD. [4.9f]"""
        x, c, g = self.softmax, self.numerics, self.grads
        row = g.slope_weights * self.row_deviation
        shared = row * (compute_row_similarity(x.weights, max(c.u_p, c.u_out)) @ row)
        ds_cells = relative_cells(g.ds.T, (c.u_ds or 1) / 2)
        stored = ds_cells.sum_coherent(self.ds_rounding.T)
        reused = self.stored_row_cells.sum_coherent(self.reused_p_rounding.T) if c.reuses_p else 0.0
        own = ((g.slope_weights * self.dp_noise) ** 2 + shared).T + self.row_cells.sum_coherent(self.ds_noise_size.T)
        return (own + (stored + reused) / 3) @ x.q**2 + self.row_sum_variance * self.partial_dk**2

    @cached_property
    def dk_drift(self) -> Array:
        """S of dK."""
        x, c, g = self.softmax, self.numerics, self.grads
        weights = self.weight_drift + 2 * c.u
        own = g.slope_weights * (self.dp_drift + self.row_drift) + np.abs(g.ds) * weights
        sums = self.row_sum_drift * self.partial_dk + self.ds_cut * np.abs(g.ds.T @ x.q)
        operands = self.forward.operands
        changes = largest([g.ds.T @ change for change in operands.q]) + np.abs(g.ds).T @ operands.q_error
        return (own + self.flushed_ds + self.slope_drift).T @ np.abs(x.q) + sums + changes

    @cached_property
    def dv_variance(self) -> Array:
        """V of dV: logits and storage of P."""
        x, c, g = self.softmax, self.numerics, self.grads
        rounding = storage_error(x.weights, c.u_p, c.eta_p) * (c.u_p > 0)
        logit = self.row_cells.sum_coherent((x.value_weights * self.forward.noise).T)
        stored = self.stored_row_cells.sum_coherent((rounding * x.keep).T)
        return (logit + stored / 3) @ g.do**2 + self.row_sum_variance * self.partial_dv**2

    @cached_property
    def dv_drift(self) -> Array:
        """S of dV."""
        x, c, g = self.softmax, self.numerics, self.grads
        own = x.value_weights * (self.weight_drift + (x.weights < c.eta_p))
        cut = c.truncates * c.u_p * np.abs(g.dv)
        changes = largest([x.value_weights.T @ change for change in g.do_changes]) + x.value_weights.T @ g.do_error
        sums = self.row_sum_drift * self.partial_dv
        return own.T @ np.abs(g.do) + sums + cut + changes
