"""Bounds of gradients of what scores are made with: slopes, tables, caps, sink logits. [BOUND-RULE] [BOUND-GRAD]

Such a gradient is a sum of coefficient times score gradient over all edges that a parameter has a part in. dS errs as
in dQ, with the coefficient in the place of a key; the coefficient errs itself, and a cap's moves with its score.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from attnconform.conformance.bounds.backward_worst import WorstBackward
from attnconform.conformance.bounds.block import Array, AttentionBlock, Mask
from attnconform.conformance.bounds.correlation import average_partial_sums, split_evenly
from attnconform.conformance.bounds.forward import forward_bounds
from attnconform.conformance.bounds.forward_probable import LAMBDA
from attnconform.conformance.bounds.gradients import compute_gradients
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.over_keys import TimesCoefficients
from attnconform.conformance.bounds.rounding import compound
from attnconform.conformance.bounds.score_gradient_probable import ProbableScoreGradient
from attnconform.conformance.bounds.softmax import Softmax

# Slopes of tanh(x) - x (1 - tanh²) and of 1 - tanh², whichever is larger: 2 x tanh (1 - tanh²) and 2 tanh (1 - tanh²).
STEEPEST_COEFFICIENT = 0.77
# Roundings beside the longest of its sums: products on both sides of it, and the steps of a reduction.
EXTRA_ROUNDINGS = 16


@dataclass(frozen=True)
class Coefficients:
    """What each edge's score gradient is multiplied by on its way to one rule's parameters; 0 where nothing is seen."""

    value: Array  # (rows, seqlen_kv), the slopes of later rules included
    rounding: Array  # (rows, seqlen_kv), how far a kernel's own arithmetic may take it
    steepness: Array  # (rows, seqlen_kv), its change by a unit of the score that a cap is given
    parameter: npt.NDArray[np.intp]  # (rows, seqlen_kv), flat index into the rule's parameters
    num_parameters: int


@dataclass(frozen=True)
class ParameterBound:
    """One block's part: worst cases, variances and drifts each add up over blocks, (num_parameters,)."""

    worst: Array
    variance: Array
    drift: Array

    def __add__(self, other: "ParameterBound") -> "ParameterBound":
        return ParameterBound(self.worst + other.worst, self.variance + other.variance, self.drift + other.drift)

    def widened(self, error: Array) -> "ParameterBound":
        """With an error of its own on top of both forms."""
        return ParameterBound(self.worst + error, self.variance, self.drift + error)

    def among(self, num_parameters: int, first: int) -> "ParameterBound":
        """The same as a part of more parameters, from the first of its own on."""
        place = (first, num_parameters - first - len(self.worst))
        return ParameterBound(*(np.pad(x, place) for x in (self.worst, self.variance, self.drift)))

    @property
    def probable(self) -> Array:
        """6 sqrt V + S, never above the worst case."""
        return np.minimum(self.worst, LAMBDA * np.sqrt(self.variance) + self.drift)


def no_bound(num_parameters: int) -> ParameterBound:
    """Of no edges."""
    zero = np.zeros(num_parameters)
    return ParameterBound(zero, zero, zero)


def rule_bounds(
    block: AttentionBlock,
    do: Array,  # (rows, head_dim_vo)
    numerics: Numerics,
    coefficients: list[Coefficients],
    num_rows: list[int],  # that a parameter of each rule sums over, in this block and others
    dlse: Array | None = None,
    do_error: Array | None = None,
) -> list[ParameterBound]:
    """Worst-case and probable error of every rule's gradients, this block's part. [BOUND-RULE]

    The rules' slopes are taken as 1 in dS: a parameter's gradient starts after its rule, and later slopes are part of
    its coefficient.
    """
    flat = replace(block, slope=np.ones(block.mask.shape))
    forward = forward_bounds(flat, numerics)
    if forward.terms is None:
        return [no_bound(c.num_parameters) for c in coefficients]
    gradients = compute_gradients(forward.terms.softmax, do, dlse, numerics, do_error)
    probable = ProbableScoreGradient(forward.terms, WorstBackward(forward.terms.worst, gradients))
    return [
        bound_parameters(probable, list_visible(probable.softmax, c), rows) if c.num_parameters else no_bound(0)
        for c, rows in zip(coefficients, num_rows, strict=True)
    ]


def bound_parameters(probable: ProbableScoreGradient, visible: Coefficients, num_rows: int) -> ParameterBound:
    """One rule's part in one block, its coefficients listed as the softmax lists its rows and keys."""
    return ProbableParameters(WorstParameters(probable.worst, visible, num_rows), probable).bound


def list_visible(x: Softmax, c: Coefficients) -> Coefficients:
    """Rows that see something; a sink is no edge of a rule."""
    sinks = len(x.k) - c.value.shape[1]
    value, rounding, steepness = (
        np.pad(m[x.visible], ((0, 0), (0, sinks))) for m in (c.value, c.rounding, c.steepness)
    )
    parameter = np.pad(c.parameter[x.visible], ((0, 0), (0, sinks)))
    return Coefficients(value, rounding, steepness, parameter, c.num_parameters)


def sink_coefficients(x: Softmax) -> Coefficients:
    """A sink's gradient is the sum over rows of the last column of dS, by head; nothing more is multiplied."""
    value, parameter = np.zeros(x.mask.shape), np.zeros(x.mask.shape, dtype=np.intp)
    value[:, -1] = 1.0
    parameter[:, -1] = x.head_of_row
    return Coefficients(value, np.zeros_like(value), np.zeros_like(value), parameter, x.num_heads)


