"""Query-centric backward: dQ and, where pages are cold, dK and dV on the way. [GRAD-FORMULA]

A program takes one task of `backward_tasks` (a tile of rows and heads, a run of keys), forms the edges again from the
saved lse and sums dS K. Chunks of one tile leave their sums in a workspace that is added up in chunk order, so dQ is
bitwise repeatable. The program also adds each key tile's P^T dO and dS^T Q to the float32 sums of cold pages, in
whatever order the programs come; a tile without a cold key skips both products. Dtypes, head_dim and page_size are
those of the forward.
"""

from __future__ import annotations

from typing import NamedTuple

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
from attnconform.kernels.sparse_attention.backward_hints import MAX_MASKED_STAGES
from attnconform.kernels.sparse_attention.backward_reuse import ColdPages
from attnconform.kernels.sparse_attention.backward_tasks import QUERY_FIELDS, SUM_FIELDS, QueryLaunch
from attnconform.kernels.sparse_attention.dropout import is_kept
from attnconform.kernels.sparse_attention.element_loads import launcher
from attnconform.kernels.sparse_attention.numerics import dot, narrow
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.rules import interval_rows, is_in_intervals

REQUEST = tl.constexpr(QUERY_FIELDS.index("request"))
Q_START = tl.constexpr(QUERY_FIELDS.index("q_start"))
Q_COUNT = tl.constexpr(QUERY_FIELDS.index("q_count"))
HEAD_START = tl.constexpr(QUERY_FIELDS.index("head_start"))
HEAD_COUNT = tl.constexpr(QUERY_FIELDS.index("head_count"))
KV_HEAD = tl.constexpr(QUERY_FIELDS.index("kv_head"))
KV_START = tl.constexpr(QUERY_FIELDS.index("kv_start"))
KV_END = tl.constexpr(QUERY_FIELDS.index("kv_end"))
FULL_START = tl.constexpr(QUERY_FIELDS.index("full_start"))
FULL_END = tl.constexpr(QUERY_FIELDS.index("full_end"))
PARTIAL = tl.constexpr(QUERY_FIELDS.index("partial"))
TASK_WIDTH = tl.constexpr(len(QUERY_FIELDS))

SUM_Q_START = tl.constexpr(SUM_FIELDS.index("q_start"))
SUM_Q_COUNT = tl.constexpr(SUM_FIELDS.index("q_count"))
SUM_HEAD_START = tl.constexpr(SUM_FIELDS.index("head_start"))
SUM_HEAD_COUNT = tl.constexpr(SUM_FIELDS.index("head_count"))
SUM_FIRST_PARTIAL = tl.constexpr(SUM_FIELDS.index("first_partial"))
SUM_NUM_PARTIALS = tl.constexpr(SUM_FIELDS.index("num_partials"))
SUM_WIDTH = tl.constexpr(len(SUM_FIELDS))


SLOTS_AT_ONCE = 16  # of a page, by one program that rounds


class RowInputs(NamedTuple):
    """What either direction reads; the last two as `prepare_rows` makes them, everything else of any strides."""

    q: Tensor  # (total_q, num_qo_heads, head_dim_qk)
    k_cache: Tensor
    v_cache: Tensor
    dout: Tensor  # (total_q, num_qo_heads, head_dim_vo)
    lse_log2: Tensor  # (num_kv_heads, total_q, group_size) float32, +inf where a row has no key
    delta: Tensor  # (num_kv_heads, total_q, group_size) float32, dout.out - dlse


def cache_strides(plan: Plan, cache: Tensor) -> tuple[int, int, int, int]:
    """Strides of page, token in page, head and dimension, whatever the layout."""
    page, a, b, dim = cache.stride()
    return (page, a, b, dim) if plan.layout == "NHD" else (page, b, a, dim)


def padded_dim(head_dim: int) -> int:
    """A power of two that a tensor core takes."""
    return max(16, triton.next_power_of_2(head_dim))


