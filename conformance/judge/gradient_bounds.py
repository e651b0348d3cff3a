"""Every gradient beside the oracle's, with the bound of each of its elements. [BOUND-GRAD, BOUND-RULE]"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from attnconform.conformance.bounds.backward import GRADIENTS, backward_bounds
from attnconform.conformance.bounds.block import AttentionBlock
from attnconform.conformance.bounds.forward import ForwardBounds, forward_bounds
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.oracle import FLOAT64, finer, in_float64, oracle_gradient_error
from attnconform.conformance.bounds.parameters import ParameterBound, no_bound, rule_bounds
from attnconform.conformance.bounds.rounding import output_rounding
from attnconform.conformance.cases.values import Values
from attnconform.conformance.judge.blocks import TURN_ROUNDINGS, UNIT, PlacedBlock, placed_blocks
from attnconform.conformance.judge.coefficients import rule_coefficients
from attnconform.conformance.judge.epilogue import EXP_ROUNDINGS
from attnconform.conformance.judge.trial import ObservedGradients, Trial, declared_numerics
from attnconform.conformance.judge.values import Comparison
from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.epilogue import epilogue_slope
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rope import frequencies, pairs
from attnconform.reference.rules import SoftCap
from attnconform.reference.steps import AttentionResult, Gradients, Steps

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
    numerics = declared_numerics(trial)
    want, got = wanted(trial, oracle, observed), given(observed)
    bounds: Bounds = {name: (np.zeros_like(want[name]), np.zeros_like(want[name])) for name in GRADIENTS}
    parameters = {name: no_bound(want[name].size) for name in want if name not in GRADIENTS}
    for placed in placed_blocks(trial, values):
        forward = forward_bounds(placed.block, numerics)
        arriving = arriving_gradient(trial, values, result, placed, forward)
        sinks = add_bounds(trial.problem, bounds, placed, forward, arriving, numerics)
        found = {"dsink": sinks} | bound_rules(trial.problem, placed, arriving, numerics, parameters)
        parameters = {name: before + found[name] for name, before in parameters.items()}
    for name, bound in parameters.items():
        bounds[name] = stored(name, bound, want[name], numerics)
    return [Comparison(name, got[name], want[name], *bounds[name]) for name in want]


def stored(name: str, bound: ParameterBound, want: FloatArray, numerics: Numerics) -> tuple[FloatArray, FloatArray]:
    """Both forms in the shape of the parameters; a sink's gradient is rounded to the output's dtype besides."""
    worst, probable = (form.reshape(want.shape) for form in (bound.worst, bound.probable))
    if name == "dsink":
        worst, probable = (form + output_rounding(numerics, np.abs(want) + form) for form in (worst, probable))
    return worst, probable


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
) -> ParameterBound:
    """Adds one block's part of the bounds of dq, dk and dv, and returns that of the sinks of all heads."""
    arrives = arriving.dlse, arriving.error, problem.total_q
    found = backward_bounds(placed.block, arriving.do, numerics, forward, *arrives)
    own = oracle_gradient_error(placed.block, arriving.do, *arrives)
    slope = 1.0 if placed.block.slope is None else placed.block.slope
    ds = np.abs(problem.sm_scale * arriving.to_scores * slope)
    for i, form in enumerate(BOTH_FORMS):
        dq, dk, dv = (getattr(found, f"{name}_{form}") + own[name] for name in GRADIENTS)
        dq = turned_back(problem, dq, placed.q_idx, ds @ np.abs(placed.block.k))
        bounds["dq"][i][placed.rows, placed.heads] = dq
        # a slot may hold two positions, or serve two requests: its errors add up
        dk = turned_back(problem, dk, np.arange(len(placed.slots)), ds.T @ np.abs(placed.block.q))
        np.add.at(bounds["dk"][i][:, placed.kv_head], placed.slots, dk)
        np.add.at(bounds["dv"][i][:, placed.kv_head], placed.slots, dv)
    return found.dsink.widened(own["dsink"]).among(problem.num_qo_heads, placed.kv_head * problem.group_size)


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


def bound_rules(
    problem: AttentionProblem,
    placed: PlacedBlock,
    arriving: Arriving,
    numerics: Numerics,
    wanted: Collection[str],
) -> dict[str, ParameterBound]:
    """One block's part of the bounds of the score rules' gradients, the oracle's own error included. [BOUND-RULE]"""
    if not any(name.startswith("dscore") for name in wanted):
        return {}
    declared = bound_rules_as(problem, placed.block, placed, arriving, numerics, arriving.error)
    own = bound_rules_as(problem, in_float64(placed.block), placed, arriving, FLOAT64, finer(arriving.error))
    return {
        f"dscore{i}": bound.widened(oracle.worst) for i, (bound, oracle) in enumerate(zip(declared, own, strict=True))
    }


def bound_rules_as(
    problem: AttentionProblem,
    block: AttentionBlock,
    placed: PlacedBlock,
    arriving: Arriving,
    numerics: Numerics,
    do_error: FloatArray | None,
) -> list[ParameterBound]:
    """The same in one arithmetic; a slope sums over the rows of its head, a cap over those of all heads."""
    rules, given = problem.score_rules, Steps().scale(problem, seen_dots(block))
    coefficients = rule_coefficients(rules, given, block.mask, placed.heads, placed.q_idx, numerics)
    num_rows = [problem.total_q * (problem.num_qo_heads if isinstance(rule, SoftCap) else 1) for rule in rules]
    return rule_bounds(block, arriving.do, numerics, coefficients, num_rows, arriving.dlse, do_error)


def seen_dots(block: AttentionBlock) -> FloatArray:
    """q.k along the edges; what no row sees may be anything."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(block.mask, block.q @ block.k.T, 0.0)
