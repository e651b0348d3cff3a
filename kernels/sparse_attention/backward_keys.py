"""KV-centric backward: dK and dV of each slot tile by one program, over everyone who selected it. [GRAD-SUM]

A program holds one tile of K and V and walks the pairs of its item (`backward_transpose`): it gathers the readers' q
and dout rows, forms the edges again from the saved lse, and sums P^T dO and dS^T Q in registers. Where a reader has few
rows several pairs fill one step. A slot is written once, by the program that owns its tile or by the one that adds the
parts of its items, PARTS_AT_ONCE at a time, by a tree of fixed order: no atomics, bitwise repeatable. Slots that no
list has are neither read nor written.
Dtypes, head_dim and page_size are those of the forward.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.backward_edges import (
    differentiate_edges,
    load_row_state,
    load_vectors,
    place_rows,
    score_slopes,
)
from attnconform.kernels.sparse_attention.backward_hints import MAX_MASKED_STAGES, PARTS_AT_ONCE
from attnconform.kernels.sparse_attention.backward_query import RowInputs, cache_strides, padded_dim
from attnconform.kernels.sparse_attention.backward_transpose import PAIR_FIELDS, TransposedPlan
from attnconform.kernels.sparse_attention.dropout import is_kept
from attnconform.kernels.sparse_attention.element_loads import launcher
from attnconform.kernels.sparse_attention.numerics import dot, narrow
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.rules import interval_rows, is_in_intervals

Q_START = tl.constexpr(PAIR_FIELDS.index("q_start"))
Q_COUNT = tl.constexpr(PAIR_FIELDS.index("q_count"))
HEAD_TILE = tl.constexpr(PAIR_FIELDS.index("head_tile"))
CELL = tl.constexpr(PAIR_FIELDS.index("cell"))
PAIR_WIDTH = tl.constexpr(len(PAIR_FIELDS))


def launch_key_gradients(
    plan: Plan,
    transposed: TransposedPlan,
    inputs: RowInputs,
    dk: Tensor,  # in the shape of k_cache, any floating dtype
    dv: Tensor,  # in the shape of v_cache, likewise
    parts: tuple[Tensor, Tensor],  # float32, (*transposed.partial_rows, head_dim)
) -> None:
    """Writes dk and dv of every slot that a list has; of tiles that were cut, their parts."""
    q, k_cache, v_cache, dout, lse_log2, delta = inputs
    shape, pair_shape, tiles, items = transposed.shape, transposed.pair_shape, transposed.tiles, transposed.items
    grid = (items.item_tile.numel(), transposed.num_head_programs)
    launcher(key_gradient_kernel, grid, q, k_cache, v_cache, dout)(
        q, k_cache, v_cache, dout, lse_log2, delta, dk, dv, *parts,
        q.stride(), cache_strides(plan, k_cache), cache_strides(plan, v_cache), dout.stride(),
        cache_strides(plan, dk), cache_strides(plan, dv),
        items.item_tile, items.item_begin, items.item_full_begin, items.item_end, items.item_partial,
        tiles.tile_slot, tiles.tile_kv_head, transposed.pairs, tiles.codes, tiles.is_touched,
        plan.row_requests, plan.row_positions, plan.mask_starts, plan.mask_ends, plan.mask_data,
        plan.score_params, plan.score_tables, plan.score_reaches, plan.dropout_words, plan.dropout_scale,
        plan.sm_scale, plan.window or 0, plan.total_q, plan.num_qo_heads,
        TILE_M=shape.tile_m,
        TILE_KV=shape.tile_kv,
        HEADS=pair_shape.heads,
        GROUP=plan.group_size,
        ROWS_PER_PAIR=pair_shape.rows_per_pair,
        IS_PACKED=pair_shape.is_packed,
        HEAD_DIM_QK=plan.head_dim_qk,
        HEAD_DIM_VO=plan.head_dim_vo,
        PADDED_QK=padded_dim(plan.head_dim_qk),
        PADDED_VO=padded_dim(plan.head_dim_vo),
        PAGE_SIZE=plan.page_size,
        SCORE_CODES=plan.score_codes,
        SCORE_SLOPES=score_slopes(plan),
        MASK_FN=plan.mask_fn,
        HAS_WINDOW=bool(plan.window) and plan.list_indptr is not None,
        HAS_HEAD_MASK=plan.has_head_mask,
        HAS_DROPOUT=plan.dropout_words is not None,
        MASKED_STAGES=min(shape.num_stages, MAX_MASKED_STAGES),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )  # fmt: skip


def launch_part_sums(
    plan: Plan, transposed: TransposedPlan, dk: Tensor, dv: Tensor, parts: tuple[Tensor, Tensor]
) -> None:
    """Writes dk and dv of every slot whose tile was cut."""
    tiles, items = transposed.tiles, transposed.items
    for gradient, part in zip((dk, dv), parts, strict=True):
        sum_parts_kernel[(items.summed_tile.numel(), transposed.num_head_programs, transposed.shape.tile_kv)](
            gradient, part, cache_strides(plan, gradient),
            items.summed_tile, items.partial_indptr, tiles.tile_slot, tiles.tile_kv_head, tiles.is_touched,
            TILE_KV=transposed.shape.tile_kv,
            HEAD_DIM=part.shape[3],
            PADDED_DIM=padded_dim(part.shape[3]),
            PAGE_SIZE=plan.page_size,
            PARTS=PARTS_AT_ONCE,
            num_warps=1,
        )  # fmt: skip


@triton.jit(do_not_specialize=["window", "total_q", "num_qo_heads"])
def key_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_log2_ptr, delta_ptr, dk_ptr, dv_ptr, partial_dk_ptr, partial_dv_ptr,
    q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides,
    item_tile_ptr, item_begin_ptr, item_full_begin_ptr, item_end_ptr, item_partial_ptr,
    tile_slot_ptr, tile_kv_head_ptr, pairs_ptr, codes_ptr, is_touched_ptr,
    row_requests_ptr, row_positions_ptr, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
    score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale,
    sm_scale, window, total_q, num_qo_heads,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS_PER_PAIR: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCORE_CODES: tl.constexpr,
    SCORE_SLOPES: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_HEAD_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """dK and dV of one item's slot tile; written, or left as its part of the sum where its tile was cut."""
    item = tl.program_id(0).to(tl.int64)
    head_program = tl.program_id(1)
    tile = tl.load(item_tile_ptr + item)
    begin = tl.load(item_begin_ptr + item)
    full_begin = tl.load(item_full_begin_ptr + item)
    end = tl.load(item_end_ptr + item)
    partial = tl.load(item_partial_ptr + item)
    kv_head = tl.load(tile_kv_head_ptr + tile) + head_program
    lane = tl.arange(0, TILE_KV)
    slot = tl.load(tile_slot_ptr + tile) + lane
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    is_touched = tl.load(is_touched_ptr + tile * TILE_KV + lane) != 0
    # [TILE_KV, PADDED_QK] and [TILE_KV, PADDED_VO]
    k_starts = page * k_strides[0] + offset * k_strides[1] + kv_head * k_strides[2]
    v_starts = page * v_strides[0] + offset * v_strides[1] + kv_head * v_strides[2]
    k = load_vectors(k_ptr, k_starts, is_touched, k_strides[3], HEAD_DIM_QK, PADDED_QK)
    v = load_vectors(v_ptr, v_starts, is_touched, v_strides[3], HEAD_DIM_VO, PADDED_VO)
    dk = tl.zeros([TILE_KV, PADDED_QK], tl.float32)
    dv = tl.zeros([TILE_KV, PADDED_VO], tl.float32)

    # Pairs that need a mask, then pairs whose rows all admit all keys of the tile.
    num_masked = count_steps(full_begin - begin, TILE_M, ROWS_PER_PAIR, IS_PACKED)
    pair = load_pair(pairs_ptr, 0, begin, full_begin, TILE_M, ROWS_PER_PAIR, IS_PACKED)
    for step in tl.range(0, num_masked, num_stages=MASKED_STAGES):
        # A pair is loaded a step ahead: what it says is an address that would be waited for.
        next_pair = load_pair(pairs_ptr, step + 1, begin, full_begin, TILE_M, ROWS_PER_PAIR, IS_PACKED)
        dk, dv = add_reader_rows(
            dk, dv, k, v, pair, step, begin, full_begin, head_program,
            q_ptr, dout_ptr, lse_log2_ptr, delta_ptr, q_strides, dout_strides, codes_ptr,
            row_requests_ptr, row_positions_ptr, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
            score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale,
            sm_scale, window, total_q, num_qo_heads,
            False, TILE_M, TILE_KV, HEADS, GROUP, ROWS_PER_PAIR, IS_PACKED, HEAD_DIM_QK, HEAD_DIM_VO,
            PADDED_QK, PADDED_VO, SCORE_CODES, SCORE_SLOPES, MASK_FN, HAS_WINDOW, HAS_HEAD_MASK, HAS_DROPOUT,
        )  # fmt: skip
        pair = next_pair
    num_full = count_steps(end - full_begin, TILE_M, ROWS_PER_PAIR, IS_PACKED)
    pair = load_pair(pairs_ptr, 0, full_begin, end, TILE_M, ROWS_PER_PAIR, IS_PACKED)
    for step in range(0, num_full):
        next_pair = load_pair(pairs_ptr, step + 1, full_begin, end, TILE_M, ROWS_PER_PAIR, IS_PACKED)
        dk, dv = add_reader_rows(
            dk, dv, k, v, pair, step, full_begin, end, head_program,
            q_ptr, dout_ptr, lse_log2_ptr, delta_ptr, q_strides, dout_strides, codes_ptr,
            row_requests_ptr, row_positions_ptr, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
            score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale,
            sm_scale, window, total_q, num_qo_heads,
            True, TILE_M, TILE_KV, HEADS, GROUP, ROWS_PER_PAIR, IS_PACKED, HEAD_DIM_QK, HEAD_DIM_VO,
            PADDED_QK, PADDED_VO, SCORE_CODES, SCORE_SLOPES, MASK_FN, HAS_WINDOW, HAS_HEAD_MASK, HAS_DROPOUT,
        )  # fmt: skip
        pair = next_pair

    dk *= sm_scale
    # Read once more, another way: held through the loops they would cost registers there, and spills.
    is_written = tl.load(is_touched_ptr + tile * TILE_KV + lane, cache_modifier=".cg") != 0
    slot = tl.load(tile_slot_ptr + tile, cache_modifier=".cg") + lane
    page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
    if partial >= 0:
        state = (partial * tl.num_programs(1) + head_program) * TILE_KV + lane
        store_vectors(partial_dk_ptr, dk, state * HEAD_DIM_QK, is_written, 1, HEAD_DIM_QK, PADDED_QK)
        store_vectors(partial_dv_ptr, dv, state * HEAD_DIM_VO, is_written, 1, HEAD_DIM_VO, PADDED_VO)
    else:
        dk_starts = page * dk_strides[0] + offset * dk_strides[1] + kv_head * dk_strides[2]
        dv_starts = page * dv_strides[0] + offset * dv_strides[1] + kv_head * dv_strides[2]
        store_vectors(dk_ptr, dk, dk_starts, is_written, dk_strides[3], HEAD_DIM_QK, PADDED_QK)
        store_vectors(dv_ptr, dv, dv_starts, is_written, dv_strides[3], HEAD_DIM_VO, PADDED_VO)