class ColdSums(NamedTuple):
    """Where cold pages are added up, float32, a row for each of `ColdPages.rows`; 0 before."""

    dk: Tensor  # (num_rows, page_size, head_dim_qk)
    dv: Tensor  # (num_rows, page_size, head_dim_vo)


def launch_query_gradients(
    plan: Plan,
    launch: QueryLaunch,
    inputs: RowInputs,
    dq: Tensor,  # (total_q, num_qo_heads, head_dim_qk), any floating dtype
    parts: Tensor,  # (*launch.partial_rows, head_dim_qk) float32
    cold: ColdPages | None = None,
    sums: ColdSums | None = None,
) -> None:
    """Writes dq, or its parts where a tile was cut, and adds dk and dv of cold pages."""
    q, k_cache, v_cache, dout, lse_log2, delta = inputs
    shape = launch.shape
    launcher(query_gradient_kernel, (launch.tasks.shape[0],), q, k_cache, v_cache, dout)(
        q, k_cache, v_cache, dout, lse_log2, delta, dq, *(sums or (None, None)), parts,
        q.stride(), cache_strides(plan, k_cache), cache_strides(plan, v_cache), dout.stride(), dq.stride(),
        launch.tasks, plan.page_table, plan.list_slots, plan.list_positions, plan.list_members,
        plan.row_positions, plan.mask_starts, plan.mask_ends, plan.mask_data,
        plan.score_params, plan.score_tables, plan.score_reaches, plan.dropout_words, plan.dropout_scale,
        None if cold is None else cold.rows,
        plan.sm_scale, plan.window or 0, plan.total_q, plan.num_qo_heads, plan.page_table.shape[1], plan.num_pages,
        TILE_M=shape.tile_m,
        TILE_KV=shape.tile_kv,
        HEADS=launch.heads_per_tile,
        GROUP=plan.group_size,
        HEAD_DIM_QK=plan.head_dim_qk,
        HEAD_DIM_VO=plan.head_dim_vo,
        PADDED_QK=padded_dim(plan.head_dim_qk),
        PADDED_VO=padded_dim(plan.head_dim_vo),
        PAGE_SIZE=plan.page_size,
        SCORE_CODES=plan.score_codes,
        SCORE_SLOPES=score_slopes(plan),
        MASK_FN=plan.mask_fn,
        HAS_LISTS=plan.list_slots is not None,
        HAS_WINDOW=bool(plan.window),
        HAS_HEAD_MASK=plan.has_head_mask,
        HAS_DROPOUT=plan.dropout_words is not None,
        IS_ADDED=cold is not None and cold.num_rows > 0,
        MASKED_STAGES=min(shape.num_stages, MAX_MASKED_STAGES),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )  # fmt: skip


def launch_chunk_sums(
    launch: QueryLaunch,
    parts: Tensor,  # (*launch.partial_rows, width) float32
    sums: Tensor,  # (total_q, num_qo_heads, width), any floating dtype and strides
) -> None:
    """Writes every row and head of the tiles that were cut, their chunks added in order."""
    sum_chunks_kernel[(launch.sums.shape[0], launch.shape.tile_m)](
        launch.sums, parts, sums, sums.stride(),
        TILE_M=launch.shape.tile_m,
        HEADS=launch.heads_per_tile,
        WIDTH=sums.shape[2],
        PADDED_WIDTH=padded_dim(sums.shape[2]),
        num_warps=4,
    )  # fmt: skip


def launch_rounding(plan: Plan, cold: ColdPages, sums: ColdSums, dk: Tensor, dv: Tensor) -> None:
    """Writes every slot of the cold pages, rounded once."""
    for gradient, total in zip((dk, dv), sums, strict=True):
        round_sums_kernel[(cold.num_rows, triton.cdiv(plan.page_size, SLOTS_AT_ONCE))](
            gradient, total, cache_strides(plan, gradient), cold.kv_head, cold.page,
            SLOTS=SLOTS_AT_ONCE,
            HEAD_DIM=total.shape[2],
            PADDED_DIM=padded_dim(total.shape[2]),
            PAGE_SIZE=plan.page_size,
            num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["window", "total_q", "num_qo_heads", "max_pages", "num_pages"])
