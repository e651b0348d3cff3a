"""One step of attention: a tile of keys and values joins the running state of a task's rows. [MASK-BEFORE-MAX]

A head dimension that is no power of two is cut into the largest power of two in it and the rest, 576 into 512 and 64,
where that takes fewer lanes than the next power of two; each part has products of its own.
"""

import triton
import triton.language as tl

from attnconform.kernels.sparse_attention.dropout import is_kept
from attnconform.kernels.sparse_attention.numerics import LOG2_E, dot, narrow
from attnconform.kernels.sparse_attention.quantization import (
    load_code_tile,
    load_key_scales,
    weigh_by_key_scales,
)
from attnconform.kernels.sparse_attention.rules import apply_score_rules, is_in_intervals

# What P is multiplied by before it meets codes in float16: its largest value, 1, stays below 65504.
P_SCALE = tl.constexpr(32768.0)


@triton.jit
def attend_tile(
    acc, acc_rest, row_max, row_sum,  # [TILE_M, PADDED_VO], the rest of it or nothing; [TILE_M], [TILE_M]
    value_unit,  # [TILE_M] of the scales in P so far
    queries,  # [TILE_M, PADDED_QK] and the rest of it, or half of it twice
    first, limit,  # keys of this tile: entries or positions from first, below limit
    where,  # [ROWS] mask_rows, is_rule_row and q_idx; request; [TILE_M] heads and is_live. ROWS is 1 or TILE_M
    page_row, k_cache, v_cache, lists, mask, score,
    IS_WHOLE: tl.constexpr,  # the tile ends before the limit
    IS_UNMASKED: tl.constexpr,  # every row admits every key below the limit
    IS_ONE_ROW: tl.constexpr,
    TILE_KV: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    REST_QK: tl.constexpr,
    REST_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCORE_CODES: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_GRANULARITY: tl.constexpr,
    V_GRANULARITY: tl.constexpr,
    K_ASSEMBLY: tl.constexpr,
    V_ASSEMBLY: tl.constexpr,
    IS_FLOAT32: tl.constexpr,  # q and out
):  # fmt: skip
    """The state after one more tile of keys."""
    mask_rows, is_rule_row, q_idx, request, heads, is_live = where
    key = first + tl.arange(0, TILE_KV)
    is_key = key < limit
    NEEDS_POSITIONS: tl.constexpr = not IS_UNMASKED or len(SCORE_CODES) > 0 or HAS_DROPOUT
    kv_idx, slots = locate_keys(key, is_key, page_row, k_cache, v_cache, lists, PAGE_SIZE, HAS_LISTS, NEEDS_POSITIONS)
    if IS_UNMASKED:
        admitted = is_key[None, :]
        is_read = is_key
    else:
        # [ROWS, TILE_KV]
        admitted = is_key[None, :] & admit_keys(
            key, is_key, kv_idx, mask_rows, is_rule_row, q_idx, request, lists, mask,
            MASK_FN, HAS_LISTS and HAS_WINDOW,
        )  # fmt: skip
        # A slot that no row admits is not read. Intervals alone leave none: the work list ends where they end.
        if IS_ONE_ROW or HAS_WINDOW or MASK_FN is not None:
            is_read = tl.max(admitted.to(tl.int32), axis=0) > 0
        else:
            is_read = is_key
    return attend_keys(
        acc, acc_rest, row_max, row_sum, value_unit, queries, kv_idx, slots, admitted, is_read,
        q_idx, request, heads, is_live, k_cache, v_cache, score,
        IS_WHOLE and IS_UNMASKED, IS_UNMASKED, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO,
        REST_QK, REST_VO, SCORE_CODES, HAS_DROPOUT,
        K_FORMAT, V_FORMAT, K_GRANULARITY, V_GRANULARITY, K_ASSEMBLY, V_ASSEMBLY, IS_FLOAT32,
    )  # fmt: skip


