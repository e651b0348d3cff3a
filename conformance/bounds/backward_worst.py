"""Worst case of dQ, dK, dV and the sinks' gradient. [BOUND-GRAD]

Two errors are common to a row: Lw of the stored lse, which the recomputed P = exp(s - lse) inherits, and dD of D. They
meet the signed sums P K and dS K, all others meet absolute values: that is what keeps the bound of dQ usable. [4.7]
"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnconform.conformance.bounds.block import Array, Mask
from attnconform.conformance.bounds.forward_worst import LARGEST_EXPONENT, LARGEST_WEIGHT_ERROR, WorstForward
from attnconform.conformance.bounds.gradients import Gradients
from attnconform.conformance.bounds.numerics import FORMATS, Numerics
from attnconform.conformance.bounds.over_keys import OverKeys, TimesKeys
from attnconform.conformance.bounds.rounding import (
    accumulation_error,
    any_in_column,
    any_in_row,
    compound,
    half_ulp,
    output_rounding,
    storage_error,
    sum_row,
)
from attnconform.conformance.bounds.softmax import Operands, Softmax

# Past this error of an exponent the recomputed P is unknown. [BOUND-VOID]
LARGEST_LOGIT_ERROR = 20.0
# e^-750 is 0 even in float64.
VANISHING_GAP = 750.0


@dataclass(frozen=True)
class WorstBackward:
    """Worst-case terms of one block: (rows, keys), (rows, 1), or (keys, 1) for what a key's rows share."""

    forward: WorstForward
    grads: Gradients

    @property
    def softmax(self) -> Softmax:
        return self.forward.softmax

    @property
    def operands(self) -> Operands:
        return self.forward.operands

    @property
    def numerics(self) -> Numerics:
        return self.forward.numerics

    @cached_property
    def dq(self) -> Array:
        """sm_scale [(own + rnd)|K| + dD(|P K| + ..) + Lw(|dS K| + ..) + operands + gq], and storage."""
        x = self.softmax
        moved = self.ds_size @ self.operands.largest_k
        sums = self.sum_over_keys * (self.ds_size @ np.abs(x.k) + moved)
        error = x.sm_scale * (self.meet(TimesKeys(x.k)) + moved + sums)
        stored = store_gradient(error, self.grads.dq, self.root_scaling, self.numerics)
        return np.where(self.is_void_row, np.inf, stored)

    def meet(self, over: OverKeys) -> Array:
        """Error that dS brings into a sum over keys: own and rnd by magnitudes, dD and Lw by signed sums. [4.7]"""
        own = over.absolute(self.own_error + self.ds_rounding)
        from_row = np.abs(over.signed(self.grads.slope_weights)) + over.absolute(self.slope_weight_error)
        from_lse = np.abs(over.signed(self.grads.ds)) + over.absolute(np.abs(self.grads.ds) * self.recomputed_error)
        return (own + self.row_error * from_row + self.lse_error * from_lse) * self.weight_growth

    @cached_property
    def dk(self) -> Array:
        """sm_scale [(tot + rnd)^T|Q| + operands + gk], heads that are rounded apart, and storage."""
        x, g, changed = self.softmax, self.grads, self.operands
        own, moved = (self.ds_error + self.ds_rounding).T @ np.abs(x.q), self.ds_size.T @ changed.largest_q
        error = x.sm_scale * (own + moved + self.sum_over_rows * (self.ds_size.T @ np.abs(x.q) + moved))
        error = error + round_heads(g, x.sm_scale * g.ds, x.q, error, self.numerics)
        return np.where(self.is_void_key, np.inf, store_gradient(error, g.dk, self.root_scaling, self.numerics))

    @cached_property
    def dv(self) -> Array:
        """(Pe + pn)^T|dO| + operands + gk, heads that are rounded apart, and storage."""
        x, g, changed = self.softmax, self.grads, self.grads.largest_do_change
        error_of_p = (self.weight_error + self.weight_rounding) * x.keep
        size = x.value_weights + error_of_p
        own, moved = error_of_p.T @ np.abs(g.do), size.T @ changed
        error = own + moved + self.sum_over_rows * (size.T @ np.abs(g.do) + moved)
        error = error + round_heads(g, x.value_weights, g.do, error, self.numerics)
        return np.where(self.is_void_key, np.inf, store_gradient(error, g.dv, 0.0, self.numerics))

    @cached_property
    def logit_error(self) -> Array:
        """eb: error of s - lse, without that of lse."""
        x, c, f = self.softmax, self.numerics, self.forward
        sizes = c.u * (6 * x.score_size + 4 * self.grads.lse_gap + 8)
        return (f.dot_error + f.score_rounding + f.rule_error + sizes + 2 * c.exp_error) * x.mask

    @cached_property
    def recomputed_error(self) -> Array:
        """fb = expm1(eb): relative error of the recomputed P, and all of it where it underflows."""
        x = self.softmax
        lost = np.minimum(1, self.numerics.tiny / np.maximum(x.weights, 1e-300))
        return (np.expm1(np.minimum(self.logit_error, LARGEST_EXPONENT)) + lost) * x.mask

    @cached_property
    def lse_error(self) -> Array:
        """Lw = expm1(lse_worst): the same factor for all keys of a row."""
        return np.expm1(np.minimum(self.forward.lse, LARGEST_EXPONENT))

    @cached_property
    def weight_growth(self) -> Array:
        """1 + Lw where parts' lse is stored: the recomputed P that all else multiplies may be larger than P. [4.11]"""
        return 1 + (self.numerics.u_part_lse > 0) * self.lse_error

    @cached_property
    def slope_error(self) -> Array:
        """sigma: error of a soft cap's slope 1 - t^2, at most 2 tau |t| + tau^2 where t is off by tau. [4.10]"""
        x, u = self.softmax, self.numerics.u
        if x.cap is None:
            return np.zeros_like(x.scores)
        tanh_error = self.forward.dot_error / x.cap + self.numerics.tanh_error + 2 * u
        tanh = np.sqrt(np.maximum(1 - x.slope, 0))
        return np.minimum(2 * tanh_error * tanh + tanh_error**2 + 3 * u, 1) * x.mask

    @cached_property
    def slope_weights(self) -> Array:
        """P times the largest slope that a kernel may use."""
        return self.grads.slope_weights + self.softmax.weights * self.slope_error

    @cached_property
    def slope_weight_error(self) -> Array:
        """Error of P times the slope: second order where it meets dD."""
        return self.slope_weights * self.recomputed_error + self.softmax.weights * self.slope_error

    @cached_property
    def out_rounding(self) -> Array:
        """hO: rounding of the out that D is made of; a row whose out may overflow is VOID anyway."""
        size = np.abs(self.softmax.out) + self.forward.before_storage
        return half_ulp(size, self.numerics.u_out, self.numerics.eta_out)

    @cached_property
    def row_error(self) -> Array:
        """dD: error of D, which is dO.out with the rounded out, or sum P dP where no out is at hand (unfused)."""
        x, c, g, f = self.softmax, self.numerics, self.grads, self.forward
        if c.norm_p:
            within, beyond = self.row_error_by_terms, self.row_error_by_hull
        else:
            beyond = sum_row(np.abs(g.do) * (f.before_storage + self.out_rounding))
            within = np.minimum(self.row_error_by_terms, beyond)
        error = np.where(f.total_error < LARGEST_WEIGHT_ERROR, within, beyond)
        summed = compound(g.do.shape[1] * c.u)
        stored = (c.u_d + c.u * (g.dlse != 0)) * np.abs(g.row_term)
        made = sum_row(g.do_error * (np.abs(x.out) + f.before_storage + self.out_rounding))
        return (error + made + summed * sum_row(np.abs(g.do * x.out)) + stored) * (1 + summed + c.u_d)

    @cached_property
    def row_error_by_terms(self) -> Array:
        """Output rounding, sum P.V, the common factor of l; P's rounding acts through dO.v and not through |dO|.|v|."""
        x, c, g, f = self.softmax, self.numerics, self.grads, self.forward
        total = np.minimum(f.total_error, LARGEST_WEIGHT_ERROR)
        elementwise = self.out_rounding + f.accumulation * x.value_size + x.value_weights @ self.operands.largest_v
        elementwise = elementwise + f.part_rounding
        factor = f.denominator_error + f.merge_error + c.l_from_p * sum_row(f.weight_rounding)
        moved = sum_row(x.weights * f.weight_error * g.out_share) / (1 - total)
        weights = sum_row(f.weight_rounding * np.abs(g.dp)) + moved
        first_order = sum_row(np.abs(g.do) * elementwise) + np.abs(g.row_dot) * factor + weights
        if c.norm_p:
            first_order = first_order + self.unfused_row_error
        return first_order * (1 + c.worst_u_p + total + f.denominator_error + f.accumulation)

    @cached_property
    def unfused_row_error(self) -> Array:
        """Errors of the dP that D is summed from, and of that sum."""
        x, c, g = self.softmax, self.numerics, self.grads
        summed = x.num_keys * c.u * np.abs(g.dp)
        return sum_row(x.weights * (summed + self.dp_error))

    @cached_property
    def row_error_by_hull(self) -> Array:
        """D' = sum P' dP' of unknown P': it may reach any |dP - D|."""
        x, c, g = self.softmax, self.numerics, self.grads
        rounded = (c.worst_u_p + x.num_keys * c.u) * np.abs(g.dp) + self.dp_error
        furthest = ((g.out_share + rounded) * x.mask).max(1, keepdims=True)
        return furthest * (1 + c.worst_u_p)

    @cached_property
    def dp_error(self) -> Array:
        """gam(acc(dv, dv)) Ad, operands changed by a rounding, and the storage of dP."""
        x, c, g, changed = self.softmax, self.numerics, self.grads, self.operands
        head_dim, do_change = g.do.shape[1], self.grads.largest_do_change
        moved = do_change @ np.abs(x.v).T + (np.abs(g.do) + do_change) @ changed.largest_v.T
        products = compound(accumulation_error(c, head_dim, head_dim)) * g.dp_size
        return products + moved * x.keep + c.u_dp * np.abs(g.dp)

    @cached_property
    def own_error(self) -> Array:
        """own: error of dS that its row does not share."""
        grown = 1 + self.recomputed_error
        relative = self.recomputed_error + 4 * self.numerics.u
        own = self.slope_weights * grown * self.dp_error + relative * np.abs(self.grads.ds)
        from_slope = self.softmax.weights * self.slope_error * self.grads.score_gradient_size
        return own + (from_slope + self.reused_p_error(self.numerics.worst_u_p)) * grown

    def reused_p_error(self, u: float) -> Array:
        """Error of dS where it is computed from the stored P."""
        x, c = self.softmax, self.numerics
        if not c.reuses_p:
            return np.zeros_like(x.weights)
        return storage_error(x.weights, u, c.eta_p) * self.grads.score_gradient_size * (x.slope + self.slope_error)

    @cached_property
    def ds_error(self) -> Array:
        """tot: own, dD and Lw together."""
        grown = 1 + self.recomputed_error
        shared = self.slope_weights * grown * self.row_error + self.lse_error * np.abs(self.grads.ds) * grown
        return (self.own_error + shared) * self.weight_growth

    @cached_property
    def ds_rounding(self) -> Array:
        """rnd: storage of dS; that of a sink enters no product and is not stored."""
        size = np.abs(self.grads.ds) + self.ds_error
        return storage_error(size, self.numerics.worst_u_ds, self.ds_floor) * self.softmax.is_key

    @property
    def ds_floor(self) -> float:
        """eta_ds; scaling dS by less than 1 before it is stored moves the floor up."""
        scale = self.softmax.sm_scale or 1.0  # products with 0 are exact
        return self.numerics.eta_ds / (min(scale, 1.0) if self.numerics.ds_scaled else 1.0)

    @cached_property
    def ds_size(self) -> Array:
        """|dS| + tot + rnd: the largest dS that a kernel may hold."""
        return np.abs(self.grads.ds) + self.ds_error + self.ds_rounding

    @cached_property
    def weight_error(self) -> Array:
        """Pe = P (fb + Lw + fb Lw)."""
        fb, lse = self.recomputed_error, self.lse_error
        return self.softmax.weights * (fb + lse + fb * lse)

    @cached_property
    def weight_rounding(self) -> Array:
        """pn: storage of the recomputed P."""
        size = self.softmax.weights + self.weight_error
        return storage_error(size, self.numerics.worst_u_p, self.numerics.eta_p)

    @cached_property
    def sum_over_keys(self) -> Array:
        """gq: error of dS K relative to the sum of magnitudes."""
        x, c = self.softmax, self.numerics
        return compound(accumulation_error(c, x.num_keys, len(x.k)) + (x.count_tiles(c) + 4) * c.u)

    @cached_property
    def sum_over_rows(self) -> Array:
        """gk: error of dS^T Q and P^T dO relative to the sum of magnitudes."""
        x, c, rows = self.softmax, self.numerics, self.grads.rows_of_key
        tiles = np.minimum(rows, np.ceil(x.num_rows / c.min_tile))
        return compound(accumulation_error(c, rows, x.num_rows) + (tiles + 4 + x.num_heads) * c.u)

    @property
    def root_scaling(self) -> float:
        """dq and dk are rounded once more where they are multiplied by the root of sm_scale."""
        return (self.numerics.prescale == "q_and_k") * self.numerics.u_out

    @cached_property
    def is_void_row(self) -> Mask:
        """Rows whose exponent is unknown, or whose stored P, dS or out may overflow. [BOUND-VOID]"""
        c, stored_ds = self.numerics, self.ds_size * (self.softmax.sm_scale if self.numerics.ds_scaled else 1.0)
        unknown = (np.maximum(self.logit_error, self.forward.logit_error) > LARGEST_LOGIT_ERROR) & ~self.vanishes
        largest_p = FORMATS[c.out_dtype if c.p_storage == "none" else c.p_storage].largest
        stored_p = self.softmax.weights * (1 + self.recomputed_error) * (1 + self.lse_error)
        overflows = (stored_p >= largest_p) | (stored_ds >= c.largest_ds)
        return any_in_row(unknown | overflows) | any_in_row(np.isinf(self.forward.out))

    @cached_property
    def vanishes(self) -> Mask:
        """Keys whose P is 0 in any arithmetic, whatever the error of their logit."""
        return self.grads.lse_gap - self.logit_error > VANISHING_GAP

    @cached_property
    def is_void_key(self) -> Mask:
        """Keys that such a row sees."""
        return any_in_column(self.softmax.mask & self.is_void_row)


def store_gradient(error: Array, exact: Array, root_scaling: float, numerics: Numerics) -> Array:
    """The gradient's own rounding added to its error."""
    size = np.abs(exact) + error
    return error + output_rounding(numerics, size) + root_scaling * size


def round_heads(grads: Gradients, left: Array, right: Array, error: Array, numerics: Numerics) -> Array:
    """Half an ulp of each head's part of left^T right, where heads are rounded before their sum."""
    x = grads.softmax
    if not numerics.heads_low or x.num_heads == 1:
        return np.zeros_like(error)
    heads = [x.head_of_row == head for head in range(x.num_heads)]
    sizes = [np.abs(left[rows].T @ right[rows]) + error for rows in heads]
    return np.sum([half_ulp(size, numerics.u_out, numerics.eta_out) for size in sizes], axis=0)
