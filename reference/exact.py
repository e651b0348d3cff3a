"""Attention of one row in mpmath, to certify the float64 reference. Slow, and only for small or extreme rows."""

from dataclasses import dataclass

import mpmath
import numpy as np

from attnconform.reference.coordinates import FloatArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rope import Rope, pairs
from attnconform.reference.rule_values import apply_score_rule
from attnconform.reference.rules import Alibi, CustomScore, RelativeBias, ScoreRule, SoftCap
from attnconform.reference.steps import AttentionResult, Steps

DECIMAL_DIGITS = 60


@dataclass(frozen=True)
class ExactRow:
    """One row and head, as mpmath numbers."""

    out: list[mpmath.mpf]  # (head_dim_vo,)
    lse: mpmath.mpf


def exact_score(rule: ScoreRule, score: mpmath.mpf, qo_head: int, q_idx: int, kv_idx: int) -> mpmath.mpf:
    """One score after one rule. [SCORE-ALIBI, SCORE-SOFTCAP, SCORE-RELATIVE]

    Raises ValueError for a registered rule, which is float64 arithmetic of its own.
    """
    match rule:
        case Alibi(slopes):
            return score + mpmath.mpf(slopes[qo_head]) * (kv_idx - q_idx)
        case RelativeBias(tables):
            farthest = len(tables[qo_head]) // 2
            return score + mpmath.mpf(tables[qo_head][max(-farthest, min(farthest, kv_idx - q_idx)) + farthest])
        case SoftCap(cap):
            return cap * mpmath.tanh(score / cap)
        case CustomScore(name):
            raise ValueError(f"the score rule {name!r} has no mpmath form")


def exact_turn(x: list[mpmath.mpf], position: int, rope: Rope | None) -> list[mpmath.mpf]:
    """A query or key turned by its position, where attention turns it. [ROPE-POSITION]"""
    if rope is None or not rope.turns:
        return x
    turned = list(x)
    for i, (a, b) in enumerate(zip(*(half.tolist() for half in pairs(rope)), strict=True)):
        angle = position * mpmath.power(mpmath.mpf(rope.theta), -mpmath.mpf(2 * i) / rope.rotary_dim)
        cos, sin = mpmath.cos(angle), mpmath.sin(angle)
        turned[a], turned[b] = x[a] * cos - x[b] * sin, x[b] * cos + x[a] * sin
    return turned


def exact_row(
    scores: list[mpmath.mpf],  # of the keys the row sees
    v: FloatArray,  # (n, head_dim_vo)
    sink_logit: float | None,
) -> ExactRow:
    """Softmax-weighted sum and lse of one row. [EMPTY-OUT, EMPTY-LSE, LSE-NATURAL, LSE-SINK]"""
    terms = [mpmath.exp(s) for s in scores]
    total = mpmath.fsum([*terms, *([] if sink_logit is None else [mpmath.exp(sink_logit)])])
    if not total:
        return ExactRow([mpmath.mpf(0)] * v.shape[1], mpmath.ninf)
    out = [mpmath.fsum(t * mpmath.mpf(float(x)) for t, x in zip(terms, column, strict=True)) / total for column in v.T]
    return ExactRow(out, mpmath.log(total))


