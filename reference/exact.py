"""Attention of one row in mpmath, to certify the float64 reference. Slow, and only for small or extreme rows."""

from dataclasses import dataclass

import mpmath
import numpy as np

from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import Alibi, ScoreRule, SoftCap
from attnconform.reference.steps import AttentionResult, Steps

DECIMAL_DIGITS = 60


@dataclass(frozen=True)
class ExactRow:
    """One row and head, as mpmath numbers."""

    out: list[mpmath.mpf]  # (head_dim_vo,)
    lse: mpmath.mpf


def exact_score(rule: ScoreRule, score: mpmath.mpf, qo_head: int, q_idx: int, kv_idx: int) -> mpmath.mpf:
    """One score after one rule. [SCORE-ALIBI, SCORE-SOFTCAP]"""
    match rule:
        case Alibi(slopes):
            return score + mpmath.mpf(slopes[qo_head]) * (kv_idx - q_idx)
        case SoftCap(cap):
            return cap * mpmath.tanh(score / cap)


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
                positions = steps.effective(problem, where, h)
                slots, kv_head = steps.slots(problem, where, positions).values, steps.kv_head(problem, h)
                scores = _exact_scores(problem, h, where.q_idx, positions.values, q[where.row, h], k[slots, kv_head])
                sink = None if problem.sink_logits is None else float(problem.sink_logits[h])
                row = exact_row(scores, v[slots, kv_head], sink)
                out[where.row, h], lse[where.row, h] = [float(x) for x in row.out], float(row.lse)
    return AttentionResult(out, lse)


def _exact_scores(
    problem: AttentionProblem, qo_head: int, q_idx: int, kv_idx: IntArray, q: FloatArray, k: FloatArray
) -> list[mpmath.mpf]:
    scores = []
    for position, key in zip(kv_idx.tolist(), k, strict=True):
        score = mpmath.mpf(problem.sm_scale) * mpmath.fdot(key.tolist(), q.tolist())
        for rule in problem.score_rules:
            score = exact_score(rule, score, qo_head, q_idx, position)
        scores.append(score)
    return scores
