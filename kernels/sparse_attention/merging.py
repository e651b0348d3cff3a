"""Partial states of attention made whole: the chunks of a tile, and two results over disjoint keys.

A partial state is (max, sum, unnormalized output), in base 2; those of one tile lie in its launch's workspace and are
merged by the tile's last program, or by a launch of their own. [MERGE-DISJOINT, LSE-SINK, EMPTY-OUT]
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.numerics import LN_2, LOG2_E, narrow, widen


def merge_states(
    out_a: Tensor,  # (total_q, num_qo_heads, head_dim)
    lse_a: Tensor,  # (total_q, num_qo_heads), natural log
    out_b: Tensor,  # likewise, over keys that a does not have
    lse_b: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint key sets; an empty state (lse -inf) changes nothing. [MERGE-DISJOINT]

    out has the dtype of out_a. A sink logit must be in at most one of the two.
    """
    for name, got, want in (
        ("out_b.shape", tuple(out_b.shape), tuple(out_a.shape)),
        ("lse_a.shape", tuple(lse_a.shape), tuple(out_a.shape[:2])),
        ("lse_b.shape", tuple(lse_b.shape), tuple(out_a.shape[:2])),
    ):
        if got != want or out_a.dim() != 3:
            raise PlanError("SAFE-SHAPE", name, got, f"out_a.shape is {tuple(out_a.shape)}")
    out = torch.empty_like(out_a, memory_format=torch.contiguous_format)
    lse = torch.empty(out_a.shape[:2], dtype=torch.float32, device=out_a.device)
    if lse.numel():
        merge_states_kernel[lse.shape](
            out_a, lse_a, out_b, lse_b, out, lse,
            out_a.stride(), lse_a.stride(), out_b.stride(), lse_b.stride(), out.stride(), lse.stride(),
            HEAD_DIM=out_a.shape[2], PADDED_DIM=triton.next_power_of_2(out_a.shape[2]),
        )  # fmt: skip
    return out, lse


@triton.jit
def store_state(
    acc, acc_rest, row_max, row_sum, is_live,  # [TILE_M, PADDED_VO], [TILE_M, REST_VO] or nothing, [TILE_M] each
    partial, partial_acc_ptr, partial_max_ptr, partial_sum_ptr,
    TILE_M: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_VO: tl.constexpr,
    REST_VO: tl.constexpr,
):  # fmt: skip
    """Writes one chunk's state to its row of the workspace."""
    state = partial * TILE_M + tl.arange(0, TILE_M)
    tl.store(partial_max_ptr + state, row_max)
    tl.store(partial_sum_ptr + state, row_sum)
    acc_ptrs = partial_acc_ptr + state[:, None] * HEAD_DIM_VO
    dim = tl.arange(0, PADDED_VO)
    tl.store(acc_ptrs + dim[None, :], acc, mask=is_live[:, None] & (dim < HEAD_DIM_VO)[None, :])
    if REST_VO > 0:
        rest = PADDED_VO + tl.arange(0, REST_VO)
        tl.store(acc_ptrs + rest[None, :], acc_rest, mask=is_live[:, None] & (rest < HEAD_DIM_VO)[None, :])