def query_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_log2_ptr, delta_ptr, dq_ptr, cold_dk_ptr, cold_dv_ptr, partial_dq_ptr,
    q_strides, k_strides, v_strides, dout_strides, dq_strides,
    tasks_ptr, page_table_ptr, list_slots_ptr, list_positions_ptr, list_members_ptr,
    row_positions_ptr, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
    score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale, cold_rows_ptr,
    sm_scale, window, total_q, num_qo_heads, max_pages, num_pages,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCORE_CODES: tl.constexpr,
    SCORE_SLOPES: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_HEAD_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_ADDED: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    """dQ of one task's rows times heads, or its chunk of it; dK and dV of the cold pages among its keys."""
    task_ptr = tasks_ptr + tl.program_id(0).to(tl.int64) * TASK_WIDTH
    q_count = tl.load(task_ptr + Q_COUNT)
    lane_m = tl.arange(0, TILE_M)
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
    places = place_rows(rows, heads, total_q, GROUP)
    lse_log2, delta, has_key = load_row_state(lse_log2_ptr, delta_ptr, places, is_row)
    rows_wide, heads_wide = rows.to(tl.int64), heads.to(tl.int64)
    # dout of a row without keys is not read: it may hold anything, and 0 * NaN would reach dV.
    q = load_vectors(
        q_ptr, rows_wide * q_strides[0] + heads_wide * q_strides[1], has_key, q_strides[2], HEAD_DIM_QK, PADDED_QK
    )
    dout_starts = rows_wide * dout_strides[0] + heads_wide * dout_strides[1]
    dout = load_vectors(dout_ptr, dout_starts, has_key, dout_strides[2], HEAD_DIM_VO, PADDED_VO)

    k_ptr += kv_head * k_strides[2]
    v_ptr += kv_head * v_strides[2]
    if IS_ADDED:
        cold_rows_ptr += kv_head * num_pages
    page_table_ptr += request.to(tl.int64) * max_pages
    mask_rows = interval_rows(rows, heads, total_q, HAS_HEAD_MASK)
    origin = tl.max(q_idx, axis=0)
    dq = tl.zeros([TILE_M, PADDED_QK], tl.float32)

    # Keys that every row admits.
    num_full = (full_end - full_start) // TILE_KV
    full_stop = full_start + num_full * TILE_KV
    ids = load_key_ids(full_start, full_stop, page_table_ptr, list_slots_ptr, TILE_KV, PAGE_SIZE, HAS_LISTS)
    for first in range(full_start, full_stop, TILE_KV):
        # A step ahead: they are addresses, which would be waited for.
        next_ids = load_key_ids(
            first + TILE_KV, full_stop, page_table_ptr, list_slots_ptr, TILE_KV, PAGE_SIZE, HAS_LISTS
        )
        dq = add_key_tile(
            dq, q, dout, lse_log2, delta, ids, first, full_stop,
            k_ptr, v_ptr, k_strides, v_strides, cold_dk_ptr, cold_dv_ptr, cold_rows_ptr,
            list_positions_ptr, list_members_ptr,
            mask_rows, q_idx, origin, heads, has_key, request, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
            score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale,
            sm_scale, window, num_qo_heads,
            True, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO, PAGE_SIZE,
            SCORE_CODES, SCORE_SLOPES, MASK_FN, HAS_LISTS, HAS_WINDOW, HAS_DROPOUT, IS_ADDED,
        )  # fmt: skip
        ids = next_ids
    # Keys before and after those, masked row by row.
    num_before = tl.cdiv(full_start - kv_start, TILE_KV)
    num_after = tl.cdiv(kv_end - full_stop, TILE_KV)
    for step in tl.range(0, num_before + num_after, num_stages=MASKED_STAGES):
        is_before = step < num_before
        first = tl.where(is_before, kv_start + step * TILE_KV, full_stop + (step - num_before) * TILE_KV)
        limit = tl.where(is_before, full_start, kv_end)
        ids = load_key_ids(first, limit, page_table_ptr, list_slots_ptr, TILE_KV, PAGE_SIZE, HAS_LISTS)
        dq = add_key_tile(
            dq, q, dout, lse_log2, delta, ids, first, limit,
            k_ptr, v_ptr, k_strides, v_strides, cold_dk_ptr, cold_dv_ptr, cold_rows_ptr,
            list_positions_ptr, list_members_ptr,
            mask_rows, q_idx, origin, heads, has_key, request, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
            score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale,
            sm_scale, window, num_qo_heads,
            False, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO, PAGE_SIZE,
            SCORE_CODES, SCORE_SLOPES, MASK_FN, HAS_LISTS, HAS_WINDOW, HAS_DROPOUT, IS_ADDED,
        )  # fmt: skip

    dim = tl.arange(0, PADDED_QK)
    is_written = is_row[:, None] & (dim < HEAD_DIM_QK)[None, :]
    dq *= sm_scale
    if partial >= 0:
        state = partial * TILE_M + lane_m
        tl.store(partial_dq_ptr + state[:, None] * HEAD_DIM_QK + dim[None, :], dq, mask=is_written)
    else:
        starts = rows_wide * dq_strides[0] + heads_wide * dq_strides[1]
        ptrs = dq_ptr + starts[:, None] + (dim.to(tl.int64) * dq_strides[2])[None, :]
        tl.store(ptrs, narrow(dq, dq_ptr.dtype.element_ty), mask=is_written)


