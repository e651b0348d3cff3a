"""What one tile of edges contributes to the gradients: the steps that both directions of the backward share.

A tile of edges is [TILE_M, TILE_KV], rows by keys. Scores are formed again as the forward forms them; probabilities
come from the saved lse, which already holds the sink. The derivative of a CustomScore comes with it.
[GRAD-FORMULA, SCORE-ORDER, LSE-SINK]
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.numerics import LOG2_E, dot, narrow
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.rules import (
    ALIBI,
    RELATIVE_BIAS,
    SOFT_CAP,
    CustomScore,
    load_biases,
    tanh,
)


def score_slopes(plan: Plan) -> tuple[triton.JITFunction | None, ...]:
    """The derivative of every CustomScore, compiled in; None for the rules of this package. [GRAD-RULE]"""
    slopes = tuple(rule.slope_fn if isinstance(rule, CustomScore) else None for rule in plan.score_rules)
    for rule, slope in zip(plan.score_rules, slopes, strict=True):
        if isinstance(rule, CustomScore) and slope is None:
            raise PlanError("GRAD-RULE", "slope_fn", None, "the backward of a CustomScore needs its derivative")
    return slopes


@triton.jit
def differentiate_edges(
    q, k, v, dout,  # [TILE_M, PADDED_QK], [TILE_KV, PADDED_QK], [TILE_KV, PADDED_VO], [TILE_M, PADDED_VO]
    lse_log2, delta,  # [TILE_M], as load_row_state gives them
    admitted,  # [TILE_M, TILE_KV], not looked at where IS_FULL
    heads, is_row,  # [TILE_M] query heads
    q_idx, kv_idx,  # [TILE_M, 1] and [TILE_M or 1, TILE_KV], only looked at where there are score rules
    kept,  # [TILE_M, TILE_KV], not looked at without dropout
    score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_scale, sm_scale, num_qo_heads,
    SCORE_CODES: tl.constexpr,
    SCORE_SLOPES: tl.constexpr,
    IS_FULL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Weights of the values, and gradients of the scores before the score rules, in the storage dtype.

    Both are 0 where not admitted. IS_FULL: every row admits every key. A row without keys needs no mask, its lse does
    it. A dropped edge weighs no value, but still shares in the denominator. [GRAD-FORMULA, DROPOUT-BACKWARD]
    """
    weights, score_grads, slope, _ = form_edges(
        q, k, v, dout, lse_log2, delta, admitted, heads, is_row, q_idx, kv_idx, kept,
        score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_scale, sm_scale, num_qo_heads,
        SCORE_CODES, SCORE_SLOPES, IS_FULL, HAS_DROPOUT,
    )  # fmt: skip
    score_grads = score_grads * slope
    if len(SCORE_CODES) > 0:
        # A user's slope may be no number in lanes without a row.
        score_grads = tl.where(is_row[:, None], score_grads, 0.0)
    if not IS_FULL:
        # What a masked key holds may be no number.
        score_grads = tl.where(admitted, score_grads, 0.0)
    return narrow(weights, v.dtype), narrow(score_grads, k.dtype)


