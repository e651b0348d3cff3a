"""What a score's gradient is multiplied by on its way to a score rule's parameters, and how exactly. [BOUND-RULE]

A rule's own coefficient (a distance, 1, or a cap's) times the slopes of the rules that come after it.
"""

from dataclasses import dataclass

import numpy as np

from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.parameters import STEEPEST_COEFFICIENT, Coefficients
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray
from attnconform.reference.rule_values import apply_score_rule, parameter_shape, relative_bucket, score_rule_slope
from attnconform.reference.rules import Alibi, CustomScore, RelativeBias, ScoreRule, SoftCap

CUSTOM_ROUNDINGS = 16  # of the slope of a rule that code brings


@dataclass(frozen=True)
class Factor:
    """A factor of a coefficient along one row's edges, (n,)."""

    value: FloatArray
    rounding: FloatArray  # absolute, of its own arithmetic
    steepness: FloatArray  # largest change by a unit of the score that a cap is given

    def __mul__(self, other: "Factor") -> "Factor":
        return Factor(
            self.value * other.value,
            np.abs(self.value) * other.rounding + self.rounding * (np.abs(other.value) + other.rounding),
            np.abs(self.value) * other.steepness + self.steepness * np.abs(other.value),
        )


def rule_coefficients(
    rules: tuple[ScoreRule, ...],
    given: FloatArray,  # (rows, keys) sm_scale q.k
    mask: BoolArray,  # (rows, keys)
    heads: IntArray,  # (rows,) query head
    q_idx: IntArray,  # (rows,) logical position
    numerics: Numerics,
) -> list[Coefficients]:
    """Of each rule, along the edges that the rows see."""
    maps = [{name: np.zeros(mask.shape) for name in ("value", "rounding", "steepness")} for _ in rules]
    parameters = [np.zeros(mask.shape, dtype=np.intp) for _ in rules]
    for r, head in enumerate(heads.tolist()):
        kv_idx, at = np.flatnonzero(mask[r]), (r, mask[r])
        factors = row_factors(rules, given[at], head, int(q_idx[r]), kv_idx, numerics)
        for rule, factor, found, parameter in zip(rules, factors, maps, parameters, strict=True):
            parameter[at] = parameter_index(rule, head, int(q_idx[r]), kv_idx)
            for name, values in found.items():
                values[at] = getattr(factor, name)
    return [
        Coefficients(**found, parameter=parameter, num_parameters=int(np.prod(parameter_shape(rule))))
        for rule, found, parameter in zip(rules, maps, parameters, strict=True)
    ]


def row_factors(
    rules: tuple[ScoreRule, ...], scores: FloatArray, head: int, q_idx: int, kv_idx: IntArray, numerics: Numerics
) -> list[Factor]:
    """Each rule's coefficient, the slopes of later rules included, along one row's edges."""
    inputs = []
    for rule in rules:
        inputs.append(scores)
        scores = apply_score_rule(rule, scores, head, q_idx, kv_idx)
    later, factors = exact(np.ones(len(kv_idx))), []
    for rule, given in reversed(list(zip(rules, inputs, strict=True))):
        factors.append(multiplied(own_factor(rule, given, q_idx, kv_idx, numerics) * later, numerics))
        later = slope_factor(rule, given, head, q_idx, kv_idx, numerics) * later
    return factors[::-1]


def own_factor(rule: ScoreRule, given: FloatArray, q_idx: int, kv_idx: IntArray, numerics: Numerics) -> Factor:
    """Derivative of a rule's score by its parameter: j - i, 1, or tanh x - x (1 - tanh² x) with x = s / cap."""
    match rule:
        case Alibi():
            return exact(kv_idx - q_idx)
        case RelativeBias():
            return exact(np.ones(len(kv_idx)))
        case SoftCap(cap):
            x, tanh = given / cap, np.tanh(given / cap)
            # 1 - tanh² loses what tanh is off by twice over, and x multiplies it
            rounding = numerics.tanh_error * (1 + 2 * np.abs(x)) + numerics.u * (4 + 2 * np.abs(x))
            return Factor(tanh - x * (1 - tanh**2), rounding, np.full(len(x), STEEPEST_COEFFICIENT / cap))
        case CustomScore():
            return exact(np.zeros(len(kv_idx)))


def slope_factor(
    rule: ScoreRule, given: FloatArray, head: int, q_idx: int, kv_idx: IntArray, numerics: Numerics
) -> Factor:
    """Derivative of a rule by the score that it is given."""
    slope = score_rule_slope(rule, given, head, q_idx, kv_idx)
    match rule:
        case SoftCap(cap):
            rounding = numerics.tanh_error * (2 * np.abs(np.tanh(given / cap)) + numerics.tanh_error) + 3 * numerics.u
            return Factor(slope, rounding, np.full(len(slope), STEEPEST_COEFFICIENT / cap))
        case CustomScore():
            return Factor(slope, CUSTOM_ROUNDINGS * numerics.u * np.abs(slope), np.zeros(len(slope)))
        case Alibi() | RelativeBias():
            return exact(slope)


def exact(value: FloatArray | IntArray) -> Factor:
    """A factor that no arithmetic rounds."""
    zero = np.zeros(len(value))
    return Factor(np.asarray(value, dtype=np.float64), zero, zero)


def multiplied(factor: Factor, numerics: Numerics) -> Factor:
    """Two more roundings: of the product of the factors, and of that with the score's gradient."""
    return Factor(factor.value, factor.rounding + 2 * numerics.u * np.abs(factor.value), factor.steepness)


def parameter_index(rule: ScoreRule, head: int, q_idx: int, kv_idx: IntArray) -> IntArray:
    """Flat index of the parameter that each edge counts towards."""
    match rule:
        case Alibi():
            return np.full(len(kv_idx), head)
        case RelativeBias(tables):
            return head * len(tables[0]) + relative_bucket(len(tables[0]), q_idx, kv_idx)
        case SoftCap() | CustomScore():
            return np.zeros(len(kv_idx), dtype=np.int64)