@triton.jit
def add_key_tile(
    dq, q, dout, lse_log2, delta,  # [TILE_M, PADDED_QK] twice, [TILE_M, PADDED_VO], [TILE_M] twice
    ids, first, limit,  # keys of this tile, as load_key_ids gives them
    k_ptr, v_ptr, k_strides, v_strides, cold_dk_ptr, cold_dv_ptr, cold_rows_ptr,
    list_positions_ptr, list_members_ptr,
    mask_rows, q_idx, origin, heads, has_key,  # [TILE_M]; a scalar
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
    SCORE_SLOPES: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    IS_ADDED: tl.constexpr,
):  # fmt: skip
    """dq / sm_scale with one more tile of keys; dk and dv of those on cold pages are added to their sums."""
    kv_idx, page, offset, admitted, is_read = find_keys(
        ids, first, limit, list_positions_ptr, list_members_ptr,
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
        q, k, v, dout, lse_log2, delta, admitted, heads, has_key, q_idx[:, None], kv_idx[None, :], origin, kept,
        score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_scale, sm_scale, num_qo_heads,
        SCORE_CODES, SCORE_SLOPES, IS_FULL, HAS_DROPOUT,
    )  # fmt: skip
    if IS_ADDED:
        row = tl.load(cold_rows_ptr + page, mask=is_read, other=-1)
        if tl.max(row, axis=0) >= 0:
            dv = dot(tl.trans(weights), dout, tl.zeros([TILE_KV, PADDED_VO], tl.float32))
            dk = dot(tl.trans(score_grads), q, tl.zeros([TILE_KV, PADDED_QK], tl.float32)) * sm_scale
            place = row.to(tl.int64) * PAGE_SIZE + offset
            add_vectors(cold_dv_ptr, dv, place * HEAD_DIM_VO, row >= 0, HEAD_DIM_VO, PADDED_VO)
            add_vectors(cold_dk_ptr, dk, place * HEAD_DIM_QK, row >= 0, HEAD_DIM_QK, PADDED_QK)
    return dot(score_grads, k, dq)


