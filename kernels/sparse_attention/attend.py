"""The kernel of `forward`: one program a task, from its query rows to its output or partial state.

Its arguments come from a plan (`forward.attend_arguments`); one step over a tile of keys is in `tile`, what becomes of
partial states in `merging`. [GQA-MAP, COORD-WIDE, COORD-STRIDE, QUANT-VALUE, DROPOUT-NUMERATOR]
"""

import triton
import triton.language as tl

from attnconform.kernels.sparse_attention.merging import live_rows, merge_when_last, store_rows, store_state
from attnconform.kernels.sparse_attention.numerics import LOG2_E, widen
from attnconform.kernels.sparse_attention.quantization import (
    load_channel_scales,
    load_whole_scale,
    normalize_query,
)
from attnconform.kernels.sparse_attention.rules import interval_rows
from attnconform.kernels.sparse_attention.tile import P_SCALE, attend_tile


# Numbers of a batch or a rule: a kernel compiled for one value of them must serve every other.
@triton.jit(do_not_specialize=["window", "total_q", "num_qo_heads", "max_pages", "batch_size"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    q_strides, k_strides, v_strides, k_scale_strides, v_scale_strides, out_strides, lse_strides,
    tasks_ptr, merges_ptr, tickets_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr, generations_ptr,
    page_table_ptr, list_slots_ptr, list_positions_ptr, list_members_ptr,
    row_positions_ptr, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
    score_params_ptr, score_tables_ptr, score_reaches_ptr, sink_logits_ptr, dropout_words_ptr, dropout_scale,
    sm_scale, window, total_q, num_qo_heads, max_pages, batch_size,
    TASK_WIDTH: tl.constexpr,
    MERGE_WIDTH: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    REST_QK: tl.constexpr,  # what PADDED_QK leaves of the dimensions
    REST_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCORE_CODES: tl.constexpr,
    IS_SCALED_LATE: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_HEAD_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    K_FORMAT: tl.constexpr,  # of codes; None where not quantized
    V_FORMAT: tl.constexpr,
    K_GRANULARITY: tl.constexpr,
    V_GRANULARITY: tl.constexpr,
    K_ASSEMBLY: tl.constexpr,  # of pair_assembly
    V_ASSEMBLY: tl.constexpr,
    IS_ONE_ROW: tl.constexpr,
    IS_UNMASKED: tl.constexpr,
    MERGE_LANES: tl.constexpr,
    MERGE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Attends one task; writes its rows, or its partial state where its tile was cut."""
    task_ptr = tasks_ptr + tl.program_id(0).to(tl.int64) * TASK_WIDTH
    request = tl.load(task_ptr)
    q_start = tl.load(task_ptr + 1)
    q_count = live_rows(tl.load(task_ptr + 2), request, generations_ptr, batch_size)
    head_start = tl.load(task_ptr + 3)
    head_count = tl.load(task_ptr + 4)
    kv_head = tl.load(task_ptr + 5).to(tl.int64)
    kv_start = tl.load(task_ptr + 6)
    kv_end = tl.load(task_ptr + 7)
    full_start = tl.load(task_ptr + 8)
    full_end = tl.load(task_ptr + 9)
    partial = tl.load(task_ptr + 10).to(tl.int64)
    kv_end = tl.where(q_count > 0, kv_end, kv_start)
    if tickets_ptr is not None:
        # asked for here: at the end of a short task nothing hides the wait
        merge = tl.load(task_ptr + 11)
        merge_ptr = merges_ptr + tl.maximum(merge, 0).to(tl.int64) * MERGE_WIDTH
        merge_rows = tl.load(merge_ptr + 1, mask=partial >= 0, other=0)
        num_partials = tl.load(merge_ptr + 5, mask=partial >= 0, other=0)

    lane_m = tl.arange(0, TILE_M)
    rows = q_start + lane_m // HEADS
    heads = head_start + lane_m % HEADS
    is_live = (lane_m // HEADS < q_count) & (lane_m % HEADS < head_count)
    # Rules mostly depend on the row, not on the head: then a tile of one row evaluates them once per key.
    if IS_ONE_ROW:
        rule_rows = q_start + tl.arange(0, 1)
        is_rule_row = tl.arange(0, 1) < q_count
        mask_rows = rule_rows
    else:
        rule_rows = rows
        is_rule_row = is_live
        mask_rows = interval_rows(rows, heads, total_q, HAS_HEAD_MASK)
    q_idx = tl.load(row_positions_ptr + rule_rows, mask=is_rule_row, other=0)

    q_starts = rows.to(tl.int64) * q_strides[0] + heads.to(tl.int64) * q_strides[1]
    queries, score_scale = load_queries(
        q_ptr, q_starts, is_live, q_strides[2], k_scale_ptr, k_scale_strides, kv_head, sm_scale,
        HEAD_DIM_QK, PADDED_QK, REST_QK, K_FORMAT, K_GRANULARITY,
    )  # fmt: skip
    page_row = page_table_ptr + request.to(tl.int64) * max_pages
    k_cache = (k_ptr + kv_head * k_strides[2], k_strides, k_scale_ptr, k_scale_strides, kv_head)
    v_cache = (v_ptr + kv_head * v_strides[2], v_strides, v_scale_ptr, v_scale_strides, kv_head)
    lists = (list_slots_ptr, list_positions_ptr, list_members_ptr, window)
    mask = (mask_starts_ptr, mask_ends_ptr, mask_data_ptr)
    score = (
        score_scale, IS_SCALED_LATE, score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads,
        dropout_words_ptr,
    )  # fmt: skip
    where = (mask_rows, is_rule_row, q_idx, request, heads, is_live)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    # Even and odd dimensions apart where V is quantized; else what the largest power of two leaves, or nothing.
    acc = tl.zeros([TILE_M, PADDED_VO if V_FORMAT is None else PADDED_VO // 2], tl.float32)
    acc_rest = tl.zeros([TILE_M, max(REST_VO, 1) if V_FORMAT is None else PADDED_VO // 2], tl.float32)
    value_unit = tl.zeros([TILE_M], tl.float32)

    if IS_ONE_ROW:
        # One row's mask is cheap where there is one at all; a second loop would only cost its start-up.
        for first in range(kv_start, kv_end, TILE_KV):
            acc, acc_rest, row_max, row_sum, value_unit = attend_tile(
                acc, acc_rest, row_max, row_sum, value_unit, queries, first, kv_end,
                where, page_row, k_cache, v_cache, lists, mask, score,
                False, IS_UNMASKED, IS_ONE_ROW, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO,
                REST_QK, REST_VO, PAGE_SIZE, SCORE_CODES, MASK_FN, HAS_LISTS, HAS_WINDOW, HAS_DROPOUT,
                K_FORMAT, V_FORMAT, K_GRANULARITY, V_GRANULARITY, K_ASSEMBLY, V_ASSEMBLY,
                q_ptr.dtype.element_ty == tl.float32,
            )  # fmt: skip
    else:
        full_stop = full_start + (full_end - full_start) // TILE_KV * TILE_KV
        # Keys that every row admits.
        for first in range(full_start, full_stop, TILE_KV):
            acc, acc_rest, row_max, row_sum, value_unit = attend_tile(
                acc, acc_rest, row_max, row_sum, value_unit, queries, first, full_stop,
                where, page_row, k_cache, v_cache, lists, mask, score,
                True, True, IS_ONE_ROW, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO,
                REST_QK, REST_VO, PAGE_SIZE, SCORE_CODES, MASK_FN, HAS_LISTS, HAS_WINDOW, HAS_DROPOUT,
                K_FORMAT, V_FORMAT, K_GRANULARITY, V_GRANULARITY, K_ASSEMBLY, V_ASSEMBLY,
                q_ptr.dtype.element_ty == tl.float32,
            )  # fmt: skip
        # Keys before and after those, masked row by row.
        num_before = tl.cdiv(full_start - kv_start, TILE_KV)
        num_after = tl.cdiv(kv_end - full_stop, TILE_KV)
        for step in range(0, num_before + num_after):
            is_before = step < num_before
            first = tl.where(is_before, kv_start + step * TILE_KV, full_stop + (step - num_before) * TILE_KV)
            limit = tl.where(is_before, full_start, kv_end)
            acc, acc_rest, row_max, row_sum, value_unit = attend_tile(
                acc, acc_rest, row_max, row_sum, value_unit, queries, first, limit,
                where, page_row, k_cache, v_cache, lists, mask, score,
                False, False, IS_ONE_ROW, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO,
                REST_QK, REST_VO, PAGE_SIZE, SCORE_CODES, MASK_FN, HAS_LISTS, HAS_WINDOW, HAS_DROPOUT,
                K_FORMAT, V_FORMAT, K_GRANULARITY, V_GRANULARITY, K_ASSEMBLY, V_ASSEMBLY,
                q_ptr.dtype.element_ty == tl.float32,
            )  # fmt: skip

    acc, acc_rest = scale_sums(
        acc, acc_rest, value_unit, v_scale_ptr, v_scale_strides, kv_head, dropout_scale,
        HEAD_DIM_VO, PADDED_VO, HAS_DROPOUT, V_FORMAT, V_GRANULARITY, q_ptr.dtype.element_ty == tl.float32,
    )  # fmt: skip
    if partial >= 0:
        store_state(
            acc, acc_rest, row_max, row_sum, is_live, partial, partial_acc_ptr, partial_max_ptr, partial_sum_ptr,
            TILE_M, HEAD_DIM_VO, PADDED_VO, REST_VO,
        )  # fmt: skip
        if tickets_ptr is not None:
            merge_when_last(
                merge_rows, num_partials, merge_ptr, tickets_ptr + merge,
                partial_acc_ptr, partial_max_ptr, partial_sum_ptr,
                sink_logits_ptr, generations_ptr, batch_size, out_ptr, lse_ptr, out_strides, lse_strides,
                TILE_M, HEADS, HEAD_DIM_VO, PADDED_VO if REST_VO == 0 else 2 * PADDED_VO, HAS_SINK,
                MERGE_LANES, MERGE_SPLITS,
            )  # fmt: skip
    else:
        store_rows(
            acc, acc_rest, row_max, row_sum, rows, heads, is_live,
            out_ptr, lse_ptr, out_strides, lse_strides, sink_logits_ptr, HEAD_DIM_VO, PADDED_VO, REST_VO, HAS_SINK,
        )  # fmt: skip


@triton.jit
def load_queries(
    q_ptr, q_starts, is_live,  # [TILE_M] twice
    stride_dim, k_scale_ptr, k_scale_strides, kv_head, sm_scale,
    HEAD_DIM_QK: tl.constexpr,
    PADDED_QK: tl.constexpr,
    REST_QK: tl.constexpr,
    K_FORMAT: tl.constexpr,
    K_GRANULARITY: tl.constexpr,
):  # fmt: skip
    """A tile's query rows in two parts, and what makes scores of their products with K.

    [TILE_M, PADDED_QK] and the rest of the dimensions; where K is quantized, even and odd dimensions apart.
    """
    if K_FORMAT is None:
        q = load_query(q_ptr, q_starts, is_live, tl.arange(0, PADDED_QK), stride_dim, HEAD_DIM_QK)
        q_rest = q
        if REST_QK > 0:
            rest = PADDED_QK + tl.arange(0, REST_QK)
            q_rest = load_query(q_ptr, q_starts, is_live, rest, stride_dim, HEAD_DIM_QK)
        return (q, q_rest), sm_scale * LOG2_E
    else:
        even_dim = 2 * tl.arange(0, PADDED_QK // 2)
        q = widen(load_query(q_ptr, q_starts, is_live, even_dim, stride_dim, HEAD_DIM_QK))
        q_odd = widen(load_query(q_ptr, q_starts, is_live, even_dim + 1, stride_dim, HEAD_DIM_QK))
        if K_GRANULARITY == "channel":
            q *= load_channel_scales(k_scale_ptr, k_scale_strides, kv_head, even_dim, HEAD_DIM_QK)[None, :]
            q_odd *= load_channel_scales(k_scale_ptr, k_scale_strides, kv_head, even_dim + 1, HEAD_DIM_QK)[None, :]
        score_scale = sm_scale * LOG2_E * load_whole_scale(k_scale_ptr, k_scale_strides, kv_head, K_GRANULARITY)
        if q_ptr.dtype.element_ty != tl.float32:
            q, q_odd, q_unit = normalize_query(q, q_odd)
            return (q, q_odd), (q_unit * score_scale)[:, None]
        else:
            return (q, q_odd), score_scale


@triton.jit
def load_query(q_ptr, starts, is_live, dim, stride_dim, HEAD_DIM: tl.constexpr):  # [TILE_M] twice, [DIMS]
    """Some dimensions of a tile's query rows, [TILE_M, DIMS]; 0 in lanes of no row."""
    ptrs = q_ptr + starts[:, None] + (dim.to(tl.int64) * stride_dim)[None, :]
    return tl.load(ptrs, mask=is_live[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def scale_sums(
    acc, acc_rest,  # [TILE_M, PADDED_VO] and the rest of it, or half of it twice
    value_unit,  # [TILE_M]
    v_scale_ptr, v_scale_strides, kv_head, dropout_scale,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_VO: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    V_GRANULARITY: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """Sums of P V with every scale that was left out of them, [TILE_M, PADDED_VO] and the rest."""
    if V_FORMAT is not None:
        acc = tl.interleave(acc, acc_rest)
        if not IS_FLOAT32:
            acc *= 1.0 / P_SCALE
            if V_GRANULARITY == "page" or V_GRANULARITY == "token":
                acc *= value_unit[:, None]
        if V_GRANULARITY == "channel":
            dims = tl.arange(0, PADDED_VO)
            acc *= load_channel_scales(v_scale_ptr, v_scale_strides, kv_head, dims, HEAD_DIM_VO)[None, :]
        else:
            acc *= load_whole_scale(v_scale_ptr, v_scale_strides, kv_head, V_GRANULARITY)
    if HAS_DROPOUT:
        acc *= dropout_scale
        acc_rest *= dropout_scale
    return acc, acc_rest
