"""Worst case of out and lse: no honest kernel of the declared class exceeds it. [BOUND-OUT] [BOUND-LSE]

One property per term of SPEC.md's formula, whose letter its docstring starts with; brackets name the section that
derives it.
"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from attnconform.conformance.bounds.block import Array, Mask
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.rounding import (
    accumulation_error,
    any_in_row,
    compound,
    half_ulp,
    lse_rounding,
    output_rounding,
    storage_error,
    sum_row,
)
from attnconform.conformance.bounds.softmax import Operands, Softmax

# Past this relative error of the weights, first order says nothing and the hull of V takes over.
LARGEST_WEIGHT_ERROR = 0.9
# Growth by e^50 is no bound any more; the limit keeps infinities out of products with 0.
LARGEST_EXPONENT = 50.0


@dataclass(frozen=True)
class WorstForward:
    """Worst-case terms of one block: (rows, keys), or (rows, 1) for what a row shares."""

    softmax: Softmax
    operands: Operands
    numerics: Numerics

    @cached_property
    def out(self) -> Array:
        """B0 + h(|o| + B0), infinite where a part may overflow the format that it is stored in."""
        stored = output_rounding(self.numerics, np.abs(self.softmax.out) + self.before_storage)
        return self.before_storage + stored + self.part_overflow

    @cached_property
    def lse(self) -> Array:
        """Shift of the denominator, the logarithm, and lse's storage; infinite where a part's lse may overflow."""
        stored = lse_rounding(self.numerics, self.softmax.lse)
        return self.lse_shift + lse_arithmetic(self) + stored + self.part_lse_overflow

    @cached_property
    def is_flat(self) -> Mask:
        """Rows whose every p is exactly 1."""
        return self.softmax.is_flat & self.numerics.exp_zero_exact

    @cached_property
    def dot_error(self) -> Array:
        """A gam(acc(d, d)) + scale (dq.|k| + (|q| + dq).dk): the products, and operands changed by a rounding. [4.2]"""
        x, changed, head_dim = self.softmax, self.operands, self.softmax.q.shape[1]
        moved = changed.largest_q @ np.abs(x.k).T + (np.abs(x.q) + changed.largest_q) @ changed.largest_k.T
        return x.dot_size * compound(accumulation_error(self.numerics, head_dim, head_dim)) + x.sm_scale * moved

    @cached_property
    def rule_error(self) -> Array:
        """U|bias|; for a soft cap its tanh, and division, product and difference by at most U of the cap. [4.10]"""
        cap = self.softmax.cap or 0.0
        return self.numerics.u * self.softmax.added + cap * (self.numerics.tanh_error + 3 * self.numerics.u)

    @cached_property
    def score_rounding(self) -> Array:
        """u_s|s| each time that an unfused kernel stores the scores: unscaled, and after each rule."""
        x, c = self.softmax, self.numerics
        stores = 1 + (c.prescale == "none") + bool((x.added > 0).any()) + 3 * (x.cap is not None)
        return c.u_score * (stores * np.abs(x.scores) + x.added)

    @cached_property
    def fused_rescale_error(self) -> Array:
        """fr T U z: fl(m log2 e) does not cancel, and every tile of an unchanged maximum errs the same way. [4.2]

        From the tile of key j on the running maximum lies between s_j and m, so none is larger than z_j.
        """
        x, c = self.softmax, self.numerics
        return c.fused_rescale * c.u * x.count_tiles(c) * x.score_size

    @cached_property
    def logit_error(self) -> Array:
        """e_j: error of a logit as the weight of key j feels it, rescalings and merges included. [4.2]"""
        x, c = self.softmax, self.numerics
        sizes = c.u * ((4 + 3 * c.merges) * x.score_size + 6 * (x.gap + c.lazy_rescale) + 8)
        rescales = (x.count_tiles(c) + 2 + c.merges) * c.exp_error + self.fused_rescale_error
        e = self.dot_error + self.score_rounding + self.rule_error + sizes + rescales
        flat = c.merges * (7 * c.u * x.row_size + 4 * c.exp_error)
        return (np.where(self.is_flat, flat, e) + self.part_lse_rounding) * x.mask

    @cached_property
    def part_lse_rounding(self) -> Array:
        """hl(z): storage of a part's lse, which lies between the score of each of its keys and the row's lse. [4.11]"""
        x, c = self.softmax, self.numerics
        if not c.u_part_lse:
            return np.zeros_like(x.scores)
        return half_ulp(x.score_size, c.u_part_lse, c.eta_part_lse)

    @cached_property
    def part_rounding(self) -> Array:
        """O: storage of each part's out: parts weigh 1 together, and none exceeds its own sum of P|v|. [4.11]"""
        x, c = self.softmax, self.numerics
        return (c.u_part > 0) * (c.u_part * x.value_size + c.eta_part)

    @cached_property
    def part_overflow(self) -> Array:
        """Infinite where the out of some keys may be past the largest number that a part can be stored as."""
        x, c = self.softmax, self.numerics
        largest_out = np.abs(x.v).max(0, keepdims=True) * x.keep.max()
        past = (c.u_part > 0) & (largest_out * (1 + self.total_error) >= c.largest_part)
        return np.where(past, np.inf, self.part_lse_overflow)

    @cached_property
    def part_lse_overflow(self) -> Array:
        """Infinite where the lse of some keys may be past that number: its part is then lost, or all others are."""
        past = (self.numerics.u_part_lse > 0) & (self.softmax.score_size >= self.numerics.largest_part_lse)
        return np.where(any_in_row(past), np.inf, 0.0)

    @cached_property
    def weight_error(self) -> Array:
        """f_j = expm1(e_j): relative error of p_j, and all of it where p_j underflows."""
        lost = np.minimum(1, self.numerics.tiny / np.maximum(self.softmax.exps, 1e-300))
        return (np.expm1(np.minimum(self.logit_error, LARGEST_EXPONENT)) + lost) * self.softmax.mask

    @cached_property
    def total_error(self) -> Array:
        """F = sum P f."""
        return sum_row(self.softmax.weights * self.weight_error)

    @cached_property
    def weight_rounding(self) -> Array:
        """w_j: storage of P_j. [4.3]"""
        return stored_weight_error(self.softmax, self.numerics, u=self.numerics.worst_u_p, growth=self.weight_error)

    @cached_property
    def denominator_chain(self) -> Array:
        """ch: longest chain of additions that makes l; sums of ones are exact up to 2^24. [4.5]"""
        n, tiles, c = self.softmax.num_keys, self.softmax.count_tiles(self.numerics), self.numerics
        chain = {
            "any": n,
            "tile": np.minimum(n, c.denominator_tile) + tiles,
            "lanes": np.minimum(n, self.softmax.k.shape[0] / 4) + tiles + 2,
        }[c.denominator]
        return np.where(self.is_flat, 4, chain + tiles + 4)

    @cached_property
    def denominator_error(self) -> Array:
        """H = gam(U ch): the terms are positive, so relative to their sum. [4.5]"""
        return compound(self.numerics.u * self.denominator_chain)

    @cached_property
    def merge_error(self) -> Array:
        """M: exp(lse_s - lse) rounds numbers of size Z again, and such weights need not sum to 1. [4.2]"""
        c = self.numerics
        return c.merges * (4 * c.u * self.softmax.row_size + 2 * c.exp_error + (c.num_splits + 4) * c.u)

    @cached_property
    def accumulation(self) -> Array:
        """g: error of the sum P.V, relative to sum P|v|. [4.4]"""
        x, c = self.softmax, self.numerics
        rescales = x.count_tiles(c) + 4 + c.merges * (c.num_splits + 3)
        return compound(accumulation_error(c, x.num_keys, len(x.k)) + rescales * c.u)

    @cached_property
    def moved_weight(self) -> Array:
        """We: out' - out = sum P eps (v - out) / (1 + sum P eps), exactly; an error that all keys share cancels. [4.1]

        By the triangle inequality or by Cauchy-Schwarz, whichever is less. Out is convex in v: the hull bounds it too.
        """
        x, f, total = self.softmax, self.weight_error, self.total_error
        triangle = (x.value_weights * f) @ np.abs(x.v) + np.abs(x.out) * total
        schwarz = np.sqrt(sum_row(x.weights * f**2)) * x.spread
        hull = x.hull + self.operands.largest_v.max(0)
        moved = np.minimum(np.minimum(triangle, schwarz) / np.maximum(1 - total, 1e-9), hull)
        return np.where(total < LARGEST_WEIGHT_ERROR, moved, hull)

    @cached_property
    def before_storage(self) -> Array:
        """B0: everything but the output's rounding; the last factor covers products of two relative errors. [4.8]"""
        x, c, out = self.softmax, self.numerics, np.abs(self.softmax.out)
        stored = (self.weight_rounding * x.keep) @ np.abs(x.v) + c.l_from_p * out * sum_row(self.weight_rounding)
        sums = self.accumulation * x.value_size + out * (self.denominator_error + self.merge_error)
        first_order = self.moved_weight + stored + x.value_weights @ self.operands.largest_v + sums + self.part_rounding
        relative = np.minimum(self.total_error, 1) + self.denominator_error + self.accumulation + self.merge_error
        return first_order * (1 + c.worst_u_p + c.u_part + relative)

    @cached_property
    def lse_shift(self) -> Array:
        """-log1p(-(F + H)): what a relative error of l does to its logarithm. [4.6]"""
        relative = self.total_error + self.denominator_error
        relative = relative + self.numerics.l_from_p * sum_row(self.weight_rounding)
        shift = -np.log1p(-np.minimum(relative, LARGEST_WEIGHT_ERROR))
        unknown = self.logit_error.max(1, keepdims=True) + self.denominator_error + 1
        return np.where(relative < LARGEST_WEIGHT_ERROR, shift, unknown)