@triton.jit
def load_key_ids(
    first, limit,  # keys of a tile: entries or positions from first, below limit
    page_table_ptr, list_slots_ptr,
    TILE_KV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_LISTS: tl.constexpr,
):  # fmt: skip
    """What says where keys are, [TILE_KV]: slots of entries, or pages of positions; 0 from the limit on."""
    key = first + tl.arange(0, TILE_KV)
    if HAS_LISTS:
        return tl.load(list_slots_ptr + key, mask=key < limit, other=0)
    else:
        return tl.load(page_table_ptr + key // PAGE_SIZE, mask=key < limit, other=0)


@triton.jit
def find_keys(
    ids, first, limit,  # keys of a tile, as load_key_ids gives them
    list_positions_ptr, list_members_ptr,
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
        page = (ids // PAGE_SIZE).to(tl.int64)
        offset = (ids % PAGE_SIZE).to(tl.int64)
    else:
        kv_idx = key
        page = ids.to(tl.int64)
        offset = (key % PAGE_SIZE).to(tl.int64)

    # In a full tile every lane is a key.
    admitted = is_key[None, :]
    is_read = is_key
    if not IS_FULL:
        # No interval holds the position -1, and a row without keys has an empty one.
        admitted = is_in_intervals(
            mask_rows, has_key, tl.where(is_key, kv_idx, -1)[None, :], mask_starts_ptr, mask_ends_ptr
        )
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
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Adds vectors to memory one element at a time; two vectors may have the same place."""
    dim = tl.arange(0, PADDED_DIM)
    ptrs = ptr + starts[:, None] + dim[None, :]
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
    sum_ptr = merges_ptr + tl.program_id(0).to(tl.int64) * SUM_WIDTH
    lane_m = tl.program_id(1)
    first_partial = tl.load(sum_ptr + SUM_FIRST_PARTIAL).to(tl.int64)
    num_partials = tl.load(sum_ptr + SUM_NUM_PARTIALS)
    is_row = (lane_m // HEADS < tl.load(sum_ptr + SUM_Q_COUNT)) & (lane_m % HEADS < tl.load(sum_ptr + SUM_HEAD_COUNT))
    if is_row:
        dim = tl.arange(0, PADDED_WIDTH)
        is_dim = dim < WIDTH
        total = tl.zeros([PADDED_WIDTH], tl.float32)
        for chunk in range(0, num_partials):
            state = (first_partial + chunk) * TILE_M + lane_m
            total += tl.load(partials_ptr + state * WIDTH + dim, mask=is_dim, other=0.0)
        row = (tl.load(sum_ptr + SUM_Q_START) + lane_m // HEADS).to(tl.int64)
        head = (tl.load(sum_ptr + SUM_HEAD_START) + lane_m % HEADS).to(tl.int64)
        ptrs = sums_ptr + row * strides[0] + head * strides[1] + dim.to(tl.int64) * strides[2]
        tl.store(ptrs, narrow(total, sums_ptr.dtype.element_ty), mask=is_dim)


@triton.jit
def round_sums_kernel(
    gradient_ptr, sums_ptr, strides, kv_head_ptr, page_ptr,
    SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """SLOTS of one cold page and KV head from their float32 sums."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * SLOTS + tl.arange(0, SLOTS)
    dim = tl.arange(0, PADDED_DIM)
    # [SLOTS, PADDED_DIM]
    is_dim = (offset < PAGE_SIZE)[:, None] & (dim < HEAD_DIM)[None, :]
    sums = tl.load(sums_ptr + ((row * PAGE_SIZE + offset) * HEAD_DIM)[:, None] + dim[None, :], mask=is_dim, other=0.0)
    start = tl.load(page_ptr + row) * strides[0] + tl.load(kv_head_ptr + row) * strides[2]
    ptrs = gradient_ptr + start + (offset.to(tl.int64) * strides[1])[:, None] + (dim.to(tl.int64) * strides[3])[None, :]
    tl.store(ptrs, narrow(sums, gradient_ptr.dtype.element_ty), mask=is_dim)
