"""Query-centric backward: dQ over the forward's tasks and, in atomic mode, dK and dV on the way. [GRAD-FORMULA]

A program takes one task of the plan (a tile of rows and heads, a run of keys) or a part of its rows, forms the edges
again from the saved lse and sums dS K. Chunks of one tile leave their sums in a workspace that is added up in chunk
order, so dQ is bitwise repeatable. In atomic mode the program also adds each key tile's P^T dO and dS^T Q to float32
buffers, in whatever order the programs come. Dtypes, head_dim and page_size are those of the forward.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.backward_edges import (
    differentiate_edges,
    load_row_state,
    load_vectors,
)
from attnconform.kernels.sparse_attention.dropout import is_kept
from attnconform.kernels.sparse_attention.numerics import dot, narrow
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.rules import interval_rows, is_in_intervals
from attnconform.kernels.sparse_attention.tasks import MERGE_FIELDS, TASK_FIELDS, Launch

REQUEST = tl.constexpr(TASK_FIELDS.index("request"))
Q_START = tl.constexpr(TASK_FIELDS.index("q_start"))
Q_COUNT = tl.constexpr(TASK_FIELDS.index("q_count"))
HEAD_START = tl.constexpr(TASK_FIELDS.index("head_start"))
HEAD_COUNT = tl.constexpr(TASK_FIELDS.index("head_count"))
KV_HEAD = tl.constexpr(TASK_FIELDS.index("kv_head"))
KV_START = tl.constexpr(TASK_FIELDS.index("kv_start"))
KV_END = tl.constexpr(TASK_FIELDS.index("kv_end"))
FULL_START = tl.constexpr(TASK_FIELDS.index("full_start"))
FULL_END = tl.constexpr(TASK_FIELDS.index("full_end"))
PARTIAL = tl.constexpr(TASK_FIELDS.index("partial"))
TASK_WIDTH = tl.constexpr(len(TASK_FIELDS))

MERGE_Q_START = tl.constexpr(MERGE_FIELDS.index("q_start"))
MERGE_Q_COUNT = tl.constexpr(MERGE_FIELDS.index("q_count"))
MERGE_HEAD_START = tl.constexpr(MERGE_FIELDS.index("head_start"))
MERGE_HEAD_COUNT = tl.constexpr(MERGE_FIELDS.index("head_count"))
MERGE_FIRST_PARTIAL = tl.constexpr(MERGE_FIELDS.index("first_partial"))
MERGE_NUM_PARTIALS = tl.constexpr(MERGE_FIELDS.index("num_partials"))
MERGE_WIDTH = tl.constexpr(len(MERGE_FIELDS))


class RowInputs(NamedTuple):
    """What either direction reads; the last two as `prepare_rows` makes them, everything else of any strides."""

    q: Tensor  # (total_q, num_qo_heads, head_dim_qk)
    k_cache: Tensor
    v_cache: Tensor
    dout: Tensor  # (total_q, num_qo_heads, head_dim_vo)
    lse_log2: Tensor  # (total_q, num_qo_heads) float32, +inf where a row has no key
    delta: Tensor  # (total_q, num_qo_heads) float32, dout.out - dlse


def cache_strides(plan: Plan, cache: Tensor) -> tuple[int, int, int, int]:
    """Strides of page, token in page, head and dimension, whatever the layout."""
    page, a, b, dim = cache.stride()
    return (page, a, b, dim) if plan.layout == "NHD" else (page, b, a, dim)


def padded_dim(head_dim: int) -> int:
    """A power of two that a tensor core takes."""
    return max(16, triton.next_power_of_2(head_dim))


def launch_query_gradients(
    plan: Plan,
    inputs: RowInputs,
    dq: Tensor,  # (total_q, num_qo_heads, head_dim_qk), any floating dtype
    accumulators: tuple[Tensor, Tensor] | None,  # float32 in the caches' shapes, already 0: atomic mode
) -> None:
    """Writes dq, and adds to the accumulators where given."""
    for launch in plan.launches:
        partial_dq = dq.new_empty(
            (launch.partial_max.shape[0], launch.shape.tile_m, plan.head_dim_qk), dtype=torch.float32
        )
        _launch_tasks(plan, launch, inputs, dq, partial_dq, accumulators)
        if launch.merges.shape[0]:
            launch_chunk_sums(launch, partial_dq, dq)


def _launch_tasks(
    plan: Plan,
    launch: Launch,
    inputs: RowInputs,
    dq: Tensor,
    partial_dq: Tensor,
    accumulators: tuple[Tensor, Tensor] | None,
) -> None:
    q, k_cache, v_cache, dout, lse_log2, delta = inputs
    dk, dv = accumulators or (None, None)
    step = choose_step(plan, launch)
    query_gradient_kernel[(launch.tasks.shape[0], launch.shape.tile_m // step.tile_m)](
        q, k_cache, v_cache, dout, lse_log2, delta, dq, dk, dv, partial_dq,
        q.stride(), cache_strides(plan, k_cache), cache_strides(plan, v_cache), dout.stride(), dq.stride(),
        None if dk is None else cache_strides(plan, dk), None if dv is None else cache_strides(plan, dv),
        launch.tasks, plan.page_table, plan.list_slots, plan.list_positions, plan.list_members,
        plan.row_positions, plan.mask_starts, plan.mask_ends, plan.mask_data,
        plan.score_params, plan.score_tables, plan.score_reaches, plan.dropout_words, plan.dropout_scale,
        plan.sm_scale, plan.window or 0, plan.total_q, plan.num_qo_heads, plan.page_table.shape[1],
        TASK_M=launch.shape.tile_m,
        TILE_M=step.tile_m,
        TILE_KV=step.tile_kv,
        HEADS=launch.shape.heads_per_tile,
        HEAD_DIM_QK=plan.head_dim_qk,
        HEAD_DIM_VO=plan.head_dim_vo,
        PADDED_QK=padded_dim(plan.head_dim_qk),
        PADDED_VO=padded_dim(plan.head_dim_vo),
        PAGE_SIZE=plan.page_size,
        SCORE_CODES=plan.score_codes,
        MASK_FN=plan.mask_fn,
        HAS_LISTS=plan.list_slots is not None,
        HAS_WINDOW=bool(plan.window),
        HAS_HEAD_MASK=plan.has_head_mask,
        HAS_DROPOUT=plan.dropout_words is not None,
        IS_ATOMIC=accumulators is not None,
        num_warps=step.num_warps,
        num_stages=2,
    )  # fmt: skip


class StepShape(NamedTuple):
    """What is compiled in: a program takes tile_m of a task's rows times heads, and tile_kv keys per step."""

    tile_m: int
    tile_kv: int
    num_warps: int