def stored_weight_error(x: Softmax, numerics: Numerics, *, u: float, growth: Array) -> Array:
    """w_j = max(u P_j, min(eta_p / l, P_j)), at most (1 - p_j + growth) / l. [4.3]

    A stored p_j is relative to the running maximum and scales down with it. 1 is representable and rounding to nearest
    monotone, so an unnormalised p_j moves by no more than its distance from 1: the largest key is not rounded at all.
    """
    divisor = np.ones_like(x.row_sum) if numerics.norm_p else x.row_sum
    rounding = storage_error(x.weights, u, numerics.eta_p / divisor)
    has_dropout = bool((x.keep != 1).any())
    if numerics.truncates or numerics.norm_p or numerics.lazy_rescale or has_dropout:
        return rounding + has_dropout * numerics.u * x.weights
    return np.minimum(rounding, (1 - x.exps + np.minimum(growth, 1)) * x.mask / x.row_sum)


def lse_arithmetic(worst: WorstForward) -> Array:
    """eps (1 + ln l), a few numbers of size Z, and a merge. [4.6]"""
    x, c = worst.softmax, worst.numerics
    logarithm = c.exp_error * (1 + np.log(x.row_sum)) * (1 + c.merges)
    return logarithm + (4 + 3 * c.merges) * c.u * x.row_size + worst.merge_error