@triton.jit
def form_edges(
    q, k, v, dout, lse_log2, delta, admitted, heads, is_row, q_idx, kv_idx, kept,  # as in differentiate_edges
    score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_scale, sm_scale, num_qo_heads,
    SCORE_CODES: tl.constexpr,
    SCORE_SLOPES: tl.constexpr,
    IS_FULL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Weights of the values, gradients of the scores after the score rules, the rules' slope, and q.k; float32.

    Only the weights are 0 where not admitted.
    """
    no_edges = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
    products = dot(q, tl.trans(k), no_edges)
    value_products = dot(dout, tl.trans(v), no_edges)
    slope = 1.0
    if len(SCORE_CODES) > 0:
        scores, slope = apply_score_rules_with_slope(
            products * sm_scale, heads, is_row, q_idx, kv_idx,
            score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads, SCORE_CODES, SCORE_SLOPES,
        )  # fmt: skip
        scores *= LOG2_E
    else:
        scores = products * (sm_scale * LOG2_E)
    exponents = scores - lse_log2[:, None]
    if not IS_FULL:
        exponents = tl.where(admitted, exponents, float("-inf"))
    probs = tl.exp2(exponents)
    weights = probs
    if HAS_DROPOUT:
        weights = tl.where(kept, probs * dropout_scale, 0.0)
        value_products = tl.where(kept, value_products * dropout_scale, 0.0)
    return weights, probs * (value_products - delta[:, None]), slope, products


@triton.jit
def apply_score_rules_with_slope(
    scores,  # [TILE_M, TILE_KV] float32, sm_scale * q.k
    heads, is_row,  # [TILE_M] query heads
    q_idx, kv_idx,  # [TILE_M, 1] and [TILE_M or 1, TILE_KV]
    score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads,
    CODES: tl.constexpr,
    SLOPES: tl.constexpr,
):  # fmt: skip
    """Scores after every rule, and their derivative by the score before the first rule. [SCORE-ORDER, GRAD-SOFTCAP]"""
    slope = 1.0
    for rule in tl.static_range(len(CODES)):
        scores, rule_slope = apply_rule_with_slope(
            scores, rule, heads, is_row, q_idx, kv_idx,
            score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads, CODES, SLOPES,
        )  # fmt: skip
        slope = slope * rule_slope
    return scores, slope


@triton.jit
def apply_rule_with_slope(
    scores, RULE: tl.constexpr, heads, is_row, q_idx, kv_idx,
    score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads,
    CODES: tl.constexpr,
    SLOPES: tl.constexpr,
):  # fmt: skip
    """Scores after one rule, and their derivative by the scores before it."""
    param = tl.load(score_params_ptr + RULE * num_qo_heads + heads, mask=is_row, other=1.0)[:, None]
    if CODES[RULE] == RELATIVE_BIAS:
        distance = kv_idx - q_idx
        return scores + load_biases(distance, heads, is_row, score_tables_ptr, score_reaches_ptr + 2 * RULE), 1.0
    elif CODES[RULE] == ALIBI:
        return scores + param * (kv_idx - q_idx).to(tl.float32), 1.0
    elif CODES[RULE] == SOFT_CAP:
        ratio = scores / param
        return param * tanh(ratio), square_sech(ratio)
    else:
        data_ptr = score_tables_ptr + tl.load(score_reaches_ptr + 2 * RULE)
        slope = SLOPES[RULE](scores, q_idx, kv_idx, heads[:, None], data_ptr)
        return CODES[RULE](scores, q_idx, kv_idx, heads[:, None], data_ptr), slope


@triton.jit
def square_sech(x):
    """Derivative of tanh; 1 - tanh^2 cancels where tanh saturates, this form keeps its relative accuracy."""
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    return 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def load_row_state(
    lse_log2_ptr,
    delta_ptr,
    rows,  # [TILE_M] global query rows
    heads,  # [TILE_M] query heads
    is_row,  # [TILE_M]
    num_qo_heads,
):
    """lse in base 2, delta, and whether there is any key; without one lse is +inf and exp2(s - lse) 0. [EMPTY-GRAD]"""
    offset = rows.to(tl.int64) * num_qo_heads + heads
    lse_log2 = tl.load(lse_log2_ptr + offset, mask=is_row, other=float("inf"))
    delta = tl.load(delta_ptr + offset, mask=is_row, other=0.0)
    return lse_log2, delta, lse_log2 < float("inf")


@triton.jit
def load_vectors(
    ptr,
    starts,  # [TILE] int64, offsets of the vectors
    is_read,  # [TILE]
    stride_dim,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Vectors of q, dout or a cache, [TILE, PADDED_DIM]; 0 where not read, whatever lies there. [MASK-INTERFERE]"""
    dim = tl.arange(0, PADDED_DIM)
    ptrs = ptr + starts[:, None] + (dim.to(tl.int64) * stride_dim)[None, :]
    return tl.load(ptrs, mask=is_read[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