def choose_step(plan: Plan, launch: Launch) -> StepShape:
    """At most the forward's tiles: a step holds K and V, two score tiles and dQ, about twice what the forward holds."""
    # float32 products run without tensor cores, from registers, so that a float counts twice.
    weight = plan.dtype.itemsize**2 // 4
    held = max(padded_dim(plan.head_dim_qk), padded_dim(plan.head_dim_vo)) * weight
    tile_m, tile_kv = (128, 64) if held <= 128 else (64, 32) if held <= 256 else (32, 16)
    tile_m, tile_kv = min(tile_m, launch.shape.tile_m), min(tile_kv, launch.shape.tile_kv)
    is_large = tile_m > 64 or plan.dtype.itemsize > 2
    return StepShape(tile_m, tile_kv, 8 if is_large else 4 if tile_m > 32 else 2)


def launch_chunk_sums(
    launch: Launch,
    partials: Tensor,  # (num_partials, tile_m, width) float32
    sums: Tensor,  # (total_q, num_qo_heads, width), any floating dtype and strides
) -> None:
    """Writes every row and head of the tiles that were cut, their chunks added in order."""
    sum_chunks_kernel[(launch.merges.shape[0], launch.shape.tile_m)](
        launch.merges, partials, sums, sums.stride(),
        TILE_M=launch.shape.tile_m,
        HEADS=launch.shape.heads_per_tile,
        WIDTH=sums.shape[2],
        PADDED_WIDTH=padded_dim(sums.shape[2]),
        num_warps=4,
    )  # fmt: skip


