"""Every gradient beside the oracle's, with the bound of each of its elements. [BOUND-GRAD, BOUND-RULE]"""

from dataclasses import dataclass

import numpy as np

from attnconform.conformance.bounds.backward import backward_bounds, score_gradient_error
from attnconform.conformance.bounds.forward import ForwardBounds, forward_bounds, scatter_rows
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.cases.values import Values
from attnconform.conformance.judge.blocks import TURN_ROUNDINGS, UNIT, PlacedBlock, placed_blocks
from attnconform.conformance.judge.epilogue import EXP_ROUNDINGS
from attnconform.conformance.judge.trial import ObservedGradients, Trial
from attnconform.conformance.judge.values import Comparison
from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.epilogue import epilogue_slope
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rope import frequencies, pairs
from attnconform.reference.rule_values import (
    apply_score_rule,
    parameter_gradient,
    parameter_shape,
    score_rule_slope,
)
from attnconform.reference.rules import Alibi, CustomScore, RelativeBias, ScoreRule, SoftCap
from attnconform.reference.steps import AttentionResult, Gradients, Steps

COEFFICIENT_ROUNDINGS = 16  # of what a score's gradient is multiplied by on its way to a parameter
STEEPEST_COEFFICIENT = 0.77  # the largest slope of tanh(x) - x (1 - tanh(x)^2), which is 2 x tanh(x) (1 - tanh(x)^2)
BOTH_FORMS = ("worst", "prob")
Bounds = dict[str, tuple[FloatArray, FloatArray]]  # name -> (worst, probable)


@dataclass(frozen=True)
class Arriving:
    """The gradient of a block's merged outputs, what a kernel may have made of it, and the scores' own gradients."""

    do: FloatArray  # (num_rows, head_dim_vo)
    error: FloatArray | None
    dlse: FloatArray | None  # (num_rows,)
    to_scores: FloatArray  # (num_rows, num_keys) gradient of the final scores


def compare_gradients(
    trial: Trial, values: Values, observed: ObservedGradients, oracle: Gradients, result: AttentionResult
) -> list[Comparison]:
    """dq, dk, dv, dsink and the score rules' gradients with their bounds."""
    numerics = trial.backend.capabilities.numerics_of(trial.case.structure.dtype)
    want, got = wanted(trial, oracle, observed), given(observed)
    bounds: Bounds = {name: (np.zeros_like(array), np.zeros_like(array)) for name, array in want.items()}
    for placed in placed_blocks(trial, values):
        forward = forward_bounds(placed.block, numerics)
        arriving = arriving_gradient(trial, values, result, placed, forward)
        add_bounds(trial.problem, bounds, placed, forward, arriving, numerics)
        if any(name.startswith("dscore") for name in want):
            add_rule_bounds(trial.problem, bounds, placed, forward, arriving, numerics)
    return [Comparison(name, got[name], want[name], *bounds[name]) for name in want]


def wanted(trial: Trial, oracle: Gradients, observed: ObservedGradients) -> dict[str, FloatArray]:
    """The oracle's gradients by name; those that a backend may leave out only where it gave them."""
    dk, dv = oracle.in_pool(trial.problem.cache.num_slots)
    want = {"dq": oracle.dq, "dk": dk, "dv": dv}
    if oracle.dsink is not None and observed.dsink is not None:
        want["dsink"] = oracle.dsink
    if trial.backend.capabilities.score_gradients and observed.dscore is not None:
        pairs = zip(oracle.dscore, observed.dscore, strict=False)  # a shorter answer is a finding of its own
        want |= {f"dscore{i}": g for i, (g, got) in enumerate(pairs) if g.size and g.shape == got.shape}
    return want


def given(observed: ObservedGradients) -> dict[str, FloatArray]:
    """The backend's gradients by name."""
    got = {"dq": observed.dq, "dk": observed.dk, "dv": observed.dv}
    if observed.dsink is not None:
        got["dsink"] = observed.dsink
    return got | {f"dscore{i}": gradient for i, gradient in enumerate(observed.dscore or ())}


def arriving_gradient(
    trial: Trial, values: Values, result: AttentionResult, placed: PlacedBlock, forward: ForwardBounds
) -> Arriving:
    """dout carried back through the epilogue, whose slope a kernel takes at its own merged output. [GRAD-EPILOGUE]"""
    at, problem, block = (placed.rows, placed.heads), trial.problem, placed.block
    merged, do, error = result.before_epilogue[at], values.dout[at], None
    if problem.epilogue:
        slopes = [
            np.stack([epilogue_slope(problem.epilogue, x, int(h)) for x, h in zip(near, placed.heads, strict=True)])
            for near in (merged, merged + forward.out_worst, merged - forward.out_worst)
        ]
        off = np.max([np.abs(slope - slopes[0]) for slope in slopes], axis=0)
        error = np.abs(do) * (off + EXP_ROUNDINGS * UNIT * np.abs(slopes[0]))
        do = do * slopes[0]
    dlse = trial.dlse(values)
    to_lse = None if dlse is None else dlse[at]
    p = np.exp(np.where(block.mask, block.scores - result.lse[at][:, None], -np.inf))
    dp = do @ block.v.T * (1.0 if block.dropout is None else block.dropout)
    delta = (do * merged).sum(axis=1) - (0.0 if to_lse is None else to_lse)
    return Arriving(do, error, to_lse, p * (dp - delta[:, None]))


