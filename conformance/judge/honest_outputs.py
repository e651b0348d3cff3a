"""One emulated kernel on one block: every output's error and both of its bounds."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from attnconform.conformance.bounds.backward import GRADIENTS, BackwardBounds, backward_bounds
from attnconform.conformance.bounds.block import Array, AttentionBlock
from attnconform.conformance.bounds.emulate import (
    Arithmetic,
    EmulatedBackward,
    EmulatedForward,
    ScoreRule,
    emulate_backward,
    emulate_forward,
    emulate_parameters,
    emulate_scores,
)
from attnconform.conformance.bounds.forward import ForwardBounds, forward_bounds
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.bounds.oracle import oracle_error, oracle_gradient_error
from attnconform.conformance.bounds.parameters import rule_bounds
from attnconform.conformance.judge.coefficients import rule_coefficients
from attnconform.conformance.judge.honest_cases import HonestCase, apply_rule
from attnconform.conformance.judge.honest_classes import HonestClass
from attnconform.reference.rules import SoftCap

OUTPUTS = ("out", "lse", "dq", "dk", "dv", "dsink", "dscore")


@dataclass(frozen=True)
class Judged:
    """One output of one block."""

    output: str
    error: Array
    worst: Array
    probable: Array


@dataclass(frozen=True)
class Exact:
    """float64 answers, straight from the formulas."""

    out: Array
    lse: Array
    dq: Array
    dk: Array
    dv: Array
    dsink: Array  # per head
    ds: Array  # of the final scores


def judge_honest(case: HonestCase, honest: HonestClass) -> list[Judged]:
    """out, lse, dq, dk, dv, and dsink or dscore where the case has sinks or a rule."""
    block, exact = with_scale_errors(case.block, honest), compute_exact(case.block, case.do)
    map_score, numerics = kernel_rule(case, honest.arithmetic), honest.numerics
    forward = emulate_forward(case.block, honest.arithmetic, honest.schedule, map_score)
    with np.errstate(invalid="ignore"):  # the recomputed P of a row without a bound may overflow [BOUND-VOID]
        backward = emulate_backward(case.block, case.do, honest.arithmetic, honest.schedule, forward, map_score)
    bounds = forward_bounds(block, numerics)
    found = judge_forward(forward, exact, bounds)
    found += judge_backward(block, case.do, backward, exact, backward_bounds(block, case.do, numerics, bounds))
    return [*found, judge_rule(case, block, honest, backward, exact)] if case.rule else found


def with_scale_errors(block: AttentionBlock, honest: HonestClass) -> AttentionBlock:
    """The block as its bounds see it: a declared scale's product may be off by so many bits."""
    bits = honest.numerics.scale_bits
    if not bits:
        return block
    return replace(block, k_error=2.0**-bits * np.abs(block.k), v_error=2.0**-bits * np.abs(block.v))


def kernel_rule(case: HonestCase, numerics: Numerics) -> ScoreRule | None:
    """The score rule in a kernel's float32."""
    rule, arithmetic = case.rule, Arithmetic(numerics)
    if rule is None:
        return None
    if isinstance(rule, SoftCap):
        return lambda scores: rule.cap * arithmetic.compute(np.tanh(scores / rule.cap))
    bias = arithmetic.compute(apply_rule(case, rule, np.zeros_like(case.block.scores)))
    return lambda scores: scores + bias


def compute_exact(block: AttentionBlock, do: Array) -> Exact:
    """Everything in float64, masked before the maximum."""
    scores = np.where(block.mask, block.scores, -np.inf)
    sink = np.full(len(scores), -np.inf) if block.sink is None else block.sink
    row_max = np.maximum(scores.max(1, initial=-np.inf), sink)[:, None]
    row_max = np.where(np.isfinite(row_max), row_max, 0.0)
    exps, sink_exp = np.exp(scores - row_max), np.exp(sink[:, None] - row_max)
    total = exps.sum(1, keepdims=True) + sink_exp
    with np.errstate(divide="ignore"):
        lse = (row_max + np.log(total))[:, 0]
    total = np.where(total > 0, total, 1)
    weights = exps / total
    out = weights @ block.v
    row_term = (do * out).sum(1, keepdims=True)
    to_scores = weights * (do @ block.v.T - row_term)
    ds = block.sm_scale * to_scores * (1.0 if block.slope is None else block.slope)
    dsink = sum_heads(block, -(sink_exp / total * row_term)[:, 0])
    return Exact(out, lse, ds @ block.k, ds.T @ block.q, weights.T @ do, dsink, to_scores)


def judge_forward(got: EmulatedForward, exact: Exact, bounds: ForwardBounds) -> list[Judged]:
    """out and lse."""
    with np.errstate(invalid="ignore"):  # a row that sees nothing has an lse of -inf on both sides
        lse_error = np.where(got.lse == exact.lse, 0.0, np.abs(got.lse - exact.lse))
    own_out, own_lse = oracle_error(bounds)
    return [
        Judged("out", np.abs(got.out - exact.out), bounds.out_worst + own_out, bounds.out_prob + own_out),
        Judged("lse", lse_error, bounds.lse_worst + own_lse, bounds.lse_prob + own_lse),
    ]


def judge_backward(
    block: AttentionBlock, do: Array, got: EmulatedBackward, exact: Exact, bounds: BackwardBounds
) -> list[Judged]:
    """dq, dk and dv, and dsink as the sum over rows that it is."""
    own = oracle_gradient_error(block, do)
    found = [
        Judged(
            name,
            np.abs(getattr(got, name) - getattr(exact, name)),
            getattr(bounds, f"{name}_worst") + own[name],
            getattr(bounds, f"{name}_prob") + own[name],
        )
        for name in GRADIENTS
    ]
    if block.sink is None:
        return found
    sink, total = bounds.dsink.widened(own["dsink"]), sum_heads(block, got.dsink.astype(np.float32))
    return [*found, Judged("dsink", np.abs(total - exact.dsink), sink.worst, sink.probable)]


def sum_heads(block: AttentionBlock, rows: np.ndarray[Any, Any]) -> Array:
    """Sums over the rows of each head, one after the other, in the precision of the rows."""
    return np.cumsum(rows.reshape(block.num_heads, -1), axis=1)[:, -1].astype(np.float64)


def judge_rule(
    case: HonestCase, block: AttentionBlock, honest: HonestClass, backward: EmulatedBackward, exact: Exact
) -> Judged:
    """The gradients of a rule's parameters."""
    assert case.rule is not None
    rows = (case.heads, case.q_idx)
    numerics, arithmetic = honest.numerics, Arithmetic(honest.arithmetic)
    (of_exact,) = rule_coefficients((case.rule,), case.given, block.mask, *rows, numerics)
    scores = np.where(block.mask, emulate_scores(case.block, arithmetic, None), 0.0)
    (of_kernel,) = rule_coefficients((case.rule,), scores, block.mask, *rows, numerics)
    used = arithmetic.compute(of_kernel.value), of_kernel.parameter, of_kernel.num_parameters
    got = emulate_parameters(backward.ds, *used, arithmetic)
    want = np.bincount(of_exact.parameter.ravel(), (exact.ds * of_exact.value).ravel(), of_exact.num_parameters)
    (bound,) = rule_bounds(block, case.do, numerics, [of_exact], [len(block.q)])
    return Judged("dscore", np.abs(got - want), bound.worst, bound.probable)
