"""Gradients of sparse attention from what the forward saved, its lists and its lse: never a new selection. [GRAD-SET]

For every edge (row i, key j) of the plan, with s0 = sm_scale * q.k and s the score after the score rules:
    P = exp(s - lse)      delta = dout.out - dlse      dS0 = P * (dout.v - delta) * ds/ds0
    dQ = sm_scale * sum_j dS0 K      dK = sm_scale * sum_i dS0 Q      dV = sum_i P dout
    dsink = -sum_i exp(sink - lse) * delta
Under dropout dout.v and the P of dV carry the edge's weight, 0 or 1 / (1 - rate), of the words the forward drew.
The sums over i run over all rows and all heads of a group. lse counts as an output of its own: d lse / d s = P and
d lse / d sink = exp(sink - lse), which is why dlse enters delta, with the sign opposite to dout.out.

dQ goes with the queries over the forward's tasks. dK and dV are either added atomically on that way (`atomic`, no index
to build, sums in any order) or gathered per slot over the transposed lists (`kv_centric`, bitwise repeatable); a hint
that never changes the edges. All sums are float32; P and dS are rounded to the storage dtype before a product, as in
the forward. What score rules hold (slopes, caps, biases) has gradients of its own, when asked for (`backward_scores`).
A quantized cache has no gradient: rounding to codes has none. A row without keys takes part in nothing, whatever its
dout holds; a slot that no row selects gets exactly 0. No gradient reaches indices or masks.
[GRAD-FORMULA, GRAD-SUM, GRAD-ZERO, GRAD-LSE, GRAD-RULE, EMPTY-GRAD, QUANT-GRAD, DROPOUT-BACKWARD]
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnconform.kernels.sparse_attention.backward_edges import load_vectors
from attnconform.kernels.sparse_attention.backward_keys import launch_key_gradients
from attnconform.kernels.sparse_attention.backward_query import RowInputs, launch_query_gradients, padded_dim
from attnconform.kernels.sparse_attention.backward_scores import compute_score_gradients
from attnconform.kernels.sparse_attention.backward_transpose import TransposedPlan, transpose_plan
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.forward import run
from attnconform.kernels.sparse_attention.numerics import LOG2_E, widen
from attnconform.kernels.sparse_attention.plan import Plan

__all__ = ["Gradients", "backward", "sparse_attention", "transpose_plan"]

Mode = Literal["atomic", "kv_centric"]
TILE_ROWS = 16


class Gradients(NamedTuple):
    """One gradient per differentiable input; dk and dv in the layout of the cache, over the whole pool."""

    dq: Tensor  # (total_q, num_qo_heads, head_dim_qk)
    dk: Tensor  # as k_cache
    dv: Tensor  # as v_cache
    dsink: Tensor | None  # (num_qo_heads,) float32; None where the plan has no sink logits
    # One per score rule, float32: (num_qo_heads,) slopes, () cap, (num_qo_heads, 2 D + 1) tables. None: not asked for.
    dscore: tuple[Tensor, ...] | None = None


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
    mode: Mode = "kv_centric",
    transposed: TransposedPlan | None = None,  # transpose_plan(plan), made here where it is needed and not given
    score_gradients: bool = False,  # dscore too
) -> Gradients:
    """Gradients of sum(dout * out) + sum(dlse * lse) by q, the caches, the sink logits and the score rules' numbers.

    Every element of dq, dk and dv is written, whatever was in it. float32 buffers receive the sums unrounded.
    Raises PlanError where a tensor is not what the plan was made for, or a cache is quantized.
    [GRAD-FORMULA, GRAD-RULE, QUANT-GRAD, SAFE-SHAPE]
    """
    _refuse_quantized(plan)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format) if dq is None else dq
    dk = torch.empty_like(k_cache, memory_format=torch.contiguous_format) if dk is None else dk
    dv = torch.empty_like(v_cache, memory_format=torch.contiguous_format) if dv is None else dv
    _check_tensors(plan, {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out, "lse": lse, "dout": dout})
    _check_tensors(plan, {"dq": dq, "dk": dk, "dv": dv} | ({} if dlse is None else {"dlse": dlse}))
    if mode not in ("atomic", "kv_centric"):
        raise PlanError("SAFE-SHAPE", "mode", mode, "must be atomic or kv_centric")
    lse_log2, delta = prepare_rows(out, lse, dout, dlse)
    inputs = RowInputs(q, k_cache, v_cache, dout, lse_log2, delta)
    if mode == "atomic":
        _add_key_gradients(plan, inputs, dq, dk, dv)
    else:
        launch_query_gradients(plan, inputs, dq, None)
        launch_key_gradients(plan, transposed or transpose_plan(plan), inputs, dk.zero_(), dv.zero_())
    dscore = compute_score_gradients(plan, inputs) if score_gradients else None
    return Gradients(dq, dk, dv, _compute_dsink(plan, lse, delta), dscore)


def _refuse_quantized(plan: Plan) -> None:
    """Refuses plans whose caches hold codes, which no gradient reaches. [QUANT-GRAD]"""
    for name, quant in (("k_quant", plan.k_quant), ("v_quant", plan.v_quant)):
        if quant is not None:
            limit = "a cache that is to be differentiated must not be quantized"
            raise PlanError("QUANT-GRAD", name, f"{quant.format} per {quant.granularity}", limit)


def _add_key_gradients(plan: Plan, inputs: RowInputs, dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """One pass for all three; sums live in float32 and are rounded once."""
    accumulators = [
        gradient.zero_() if gradient.dtype == torch.float32 else torch.zeros_like(gradient, dtype=torch.float32)
        for gradient in (dk, dv)
    ]
    launch_query_gradients(plan, inputs, dq, (accumulators[0], accumulators[1]))
    for gradient, accumulator in zip((dk, dv), accumulators, strict=True):
        if accumulator is not gradient:
            gradient.copy_(accumulator)


def _compute_dsink(plan: Plan, lse: Tensor, delta: Tensor) -> Tensor | None:
    """A sink has no value: its probability times what it takes from the other keys. [GRAD-SINK]"""
    if plan.sink_logits is None:
        return None
    return -(torch.exp(plan.sink_logits - lse) * delta).sum(0)


def prepare_rows(out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor, Tensor]:
    """lse in base 2, +inf where a row has no key, and delta = dout.out - dlse; both contiguous."""
    lse_log2, delta = torch.empty((2, *lse.shape), dtype=torch.float32, device=out.device)
    if delta.numel():
        row_kernel[(triton.cdiv(delta.numel(), TILE_ROWS),)](
            out, lse, dout, dlse, lse_log2, delta,
            out.stride(), lse.stride(), dout.stride(), None if dlse is None else dlse.stride(),
            out.shape[0], out.shape[1],
            TILE_ROWS=TILE_ROWS,
            HEAD_DIM=out.shape[2],
            PADDED_DIM=padded_dim(out.shape[2]),
            num_warps=4,
        )  # fmt: skip
    return lse_log2, delta


@triton.jit
def row_kernel(
    out_ptr, lse_ptr, dout_ptr, dlse_ptr, lse_log2_ptr, delta_ptr,
    out_strides, lse_strides, dout_strides, dlse_strides, total_q, num_qo_heads,
    TILE_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """lse and delta of TILE_ROWS rows times heads."""
    unit = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row = unit // num_qo_heads
    head = unit % num_qo_heads
    is_row = row < total_q
    lse = tl.load(lse_ptr + row * lse_strides[0] + head * lse_strides[1], mask=is_row, other=0.0)
    has_key = is_row & (lse > float("-inf"))
    tl.store(lse_log2_ptr + unit, tl.where(has_key, lse * LOG2_E, float("inf")), mask=is_row)
    out_starts = row * out_strides[0] + head * out_strides[1]
    dout_starts = row * dout_strides[0] + head * dout_strides[1]
    out = load_vectors(out_ptr, out_starts, is_row, out_strides[2], HEAD_DIM, PADDED_DIM)
    dout = load_vectors(dout_ptr, dout_starts, has_key, dout_strides[2], HEAD_DIM, PADDED_DIM)
    delta = tl.sum(widen(out) * widen(dout), axis=1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + row * dlse_strides[0] + head * dlse_strides[1], mask=is_row, other=0.0)
    tl.store(delta_ptr + unit, delta, mask=is_row)


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


def sparse_attention(
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    sink_logits: Tensor | None = None,  # the tensor the plan was given, where it wants a gradient
    mode: Mode = "kv_centric",
    transposed: TransposedPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """`run` with gradients: out and lse, both differentiable by q, the caches and the sink logits. [GRAD-FORMULA]

    The backward uses this plan's lists, whatever selector or table made them has become since. [GRAD-SET]
    Raises PlanError where a cache is quantized. [QUANT-GRAD]
    """
    _refuse_quantized(plan)
    if sink_logits is not None:
        _check_sink_logits(plan, sink_logits)
    out, lse = _SparseAttention.apply(plan, q, k_cache, v_cache, sink_logits, mode, transposed)
    return out, lse


def _check_sink_logits(plan: Plan, sink_logits: Tensor) -> None:
    """Refuses sink logits other than the plan's, whose gradient would be of another function."""
    if plan.sink_logits is None:
        raise PlanError("LSE-SINK", "sink_logits", tuple(sink_logits.shape), "the plan has none")
    is_same = sink_logits.shape == plan.sink_logits.shape and (
        sink_logits.data_ptr() == plan.sink_logits.data_ptr()
        or torch.equal(sink_logits.detach().to(plan.sink_logits), plan.sink_logits)
    )
    if not is_same:
        raise PlanError("LSE-SINK", "sink_logits", sink_logits.tolist(), f"the plan has {plan.sink_logits.tolist()}")


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        sink_logits: Tensor | None,
        mode: Mode,
        transposed: TransposedPlan | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = run(plan, q, k_cache, v_cache)
        ctx.save_for_backward(q, k_cache, v_cache, out, lse)
        ctx.plan, ctx.mode, ctx.transposed = plan, mode, transposed
        ctx.sink_dtype = None if sink_logits is None else sink_logits.dtype
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv, dsink, _ = backward(
            ctx.plan, *ctx.saved_tensors, dout, dlse=dlse, mode=ctx.mode, transposed=ctx.transposed
        )
        if ctx.sink_dtype is None or dsink is None:
            return None, dq, dk, dv, None, None, None
        return None, dq, dk, dv, dsink.to(ctx.sink_dtype), None, None
