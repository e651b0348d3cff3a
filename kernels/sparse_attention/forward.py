"""Forward attention over the tasks of a plan: decode and prefill, paged, listed or dense, with rules fused in.

One program handles one task: it loads its query rows once (rows times the heads of a group, the M dimension), then
walks its keys in packed tiles: any tokens of any pages, gathered by slot, so a tile is full whatever the page size.
Online softmax runs in base 2 and float32. Keys that every row of the task admits need no mask and have a loop of their
own. A long run of keys is several tasks whose partial states (max, sum, unnormalized output) are merged: by the last of
them to finish, or by a second kernel. Where a plan has union tiles (`union`), neighbouring rows with lists of their own
share one tile of the union of their blocks instead.

Slots outside what a task's rows may see are never read, so bytes that no request owns never matter, NaN included. Rows
of one task share their reads: a slot that only some of them see must hold finite numbers. [MASK-INTERFERE]
bfloat16, float16 and float32; head_dim_qk up to 576 and head_dim_vo up to 512, each in parts that are powers of two in
registers only; any page size. K and V may be quantized, each on its own terms; where their scales are multiplied in,
`quantization` says. Dropout takes edges out of the sum of values, never out of the denominator.
[MASK-BEFORE-MAX, EMPTY-OUT, LSE-NATURAL, LSE-SINK, MERGE-DISJOINT, GQA-MAP, COORD-WIDE, COORD-STRIDE, QUANT-VALUE,
DROPOUT-COUNTER, DROPOUT-NUMERATOR]
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.arguments import (
    attend_arguments,
    cache_strides,
    merge_arguments,
    union_arguments,
)
from attnconform.kernels.sparse_attention.attend import attend_kernel
from attnconform.kernels.sparse_attention.attend_union import attend_union_kernel
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.graphs import call_or_replay, launching_on
from attnconform.kernels.sparse_attention.hopper import launch_hopper
from attnconform.kernels.sparse_attention.hopper_union import launch_hopper_union
from attnconform.kernels.sparse_attention.merging import merge_kernel
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.prepared import PreparedLaunch
from attnconform.kernels.sparse_attention.quantization import code_bits, scale_strides
from attnconform.kernels.sparse_attention.run_checks import check_run
from attnconform.kernels.sparse_attention.tasks import Launch
from attnconform.kernels.sparse_attention.union import UnionLists

__all__ = ["launch_run", "replay", "run"]


def run(
    plan: Plan,
    q: Tensor,  # (total_q, num_qo_heads, head_dim_qk)
    k_cache: Tensor,  # NHD: (num_pages, page_size, num_kv_heads, head_dim_qk); HND: heads before page_size
    v_cache: Tensor,  # likewise, with head_dim_vo
    *,
    k_scale: Tensor | None = None,  # float32, where the plan's K is quantized, in the shape of its granularity
    v_scale: Tensor | None = None,  # likewise for V
    out: Tensor | None = None,  # (total_q, num_qo_heads, head_dim_vo)
    lse: Tensor | None = None,  # (total_q, num_qo_heads) float32
) -> tuple[Tensor, Tensor]:
    """Attention output and natural-log lse of every row; an empty row gives 0 and -inf, or its sink logit.

    Any strides are honoured. Allocates nothing but out and lse where they are not given, and does not synchronize; the
    first run of a plan may compile, later ones can be captured in a graph.
    Raises PlanError where a tensor is not what the plan was made for. [SAFE-SHAPE]
    """
    if not isinstance(plan, Plan):
        raise PlanError("PLAN-INPUTS", "plan", type(plan).__name__, "run takes what plan returned, never raw indices")
    *_, (_, out_shape, _), (_, lse_shape, _) = plan.tensor_shapes
    out = q.new_empty(out_shape) if out is None else out
    lse = q.new_empty(lse_shape, dtype=torch.float32) if lse is None else lse
    check_run(plan, q, k_cache, v_cache, k_scale, v_scale, out, lse)
    launch_run(plan, q, k_cache, v_cache, k_scale, v_scale, out, lse)
    return out, lse


def replay(
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    out: Tensor,
    lse: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """`run`, as one CUDA graph where these very tensors came before. [PLAN-REPLAY]"""
    tensors = (q, k_cache, v_cache, k_scale, v_scale, out, lse)

    def launch() -> None:
        check_run(plan, *tensors)
        launch_run(plan, *tensors)

    call_or_replay(plan.graphs, plan.device, tensors, launch)


def launch_run(
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Every launch of a run whose tensors are checked."""
    k_bits, v_bits = code_bits(k_cache, plan.k_quant), code_bits(v_cache, plan.v_quant)
    tensors = RunTensors(q, k_bits, v_bits, k_scale, v_scale, out, lse)
    with launching_on(plan.device):
        if plan.union is not None and launch_union(plan, plan.union, tensors):
            return
        for launch in plan.launches:
            launch_attend(plan, launch, tensors)
            if launch.merges.shape[0] and launch.tickets is None:
                launch_merge(plan, launch, out, lse)


class RunTensors(NamedTuple):
    """What the attention kernels are given beside their plan, in their order; codes as bits."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    out: Tensor
    lse: Tensor

    def strides(self, plan: Plan) -> tuple[tuple[int | None, ...] | None, ...]:
        """Strides of each, in the kernels' order of axes."""
        caches = cache_strides(plan, self.k_cache), cache_strides(plan, self.v_cache)
        scales = scale_strides(self.k_scale), scale_strides(self.v_scale)
        return (self.q.stride(), *caches, *scales, self.out.stride(), self.lse.stride())


def launch_attend(plan: Plan, launch: Launch, tensors: RunTensors) -> None:
    """One program per task, or `hopper` where the plan chose it and the caches lie as TMA reads them."""
    if launch.shape.box and launch_hopper(plan, launch, tensors):
        return
    if "attend" not in launch.prepared:
        grid = (launch.tasks.shape[0], 1, 1)
        launch.prepared["attend"] = PreparedLaunch(attend_kernel, grid, *attend_arguments(plan, launch))
    launch.prepared["attend"](tensors, tensors.strides(plan))


def launch_union(plan: Plan, union: UnionLists, tensors: RunTensors) -> bool:
    """Whether it was launched: one program per union tile and its heads; nothing is cut, so nothing is merged.

    Not where the plan chose `hopper_union` and TMA cannot read the caches as they lie: the plan's tasks have its rows
    apart.
    """
    if union.shape.box:
        return launch_hopper_union(plan, union, tensors)
    if "attend" not in union.prepared:
        grid = (union.tasks.shape[0], 1, 1)
        union.prepared["attend"] = PreparedLaunch(attend_union_kernel, grid, *union_arguments(plan, union))
    union.prepared["attend"](tensors, tensors.strides(plan))
    return True


def launch_merge(plan: Plan, launch: Launch, out: Tensor, lse: Tensor) -> None:
    """One program per output row of a tile that was cut."""
    if "merge" not in launch.prepared:
        grid = (launch.merges.shape[0], launch.shape.tile_m, 1)
        launch.prepared["merge"] = PreparedLaunch(merge_kernel, grid, *merge_arguments(plan, launch))
    launch.prepared["merge"]((out, lse), (out.stride(), lse.stride()))