@dataclass(frozen=True)
class WorstParameters:
    """Worst-case terms of one rule in one block: (rows, keys), or (rows, num_parameters) once summed over keys."""

    ds: WorstBackward
    coefficients: Coefficients
    num_rows: int

    @property
    def softmax(self) -> Softmax:
        return self.ds.softmax

    @property
    def numerics(self) -> Numerics:
        return self.ds.numerics

    @cached_property
    def bound(self) -> Array:
        """What dS brings, what the coefficient brings, and the sum; infinite where the exponent is unknown."""
        moved = self.over.gather(self.ds.ds_size * self.coefficient_error)
        error = self.ds.meet(self.over) + moved
        error = error + compound(self.chain * self.numerics.u) * (self.over.absolute(self.ds.ds_size) + moved)
        return np.where(self.ds.is_void_row & (self.edges > 0), np.inf, error)

    @cached_property
    def over(self) -> TimesCoefficients:
        c = self.coefficients
        return TimesCoefficients(c.value, c.parameter, c.num_parameters)

    @cached_property
    def edges(self) -> Array:
        """n: a row's edges by parameter."""
        return self.over.gather(self.softmax.mask.astype(np.float64) * (self.coefficients.value != 0))

    @cached_property
    def chain(self) -> Array:
        """A row is summed over its edges, then rows are summed one after the other."""
        return self.edges + self.num_rows + EXTRA_ROUNDINGS

    @cached_property
    def coefficient_error(self) -> Array:
        """dc: its own roundings, and the steepest slope times the error of the score."""
        return self.coefficients.rounding + self.coefficients.steepness * self.given_error

    @cached_property
    def given_error(self) -> Array:
        """Of the score that a cap is given: its dot product, biases, stores and a few roundings, none larger than A."""
        c = self.numerics
        return self.ds.forward.dot_error + (4 * c.u + 4 * c.u_score) * self.softmax.dot_size


@dataclass(frozen=True)
class ProbableParameters:
    """Probable terms of one rule in one block."""

    worst: WorstParameters
    ds: ProbableScoreGradient

    @property
    def softmax(self) -> Softmax:
        return self.ds.softmax

    @property
    def numerics(self) -> Numerics:
        return self.ds.numerics

    @property
    def over(self) -> TimesCoefficients:
        return self.worst.over

    @property
    def bound(self) -> ParameterBound:
        """Summed over rows: worst cases and drifts as they are, deviations by how far rows share their errors."""
        grown = 1 + 2 * self.numerics.worst_u_ds
        shared = self.ds.share_between_rows(np.sqrt(self.variance))
        variance = shared.sum(0) + self.row_sum_variance
        return ParameterBound(self.worst.bound.sum(0), variance * grown**2, self.drift.sum(0) * grown)

    @cached_property
    def is_invalid(self) -> Mask:
        """Where first order does not hold the worst case is used, as drift."""
        return np.broadcast_to(self.ds.is_invalid_row, self.worst.bound.shape)

    @cached_property
    def variance(self) -> Array:
        """V of dS c, of a coefficient that moves with the logit and is rounded, and of the sum over keys."""
        summed = self.numerics.u**2 / 3 * (self.worst.edges + EXTRA_ROUNDINGS) * self.partial_sum**2
        variance = self.ds.variance_met(self.over) + self.moving_variance + self.rounding_variance + summed
        return np.where(self.is_invalid, 0.0, variance)

    @cached_property
    def moving_variance(self) -> Array:
        """(|c| + b)² - c² of the logit's own noise: what it does to dS and what it does to c go together."""
        c = self.worst.coefficients
        noise = self.ds.forward.logit_cells.sum_coherent(self.ds.ds_noise_size)
        return self.over.gather(noise * (2 * np.abs(c.value) + c.steepness) * c.steepness)

    @cached_property
    def rounding_variance(self) -> Array:
        """Of the coefficient's own arithmetic, a function of the logit: equal logits err alike."""
        rounded = np.abs(self.ds.grads.ds) * self.worst.coefficients.rounding
        return self.over.gather(self.ds.forward.logit_cells.sum_coherent(rounded)) / 3

    @cached_property
    def drift(self) -> Array:
        """S of dS c, and what the systematic part of the logit's error does to the coefficient."""
        moved = np.abs(self.ds.grads.ds) * self.worst.coefficients.steepness * self.ds.recompute_drift
        drift = self.ds.drift_met(self.over) + self.over.gather(moved)
        return np.where(self.is_invalid, self.worst.bound, drift)

    @cached_property
    def products(self) -> Array:
        """dS c."""
        return self.ds.grads.ds * self.worst.coefficients.value

    @cached_property
    def partial_sum(self) -> Array:
        """v^ of a row's sum over keys."""
        products, gather = self.products, self.over.gather
        parts = [gather(products[:, keys], keys) for keys in split_evenly(products.shape[1], 16)]
        return average_partial_sums(accumulate(parts), gather(products**2), gather(np.abs(products)))

    @cached_property
    def row_sum_variance(self) -> Array:
        """Of the sum over rows, whose partial sums are those of the rows' own."""
        rows = self.over.gather(self.products)
        partial = average_partial_sums(accumulate(rows), (rows**2).sum(0), np.abs(rows).sum(0))
        return np.asarray(self.numerics.u**2 / 3 * self.worst.num_rows * partial**2)