def add_bounds(
    problem: AttentionProblem,
    bounds: Bounds,
    placed: PlacedBlock,
    forward: ForwardBounds,
    arriving: Arriving,
    numerics: Numerics,
) -> None:
    """Adds one block's part of the bounds of dq, dk, dv and dsink."""
    found = backward_bounds(placed.block, arriving.do, numerics, forward, arriving.dlse, arriving.error)
    slope = 1.0 if placed.block.slope is None else placed.block.slope
    ds = np.abs(problem.sm_scale * arriving.to_scores * slope)
    for i, form in enumerate(BOTH_FORMS):
        dq, dk = getattr(found, f"dq_{form}"), getattr(found, f"dk_{form}")
        dq = turned_back(problem, dq, placed.q_idx, ds @ np.abs(placed.block.k))
        bounds["dq"][i][placed.rows, placed.heads] = dq
        # a slot may hold two positions, or serve two requests: its errors add up
        dk = turned_back(problem, dk, np.arange(len(placed.slots)), ds.T @ np.abs(placed.block.q))
        np.add.at(bounds["dk"][i][:, placed.kv_head], placed.slots, dk)
        np.add.at(bounds["dv"][i][:, placed.kv_head], placed.slots, getattr(found, f"dv_{form}"))
        if "dsink" in bounds:
            np.add.at(bounds["dsink"][i], placed.heads, getattr(found, f"dsink_{form}"))


def turned_back(problem: AttentionProblem, bound: FloatArray, positions: IntArray, size: FloatArray) -> FloatArray:
    """Bound of a gradient of some size that is turned back by its position, which rounds once more. [ROPE-GRAD]"""
    if problem.rope is None or not problem.rope.turns:
        return bound
    first, second = pairs(problem.rope)
    turn = TURN_ROUNDINGS * UNIT * (1 + np.abs(positions)[:, None] * frequencies(problem.rope))
    moved = bound.copy()
    grown = np.hypot(bound[:, first], bound[:, second]) + turn * np.hypot(size[:, first], size[:, second])
    moved[:, first] = moved[:, second] = grown
    return np.where(bound.any(axis=1, keepdims=True), moved, bound)


def add_rule_bounds(
    problem: AttentionProblem,
    bounds: Bounds,
    placed: PlacedBlock,
    forward: ForwardBounds,
    arriving: Arriving,
    numerics: Numerics,
) -> None:
    """Adds one block's part of the bounds of the score rules' gradients. [BOUND-RULE]

    A gradient is a sum of coefficient times score gradient: each factor's error, and the sum's own.
    """
    if forward.terms is None:
        return
    error = score_gradient_error(placed.block, arriving.do, numerics, arriving.dlse, arriving.error)
    given_error = scatter_rows(forward.terms.softmax, forward.terms.worst.logit_error)
    steps, kv_idx = Steps(), np.arange(len(placed.slots))
    for r, head in enumerate(placed.heads.tolist()):
        seen, q_idx = placed.block.mask[r], int(placed.q_idx[r])
        where = kv_idx[seen]
        inputs, scores = [], steps.scale(problem, placed.block.k[seen] @ placed.block.q[r])
        for rule in problem.score_rules:
            inputs.append(scores)
            scores = apply_score_rule(rule, scores, head, q_idx, where)
        size = np.abs(arriving.to_scores[r, seen])
        off = error[r, seen] + (COEFFICIENT_ROUNDINGS + len(where)) * UNIT * size
        for i, rule in reversed(list(enumerate(problem.score_rules))):
            part = rule_bound(rule, inputs[i], off, size * given_error[r, : len(seen)][seen], head, q_idx, where)
            for bound in bounds.get(f"dscore{i}", ()):
                bound += part
            slope = np.abs(score_rule_slope(rule, inputs[i], head, q_idx, where))
            off, size = off * slope, size * slope


def rule_bound(
    rule: ScoreRule,
    given_scores: FloatArray,
    off: FloatArray,  # (n,) error of the gradient that arrives
    moved: FloatArray,  # (n,) that gradient times the error of the scores the rule is given
    qo_head: int,
    q_idx: int,
    kv_idx: IntArray,
) -> FloatArray:
    """One row's part of the bound of a rule's gradients, in the shape of its parameters."""
    bound = np.zeros(parameter_shape(rule))
    match rule:
        case Alibi():
            bound[qo_head] = off @ np.abs(kv_idx - q_idx)
        case RelativeBias():
            bound = parameter_gradient(rule, given_scores, off, qo_head, q_idx, kv_idx)
        case SoftCap(cap):
            x = given_scores / cap
            coefficient = np.abs(np.tanh(x) - x * (1 - np.tanh(x) ** 2)) + COEFFICIENT_ROUNDINGS * UNIT
            bound[()] = off @ coefficient + moved.sum() * STEEPEST_COEFFICIENT / cap
        case CustomScore():
            pass
    return bound