@triton.jit
def attend_keys(
    acc, acc_rest, row_max, row_sum, value_unit, queries,  # as attend_tile has them
    kv_idx,  # [TILE_KV] positions, where a rule asks for them
    slots,  # [TILE_KV] each: page, slot, and where its K and V start
    admitted,  # [ROWS or 1, TILE_KV]
    is_read,  # [TILE_KV]
    q_idx,  # [ROWS]
    request,
    heads, is_live,  # [TILE_M]
    k_cache, v_cache, score,
    IS_WHOLE: tl.constexpr,  # every row admits every key
    IS_UNMASKED: tl.constexpr,  # or all that are read
    TILE_KV: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    REST_QK: tl.constexpr,
    REST_VO: tl.constexpr,
    SCORE_CODES: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_GRANULARITY: tl.constexpr,
    V_GRANULARITY: tl.constexpr,
    K_ASSEMBLY: tl.constexpr,
    V_ASSEMBLY: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """The state after some more keys, wherever they are and whoever admits them."""
    page, slot, k_start, v_start = slots
    q, q_rest = queries
    score_scale, IS_SCALED_LATE, params_ptr, tables_ptr, reaches_ptr, num_qo_heads, dropout_words_ptr = score
    # What codes become: see `quantization`.
    CODE_DTYPE: tl.constexpr = tl.float32 if IS_FLOAT32 else tl.float16
    scores = tl.zeros([q.shape[0], TILE_KV], tl.float32)
    if K_FORMAT is None:
        k = load_keys(k_cache, k_start, is_read, 0, PADDED_QK, HEAD_DIM_QK, IS_WHOLE)
        scores = dot(q, k, scores)
        if REST_QK > 0:
            k_rest = load_keys(k_cache, k_start, is_read, PADDED_QK, REST_QK, HEAD_DIM_QK, IS_WHOLE)
            scores = dot(q_rest, k_rest, scores)
    else:
        pair = tl.arange(0, PADDED_QK // 2)[:, None]
        k, k_odd = load_code_tile(
            k_cache[0], k_start[None, :], is_read[None, :], pair, k_cache[1][3], CODE_DTYPE,
            K_FORMAT, K_ASSEMBLY, IS_WHOLE, HEAD_DIM_QK, PADDED_QK,
        )  # fmt: skip
        scores = dot(q_rest, k_odd, dot(q, k, scores))
    if K_GRANULARITY == "page" or K_GRANULARITY == "token":
        key_scales = load_key_scales(k_cache[2], k_cache[3], k_cache[4], page, slot, is_read, K_GRANULARITY)
        scores *= key_scales[None, :] * score_scale
    elif not IS_SCALED_LATE:
        scores *= score_scale
    if len(SCORE_CODES) > 0:
        scores = apply_score_rules(
            scores, heads, is_live, q_idx, kv_idx,
            params_ptr, tables_ptr, reaches_ptr, num_qo_heads, LOG2_E, SCORE_CODES,
        )  # fmt: skip
    if not IS_WHOLE:
        scores = tl.where(admitted, scores, float("-inf"))

    tile_max = tl.max(scores, axis=1)
    # Two conditions: the compiler knows the first alone, and the scale of codes may be one a row, of another shape.
    if K_FORMAT is None:  # noqa: SIM102
        if IS_SCALED_LATE:
            # One product less an element: a factor above 0 keeps the order, and the other product joins a subtraction.
            tile_max *= score_scale
            scores *= score_scale
    new_max = tl.maximum(row_max, tile_max)
    # A row that has admitted nothing yet would subtract -inf from -inf. [EMPTY-OUT]
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    if HAS_DROPOUT:
        kept = is_kept(dropout_words_ptr, request, heads[:, None], q_idx[:, None], kv_idx[None, :])
        weights = tl.where(kept, weights, 0.0)
    if V_FORMAT is None:
        v = load_values(v_cache, v_start, is_read, 0, PADDED_VO, HEAD_DIM_VO, IS_WHOLE)
        weights = narrow(weights, v.dtype)
        acc = dot(weights, v, acc * rescale[:, None])
        if REST_VO > 0:
            v_rest = load_values(v_cache, v_start, is_read, PADDED_VO, REST_VO, HEAD_DIM_VO, IS_WHOLE)
            acc_rest = dot(weights, v_rest, acc_rest * rescale[:, None])
    else:
        pair = tl.arange(0, PADDED_VO // 2)[None, :]
        v, v_odd = load_code_tile(
            v_cache[0], v_start[:, None], is_read[:, None], pair, v_cache[1][3], CODE_DTYPE,
            V_FORMAT, V_ASSEMBLY, IS_WHOLE, HEAD_DIM_VO, PADDED_VO,
        )  # fmt: skip
        if V_GRANULARITY == "page" or V_GRANULARITY == "token":
            value_scales = load_key_scales(v_cache[2], v_cache[3], v_cache[4], page, slot, is_read, V_GRANULARITY)
            if tl.float32 == CODE_DTYPE:
                weights *= value_scales[None, :]
            else:
                weights, value_unit, unit_change = weigh_by_key_scales(
                    weights, value_scales, admitted, value_unit, IS_UNMASKED
                )
                rescale *= unit_change
        if tl.float32 != CODE_DTYPE:
            weights = (weights * P_SCALE).to(tl.float16)
        acc = dot(weights, v, acc * rescale[:, None])
        acc_rest = dot(weights, v_odd, acc_rest * rescale[:, None])
    return acc, acc_rest, new_max, row_sum, value_unit


@triton.jit
def locate_keys(
    key, is_key,  # [TILE_KV] entries of a list, or positions
    page_row, k_cache, v_cache, lists,
    PAGE_SIZE: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    NEEDS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Position of every key; its page, slot, and where its K and V start in the cache. [COORD-SLOT, COORD-WIDE]

    The position is the logical one where it is needed.
    """
    kv_idx = key
    if HAS_LISTS:
        slot = tl.load(lists[0] + key, mask=is_key, other=0).to(tl.int64)
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
        if NEEDS_POSITIONS:
            kv_idx = tl.load(lists[1] + key, mask=is_key, other=0)
    else:
        page = tl.load(page_row + key // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
        offset = (key % PAGE_SIZE).to(tl.int64)
        slot = page * PAGE_SIZE + offset
    k_start = find_slots(page, offset, slot, k_cache[1])
    v_start = find_slots(page, offset, slot, v_cache[1])
    return kv_idx, (page, slot, k_start, v_start)


@triton.jit
def find_slots(page, offset, slot, strides):
    """Where slots start, as _cache_strides gives the strides."""
    if strides[0] is None:
        return slot * strides[1]
    else:
        return page * strides[0] + offset * strides[1]


@triton.jit
def admit_keys(
    key, is_key, kv_idx,  # [TILE_KV]
    mask_rows, is_rule_row, q_idx,  # [ROWS]
    request, lists, mask,
    MASK_FN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Which keys are in E of each row, [ROWS, TILE_KV]. [MASK-BEFORE-MAX, SET-UNION]"""
    mask_starts_ptr, mask_ends_ptr, mask_data_ptr = mask
    admitted = is_in_intervals(mask_rows, is_rule_row, kv_idx[None, :], mask_starts_ptr, mask_ends_ptr)
    if HAS_WINDOW:
        is_member = tl.load(lists[2] + key, mask=is_key, other=0) != 0
        distance = q_idx[:, None] - kv_idx[None, :]
        admitted = admitted & (is_member[None, :] | ((distance >= 0) & (distance < lists[3])))
    if MASK_FN is not None:
        admitted = admitted & MASK_FN(q_idx[:, None], kv_idx[None, :], request, mask_data_ptr)
    return admitted


@triton.jit
def load_keys(
    k_cache, k_start, is_read,
    FIRST_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """DIMS dimensions of a tile's keys from FIRST_DIM on, [DIMS, TILE_KV]."""
    dim = FIRST_DIM + tl.arange(0, DIMS)
    ptrs = k_cache[0] + k_start[None, :] + (dim.to(tl.int64) * k_cache[1][3])[:, None]
    return load_tile(ptrs, is_read[None, :], (dim < HEAD_DIM)[:, None], IS_WHOLE, FIRST_DIM + DIMS > HEAD_DIM)


@triton.jit
def load_values(
    v_cache, v_start, is_read,
    FIRST_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """DIMS dimensions of a tile's values from FIRST_DIM on, [TILE_KV, DIMS]."""
    dim = FIRST_DIM + tl.arange(0, DIMS)
    ptrs = v_cache[0] + v_start[:, None] + (dim.to(tl.int64) * v_cache[1][3])[None, :]
    return load_tile(ptrs, is_read[:, None], (dim < HEAD_DIM)[None, :], IS_WHOLE, FIRST_DIM + DIMS > HEAD_DIM)


@triton.jit
def load_tile(ptrs, is_read, is_dim, IS_WHOLE: tl.constexpr, IS_PADDED: tl.constexpr):
    """Keys or values of a tile, 0 where a lane is masked; a mask that is known to be true is left out."""
    if IS_WHOLE:
        if IS_PADDED:
            return tl.load(ptrs, mask=is_dim, other=0.0)
        else:
            return tl.load(ptrs)
    else:
        if IS_PADDED:
            return tl.load(ptrs, mask=is_read & is_dim, other=0.0)
        else:
            return tl.load(ptrs, mask=is_read, other=0.0)
