"""Gradients of sparse attention from what the forward saved, its lists and its lse: never a new selection. [GRAD-SET]

For every edge (row i, key j) of the plan, with s0 = sm_scale * q.k and s the score after the score rules:
    P = exp(s - lse)      delta = dout.out - dlse      dS0 = P * (dout.v - delta) * ds/ds0
    dQ = sm_scale * sum_j dS0 K      dK = sm_scale * sum_i dS0 Q      dV = sum_i P dout
    dsink = -sum_i exp(sink - lse) * delta
Under dropout dout.v and the P of dV carry the edge's weight, 0 or 1 / (1 - rate), of the words the forward drew.
The sums over i run over all rows and all heads of a group. lse counts as an output of its own: d lse / d s = P and
d lse / d sink = exp(sink - lse), which is why dlse enters delta, with the sign opposite to dout.out.

dQ goes with the queries, over task tables of the backward's own, or on Hopper over tiles of neighbouring rows whose own
lists overlap. dK and dV are added atomically on that way (`atomic`, no index to build, sums in any order), gathered per
slot over the transposed lists (`kv_centric`, bitwise repeatable), or each where it is better (`hybrid`: pages where few
adds meet are added to, hot pages gathered); a hint that never changes the edges. All sums are float32; P and dS are
rounded to the storage dtype before a product, as in the forward.
What score rules hold (slopes, caps, biases, data) has gradients of its own, when asked for (`backward_scores`). A
quantized cache has no gradient: rounding to codes has none. A row without keys takes part in nothing, whatever its dout
holds; a slot that no row selects gets exactly 0. No gradient reaches indices or masks.
[GRAD-FORMULA, GRAD-SUM, GRAD-ZERO, GRAD-LSE, GRAD-RULE, EMPTY-GRAD, QUANT-GRAD, DROPOUT-BACKWARD]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.backward_edges import load_vectors
from attnconform.kernels.sparse_attention.backward_hints import BackwardHints, Mode
from attnconform.kernels.sparse_attention.backward_keys import launch_key_gradients, launch_part_sums
from attnconform.kernels.sparse_attention.backward_plan import BackwardPlan, Buffers, allocate_buffers, plan_backward
from attnconform.kernels.sparse_attention.backward_query import (
    ColdSums,
    RowInputs,
    launch_chunk_sums,
    launch_query_gradients,
    launch_rounding,
    padded_dim,
)
from attnconform.kernels.sparse_attention.backward_scores import compute_score_gradients
from attnconform.kernels.sparse_attention.backward_tasks import QueryLaunch
from attnconform.kernels.sparse_attention.backward_transpose import TransposedPlan
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.hopper_backward_choice import TASK_LANES
from attnconform.kernels.sparse_attention.numerics import LOG2_E, widen
from attnconform.kernels.sparse_attention.plan import Plan

__all__ = ["BackwardHints", "BackwardPlan", "Gradients", "backward", "backward_stages", "plan_backward"]

TILE_ROWS = 32


class Gradients(NamedTuple):
    """One gradient per differentiable input; dk and dv in the layout of the cache, over the whole pool."""

    dq: Tensor  # (total_q, num_qo_heads, head_dim_qk)
    dk: Tensor  # as k_cache
    dv: Tensor  # as v_cache
    dsink: Tensor | None  # (num_qo_heads,) float32; None where the plan has no sink logits
    # One per score rule, float32: (num_qo_heads,) slopes, () cap, (num_qo_heads, 2 D + 1) tables, (len(data),) data.
    # None: not asked for.
    dscore: tuple[Tensor, ...] | None = None


class Stage(NamedTuple):
    """A part of a backward, in the order they run."""

    name: str
    launch: Callable[[], object]


@torch.no_grad()
def backward(
    plan: Plan,
    q: Tensor,  # (total_q, num_qo_heads, head_dim_qk)
    k_cache: Tensor,  # in the plan's layout
    v_cache: Tensor,
    out: Tensor,  # (total_q, num_qo_heads, head_dim_vo), as the forward wrote it
    lse: Tensor,  # (total_q, num_qo_heads) float32, likewise
    dout: Tensor,  # as out, of any strides
    *,
    dlse: Tensor | None = None,  # as lse
    dq: Tensor | None = None,  # as q, in its dtype or float32; overwritten
    dk: Tensor | None = None,  # as k_cache, likewise
    dv: Tensor | None = None,  # as v_cache, likewise
    mode: Mode | None = None,  # kv_centric where neither it nor `work` is given
    work: BackwardPlan | None = None,  # plan_backward(plan), made here where it is not given
    score_gradients: bool = False,  # dscore too
) -> Gradients:
    """Gradients of sum(dout * out) + sum(dlse * lse) by q, the caches, the sink logits and the score rules' numbers.

    Every element of dq, dk and dv is written, whatever was in it. float32 buffers receive the sums unrounded.
    Raises PlanError where a tensor is not what the plan was made for, or a cache is quantized.
    [GRAD-FORMULA, GRAD-RULE, QUANT-GRAD, SAFE-SHAPE]
    """
    refuse_quantized(plan)
    work = _work_for(plan, mode, work)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if dq is None else dq
    dk = torch.empty_like(k_cache, memory_format=torch.contiguous_format) if dk is None else dk
    dv = torch.empty_like(v_cache, memory_format=torch.contiguous_format) if dv is None else dv
    _check_tensors(plan, {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out, "lse": lse, "dout": dout})
    _check_tensors(plan, {"dq": dq, "dk": dk, "dv": dv} | ({} if dlse is None else {"dlse": dlse}))
    buffers = allocate_buffers(plan, work)
    inputs = RowInputs(q, k_cache, v_cache, dout, buffers.lse_log2, buffers.delta)
    with torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext():
        prepare_rows(buffers, out, lse, dout, dlse)
        for stage in backward_stages(plan, work, inputs, (dq, dk, dv), buffers):
            stage.launch()
        dscore = compute_score_gradients(plan, work.launches, inputs) if score_gradients else None
    return Gradients(dq, dk, dv, _compute_dsink(plan, lse, buffers.delta), dscore)


def _work_for(plan: Plan, mode: Mode | None, work: BackwardPlan | None) -> BackwardPlan:
    """The work given, or one made for the mode; refuses two modes that differ."""
    if work is None:
        return plan_backward(plan, BackwardHints(mode=mode or "kv_centric"))
    if mode not in (None, work.hints.mode):
        raise PlanError("SAFE-SHAPE", "mode", mode, f"the work was planned for {work.hints.mode}")
    return work


def refuse_quantized(plan: Plan) -> None:
    """Refuses plans whose caches hold codes, which no gradient reaches. [QUANT-GRAD]"""
    for name, quant in (("k_quant", plan.k_quant), ("v_quant", plan.v_quant)):
        if quant is not None:
            limit = "a cache that is to be differentiated must not be quantized"
            raise PlanError("QUANT-GRAD", name, f"{quant.format} per {quant.granularity}", limit)


def backward_stages(
    plan: Plan,
    work: BackwardPlan,
    inputs: RowInputs,  # with lse and delta as prepare_rows leaves them
    gradients: tuple[Tensor, Tensor, Tensor],  # dq, dk, dv
    buffers: Buffers,
) -> Iterator[Stage]:
    """Everything between the rows' deltas and the gradients; no allocation, and apart so that each can be timed."""
    dq, dk, dv = gradients
    sums, parts = buffers.sums, buffers.parts

    def clear() -> None:
        for tensor in (dk, dv, *(sums or ())):
            tensor.zero_()

    yield Stage("clear", clear)
    if work.hopper_union is None:
        yield from _query_stages(plan, work, inputs, dq, buffers)
    else:
        yield Stage("dq", partial(_launch_united, plan, work, inputs, dq, buffers))
    keys, cold = work.keys, work.cold
    if keys is not None and keys.items.item_tile.numel():
        yield Stage("dk, dv", partial(_launch_keys, plan, work, keys, inputs, dk, dv, parts))
        if keys.items.num_partials:
            yield Stage("reduce dk, dv", partial(launch_part_sums, plan, keys, dk, dv, parts))
    if cold is not None and cold.num_rows:
        yield Stage("round dk, dv", partial(launch_rounding, plan, cold, sums, dk, dv))