@triton.jit
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_log2_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, partial_dq_ptr,
    q_strides, k_strides, v_strides, dout_strides, dq_strides, dk_strides, dv_strides,
    tasks_ptr, page_table_ptr, list_slots_ptr, list_positions_ptr, list_members_ptr,
    row_positions_ptr, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
    score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale,
    sm_scale, window, total_q, num_qo_heads, max_pages,
    TASK_M: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCORE_CODES: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_HEAD_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_ATOMIC: tl.constexpr,
):  # fmt: skip
    """dQ of TILE_M of one task's rows times heads, or its chunk of it."""
    task_ptr = tasks_ptr + tl.program_id(0).to(tl.int64) * TASK_WIDTH
    q_count = tl.load(task_ptr + Q_COUNT)
    lane_m = tl.program_id(1) * TILE_M + tl.arange(0, TILE_M)
    # A short task has no rows for its last programs.
    if tl.program_id(1) * TILE_M >= q_count * HEADS:
        return
    request = tl.load(task_ptr + REQUEST)
    kv_head = tl.load(task_ptr + KV_HEAD).to(tl.int64)
    kv_start = tl.load(task_ptr + KV_START)
    kv_end = tl.load(task_ptr + KV_END)
    full_start = tl.load(task_ptr + FULL_START)
    full_end = tl.load(task_ptr + FULL_END)
    partial = tl.load(task_ptr + PARTIAL).to(tl.int64)

    rows = tl.load(task_ptr + Q_START) + lane_m // HEADS
    heads = tl.load(task_ptr + HEAD_START) + lane_m % HEADS
    is_row = (lane_m // HEADS < q_count) & (lane_m % HEADS < tl.load(task_ptr + HEAD_COUNT))
    q_idx = tl.load(row_positions_ptr + rows, mask=is_row, other=0)
    lse_log2, delta, has_key = load_row_state(lse_log2_ptr, delta_ptr, rows, heads, is_row, num_qo_heads)
    rows_wide, heads_wide = rows.to(tl.int64), heads.to(tl.int64)
    # dout of a row without keys is not read: it may hold anything, and 0 * NaN would reach dV.
    q = load_vectors(
        q_ptr, rows_wide * q_strides[0] + heads_wide * q_strides[1], has_key, q_strides[2], HEAD_DIM_QK, PADDED_QK
    )
    dout_starts = rows_wide * dout_strides[0] + heads_wide * dout_strides[1]
    dout = load_vectors(dout_ptr, dout_starts, has_key, dout_strides[2], HEAD_DIM_VO, PADDED_VO)

    k_ptr += kv_head * k_strides[2]
    v_ptr += kv_head * v_strides[2]
    if IS_ATOMIC:
        dk_ptr += kv_head * dk_strides[2]
        dv_ptr += kv_head * dv_strides[2]
    page_table_ptr += request.to(tl.int64) * max_pages
    mask_rows = interval_rows(rows, heads, total_q, HAS_HEAD_MASK)
    dq = tl.zeros([TILE_M, PADDED_QK], tl.float32)

    # Keys that every row admits.
    num_full = (full_end - full_start) // TILE_KV
    full_stop = full_start + num_full * TILE_KV
    for first in range(full_start, full_stop, TILE_KV):
        dq = add_key_tile(
            dq, q, dout, lse_log2, delta, first, full_stop,
            k_ptr, v_ptr, dk_ptr, dv_ptr, k_strides, v_strides, dk_strides, dv_strides,
            page_table_ptr, list_slots_ptr, list_positions_ptr, list_members_ptr,
            mask_rows, q_idx, heads, has_key, request, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
            score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale,
            sm_scale, window, num_qo_heads,
            True, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO, PAGE_SIZE,
            SCORE_CODES, MASK_FN, HAS_LISTS, HAS_WINDOW, HAS_DROPOUT, IS_ATOMIC,
        )  # fmt: skip
    # Keys before and after those, masked row by row.
    num_before = tl.cdiv(full_start - kv_start, TILE_KV)
    num_after = tl.cdiv(kv_end - full_stop, TILE_KV)
    for step in range(0, num_before + num_after):
        is_before = step < num_before
        first = tl.where(is_before, kv_start + step * TILE_KV, full_stop + (step - num_before) * TILE_KV)
        dq = add_key_tile(
            dq, q, dout, lse_log2, delta, first, tl.where(is_before, full_start, kv_end),
            k_ptr, v_ptr, dk_ptr, dv_ptr, k_strides, v_strides, dk_strides, dv_strides,
            page_table_ptr, list_slots_ptr, list_positions_ptr, list_members_ptr,
            mask_rows, q_idx, heads, has_key, request, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
            score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale,
            sm_scale, window, num_qo_heads,
            False, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO, PAGE_SIZE,
            SCORE_CODES, MASK_FN, HAS_LISTS, HAS_WINDOW, HAS_DROPOUT, IS_ATOMIC,
        )  # fmt: skip

    dim = tl.arange(0, PADDED_QK)
    is_written = is_row[:, None] & (dim < HEAD_DIM_QK)[None, :]
    dq *= sm_scale
    if partial >= 0:
        state = partial * TASK_M + lane_m
        tl.store(partial_dq_ptr + state[:, None] * HEAD_DIM_QK + dim[None, :], dq, mask=is_written)
    else:
        starts = rows_wide * dq_strides[0] + heads_wide * dq_strides[1]
        ptrs = dq_ptr + starts[:, None] + (dim.to(tl.int64) * dq_strides[2])[None, :]
        tl.store(ptrs, narrow(dq, dq_ptr.dtype.element_ty), mask=is_written)


@triton.jit
def add_key_tile(
    dq, q, dout, lse_log2, delta,  # [TILE_M, PADDED_QK] twice, [TILE_M, PADDED_VO], [TILE_M] twice
    first, limit,  # keys of this tile: entries or positions from first, below limit
    k_ptr, v_ptr, dk_ptr, dv_ptr, k_strides, v_strides, dk_strides, dv_strides,
    page_table_ptr, list_slots_ptr, list_positions_ptr, list_members_ptr,
    mask_rows, q_idx, heads, has_key,  # [TILE_M]
    request, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
    score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale,
    sm_scale, window, num_qo_heads,
    IS_FULL: tl.constexpr,
    TILE_KV: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCORE_CODES: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_ATOMIC: tl.constexpr,
):  # fmt: skip
    """dq / sm_scale with one more tile of keys; the tile's dk and dv go to the accumulators in atomic mode."""
    kv_idx, page, offset, admitted, is_read = find_keys(
        first, limit, page_table_ptr, list_slots_ptr, list_positions_ptr, list_members_ptr,
        mask_rows, q_idx, has_key, request, mask_starts_ptr, mask_ends_ptr, mask_data_ptr, window,
        IS_FULL, TILE_KV, PAGE_SIZE, MASK_FN, HAS_LISTS, HAS_WINDOW,
    )  # fmt: skip
    # [TILE_KV, PADDED_QK] and [TILE_KV, PADDED_VO]
    k = load_vectors(k_ptr, page * k_strides[0] + offset * k_strides[1], is_read, k_strides[3], HEAD_DIM_QK, PADDED_QK)
    v = load_vectors(v_ptr, page * v_strides[0] + offset * v_strides[1], is_read, v_strides[3], HEAD_DIM_VO, PADDED_VO)
    kept = admitted
    if HAS_DROPOUT:
        kept = is_kept(dropout_words_ptr, request, heads[:, None], q_idx[:, None], kv_idx[None, :])
    weights, score_grads = differentiate_edges(
        q, k, v, dout, lse_log2, delta, admitted, heads, has_key, kv_idx[None, :] - q_idx[:, None], kept,
        score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_scale, sm_scale, num_qo_heads,
        SCORE_CODES, IS_FULL, HAS_DROPOUT,
    )  # fmt: skip
    if IS_ATOMIC:
        dv = dot(tl.trans(weights), dout, tl.zeros([TILE_KV, PADDED_VO], tl.float32))
        dk = dot(tl.trans(score_grads), q, tl.zeros([TILE_KV, PADDED_QK], tl.float32)) * sm_scale
        dv_starts = page * dv_strides[0] + offset * dv_strides[1]
        dk_starts = page * dk_strides[0] + offset * dk_strides[1]
        add_vectors(dv_ptr, dv, dv_starts, is_read, dv_strides[3], HEAD_DIM_VO, PADDED_VO)
        add_vectors(dk_ptr, dk, dk_starts, is_read, dk_strides[3], HEAD_DIM_QK, PADDED_QK)
    return dot(score_grads, k, dq)


@triton.jit
def find_keys(
    first, limit,  # keys of a tile: entries or positions from first, below limit
    page_table_ptr, list_slots_ptr, list_positions_ptr, list_members_ptr,
    mask_rows, q_idx, has_key,  # [TILE_M]
    request, mask_starts_ptr, mask_ends_ptr, mask_data_ptr, window,
    IS_FULL: tl.constexpr,
    TILE_KV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """Position, page and offset of every key, the edges [TILE_M, TILE_KV], and which keys have any. [GRAD-SET]"""
    key = first + tl.arange(0, TILE_KV)
    is_key = key < limit
    if HAS_LISTS:
        kv_idx = tl.load(list_positions_ptr + key, mask=is_key, other=0)
        slot = tl.load(list_slots_ptr + key, mask=is_key, other=0)
        page = slot // PAGE_SIZE
        offset = slot % PAGE_SIZE
    else:
        kv_idx = key
        page = tl.load(page_table_ptr + key // PAGE_SIZE, mask=is_key, other=0).to(tl.int64)
        offset = (key % PAGE_SIZE).to(tl.int64)

    # In a full tile every lane is a key.
    admitted = is_key[None, :] & has_key[:, None]
    is_read = is_key
    if not IS_FULL:
        admitted = admitted & is_in_intervals(mask_rows, has_key, kv_idx[None, :], mask_starts_ptr, mask_ends_ptr)
        if HAS_LISTS and HAS_WINDOW:
            is_member = tl.load(list_members_ptr + key, mask=is_key, other=0) != 0
            age = q_idx[:, None] - kv_idx[None, :]
            admitted = admitted & (is_member[None, :] | ((age >= 0) & (age < window)))
        if MASK_FN is not None:
            # The function may load by position: it gets a legal one where there is none.
            legal_idx = tl.where(is_key, kv_idx, 0)
            admitted = admitted & MASK_FN(q_idx[:, None], legal_idx[None, :], request, mask_data_ptr)
        # A slot that no row admits is not read, as in the forward.
        is_read = tl.max(admitted.to(tl.int32), axis=0) > 0
    return kv_idx, page, offset, admitted, is_read


@triton.jit
def add_vectors(
    ptr,
    vectors,  # [TILE, PADDED_DIM] float32
    starts,  # [TILE] int64
    is_added,  # [TILE]
    stride_dim,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Adds vectors to memory one element at a time; two vectors may have the same place."""
    dim = tl.arange(0, PADDED_DIM)
    ptrs = ptr + starts[:, None] + (dim.to(tl.int64) * stride_dim)[None, :]
    tl.atomic_add(ptrs, vectors, mask=is_added[:, None] & (dim < HEAD_DIM)[None, :], sem="relaxed")


@triton.jit
def sum_chunks_kernel(
    merges_ptr, partials_ptr, sums_ptr, strides,
    TILE_M: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
):  # fmt: skip
    """One row and head of a tile that was cut, chunks added in order."""
    merge_ptr = merges_ptr + tl.program_id(0).to(tl.int64) * MERGE_WIDTH
    lane_m = tl.program_id(1)
    first_partial = tl.load(merge_ptr + MERGE_FIRST_PARTIAL).to(tl.int64)
    num_partials = tl.load(merge_ptr + MERGE_NUM_PARTIALS)
    is_row = (lane_m // HEADS < tl.load(merge_ptr + MERGE_Q_COUNT)) & (
        lane_m % HEADS < tl.load(merge_ptr + MERGE_HEAD_COUNT)
    )
    if is_row:
        dim = tl.arange(0, PADDED_WIDTH)
        is_dim = dim < WIDTH
        total = tl.zeros([PADDED_WIDTH], tl.float32)
        for chunk in range(0, num_partials):
            state = (first_partial + chunk) * TILE_M + lane_m
            total += tl.load(partials_ptr + state * WIDTH + dim, mask=is_dim, other=0.0)
        row = (tl.load(merge_ptr + MERGE_Q_START) + lane_m // HEADS).to(tl.int64)
        head = (tl.load(merge_ptr + MERGE_HEAD_START) + lane_m % HEADS).to(tl.int64)
        ptrs = sums_ptr + row * strides[0] + head * strides[1] + dim.to(tl.int64) * strides[2]
        tl.store(ptrs, narrow(total, sums_ptr.dtype.element_ty), mask=is_dim)