@triton.jit
def count_steps(num_pairs, TILE_M: tl.constexpr, ROWS_PER_PAIR: tl.constexpr, IS_PACKED: tl.constexpr):
    """Steps of TILE_M rows that some pairs take, int32."""
    num_pairs = num_pairs.to(tl.int32)
    if IS_PACKED:
        return tl.cdiv(num_pairs * ROWS_PER_PAIR, TILE_M)
    else:
        return num_pairs * tl.cdiv(ROWS_PER_PAIR, TILE_M)


@triton.jit
def load_pair(
    pairs_ptr, step, begin, end,
    TILE_M: tl.constexpr,
    ROWS_PER_PAIR: tl.constexpr,
    IS_PACKED: tl.constexpr,
):  # fmt: skip
    """q_start, q_count, head_tile and cell of the pairs of a step, [TILE_M] where packed; 0 past the last."""
    if IS_PACKED:
        pair = begin + (step * TILE_M + tl.arange(0, TILE_M)) // ROWS_PER_PAIR
    else:
        pair = begin + step // ((ROWS_PER_PAIR + TILE_M - 1) // TILE_M)
    is_pair = pair < end
    pair_ptr = pairs_ptr + pair * PAIR_WIDTH
    q_start = tl.load(pair_ptr + Q_START, mask=is_pair, other=0)
    q_count = tl.load(pair_ptr + Q_COUNT, mask=is_pair, other=0)
    head_tile = tl.load(pair_ptr + HEAD_TILE, mask=is_pair, other=0)
    cell = tl.load(pair_ptr + CELL, mask=is_pair, other=0)
    return q_start, q_count, head_tile, cell