def exact_attention(problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
    """Attention of every row and head with DECIMAL_DIGITS digits, rounded to float64 at the end.

    Shapes as in `attention`. The edges are the reference's; the arithmetic is mpmath's alone.
    """
    steps = Steps()
    steps.refuse(problem)
    out = np.zeros((problem.total_q, problem.num_qo_heads, problem.head_dim_vo))
    lse = np.full((problem.total_q, problem.num_qo_heads), -np.inf)
    with mpmath.workdps(DECIMAL_DIGITS):
        for where in problem.rows():
            for h in range(problem.num_qo_heads):
                row = _exact_row_of(problem, steps, where, h, q[where.row, h], k, v)
                out[where.row, h], lse[where.row, h] = [float(x) for x in row.out], float(row.lse)
    merged = out
    for h in range(problem.num_qo_heads if problem.epilogue else 0):
        out = out.copy()
        out[:, h] = steps.epilogue(problem, h, merged[:, h])
    return AttentionResult(out, lse, merged if problem.epilogue else None)


def _exact_row_of(
    problem: AttentionProblem, steps: Steps, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
) -> ExactRow:
    positions, kv_head = steps.effective(problem, where, qo_head), steps.kv_head(problem, qo_head)
    slots = steps.head_slots(problem, steps.slots(problem, where, positions), kv_head)
    # a code of 8 bits times a float32 scale, and a power of two's dropout factor or not, are rounded at most once
    values = steps.dropout_weights(problem, where, qo_head, positions)[:, None] * steps.values(
        problem, slots, kv_head, v
    )
    encoded = steps.key_numbers(problem, slots, kv_head, k)
    scores = _exact_scores(problem, steps, where, qo_head, positions, q, encoded)
    sink = None if problem.sink_logits is None else float(problem.sink_logits[qo_head])
    return exact_row(scores, values, sink)


def float64_error(
    weights: FloatArray,  # (rows, n) softmax weights, 0 where a row does not see a key
    keep: FloatArray,  # (rows, n) what dropout multiplies them by in the numerator; 1 where nothing is dropped
    sizes: FloatArray,  # (rows, n) the largest number each score passes through, partial sums included
    v: FloatArray,  # (n, head_dim_vo)
    lse: FloatArray,  # (rows,)
    *,
    num_terms: int,  # of a dot product
) -> tuple[FloatArray, FloatArray]:
    """How far the float64 reference may be from exact out, (rows, head_dim_vo), and lse, (rows,). [BOUND-OUT]

    A score is off by its size times 2^-53 for each rounding, and a weight by as much, relatively: large scores cost
    bits, 2^-52 |score| for each unit of weight. To first order; what is not finite counts as 0.
    """
    unit = 2.0**-53
    num_keys = weights.shape[1]
    off = weights * unit * ((num_terms + 8) * sizes + 4)
    size = (weights * keep) @ np.abs(v)
    lse_size = np.where(np.isfinite(lse), np.abs(lse), 0.0)
    out_error = (off * keep) @ np.abs(v) + (off.sum(axis=1)[:, None] + (num_keys + 4) * unit) * size
    # a subnormal product has no relative error, and each of n may be off by half the smallest number
    is_reached = (weights * keep > 0).astype(np.float64) @ (v != 0) > 0
    out_error = out_error + np.where(is_reached, (num_keys + 1) * 2.0**-1074, 0.0)
    return out_error, off.sum(axis=1) + unit * (num_keys + 4 + 4 * lse_size)


def float64_errors(
    problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """float64_error of every row and head: of out before the epilogue, and of lse; shapes as theirs."""
    steps = Steps()
    lse = steps.forward(problem, q, k, v).lse
    out_errors = np.zeros((problem.total_q, problem.num_qo_heads, problem.head_dim_vo))
    lse_errors = np.zeros(lse.shape)
    for where in problem.rows():
        for h in range(problem.num_qo_heads):
            positions, kv_head = steps.effective(problem, where, h), steps.kv_head(problem, h)
            row_lse = lse[where.row, h]
            scores, sizes = _score_sizes(problem, steps, where, h, positions, q[where.row, h], k)
            slots = steps.head_slots(problem, steps.slots(problem, where, positions), kv_head)
            out_error, lse_error = float64_error(
                steps.probabilities(scores, row_lse)[None],
                steps.dropout_weights(problem, where, h, positions)[None],
                np.maximum(sizes, abs(row_lse) if np.isfinite(row_lse) else 0.0)[None],
                steps.values(problem, slots, kv_head, v),
                np.array([row_lse]),
                num_terms=problem.head_dim_qk,
            )
            out_errors[where.row, h], lse_errors[where.row, h] = out_error[0], lse_error[0]
    return out_errors, lse_errors


def _score_sizes(
    problem: AttentionProblem,
    steps: Steps,
    where: QueryRow,
    qo_head: int,
    positions: Positions,
    q: FloatArray,
    k: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Scores of one row, (n,), and the largest numbers that they pass through."""
    kv_head = steps.kv_head(problem, qo_head)
    slots = steps.head_slots(problem, steps.slots(problem, where, positions), kv_head)
    keys, query = steps.keys(problem, positions, slots, kv_head, k), steps.query(problem, where, q)
    sizes = abs(problem.sm_scale) * (np.abs(keys) @ np.abs(query))
    if problem.rope is not None and problem.rope.turns:
        # an angle is off by its own size: far positions turn less exactly
        sizes = sizes * (1 + 2 * (abs(where.q_idx) + positions.values))
    score = steps.scale(problem, keys @ query)
    for rule in problem.score_rules:
        after = apply_score_rule(rule, score, qo_head, where.q_idx, positions.values)
        sizes, score = sizes + np.abs(after - score), after
    bias = np.broadcast_to(steps.rank_bias(problem, where, qo_head, positions), score.shape)
    return score + bias, sizes + np.abs(bias)


def _exact_scores(
    problem: AttentionProblem,
    steps: Steps,
    where: QueryRow,
    qo_head: int,
    positions: Positions,
    q: FloatArray,
    keys: FloatArray,  # dequantized, not yet turned
) -> list[mpmath.mpf]:
    bias = np.broadcast_to(steps.rank_bias(problem, where, qo_head, positions), len(positions))
    query = exact_turn([mpmath.mpf(x) for x in q.tolist()], where.q_idx, problem.rope)
    scores = []
    for position, key, rank in zip(positions.values.tolist(), keys.tolist(), bias.tolist(), strict=True):
        turned = exact_turn([mpmath.mpf(x) for x in key], position, problem.rope)
        score = mpmath.mpf(problem.sm_scale) * mpmath.fdot(turned, query)
        for rule in problem.score_rules:
            score = exact_score(rule, score, qo_head, where.q_idx, position)
        scores.append(score + rank)
    return scores