@triton.jit
def store_rows(
    acc, acc_rest, row_max, row_sum,  # [LANES, PADDED_VO], [LANES, REST_VO] or nothing, [LANES] each
    rows, heads, is_live,  # [LANES]
    out_ptr, lse_ptr, out_strides, lse_strides, sink_logits_ptr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_VO: tl.constexpr,
    REST_VO: tl.constexpr,
    HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Normalizes and writes finished rows; the sink logit joins the denominator here, once. [LSE-SINK, EMPTY-OUT]"""
    is_empty = row_sum == 0
    empty_lse = tl.full(row_sum.shape, float("-inf"), tl.float32)
    factor = tl.full(row_sum.shape, 1.0, tl.float32)
    if HAS_SINK:
        empty_lse = tl.load(sink_logits_ptr + heads, mask=is_live, other=0.0)
        sink = empty_lse * LOG2_E
        new_max = tl.maximum(row_max, sink)
        factor = tl.exp2(row_max - new_max)
        row_sum = row_sum * factor + tl.exp2(sink - new_max)
        row_max = new_max
    denominator = tl.where(is_empty, 1.0, row_sum)
    lse = tl.where(is_empty, empty_lse, (row_max + tl.log2(denominator)) * LN_2)
    rows = rows.to(tl.int64)
    heads = heads.to(tl.int64)
    tl.store(lse_ptr + rows * lse_strides[0] + heads * lse_strides[1], lse, mask=is_live)
    out_ptrs = out_ptr + rows * out_strides[0] + heads * out_strides[1]
    dim = tl.arange(0, PADDED_VO)
    store_dims(acc, factor, denominator, is_empty, out_ptrs, out_strides[2], dim, is_live, HEAD_DIM_VO)
    if REST_VO > 0:
        rest = PADDED_VO + tl.arange(0, REST_VO)
        store_dims(acc_rest, factor, denominator, is_empty, out_ptrs, out_strides[2], rest, is_live, HEAD_DIM_VO)


@triton.jit
def store_dims(
    acc,  # [LANES, DIMS]
    factor, denominator, is_empty, out_ptrs,  # [LANES]
    stride_dim,
    dim,  # [DIMS]
    is_live,  # [LANES]
    HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Normalizes and writes some dimensions of finished rows."""
    out = tl.where(is_empty[:, None], 0.0, acc * factor[:, None] / denominator[:, None])
    ptrs = out_ptrs[:, None] + (dim.to(tl.int64) * stride_dim)[None, :]
    out = narrow(out, out_ptrs.dtype.element_ty)
    tl.store(ptrs, out, mask=is_live[:, None] & (dim < HEAD_DIM)[None, :])


@triton.jit
def merge_lanes(
    lane,  # [LANES] of a tile
    merge_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr, sink_logits_ptr, generations_ptr, batch_size,
    out_ptr, lse_ptr, out_strides, lse_strides,
    TILE_M: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_VO: tl.constexpr,
    HAS_SINK: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merges the partial states of some rows of a tile and writes them; states of no keys change nothing.

    Other programs have written them, so that no line of L1 counts. [MERGE-DISJOINT]
    """
    q_start = tl.load(merge_ptr)
    q_count = live_rows(tl.load(merge_ptr + 1), tl.load(merge_ptr + 6), generations_ptr, batch_size)
    head_start = tl.load(merge_ptr + 2)
    head_count = tl.load(merge_ptr + 3)
    first_partial = tl.load(merge_ptr + 4).to(tl.int64)
    num_partials = tl.load(merge_ptr + 5)
    is_live = (lane // HEADS < q_count) & (lane % HEADS < head_count)
    dim = tl.arange(0, PADDED_VO)
    row_max = tl.full(lane.shape, float("-inf"), tl.float32)
    row_sum = tl.zeros(lane.shape, tl.float32)
    acc = tl.zeros([lane.shape[0], PADDED_VO], tl.float32)
    # A few chunks at a time, so that their loads are in flight together.
    for first in range(0, num_partials, TILE_SPLITS):
        chunk = first + tl.arange(0, TILE_SPLITS)
        # [LANES, TILE_SPLITS]
        state = ((first_partial + chunk) * TILE_M)[None, :] + lane[:, None]
        is_state = is_live[:, None] & (chunk < num_partials)[None, :]
        chunk_max = tl.load(partial_max_ptr + state, mask=is_state, other=float("-inf"), cache_modifier=".cg")
        chunk_sum = tl.load(partial_sum_ptr + state, mask=is_state, other=0.0, cache_modifier=".cg")
        acc_ptrs = partial_acc_ptr + state[:, :, None] * HEAD_DIM_VO + dim[None, None, :]
        acc_mask = is_state[:, :, None] & (dim < HEAD_DIM_VO)[None, None, :]
        chunk_acc = tl.load(acc_ptrs, mask=acc_mask, other=0.0, cache_modifier=".cg")
        new_max = tl.maximum(row_max, tl.max(chunk_max, axis=1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        rescale = tl.exp2(row_max - base)
        weight = tl.exp2(chunk_max - base[:, None])
        row_sum = row_sum * rescale + tl.sum(chunk_sum * weight, axis=1)
        acc = acc * rescale[:, None] + tl.sum(chunk_acc * weight[:, :, None], axis=1)
        row_max = new_max
    store_rows(
        acc, acc, row_max, row_sum, q_start + lane // HEADS, head_start + lane % HEADS, is_live,
        out_ptr, lse_ptr, out_strides, lse_strides, sink_logits_ptr, HEAD_DIM_VO, PADDED_VO, 0, HAS_SINK,
    )  # fmt: skip


@triton.jit
def live_rows(q_count, request, generations_ptr, batch_size):
    """The rows of a task, or none where its request's slot went to another since it was planned. [FORMAT-GENERATION]"""
    if generations_ptr is None:
        return q_count
    else:
        live = tl.load(generations_ptr + request, cache_modifier=".cg")
        planned = tl.load(generations_ptr + batch_size + request, cache_modifier=".cg")
        return tl.where(live == planned, q_count, 0)


@triton.jit
def merge_when_last(
    rows, num_partials,  # of the tile
    merge_ptr, ticket_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr, sink_logits_ptr,
    generations_ptr, batch_size, out_ptr, lse_ptr, out_strides, lse_strides,
    TILE_M: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_VO: tl.constexpr,
    HAS_SINK: tl.constexpr,
    LANES: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Counts this chunk of a tile as done; the program of the last one merges them all, in the order of the chunks."""
    # every thread's part of the state must be out before the count is
    tl.debug_barrier()
    done = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") + 1
    if done == num_partials:
        tl.store(ticket_ptr, 0)
        for first in range(0, rows * HEADS, LANES):
            merge_lanes(
                first + tl.arange(0, LANES), merge_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr,
                sink_logits_ptr, generations_ptr, batch_size, out_ptr, lse_ptr, out_strides, lse_strides,
                TILE_M, HEADS, HEAD_DIM_VO, PADDED_VO, HAS_SINK, TILE_SPLITS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["batch_size"])
def merge_kernel(
    out_ptr, lse_ptr, out_strides, lse_strides,
    merges_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr, sink_logits_ptr, generations_ptr, batch_size,
    MERGE_WIDTH: tl.constexpr,
    TILE_M: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_VO: tl.constexpr,
    HAS_SINK: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merges the partial states of one row of one tile and writes it."""
    merge_ptr = merges_ptr + tl.program_id(0).to(tl.int64) * MERGE_WIDTH
    lane = tl.program_id(1)
    if (lane // HEADS < tl.load(merge_ptr + 1)) & (lane % HEADS < tl.load(merge_ptr + 3)):
        merge_lanes(
            lane + tl.arange(0, 1), merge_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr,
            sink_logits_ptr, generations_ptr, batch_size, out_ptr, lse_ptr, out_strides, lse_strides,
            TILE_M, HEADS, HEAD_DIM_VO, PADDED_VO, HAS_SINK, TILE_SPLITS,
        )  # fmt: skip


@triton.jit
def merge_states_kernel(
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr,
    out_a_strides, lse_a_strides, out_b_strides, lse_b_strides, out_strides, lse_strides,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Merges two normalized states of one row and head."""
    one = tl.arange(0, 1)
    row = tl.program_id(0).to(tl.int64) + one
    head = tl.program_id(1).to(tl.int64) + one
    dim = tl.arange(0, PADDED_DIM)
    is_dim = dim < HEAD_DIM
    lse_a = tl.load(lse_a_ptr + row * lse_a_strides[0] + head * lse_a_strides[1]).to(tl.float32)
    lse_b = tl.load(lse_b_ptr + row * lse_b_strides[0] + head * lse_b_strides[1]).to(tl.float32)
    a_ptrs = out_a_ptr + row * out_a_strides[0] + head * out_a_strides[1] + dim.to(tl.int64) * out_a_strides[2]
    b_ptrs = out_b_ptr + row * out_b_strides[0] + head * out_b_strides[1] + dim.to(tl.int64) * out_b_strides[2]
    # What lies in the output of an empty state is nobody's business. [EMPTY-OUT]
    out_a = widen(tl.load(a_ptrs, mask=is_dim & (lse_a != float("-inf")), other=0.0))
    out_b = widen(tl.load(b_ptrs, mask=is_dim & (lse_b != float("-inf")), other=0.0))
    base = tl.maximum(lse_a, lse_b)
    base = tl.where(base == float("-inf"), 0.0, base)
    weight_a = tl.exp2((lse_a - base) * LOG2_E)
    weight_b = tl.exp2((lse_b - base) * LOG2_E)
    total = weight_a + weight_b
    is_empty = total == 0
    out = (out_a * weight_a + out_b * weight_b) / tl.where(is_empty, 1.0, total)
    lse = tl.where(is_empty, float("-inf"), base + tl.log2(tl.where(is_empty, 1.0, total)) * LN_2)
    out_ptrs = out_ptr + row * out_strides[0] + head * out_strides[1] + dim.to(tl.int64) * out_strides[2]
    tl.store(out_ptrs, narrow(out, out_ptr.dtype.element_ty), mask=is_dim)
    tl.store(lse_ptr + row * lse_strides[0] + head * lse_strides[1], lse)