def _query_stages(plan: Plan, work: BackwardPlan, inputs: RowInputs, dq: Tensor, buffers: Buffers) -> Iterator[Stage]:
    """dQ by tasks, and the sums of those that were cut."""
    name = "dq and cold dk, dv" if buffers.sums else "dq"
    for launch, dq_parts in zip(work.launches, buffers.dq_parts, strict=True):
        yield Stage(name, partial(_launch_queries, plan, work, launch, inputs, dq, dq_parts, buffers.sums))
        if launch.sums.shape[0]:
            yield Stage("reduce dq", partial(launch_chunk_sums, launch, dq_parts, dq))


def _launch_united(plan: Plan, work: BackwardPlan, inputs: RowInputs, dq: Tensor, buffers: Buffers) -> None:
    """dQ over unions of rows where TMA can read the caches, or by tasks."""
    from attnconform.kernels.sparse_attention.hopper_backward import launch_hopper_union_queries

    if work.hopper_union is None or not launch_hopper_union_queries(plan, inputs, dq, work.hopper_union):
        for stage in _query_stages(plan, work, inputs, dq, buffers):
            stage.launch()


def _launch_queries(
    plan: Plan,
    work: BackwardPlan,
    launch: QueryLaunch,
    inputs: RowInputs,
    dq: Tensor,
    dq_parts: Tensor,
    sums: ColdSums | None,
) -> None:
    """dQ by Hopper's kernel, where it was chosen and TMA can read the caches, or by any GPU's."""
    if work.hopper_queries is not None and launch.shape.tile_m == TASK_LANES:
        from attnconform.kernels.sparse_attention.hopper_backward import launch_hopper_queries

        if launch_hopper_queries(plan, launch, inputs, dq, dq_parts, work.hopper_queries):
            return
    launch_query_gradients(plan, launch, inputs, dq, dq_parts, work.cold, sums)