@triton.jit
def add_reader_rows(
    dk, dv, k, v,  # [TILE_KV, PADDED_QK], [TILE_KV, PADDED_VO], and likewise
    pair,  # as load_pair gives it
    step, begin, end,  # of the rows of pairs from begin, below end
    head_program,  # heads of a reader that come before, where all KV heads share a list
    q_ptr, dout_ptr, lse_log2_ptr, delta_ptr, q_strides, dout_strides, codes_ptr,
    row_requests_ptr, row_positions_ptr, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
    score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale,
    sm_scale, window, total_q, num_qo_heads,
    IS_FULL: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS_PER_PAIR: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    SCORE_CODES: tl.constexpr,
    SCORE_SLOPES: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_HEAD_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """dk / sm_scale and dv with TILE_M more rows."""
    q_start, q_count, head_tile, cell = pair
    # A row and head of a reader, [TILE_M].
    unit = step * TILE_M + tl.arange(0, TILE_M)
    if IS_PACKED:
        is_unit = begin + unit // ROWS_PER_PAIR < end
        unit = unit % ROWS_PER_PAIR
    else:
        unit = (step % ((ROWS_PER_PAIR + TILE_M - 1) // TILE_M)) * TILE_M + tl.arange(0, TILE_M)
        is_unit = unit < ROWS_PER_PAIR
    rows = q_start + unit // HEADS
    head_tile += head_program
    heads = head_tile * HEADS + unit % HEADS
    # A full pair's reader has all its rows, and all of them have keys.
    is_row = is_unit if IS_FULL else is_unit & (unit // HEADS < q_count)
    if HEADS == GROUP:
        # What place_rows gives, as the run that it is.
        places = (head_tile.to(tl.int64) * total_q + q_start) * HEADS + unit
    else:
        places = place_rows(rows, heads, total_q, GROUP)
    lse_log2, delta, has_key = load_row_state(lse_log2_ptr, delta_ptr, places, is_row)
    if IS_FULL:
        has_key = is_row

    # [TILE_M or 1, TILE_KV]
    kv_idx = tl.zeros([1, TILE_KV], tl.int32)
    q_idx = tl.zeros([TILE_M], tl.int32)
    origin = None
    admitted = kv_idx == 0
    if not IS_FULL or len(SCORE_CODES) > 0 or HAS_DROPOUT:
        cells = cell.to(tl.int64) * TILE_KV
        lane = tl.arange(0, TILE_KV)
        if IS_PACKED:
            codes = tl.load(codes_ptr + cells[:, None] + lane[None, :])
        else:
            codes = tl.load(codes_ptr + cells + lane)[None, :]
        kv_idx = tl.where(codes >= 0, codes, -2 - codes)
        if IS_PACKED:
            q_idx = tl.load(row_positions_ptr + rows, mask=has_key, other=0)
        else:
            # A reader's rows follow each other in one request.
            origin = tl.load(row_positions_ptr + q_start)
            q_idx = origin + unit // HEADS
        if not IS_FULL:
            admitted = is_admitted(
                codes, kv_idx, interval_rows(rows, heads, total_q, HAS_HEAD_MASK), q_idx, has_key,
                row_requests_ptr + q_start, mask_starts_ptr, mask_ends_ptr, mask_data_ptr, window, MASK_FN, HAS_WINDOW,
            )  # fmt: skip
    kept = admitted
    if HAS_DROPOUT:
        request = tl.load(row_requests_ptr + rows, mask=has_key, other=0)
        kept = is_kept(dropout_words_ptr, request[:, None], heads[:, None], q_idx[:, None], kv_idx)

    # dout of a row without keys is not read: it may hold anything, and 0 * NaN would reach dV.
    rows, heads = rows.to(tl.int64), heads.to(tl.int64)
    q_starts = rows * q_strides[0] + heads * q_strides[1]
    dout_starts = rows * dout_strides[0] + heads * dout_strides[1]
    q = load_vectors(q_ptr, q_starts, has_key, q_strides[2], HEAD_DIM_QK, PADDED_QK)
    dout = load_vectors(dout_ptr, dout_starts, has_key, dout_strides[2], HEAD_DIM_VO, PADDED_VO)
    # What tensor cores multiply: other products are formed from registers, either way.
    IS_KEYS_FIRST: tl.constexpr = k.dtype.primitive_bitwidth == 16
    weights, score_grads = differentiate_edges(
        q, k, v, dout, lse_log2, delta, admitted, heads, has_key, q_idx[:, None], kv_idx, origin, kept,
        score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_scale, sm_scale, num_qo_heads,
        SCORE_CODES, SCORE_SLOPES, IS_FULL, HAS_DROPOUT, IS_KEYS_FIRST,
    )  # fmt: skip
    dv = dot(tl.trans(weights), dout, dv)
    dk = dot(tl.trans(score_grads), q, dk)
    return dk, dv


@triton.jit
def is_admitted(
    codes, kv_idx,  # [TILE_M or 1, TILE_KV]; a slot that the list does not have has code and position -1
    mask_rows, q_idx, has_key,  # [TILE_M]
    request_ptr, mask_starts_ptr, mask_ends_ptr, mask_data_ptr, window,
    MASK_FN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Which edges the lists and the mask hold, [TILE_M, TILE_KV]."""
    # Rows without keys have an empty interval here, and no interval holds the position -1.
    admitted = is_in_intervals(mask_rows, has_key, kv_idx, mask_starts_ptr, mask_ends_ptr)
    if HAS_WINDOW:
        age = q_idx[:, None] - kv_idx
        admitted = admitted & ((codes >= 0) | ((age >= 0) & (age < window)))
    if MASK_FN is not None:
        # The function may load by position: it gets a legal one where there is none.
        legal_idx = tl.maximum(kv_idx, 0)
        admitted = admitted & MASK_FN(q_idx[:, None], legal_idx, tl.load(request_ptr), mask_data_ptr)
    return admitted


@triton.jit
def store_vectors(
    ptr,
    vectors,  # [TILE, PADDED_DIM] float32
    starts,  # [TILE] int64
    is_written,  # [TILE]
    stride_dim,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Writes vectors in the dtype of the memory."""
    dim = tl.arange(0, PADDED_DIM)
    ptrs = ptr + starts[:, None] + (dim.to(tl.int64) * stride_dim)[None, :]
    tl.store(ptrs, narrow(vectors, ptr.dtype.element_ty), mask=is_written[:, None] & (dim < HEAD_DIM)[None, :])


@triton.jit
def sum_parts_kernel(
    gradient_ptr, part_ptr, strides,
    summed_tile_ptr, partial_indptr_ptr, tile_slot_ptr, tile_kv_head_ptr, is_touched_ptr,
    TILE_KV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One slot's gradient: the parts of its tile's items, PARTS of them by a tree and those sums in order."""
    head_program = tl.program_id(1)
    lane = tl.program_id(2)
    tile = tl.load(summed_tile_ptr + tl.program_id(0))
    if tl.load(is_touched_ptr + tile * TILE_KV + lane) != 0:
        dim = tl.arange(0, PADDED_DIM)
        total = tl.zeros([PADDED_DIM], tl.float32)
        begin = tl.load(partial_indptr_ptr + tl.program_id(0))
        end = tl.load(partial_indptr_ptr + tl.program_id(0) + 1)
        for step in range(0, tl.cdiv(end - begin, PARTS)):
            # [PARTS, PADDED_DIM]
            part = begin + step * PARTS + tl.arange(0, PARTS)
            state = (part * tl.num_programs(1) + head_program) * TILE_KV + lane
            is_read = (part < end)[:, None] & (dim < HEAD_DIM)[None, :]
            parts = tl.load(part_ptr + state[:, None] * HEAD_DIM + dim[None, :], mask=is_read, other=0.0)
            total += add_as_tree(parts, PARTS, PADDED_DIM)
        slot = tl.load(tile_slot_ptr + tile) + lane
        kv_head = tl.load(tile_kv_head_ptr + tile) + head_program
        start = slot // PAGE_SIZE * strides[0] + slot % PAGE_SIZE * strides[1] + kv_head * strides[2]
        ptrs = gradient_ptr + start + dim.to(tl.int64) * strides[3]
        tl.store(ptrs, narrow(total, gradient_ptr.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit
def add_as_tree(parts, PARTS: tl.constexpr, PADDED_DIM: tl.constexpr):
    """Sum over PARTS rows, 8: halves are added until one row is left, in the same order everywhere."""
    for level in tl.static_range(3):
        halves = tl.reshape(parts, [2, PARTS // (2 << level), PADDED_DIM])
        low, high = tl.split(tl.permute(halves, [1, 2, 0]))
        parts = low + high
    return tl.reshape(parts, [PADDED_DIM])
