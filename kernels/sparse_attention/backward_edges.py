"""What one tile of edges contributes to the gradients: the steps that both directions of the backward share.

A tile of edges is [TILE_M, TILE_KV], rows by keys. Scores are formed again as the forward forms them; probabilities
come from the saved lse, which already holds the sink. The derivative of a CustomScore comes with it.
[GRAD-FORMULA, SCORE-ORDER, LSE-SINK]
"""

from __future__ import annotations

import triton
import triton.language as tl

from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.numerics import LOG2_E, dot, narrow, reciprocal
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.rules import (
    ALIBI,
    RELATIVE_BIAS,
    SOFT_CAP,
    CustomScore,
    load_biases,
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
    origin,  # a position near those of the rows; None where they may lie far apart
    kept,  # [TILE_M, TILE_KV], not looked at without dropout
    score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_scale, sm_scale, num_qo_heads,
    SCORE_CODES: tl.constexpr,
    SCORE_SLOPES: tl.constexpr,
    IS_FULL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_KEYS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Weights of the values, and gradients of the scores before the score rules, in the storage dtype.

    Both are 0 where not admitted. IS_FULL: every row admits every key. A row without keys needs no mask, its lse does
    it. A dropped edge weighs no value, but still shares in the denominator. [GRAD-FORMULA, DROPOUT-BACKWARD]
    """
    weights, score_grads, slope, _ = form_edges(
        q, k, v, dout, lse_log2, delta, admitted, heads, is_row, q_idx, kv_idx, origin, kept,
        score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_scale, sm_scale, num_qo_heads,
        SCORE_CODES, SCORE_SLOPES, IS_FULL, HAS_DROPOUT, IS_KEYS_FIRST,
    )  # fmt: skip
    score_grads = score_grads * slope
    for rule in tl.static_range(len(SCORE_CODES)):
        if SCORE_SLOPES[rule] is not None:
            # A user's slope may be no number in lanes without a row.
            score_grads = tl.where(is_row[:, None], score_grads, 0.0)
    if not IS_FULL:
        # What a masked key holds may be no number.
        score_grads = tl.where(admitted, score_grads, 0.0)
    return narrow(weights, v.dtype), narrow(score_grads, k.dtype)


@triton.jit
def form_edges(
    q, k, v, dout, lse_log2, delta, admitted, heads, is_row, q_idx, kv_idx, origin, kept,  # as in differentiate_edges
    score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_scale, sm_scale, num_qo_heads,
    SCORE_CODES: tl.constexpr,
    SCORE_SLOPES: tl.constexpr,
    IS_FULL: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_KEYS_FIRST: tl.constexpr = False,
):  # fmt: skip
    """Weights of the values, gradients of the scores after the score rules, the rules' slope, and q.k; float32.

    Only the weights are 0 where not admitted. IS_KEYS_FIRST: products are formed keys by rows and turned, so that what
    is turned back to enter a product summed over rows is where the tensor cores left it.
    """
    if IS_KEYS_FIRST:
        no_edges = tl.zeros([k.shape[0], q.shape[0]], tl.float32)
        products = tl.trans(dot(k, tl.trans(q), no_edges))
        value_products = tl.trans(dot(v, tl.trans(dout), no_edges))
    else:
        no_edges = tl.zeros([q.shape[0], k.shape[0]], tl.float32)
        products = dot(q, tl.trans(k), no_edges)
        value_products = dot(dout, tl.trans(v), no_edges)
    slope = 1.0
    if len(SCORE_CODES) > 0:
        scores, slope = apply_score_rules_with_slope(
            products * (sm_scale * LOG2_E), heads, is_row, q_idx, kv_idx, origin,
            score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads, LOG2_E, SCORE_CODES, SCORE_SLOPES,
        )  # fmt: skip
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
    scores,  # [TILE_M, TILE_KV] float32, sm_scale * q.k, times unit
    heads, is_row,  # [TILE_M] query heads
    q_idx, kv_idx, origin,  # as in differentiate_edges
    score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads,
    unit,  # LOG2_E where scores are to be in base 2
    CODES: tl.constexpr,
    SLOPES: tl.constexpr,
):  # fmt: skip
    """Scores after every rule, and their derivative by the score before the first rule. [SCORE-ORDER, GRAD-SOFTCAP]"""
    slope = 1.0
    for rule in tl.static_range(len(CODES)):
        scores, rule_slope = apply_rule_with_slope(
            scores, rule, heads, is_row, q_idx, kv_idx, origin,
            score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads, unit, CODES, SLOPES,
        )  # fmt: skip
        slope = slope * rule_slope
    return scores, slope


@triton.jit
def apply_rule_with_slope(
    scores, RULE: tl.constexpr, heads, is_row, q_idx, kv_idx, origin,
    score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads, unit,
    CODES: tl.constexpr,
    SLOPES: tl.constexpr,
):  # fmt: skip
    """Scores after one rule, and their derivative by the scores before it, which no unit changes."""
    params_ptr = score_params_ptr + RULE * num_qo_heads
    if CODES[RULE] == RELATIVE_BIAS:
        biases = load_biases(kv_idx - q_idx, heads, is_row, score_tables_ptr, score_reaches_ptr + 2 * RULE)
        return scores + biases * unit, 1.0
    elif CODES[RULE] == ALIBI:
        slopes = tl.load(params_ptr + heads, mask=is_row, other=1.0)[:, None] * unit
        if origin is None:
            return scores + slopes * (kv_idx - q_idx).to(tl.float32), 1.0
        else:
            # Positions are converted one by one and not pair by pair, as the forward does it.
            return scores + slopes * ((kv_idx - origin).to(tl.float32) - (q_idx - origin).to(tl.float32)), 1.0
    elif CODES[RULE] == SOFT_CAP:
        cap = tl.load(params_ptr) * unit  # every head has the same
        saturated, slope = tanh_with_slope(scores * (1.0 / cap))
        return cap * saturated, slope
    else:
        data_ptr = score_tables_ptr + tl.load(score_reaches_ptr + 2 * RULE)
        scores = scores / unit
        slope = SLOPES[RULE](scores, q_idx, kv_idx, heads[:, None], data_ptr)
        return CODES[RULE](scores, q_idx, kv_idx, heads[:, None], data_ptr) * unit, slope


@triton.jit
def tanh_with_slope(x):
    """Hyperbolic tangent to about 2^-23 absolutely, and its derivative, by one exponential.

    1 - tanh^2 would cancel where tanh saturates. Of m = 1 - tanh |x|, m (2 - m) does not, and near 0, where m is 1, no
    error of m moves it. [SCORE-SOFTCAP, GRAD-SOFTCAP]
    """
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    share = reciprocal(1.0 + decay)
    missing = 2.0 * decay * share  # 1 - tanh |x|
    size = 1.0 - missing
    return tl.where(x < 0, -size, size), missing * (2.0 - missing)


@triton.jit
def square_sech(x):
    """Derivative of tanh; 1 - tanh^2 cancels where tanh saturates, this form keeps its relative accuracy."""
    decay = tl.exp2(tl.abs(x) * (-2.0 * LOG2_E))
    return 4.0 * decay / ((1.0 + decay) * (1.0 + decay))


@triton.jit
def place_rows(rows, heads, total_q, GROUP: tl.constexpr):
    """Where the states of rows and query heads are, [TILE_M] int64: a group's heads together, row after row."""
    return ((heads // GROUP).to(tl.int64) * total_q + rows) * GROUP + heads % GROUP


@triton.jit
def load_row_state(
    lse_log2_ptr,
    delta_ptr,
    places,  # [TILE_M], as place_rows gives them
    is_row,  # [TILE_M]
):
    """lse in base 2, delta, and whether there is any key; without one lse is +inf and exp2(s - lse) 0. [EMPTY-GRAD]"""
    lse_log2 = tl.load(lse_log2_ptr + places, mask=is_row, other=float("inf"))
    delta = tl.load(delta_ptr + places, mask=is_row, other=0.0)
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
