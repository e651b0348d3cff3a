"""Probable error of dS: of its dP, of the recomputed P, of D, and of its storage. [BOUND-GRAD] [BOUND-PROBABILISTIC]"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from attnconform.conformance.bounds.block import Array, Mask
from attnconform.conformance.bounds.correlation import compute_row_similarity, compute_typical_partial, relative_cells
from attnconform.conformance.bounds.forward_probable import (
    LAMBDA,
    ROUNDED_CONSTANTS,
    SIZED_ROUNDINGS,
    compute_growth,
)
from attnconform.conformance.bounds.forward_worst import LARGEST_EXPONENT
from attnconform.conformance.bounds.over_keys import OverKeys
from attnconform.conformance.bounds.rounding import (
    accumulation_drift,
    accumulation_variance,
    any_in_row,
    largest,
    lse_rounding,
    storage_error,
)
from attnconform.conformance.bounds.row_term_probable import ProbableRowTerm, ProbableTerm

# Past this growth of a row's recomputed P by a part's stored lse, first order says nothing. [4.11]
LARGEST_GROWTH = 1.5


@dataclass(frozen=True)
class ProbableScoreGradient(ProbableTerm):
    """Terms of dS: (rows, keys) or (rows, 1)."""

    @cached_property
    def row_term(self) -> ProbableRowTerm:
        return ProbableRowTerm(self.forward, self.worst)

    # How it enters sums over keys and rows.

    def variance_met(self, over: OverKeys) -> Array:
        """Own variances by squares, that of D by the square of a signed sum. [4.7]"""
        from_row = self.row_term.deviation**2 * over.signed(self.grads.slope_weights) ** 2
        from_lse = self.lse_deviation**2 * over.signed(self.grads.ds) ** 2
        return over.squared(self.own_variance) + from_row + from_lse

    def drift_met(self, over: OverKeys) -> Array:
        """Own drifts by magnitudes, those of D, of lse, of a cut and of constants by signed sums. [4.7]"""
        from_row = self.row_term.drift * np.abs(over.signed(self.grads.slope_weights))
        from_lse = (self.lse_drift + self.ds_cut) * np.abs(over.signed(self.grads.ds))
        common = sum(size * np.abs(over.signed(drift)) for size, drift in self.common_drifts(self.grads.ds))
        return over.absolute(self.own_drift) + from_row + from_lse + common

    @cached_property
    def similarity(self) -> Array:
        """same: rows with equal P share their errors. [4.9f]"""
        return compute_row_similarity(self.softmax.weights, max(self.numerics.u_p, self.numerics.u_out))

    def share_between_rows(self, deviation: Array) -> Array:
        """Variance of a sum over rows, spread over its rows."""
        return np.abs(deviation) * (self.similarity @ np.abs(deviation))

    @cached_property
    def is_invalid_row(self) -> Mask:
        """Rows where first order does not hold, here or in the forward."""
        unknown = (self.exponent > 1) & ~self.worst.vanishes
        return ~self.forward.is_valid | any_in_row(unknown) | (self.worst.weight_growth > LARGEST_GROWTH)

    # All of it.

    @cached_property
    def own_variance(self) -> Array:
        """Of a dS: its dP, its logit, its storage and that of the P it is made of."""
        c, g, f = self.numerics, self.grads, self.forward
        own = (g.slope_weights * self.dp_noise) ** 2 + f.logit_cells.sum_coherent(self.ds_noise_size)
        stored = relative_cells(g.ds, (c.u_ds or 1) / 2).sum_coherent(self.ds_rounding)
        reused = f.weight_cells.sum_coherent(self.reused_p_rounding) if c.reuses_p else 0.0
        return own + (stored + reused) / 3

    @cached_property
    def own_drift(self) -> Array:
        """Systematic part of a dS that its row does not share."""
        moved = self.grads.slope_weights * self.dp_drift + np.abs(self.grads.ds) * self.own_weight_drift
        return moved + self.flushed_ds + self.slope_drift

    # dP, which is a key's own.

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

    # The recomputed P, and dS as it is stored.

    @cached_property
    def recompute_drift(self) -> Array:
        """bb before it is made relative: systematic part of the exponent s - lse, all of it."""
        c = self.numerics
        sizes = c.u * (self.softmax.score_size + ROUNDED_CONSTANTS * self.grads.lse_gap + 2)
        return (self.own_recompute_drift + sizes + c.exp_error) * self.softmax.mask

    @cached_property
    def own_recompute_drift(self) -> Array:
        """Of a key's own: cuts, the roundings of inputs, rules."""
        c, f, head_dim = self.numerics, self.forward, self.softmax.q.shape[1]
        cuts = accumulation_drift(c, head_dim, head_dim) * f.typical_dot
        return (cuts + f.known_change + f.worst.rule_error + f.scale_drift) * self.softmax.mask

    @cached_property
    def recompute_noise(self) -> Array:
        """r of the recomputed P, whose exponent is s - lse instead of s - m."""
        argument = SIZED_ROUNDINGS * (self.numerics.u * self.grads.lse_gap) ** 2 / 3
        return np.sqrt(self.forward.logit_noise**2 + argument) * self.softmax.mask

    @cached_property
    def exponent(self) -> Array:
        """t = bb + 6 r."""
        return np.minimum(self.recompute_drift + LAMBDA * self.recompute_noise, LARGEST_EXPONENT)

    @cached_property
    def growth(self) -> Array:
        """From an error of the exponent to a relative error of P, lse's own included."""
        return compute_growth(self.exponent) * (1 + self.lse_error)

    @cached_property
    def noise(self) -> Array:
        """r_j, relative to the recomputed P."""
        return self.recompute_noise * self.growth

    @cached_property
    def own_weight_drift(self) -> Array:
        """bb of a key's own, relative to P, and all of P where it underflows."""
        lost = np.minimum(1, self.numerics.tiny / np.maximum(self.softmax.weights, 1e-300)) * self.softmax.mask
        return self.own_recompute_drift * self.growth + lost * (1 + self.lse_error)

    @cached_property
    def lse_error(self) -> Array:
        """Lp = expm1(lse_prob)."""
        return np.expm1(np.minimum(self.forward.lse, LARGEST_EXPONENT))

    @cached_property
    def lse_growth(self) -> Array:
        """From an error of lse to a relative error of a row's P."""
        return compute_growth(np.minimum(self.forward.lse, LARGEST_EXPONENT))

    @cached_property
    def lse_deviation(self) -> Array:
        """s_L, to first order: the factor that a row's P share."""
        return np.where(self.forward.is_valid, self.forward.lse_deviation, 0.0) * self.lse_growth

    @cached_property
    def lse_drift(self) -> Array:
        """S_L, likewise, the stored lse's rounding included; all of Lp where first order does not hold."""
        f = self.forward
        drift = (f.lse_drift + lse_rounding(self.numerics, self.softmax.lse)) * self.lse_growth
        return np.where(f.is_valid, np.minimum(drift, self.lse_error), self.lse_error)

    def common_drifts(self, weighted: Array) -> list[tuple[float, Array]]:
        """Drifts of a (rows, keys) matrix made of P that all rows and keys share, and what each multiplies. [4.9h]

        An exp that errs one way, sm_scale rounded (it acts on s), and the constants of the exponent (on s - lse).
        """
        x, c, grown = self.softmax, self.numerics, weighted * self.growth
        exponent = np.where(x.mask, x.scores - x.lse, 0.0)
        return [
            (c.exp_error + 2 * c.u, grown),
            (c.u * (not x.has_rules), grown * x.scores),
            ((ROUNDED_CONSTANTS - 1) * c.u, grown * exponent),
        ]

    @cached_property
    def slope_drift(self) -> Array:
        """A soft cap's slope is a function of the logit: equal logits err alike, so none of it is noise."""
        return self.softmax.weights * self.worst.slope_error * self.grads.score_gradient_size

    @cached_property
    def probable_ds(self) -> Array:
        """The largest dS that is stored, but for improbable errors."""
        error = LAMBDA * self.row_term.deviation + self.row_term.drift + self.dp_drift + LAMBDA * self.dp_noise
        return np.abs(self.grads.ds) + self.grads.slope_weights * error + self.slope_drift

    @cached_property
    def ds_rounding(self) -> Array:
        """rnd of a rounding to nearest."""
        rounding = storage_error(self.probable_ds, self.numerics.u_ds, self.worst.ds_floor)
        return rounding * (self.numerics.u_ds > 0) * self.softmax.is_key

    @cached_property
    def reused_p_rounding(self) -> Array:
        """Rounding of the stored P in the dS that is computed from it."""
        return self.worst.reused_p_error(self.numerics.u_p)

    @cached_property
    def flushed_ds(self) -> Array:
        """dS where its storage, or that of the P it is made of, may give 0."""
        x, c = self.softmax, self.numerics
        flushed = self.probable_ds * (self.probable_ds < self.worst.ds_floor) * self.softmax.is_key
        if c.reuses_p:
            flushed = flushed + self.grads.slope_weights * (x.weights < c.eta_p) * self.grads.score_gradient_size
        return flushed

    @cached_property
    def ds_noise_size(self) -> Array:
        """|dS| r, and the roundings of dP - D and of its product with P."""
        return np.abs(self.grads.ds) * np.sqrt(self.noise**2 + 2 / 3 * self.numerics.u**2)

    @cached_property
    def ds_cut(self) -> float:
        """Cutting dS shrinks all of it."""
        return self.numerics.truncates * self.numerics.u_ds
