"""Probable error of out and lse, about six standard deviations. [BOUND-PROBABILISTIC]

Random parts add in squares, systematic parts add up, the output's rounding stays whole. Where roundings are not
independent, or not zero on average, a term of its own says so (items a to g of section 4.9).
"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from attnconform.conformance.bounds.block import Array, Mask
from attnconform.conformance.bounds.correlation import (
    Cells,
    absolute_cells,
    block_prefixes,
    bound_partial_sums,
    compute_average_partial,
    compute_typical_partial,
    count_later_rises,
    relative_cells,
)
from attnconform.conformance.bounds.forward_worst import (
    LARGEST_EXPONENT,
    WorstForward,
    lse_arithmetic,
    stored_weight_error,
)
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.rounding import (
    accumulation_drift,
    accumulation_variance,
    largest,
    lse_rounding,
    output_rounding,
    sum_row,
)
from attnconform.conformance.bounds.softmax import Operands, Softmax

LAMBDA = 6.0
# Logits closer than this share one rounding error of their weight. [4.9b]
LOGIT_CELL = 2.0**-11
# Of numbers as large as a logit, and of numbers as large as its distance from the maximum: each on its own.
SIZED_ROUNDINGS = 4.0
# sm_scale, log2 e, and their product. [4.9h]
ROUNDED_CONSTANTS = 3.0
# Rises of the running maximum after a key in a random place: one on average, this many hardly ever. [4.9g]
RISES_AT_RANDOM = 4.0


def compute_growth(exponent: Array) -> Array:
    """expm1(t) / t: from an error of the exponent to a relative error of the weight."""
    return np.where(exponent > 1e-9, np.expm1(exponent) / np.maximum(exponent, 1e-9), 1)


@dataclass(frozen=True)
class ProbableForward:
    """Probable terms of one block: (rows, keys), or (rows, 1) for what a row shares."""

    worst: WorstForward

    @property
    def softmax(self) -> Softmax:
        return self.worst.softmax

    @property
    def operands(self) -> Operands:
        return self.worst.operands

    @property
    def numerics(self) -> Numerics:
        return self.worst.numerics

    @cached_property
    def out(self) -> Array:
        """B1 + h(|o| + B1), never above the worst case."""
        deviation = LAMBDA * np.sqrt(self.out_variance)
        grown = (1 + 2 * self.numerics.worst_u_p) / np.maximum(1 - self.total_error, 0.5)
        error = (deviation + self.out_drift) * grown
        bound = error + output_rounding(self.numerics, np.abs(self.softmax.out) + error)
        return np.where(self.is_valid, np.minimum(self.worst.out, bound), self.worst.out)

    @cached_property
    def lse(self) -> Array:
        """6 sqrt V + S, and lse's storage; never above the worst case."""
        bound = LAMBDA * self.lse_deviation + self.lse_drift + lse_rounding(self.numerics, self.softmax.lse)
        return np.where(self.is_valid, np.minimum(self.worst.lse, bound), self.worst.lse)

    @cached_property
    def lse_deviation(self) -> Array:
        """Noise of the denominator's terms, of runs of them, and of their sum."""
        c, x = self.numerics, self.softmax
        runs = sum_row(x.weights * self.run_noise * self.growth) ** 2
        variance = sum_row(self.logit_variance) + runs + c.u**2 * self.chain_variance / 3
        return np.sqrt(variance + c.l_from_p * self.stored_sum_variance) / np.maximum(1 - self.total_error, 0.5)

    @cached_property
    def lse_drift(self) -> Array:
        """Drift of the terms, an exp that errs one way, and the logarithm."""
        c, drift = self.numerics, self.own_drift + self.constant_drift + self.run_drift
        terms = sum_row(self.softmax.weights * drift * self.growth) + c.l_from_p * self.stored_sum_drift
        return (terms + c.exp_error + 4 * c.u + lse_arithmetic(self.worst)) / np.maximum(1 - self.total_error, 0.5)

    @cached_property
    def typical_dot(self) -> Array:
        """x~: typical partial sum of sm_scale q.k."""
        return self.softmax.sm_scale * compute_typical_partial(self.softmax.q, self.softmax.k.T)

    @cached_property
    def partial_out(self) -> Array:
        """v^: partial sums of P.V."""
        return compute_average_partial(self.softmax.value_weights, self.softmax.v)

    @cached_property
    def known_change(self) -> Array:
        """known_j: the rounding of an input is data, not chance, so its effect on a logit is computed. [4.9d]"""
        q, k = self.softmax.q, self.softmax.k
        changes = [dq @ k.T + (q + dq) @ dk.T for dq, dk in product(self.operands.q, self.operands.k)]
        made = self.operands.q_error @ np.abs(k).T + np.abs(q) @ self.operands.k_error.T
        return self.softmax.sm_scale * (largest(changes) + made)

    @cached_property
    def rescales(self) -> Array:
        """R_j: rises of the running maximum after key j, keys in order or reversed, or at random. [4.9g]

        A key in a random place has one rise after it on average, and n keys rise at most n - 1 times.
        """
        x, c = self.softmax, self.numerics
        shifted = np.where(x.mask, x.scores, -np.inf)
        in_order = np.maximum(count_later_rises(shifted), count_later_rises(shifted[:, ::-1])[:, ::-1])
        likely = np.maximum(in_order, np.minimum(RISES_AT_RANDOM, x.num_keys - 1))
        return np.minimum(x.count_tiles(c), likely) + c.merges * c.num_splits

    @cached_property
    def logit_noise(self) -> Array:
        """Standard deviation of a logit's error: dot product, storage, numbers of its size, exp and its argument."""
        x, c, head_dim = self.softmax, self.numerics, self.softmax.q.shape[1]
        dot = accumulation_variance(c, head_dim, head_dim) * self.typical_dot**2
        sizes = SIZED_ROUNDINGS * c.u**2 * ((x.score_size + x.added) ** 2 + (x.gap + c.lazy_rescale) ** 2)
        return np.sqrt(dot + (self.worst.score_rounding**2 + sizes + c.exp_error**2) / 3) * x.mask

    @cached_property
    def logit_drift(self) -> Array:
        """b_j: systematic part of a logit's error, all of it."""
        return self.own_drift + self.constant_drift + self.run_drift + LAMBDA * self.run_noise

    @cached_property
    def own_drift(self) -> Array:
        """Of a key's own: cuts, input roundings, rules, underflow, and what only exp(0) is spared. [4.9a, d, e]"""
        x, c, head_dim = self.softmax, self.numerics, self.softmax.q.shape[1]
        cuts = accumulation_drift(c, head_dim, head_dim) * self.typical_dot
        spared = c.exp_error * (x.gap == 0)
        lost = np.minimum(1, c.tiny / np.maximum(x.exps, 1e-300))
        drift = cuts + spared + self.known_change + self.worst.rule_error + self.scale_drift + lost
        return np.where(self.worst.is_flat, 0.0, drift) * x.mask

    @cached_property
    def scale_drift(self) -> Array:
        """A rounded sm_scale behind a rule: what is left of s - m then says nothing of its sign. [4.9h]"""
        x = self.softmax
        return x.has_rules * self.numerics.u * (np.abs(x.scores) + x.added)

    @cached_property
    def constant_drift(self) -> Array:
        """sm_scale, log2 e and their product are rounded once for all keys, and act on s - m. [4.9h]"""
        return ROUNDED_CONSTANTS * self.numerics.u * (self.softmax.gap + self.numerics.lazy_rescale) * self.softmax.mask

    @cached_property
    def run_drift(self) -> Array:
        """Alike along runs of keys: of tiles that are all rescaled by a wrong 1, of splits where all p are 1. [4.9g]"""
        x, c = self.softmax, self.numerics
        flat = c.merges * (4 * c.u * x.row_size + 2 * c.exp_error)
        return np.where(self.worst.is_flat, flat, self.worst.fused_rescale_error) * x.mask

    @cached_property
    def run_noise(self) -> Array:
        """Random, but the same along runs of keys: of a rounded maximum or split, and of rescale factors. [4.9g]"""
        return np.hypot(self.maximum_noise, self.rescale_noise)

    @cached_property
    def maximum_noise(self) -> Array:
        """(1 + 3two) U z / sqrt 3, and that of a part's stored lse: once for all keys that it is subtracted from."""
        c, x = self.numerics, self.softmax
        rounded = np.where(self.worst.is_flat, 0.0, c.u * (1 + 3 * c.merges) * x.score_size)
        return np.hypot(rounded, np.minimum(self.worst.part_lse_rounding, LARGEST_EXPONENT)) / np.sqrt(3) * x.mask

    @cached_property
    def rescale_noise(self) -> Array:
        """eps sqrt(R / 3): a rescale factor errs for all earlier keys."""
        noise = self.numerics.exp_error * np.sqrt(self.rescales / 3)
        return np.where(self.worst.is_flat, 0.0, noise) * self.softmax.mask

    @cached_property
    def num_maxima(self) -> Array:
        """How many maxima a row has, each with its own rounding and its own run of keys."""
        return 1 + self.rescales.max(1, keepdims=True)

    @cached_property
    def exponent(self) -> Array:
        """t = b + 6 r."""
        return np.minimum(self.logit_drift + LAMBDA * self.logit_noise, LARGEST_EXPONENT)

    @cached_property
    def noise(self) -> Array:
        """r_j, relative to the weight."""
        return self.logit_noise * self.growth

    @cached_property
    def growth(self) -> Array:
        """From an error of the exponent to a relative error of the weight."""
        return compute_growth(self.exponent)

    @cached_property
    def total_error(self) -> Array:
        """Fp = sum P expm1(t)."""
        return sum_row(self.softmax.weights * np.expm1(self.exponent))

    @cached_property
    def is_valid(self) -> Mask:
        """Rows where first order holds; elsewhere the worst case is used."""
        return self.total_error < 0.5

    @cached_property
    def logit_cells(self) -> Cells:
        """Keys whose logits round alike: close ones, or where scores are stored those of one stored value. [4.9b]"""
        if self.numerics.u_score:
            return relative_cells(self.softmax.scores, self.numerics.u_score / 2)
        return absolute_cells(self.softmax.scores, LOGIT_CELL, self.softmax.mask)

    @cached_property
    def weight_cells(self) -> Cells:
        """Keys whose stored P round alike: a quarter of an ulp of p is so much of a logit. [4.9b]"""
        return absolute_cells(self.softmax.scores, self.numerics.u_p / 2 or 1, self.softmax.mask)

    @cached_property
    def weight_rounding(self) -> Array:
        """w_j of a rounding to nearest; that of a cut errs one way and is drift besides."""
        rounding = stored_weight_error(self.softmax, self.numerics, u=self.numerics.u_p, growth=self.exponent)
        return rounding * (self.numerics.u_p > 0)

    @cached_property
    def flushed(self) -> Array:
        """P where storing it may give 0: all such errors go one way. [4.9e]"""
        divisor = 1.0 if self.numerics.norm_p else self.softmax.row_sum
        return self.softmax.weights * (self.softmax.weights * divisor < self.numerics.eta_p)

    @cached_property
    def logit_variance(self) -> Array:
        """(P r)^2 per cell, spread over its keys."""
        return self.logit_cells.sum_coherent(self.softmax.weights * self.noise)

    @cached_property
    def stored_sum_variance(self) -> Array:
        """Variance of the sum of the stored P."""
        return sum_row(self.weight_cells.sum_coherent(self.weight_rounding)) / 3

    @cached_property
    def stored_sum_drift(self) -> Array:
        """What cuts and flushes take from the sum of the stored P."""
        return self.numerics.truncates * self.numerics.u_p + sum_row(self.flushed)

    @cached_property
    def chain_variance(self) -> Array:
        """ch2: equal terms added in a row drift linearly, by the coincidence index N2 / n^2. [4.9c]"""
        chain = self.worst.denominator_chain
        alike = sum_row(self.logit_cells.sum_coherent(self.softmax.mask.astype(np.float64)))
        grown = np.maximum(chain, chain**2 * alike / self.softmax.num_keys**2)
        return np.minimum(grown, 3 * (self.worst.denominator_error / self.numerics.u / LAMBDA) ** 2)

    @cached_property
    def sum_variance(self) -> Array:
        """var(n, N) + U^2 T / 3: accumulation of P.V, relative to the square of v^."""
        x, c = self.softmax, self.numerics
        return accumulation_variance(c, x.num_keys, len(x.k)) + c.u**2 * x.count_tiles(c) / 3

    @cached_property
    def out_variance(self) -> Array:
        """V: logits, runs of them, storage of P, accumulation, denominator."""
        x, c, logit = self.softmax, self.numerics, self.logit_variance
        moved = (logit * x.keep**2) @ x.v**2 - 2 * x.out * ((logit * x.keep) @ x.v) + x.out**2 * sum_row(logit)
        stored = self.weight_cells.sum_coherent(self.weight_rounding * x.keep) @ x.v**2 / 3
        if c.l_from_p:
            stored = 2 * (stored + x.out**2 * self.stored_sum_variance)
        denominator = x.out**2 * c.u**2 * self.chain_variance / 3
        maxima = self.moved_by_runs(self.maximum_noise, np.sqrt(self.num_maxima))
        runs = maxima**2 + self.moved_by_runs(self.rescale_noise) ** 2
        return np.maximum(moved, 0) + runs + stored + self.sum_variance * self.partial_out**2 + denominator

    @cached_property
    def row_drift(self) -> Array:
        """8U, a merge, and what cutting P takes: relative to the row's out."""
        c = self.numerics
        cut = c.truncates * c.u_p
        return 8 * c.u + self.worst.merge_error + cut + c.l_from_p * self.stored_sum_drift

    def moved_by_runs(self, along_runs: Array, runs: Array | int = 1) -> Array:
        """What relative errors alike along runs do to out: a run meets a partial sum of P (v - o), whose whole is 0."""
        x, error = self.softmax, along_runs * self.growth
        schwarz = np.sqrt(sum_row(x.weights * error**2)) * x.spread
        return np.minimum(schwarz, runs * error.max(1, keepdims=True) * self.partial_deviation)

    @cached_property
    def constant_moved(self) -> Array:
        """What rounded constants do to out: one factor for all keys meets the signed sum of P |s - m| (v - o)."""
        x, drift = self.softmax, self.softmax.weights * self.constant_drift * self.growth
        return np.abs((drift * x.keep) @ x.v - x.out * sum_row(drift))

    @cached_property
    def partial_deviation(self) -> Array:
        """Any contiguous partial sum of P (v - o)."""
        x, blocks = self.softmax, 16
        of_v = block_prefixes(x.value_weights, x.v, blocks)
        of_p = block_prefixes(x.weights, np.ones((len(x.k), 1)), blocks)
        prefixes = (moved - x.out * weight for moved, weight in zip(of_v, of_p, strict=True))
        mixed = (x.value_weights * x.weights) @ x.v
        squares = x.value_weights**2 @ x.v**2 - 2 * x.out * mixed + x.out**2 * sum_row(x.weights**2)
        return bound_partial_sums(prefixes, np.maximum(squares, 0), x.spread + 1e-15 * x.value_size)

    @cached_property
    def out_drift(self) -> Array:
        """S_: systematic part of out's error."""
        x = self.softmax
        return (
            np.sqrt(sum_row(x.weights * (self.own_drift * self.growth) ** 2)) * x.spread
            + self.moved_by_runs(self.run_drift, self.numerics.num_splits)
            + self.constant_moved
            + (self.flushed * x.keep) @ np.abs(x.v)
            + largest([x.value_weights @ change for change in self.operands.v])
            + x.value_weights @ self.operands.v_error
            + accumulation_drift(self.numerics, x.num_keys, len(x.k)) * self.partial_out
            + np.abs(x.out) * self.row_drift
            + self.part_rounding
        )

    @cached_property
    def part_rounding(self) -> Array:
        """O of few roundings, whole: parts sum to o, each off by no more than a partial sum of P (v - o). [4.11]"""
        x, c = self.softmax, self.numerics
        if not c.u_part:
            return np.zeros_like(x.out)
        sizes = np.abs(x.out) + c.num_splits * self.partial_deviation
        return np.minimum(c.u_part * sizes + c.eta_part, self.worst.part_rounding)