def _launch_keys(
    plan: Plan,
    work: BackwardPlan,
    keys: TransposedPlan,
    inputs: RowInputs,
    dk: Tensor,
    dv: Tensor,
    parts: tuple[Tensor, Tensor],
) -> None:
    """dK and dV likewise."""
    if work.hopper_keys is not None:
        from attnconform.kernels.sparse_attention.hopper_backward import launch_hopper_keys

        if launch_hopper_keys(plan, keys, inputs, dk, dv, parts, work.hopper_keys):
            return
    if work.hopper_rows is not None:
        from attnconform.kernels.sparse_attention.hopper_backward import launch_hopper_rows

        if launch_hopper_rows(plan, keys, inputs, dk, dv, parts, work.hopper_rows):
            return
    launch_key_gradients(plan, keys, inputs, dk, dv, parts)


def _compute_dsink(
    plan: Plan,
    lse: Tensor,  # (total_q, num_qo_heads)
    delta: Tensor,  # (num_kv_heads, total_q, group_size)
) -> Tensor | None:
    """A sink has no value: its probability times what it takes from the other keys. [GRAD-SINK]"""
    if plan.sink_logits is None:
        return None
    delta = delta.transpose(0, 1).reshape(lse.shape)
    return -(torch.exp(plan.sink_logits - lse) * delta).sum(0)


def prepare_rows(buffers: Buffers, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> None:
    """Writes lse in base 2, +inf where a row has no key, and delta = dout.out - dlse."""
    if lse.numel():
        num_kv_heads, total_q, group_size = buffers.delta.shape
        row_kernel[(triton.cdiv(total_q * group_size, TILE_ROWS), num_kv_heads)](
            out, lse, dout, dlse, buffers.lse_log2, buffers.delta,
            out.stride(), lse.stride(), dout.stride(), None if dlse is None else dlse.stride(),
            total_q,
            TILE_ROWS=TILE_ROWS,
            GROUP=group_size,
            HEAD_DIM=out.shape[2],
            PADDED_DIM=padded_dim(out.shape[2]),
            num_warps=4,
        )  # fmt: skip


@triton.jit(do_not_specialize=["total_q"])
def row_kernel(
    out_ptr, lse_ptr, dout_ptr, dlse_ptr, lse_log2_ptr, delta_ptr,
    out_strides, lse_strides, dout_strides, dlse_strides, total_q,
    TILE_ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """lse and delta of TILE_ROWS rows times heads of one group, in the order that place_rows gives them."""
    unit = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)  # below 2^31 in any memory
    row = (unit // GROUP).to(tl.int64)
    head = (tl.program_id(1) * GROUP + unit % GROUP).to(tl.int64)
    is_row = row < total_q
    lse = tl.load(lse_ptr + row * lse_strides[0] + head * lse_strides[1], mask=is_row, other=0.0)
    has_key = is_row & (lse > float("-inf"))
    place = tl.program_id(1).to(tl.int64) * total_q * GROUP + unit
    tl.store(lse_log2_ptr + place, tl.where(has_key, lse * LOG2_E, float("inf")), mask=is_row)
    out_starts = row * out_strides[0] + head * out_strides[1]
    dout_starts = row * dout_strides[0] + head * dout_strides[1]
    out = load_vectors(out_ptr, out_starts, is_row, out_strides[2], HEAD_DIM, PADDED_DIM)
    dout = load_vectors(dout_ptr, dout_starts, has_key, dout_strides[2], HEAD_DIM, PADDED_DIM)
    delta = tl.sum(widen(out) * widen(dout), axis=1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row * dlse_strides[0] + head * dlse_strides[1], mask=is_row, other=0.0)
    tl.store(delta_ptr + place, delta, mask=is_row)


def _check_tensors(plan: Plan, tensors: dict[str, Tensor]) -> None:
    """Refuses tensors of another shape, dtype or device than planned. [SAFE-SHAPE]"""
    inner = (plan.page_size, plan.num_kv_heads) if plan.layout == "NHD" else (plan.num_kv_heads, plan.page_size)
    rows = (plan.total_q, plan.num_qo_heads)
    like_q, like_out = (*rows, plan.head_dim_qk), (*rows, plan.head_dim_vo)
    like_k, like_v = (plan.num_pages, *inner, plan.head_dim_qk), (plan.num_pages, *inner, plan.head_dim_vo)
    shapes = {"q": like_q, "dq": like_q, "k_cache": like_k, "dk": like_k, "v_cache": like_v, "dv": like_v}
    shapes |= {"out": like_out, "dout": like_out, "lse": rows, "dlse": rows}
    for name, tensor in tensors.items():
        dtypes = {plan.dtype, torch.float32} if name in ("dq", "dk", "dv") else {plan.dtype}
        dtypes = {torch.float32} if name in ("lse", "dlse") else dtypes
        if tensor.shape != shapes[name]:
            raise PlanError("SAFE-SHAPE", f"{name}.shape", tuple(tensor.shape), f"the plan is for {shapes[name]}")
        if tensor.dtype not in dtypes:
            expected = " or ".join(sorted(str(dtype) for dtype in dtypes))
            raise PlanError("SAFE-SHAPE", f"{name}.dtype", tensor.dtype, f"the plan is for {expected}")
        if tensor.device != plan.device:
            raise PlanError("SAFE-SHAPE", f"{name}.device", tensor.device, f"the plan is for {plan.device}")
