"""Forward attention over the tasks of a plan: decode and prefill, paged, listed or dense, with rules fused in.

One program handles one task: it loads its query rows once (rows times the heads of a group, the M dimension), then
walks its keys in packed tiles: any tokens of any pages, gathered by slot, so a tile is full whatever the page size.
Online softmax runs in base 2 and float32. Keys that every row of the task admits need no mask and have a loop of their
own. A long run of keys is several tasks whose partial states (max, sum, unnormalized output) a second kernel merges.

Slots outside what a task's rows may see are never read, so bytes that no request owns never matter, NaN included. Rows
of one task share their reads: a slot that only some of them see must hold finite numbers. [MASK-INTERFERE]
bfloat16, float16 and float32; head_dim up to 256, padded to a power of two in registers only; any page size. K and V
may be quantized, each on its own terms; where their scales are multiplied in, `quantization` says. Dropout takes edges
out of the sum of values, never out of the denominator.
[MASK-BEFORE-MAX, EMPTY-OUT, LSE-NATURAL, LSE-SINK, MERGE-DISJOINT, GQA-MAP, COORD-WIDE, COORD-STRIDE, QUANT-VALUE,
DROPOUT-COUNTER, DROPOUT-NUMERATOR]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.candidates import enumerate_runs, first_index, to_slots
from attnconform.kernels.sparse_attention.dropout import is_kept
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.numerics import IS_INTERPRETED, LN_2, LOG2_E, dot, narrow, widen
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.quantization import (
    code_bits,
    load_channel_scales,
    load_code_tile,
    load_key_scales,
    load_whole_scale,
    normalize_query,
    pair_assembly,
    scale_strides,
    weigh_by_key_scales,
)
from attnconform.kernels.sparse_attention.rules import apply_score_rules, interval_rows, is_in_intervals
from attnconform.kernels.sparse_attention.tasks import MERGE_FIELDS, TASK_FIELDS, Launch, TileShape


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
    if plan.device.type == "cpu" and not IS_INTERPRETED:
        limit = "Triton runs there only with TRITON_INTERPRET=1 set before it is imported"
        raise PlanError("SAFE-SHAPE", "device", plan.device, limit)
    *_, (_, out_shape, _), (_, lse_shape, _) = plan.tensor_shapes
    out = q.new_empty(out_shape) if out is None else out
    lse = q.new_empty(lse_shape, dtype=torch.float32) if lse is None else lse
    _check_tensors(plan, (q, k_cache, v_cache, out, lse))
    _check_scales(plan, (k_scale, v_scale))
    k_cache, v_cache = code_bits(k_cache, plan.k_quant), code_bits(v_cache, plan.v_quant)
    with torch.cuda.device(plan.device) if plan.device.type == "cuda" else nullcontext():
        for launch in plan.launches:
            launch_attend(plan, launch, q, k_cache, v_cache, k_scale, v_scale, out, lse)
            if launch.merges.shape[0]:
                launch_merge(plan, launch, out, lse)
    return out, lse


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


def launch_attend(
    plan: Plan,
    launch: Launch,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """One program per task."""
    strides = (
        q.stride(), _cache_strides(plan, k_cache), _cache_strides(plan, v_cache),
        scale_strides(k_scale), scale_strides(v_scale), out.stride(), lse.stride(),
    )  # fmt: skip
    if "attend" not in launch.prepared:
        grid = (launch.tasks.shape[0], 1, 1)
        launch.prepared["attend"] = PreparedLaunch(attend_kernel, grid, *_attend_arguments(plan, launch))
    launch.prepared["attend"]((q, k_cache, v_cache, k_scale, v_scale, out, lse), strides)


def launch_merge(plan: Plan, launch: Launch, out: Tensor, lse: Tensor) -> None:
    """One program per output row of a tile that was cut."""
    if "merge" not in launch.prepared:
        grid = (launch.merges.shape[0], launch.shape.tile_m, 1)
        launch.prepared["merge"] = PreparedLaunch(merge_kernel, grid, *_merge_arguments(plan, launch))
    launch.prepared["merge"]((out, lse), (out.stride(), lse.stride()))


class PreparedLaunch:
    """A kernel whose grid and plan arguments are fixed, called with the tensors of one run.

    Triton looks at every argument of every call to find the compiled kernel, which takes longer than a short kernel
    runs. All it could find different between two runs of a plan are the strides and the alignment of the run's tensors.
    """

    def __init__(
        self, kernel: triton.JITFunction, grid: tuple[int, int, int], fixed: dict[str, object], options: dict[str, int]
    ) -> None:
        self.kernel, self.grid, self.fixed, self.options = kernel, grid, fixed, options
        assert kernel.arg_names[-len(fixed) :] == list(fixed)
        self.fixed_values = tuple(fixed.values())
        self.compiled: dict[object, Callable[..., None]] = {}

    def __call__(self, tensors: tuple[Tensor | None, ...], strides: tuple[tuple[int | None, ...] | None, ...]) -> None:
        key = (strides, *[None if tensor is None else tensor.data_ptr() % 16 for tensor in tensors])
        runner = self.compiled.get(key)
        if runner is not None:
            runner(*tensors, *strides, *self.fixed_values)
            return
        compiled = self.kernel[self.grid](*tensors, *strides, **self.fixed, **self.options)
        if not IS_INTERPRETED:
            self.compiled[key] = compiled[self.grid]


def _attend_arguments(plan: Plan, launch: Launch) -> tuple[dict[str, object], dict[str, int]]:
    """Arguments of attend_kernel that a plan fixes, in order, and compiler options."""
    shape = launch.shape
    fixed = {
        "tasks_ptr": launch.tasks,
        "partial_acc_ptr": launch.partial_acc,
        "partial_max_ptr": launch.partial_max,
        "partial_sum_ptr": launch.partial_sum,
        "page_table_ptr": plan.page_table,
        "list_slots_ptr": plan.list_slots,
        "list_positions_ptr": plan.list_positions,
        "list_members_ptr": plan.list_members,
        "row_positions_ptr": plan.row_positions,
        "mask_starts_ptr": plan.mask_starts,
        "mask_ends_ptr": plan.mask_ends,
        "mask_data_ptr": plan.mask_data,
        "score_params_ptr": plan.score_params,
        "score_tables_ptr": plan.score_tables,
        "score_reaches_ptr": plan.score_reaches,
        "sink_logits_ptr": plan.sink_logits,
        "dropout_words_ptr": plan.dropout_words,
        "dropout_scale": plan.dropout_scale,
        "sm_scale": plan.sm_scale,
        "window": plan.window or 0,
        "total_q": plan.total_q,
        "num_qo_heads": plan.num_qo_heads,
        "max_pages": plan.page_table.shape[1],
        "TASK_WIDTH": len(TASK_FIELDS),
        "TILE_M": shape.tile_m,
        "TILE_KV": shape.tile_kv,
        "HEADS": shape.heads_per_tile,
        "HEAD_DIM_QK": plan.head_dim_qk,
        "HEAD_DIM_VO": plan.head_dim_vo,
        "PADDED_QK": _padded(plan.head_dim_qk, plan.k_quant is not None),
        "PADDED_VO": _padded(plan.head_dim_vo, plan.v_quant is not None),
        "PAGE_SIZE": plan.page_size,
        "SCORE_CODES": plan.score_codes,
        "MASK_FN": plan.mask_fn,
        "HAS_LISTS": plan.list_slots is not None,
        "HAS_WINDOW": bool(plan.window),
        "HAS_SINK": plan.sink_logits is not None,
        "HAS_HEAD_MASK": plan.has_head_mask,
        "HAS_DROPOUT": plan.dropout_words is not None,
        "K_FORMAT": plan.k_quant.format if plan.k_quant else None,
        "V_FORMAT": plan.v_quant.format if plan.v_quant else None,
        "K_GRANULARITY": plan.k_quant.granularity if plan.k_quant else None,
        "V_GRANULARITY": plan.v_quant.granularity if plan.v_quant else None,
        "K_ASSEMBLY": pair_assembly(plan.k_quant, plan.dtype, plan.device),
        "V_ASSEMBLY": pair_assembly(plan.v_quant, plan.dtype, plan.device),
        "IS_ONE_ROW": shape.tile_q == 1 and not plan.has_head_mask,
        "IS_UNMASKED": _is_unmasked(plan, shape),
    }
    return fixed, {"num_warps": shape.num_warps, "num_stages": shape.num_stages}


def _merge_arguments(plan: Plan, launch: Launch) -> tuple[dict[str, object], dict[str, int]]:
    """Arguments of merge_kernel that a plan fixes, in order, and compiler options."""
    fixed = {
        "merges_ptr": launch.merges,
        "partial_acc_ptr": launch.partial_acc,
        "partial_max_ptr": launch.partial_max,
        "partial_sum_ptr": launch.partial_sum,
        "sink_logits_ptr": plan.sink_logits,
        "MERGE_WIDTH": len(MERGE_FIELDS),
        "TILE_M": launch.shape.tile_m,
        "HEADS": launch.shape.heads_per_tile,
        "HEAD_DIM_VO": plan.head_dim_vo,
        "PADDED_VO": _padded(plan.head_dim_vo),
        "HAS_SINK": plan.sink_logits is not None,
        "TILE_SPLITS": 8,
    }
    return fixed, {"num_warps": 4}


def _is_unmasked(plan: Plan, shape: TileShape) -> bool:
    """Whether a task's keys are exactly those its single row may see, as the work list has cut them."""
    is_row_of_block = plan.q_block_size == 1 or not plan.window
    return shape.tile_q == 1 and plan.mask_fn is None and is_row_of_block and not plan.has_head_mask


def _padded(head_dim: int, is_halved: bool = False) -> int:
    """A power of two that a tensor core takes, its half too where even and odd dimensions go apart."""
    return max(32 if is_halved else 16, triton.next_power_of_2(head_dim))


def _cache_strides(plan: Plan, cache: Tensor) -> tuple[int | None, int, int, int]:
    """Strides of page, token in page, head and dimension, whatever the layout; None for pages that follow as tokens do.

    There a slot is one product away from its address, where it is two and a division otherwise.
    """
    page, a, b, dim = cache.stride()
    token, head = (a, b) if plan.layout == "NHD" else (b, a)
    return None if page == plan.page_size * token else page, token, head, dim


def _check_tensors(plan: Plan, tensors: tuple[Tensor, ...]) -> None:
    """Refuses tensors of another shape, dtype or device than planned. [SAFE-SHAPE]"""
    for tensor, (name, shape, dtype) in zip(tensors, plan.tensor_shapes, strict=True):
        if tensor.shape != shape:
            raise PlanError("SAFE-SHAPE", f"{name}.shape", tuple(tensor.shape), f"the plan is for {shape}")
        if tensor.dtype != dtype:
            raise PlanError("SAFE-SHAPE", f"{name}.dtype", tensor.dtype, f"the plan is for {dtype}")
        if tensor.device != plan.device:
            raise PlanError("SAFE-SHAPE", f"{name}.device", tensor.device, f"the plan is for {plan.device}")


def _check_scales(plan: Plan, scales: tuple[Tensor | None, Tensor | None]) -> None:
    """Refuses scales that are missing, not asked for, or of another shape, dtype or device. [QUANT-SCALE]"""
    for scale, (name, shape) in zip(scales, plan.scale_shapes, strict=True):
        if scale is None and shape is None:
            continue
        if scale is None or shape is None:
            got, limit = ("None", f"the plan is for {shape}") if scale is None else ("given", "the plan has no codes")
            raise PlanError("QUANT-SCALE", name, got, limit)
        if scale.shape != shape:
            raise PlanError("QUANT-SCALE", f"{name}.shape", tuple(scale.shape), f"the plan is for {shape}")
        if scale.dtype != torch.float32:
            raise PlanError("QUANT-SCALE", f"{name}.dtype", scale.dtype, "must be float32")
        if scale.device != plan.device:
            raise PlanError("QUANT-SCALE", f"{name}.device", scale.device, f"the plan is for {plan.device}")


def check_scale_values(plan: Plan, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> None:
    """Refuses scales that are not finite and above 0; those of pages and slots that no request owns may be anything.

    A run does not look, since it would have to synchronize: call this where scales come from outside. [QUANT-SCALE]
    """
    _check_scales(plan, (k_scale, v_scale))
    request, position = enumerate_runs(plan.seqlen_kv)
    slots = to_slots(request, position, plan.page_table, plan.page_size)
    for name, quant, scale in (("k_scale", plan.k_quant, k_scale), ("v_scale", plan.v_quant, v_scale)):
        if quant is None or scale is None:
            continue
        is_owned = torch.ones(scale.shape, dtype=torch.bool, device=scale.device)
        if quant.granularity in ("page", "token"):
            is_owned.zero_()
            is_owned[slots // plan.page_size if quant.granularity == "page" else slots] = True
        is_bad = is_owned & ~(torch.isfinite(scale) & (scale > 0))
        if bool(is_bad.any()):
            index = first_index(is_bad)
            raise PlanError("QUANT-SCALE", name, float(scale[index]), "must be finite and above 0", index)


# What P is multiplied by before it meets codes in float16: its largest value, 1, stays below 65504.
P_SCALE = tl.constexpr(32768.0)


# Numbers of a batch or a rule: a kernel compiled for one value of them must serve every other.
@triton.jit(do_not_specialize=["window", "total_q", "num_qo_heads", "max_pages"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    q_strides, k_strides, v_strides, k_scale_strides, v_scale_strides, out_strides, lse_strides,
    tasks_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr,
    page_table_ptr, list_slots_ptr, list_positions_ptr, list_members_ptr,
    row_positions_ptr, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
    score_params_ptr, score_tables_ptr, score_reaches_ptr, sink_logits_ptr, dropout_words_ptr, dropout_scale,
    sm_scale, window, total_q, num_qo_heads, max_pages,
    TASK_WIDTH: tl.constexpr,
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
):  # fmt: skip
    """Attends one task; writes its rows, or its partial state where its tile was cut."""
    task_ptr = tasks_ptr + tl.program_id(0).to(tl.int64) * TASK_WIDTH
    request = tl.load(task_ptr)
    q_start = tl.load(task_ptr + 1)
    q_count = tl.load(task_ptr + 2)
    head_start = tl.load(task_ptr + 3)
    head_count = tl.load(task_ptr + 4)
    kv_head = tl.load(task_ptr + 5).to(tl.int64)
    kv_start = tl.load(task_ptr + 6)
    kv_end = tl.load(task_ptr + 7)
    full_start = tl.load(task_ptr + 8)
    full_end = tl.load(task_ptr + 9)
    partial = tl.load(task_ptr + 10).to(tl.int64)

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

    # [TILE_M, PADDED_QK]; where K is quantized, even and odd dimensions apart, [TILE_M, PADDED_QK // 2] each
    q_starts = rows.to(tl.int64) * q_strides[0] + heads.to(tl.int64) * q_strides[1]
    if K_FORMAT is None:
        q = load_query(q_ptr, q_starts, is_live, tl.arange(0, PADDED_QK), q_strides[2], HEAD_DIM_QK)
        queries = (q, q)
        score_scale = sm_scale * LOG2_E
    else:
        even_dim = 2 * tl.arange(0, PADDED_QK // 2)
        q = widen(load_query(q_ptr, q_starts, is_live, even_dim, q_strides[2], HEAD_DIM_QK))
        q_odd = widen(load_query(q_ptr, q_starts, is_live, even_dim + 1, q_strides[2], HEAD_DIM_QK))
        if K_GRANULARITY == "channel":
            q *= load_channel_scales(k_scale_ptr, k_scale_strides, kv_head, even_dim, HEAD_DIM_QK)[None, :]
            q_odd *= load_channel_scales(k_scale_ptr, k_scale_strides, kv_head, even_dim + 1, HEAD_DIM_QK)[None, :]
        score_scale = sm_scale * LOG2_E * load_whole_scale(k_scale_ptr, k_scale_strides, kv_head, K_GRANULARITY)
        if q_ptr.dtype.element_ty != tl.float32:
            q, q_odd, q_unit = normalize_query(q, q_odd)
            score_scale = (q_unit * score_scale)[:, None]
        queries = (q, q_odd)

    page_row = page_table_ptr + request.to(tl.int64) * max_pages
    k_cache = (k_ptr + kv_head * k_strides[2], k_strides, k_scale_ptr, k_scale_strides, kv_head)
    v_cache = (v_ptr + kv_head * v_strides[2], v_strides, v_scale_ptr, v_scale_strides, kv_head)
    lists = (list_slots_ptr, list_positions_ptr, list_members_ptr, window)
    mask = (mask_starts_ptr, mask_ends_ptr, mask_data_ptr)
    score = (score_scale, score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads, dropout_words_ptr)
    where = (mask_rows, is_rule_row, q_idx, request, heads, is_live)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    # Even dimensions only where V is quantized; else all, and the other is nothing.
    acc = tl.zeros([TILE_M, PADDED_VO if V_FORMAT is None else PADDED_VO // 2], tl.float32)
    acc_odd = tl.zeros([TILE_M, 1 if V_FORMAT is None else PADDED_VO // 2], tl.float32)
    value_unit = tl.zeros([TILE_M], tl.float32)

    if IS_ONE_ROW:
        # One row's mask is cheap where there is one at all; a second loop would only cost its start-up.
        for first in range(kv_start, kv_end, TILE_KV):
            acc, acc_odd, row_max, row_sum, value_unit = attend_tile(
                acc, acc_odd, row_max, row_sum, value_unit, queries, first, kv_end,
                where, page_row, k_cache, v_cache, lists, mask, score,
                False, IS_UNMASKED, IS_ONE_ROW, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO, PAGE_SIZE,
                SCORE_CODES, MASK_FN, HAS_LISTS, HAS_WINDOW, HAS_DROPOUT,
                K_FORMAT, V_FORMAT, K_GRANULARITY, V_GRANULARITY, K_ASSEMBLY, V_ASSEMBLY,
                q_ptr.dtype.element_ty == tl.float32,
            )  # fmt: skip
    else:
        full_stop = full_start + (full_end - full_start) // TILE_KV * TILE_KV
        # Keys that every row admits.
        for first in range(full_start, full_stop, TILE_KV):
            acc, acc_odd, row_max, row_sum, value_unit = attend_tile(
                acc, acc_odd, row_max, row_sum, value_unit, queries, first, full_stop,
                where, page_row, k_cache, v_cache, lists, mask, score,
                True, True, IS_ONE_ROW, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO, PAGE_SIZE,
                SCORE_CODES, MASK_FN, HAS_LISTS, HAS_WINDOW, HAS_DROPOUT,
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
            acc, acc_odd, row_max, row_sum, value_unit = attend_tile(
                acc, acc_odd, row_max, row_sum, value_unit, queries, first, limit,
                where, page_row, k_cache, v_cache, lists, mask, score,
                False, False, IS_ONE_ROW, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO, PAGE_SIZE,
                SCORE_CODES, MASK_FN, HAS_LISTS, HAS_WINDOW, HAS_DROPOUT,
                K_FORMAT, V_FORMAT, K_GRANULARITY, V_GRANULARITY, K_ASSEMBLY, V_ASSEMBLY,
                q_ptr.dtype.element_ty == tl.float32,
            )  # fmt: skip

    if V_FORMAT is not None:
        acc = tl.interleave(acc, acc_odd)
        if q_ptr.dtype.element_ty != tl.float32:
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

    if partial >= 0:
        dim_vo = tl.arange(0, PADDED_VO)
        state = partial * TILE_M + lane_m
        tl.store(partial_max_ptr + state, row_max)
        tl.store(partial_sum_ptr + state, row_sum)
        acc_ptrs = partial_acc_ptr + state[:, None] * HEAD_DIM_VO + dim_vo[None, :]
        tl.store(acc_ptrs, acc, mask=is_live[:, None] & (dim_vo < HEAD_DIM_VO)[None, :])
    else:
        store_rows(
            acc, row_max, row_sum, rows, heads, is_live, out_ptr, lse_ptr, out_strides, lse_strides, sink_logits_ptr,
            HEAD_DIM_VO, PADDED_VO, HAS_SINK,
        )  # fmt: skip


@triton.jit
def attend_tile(
    acc, acc_odd, row_max, row_sum,  # [TILE_M, PADDED_VO], nothing or half of it each; [TILE_M], [TILE_M]
    value_unit,  # [TILE_M] of the scales in P so far
    queries,  # [TILE_M, PADDED_QK], or half of it twice
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
    kv_idx, page, slot, k_start, v_start = locate_keys(
        key, is_key, page_row, k_cache, v_cache, lists, PAGE_SIZE, HAS_LISTS, NEEDS_POSITIONS
    )
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

    q, q_odd = queries
    # What codes become: see `quantization`.
    CODE_DTYPE: tl.constexpr = tl.float32 if IS_FLOAT32 else tl.float16
    scores = tl.zeros([q.shape[0], TILE_KV], tl.float32)
    if K_FORMAT is None:
        dim_qk = tl.arange(0, PADDED_QK)
        k_ptrs = k_cache[0] + k_start[None, :] + (dim_qk.to(tl.int64) * k_cache[1][3])[:, None]
        # [PADDED_QK, TILE_KV]
        is_dim = (dim_qk < HEAD_DIM_QK)[:, None]
        k = load_tile(k_ptrs, is_read[None, :], is_dim, IS_WHOLE and IS_UNMASKED, HEAD_DIM_QK)
        scores = dot(q, k, scores)
    else:
        pair = tl.arange(0, PADDED_QK // 2)[:, None]
        k, k_odd = load_code_tile(
            k_cache[0], k_start[None, :], is_read[None, :], pair, k_cache[1][3], CODE_DTYPE,
            K_FORMAT, K_ASSEMBLY, IS_WHOLE and IS_UNMASKED, HEAD_DIM_QK, PADDED_QK,
        )  # fmt: skip
        scores = dot(q_odd, k_odd, dot(q, k, scores))
    if K_GRANULARITY == "page" or K_GRANULARITY == "token":
        key_scales = load_key_scales(k_cache[2], k_cache[3], k_cache[4], page, slot, is_read, K_GRANULARITY)
        scores *= key_scales[None, :] * score[0]
    else:
        scores *= score[0]
    if len(SCORE_CODES) > 0:
        scores = apply_score_rules(
            scores, heads, is_live, q_idx, kv_idx, score[1], score[2], score[3], score[4], LOG2_E, SCORE_CODES
        )
    if not (IS_WHOLE and IS_UNMASKED):
        scores = tl.where(admitted, scores, float("-inf"))

    new_max = tl.maximum(row_max, tl.max(scores, axis=1))
    # A row that has admitted nothing yet would subtract -inf from -inf. [EMPTY-OUT]
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - base[:, None])
    rescale = tl.exp2(row_max - base)
    row_sum = row_sum * rescale + tl.sum(weights, axis=1)
    if HAS_DROPOUT:
        kept = is_kept(score[5], request, heads[:, None], q_idx[:, None], kv_idx[None, :])
        weights = tl.where(kept, weights, 0.0)
    if V_FORMAT is None:
        dim_vo = tl.arange(0, PADDED_VO)
        v_ptrs = v_cache[0] + v_start[:, None] + (dim_vo.to(tl.int64) * v_cache[1][3])[None, :]
        # [TILE_KV, PADDED_VO]
        is_dim = (dim_vo < HEAD_DIM_VO)[None, :]
        v = load_tile(v_ptrs, is_read[:, None], is_dim, IS_WHOLE and IS_UNMASKED, HEAD_DIM_VO)
        acc = dot(narrow(weights, v.dtype), v, acc * rescale[:, None])
    else:
        pair = tl.arange(0, PADDED_VO // 2)[None, :]
        v, v_odd = load_code_tile(
            v_cache[0], v_start[:, None], is_read[:, None], pair, v_cache[1][3], CODE_DTYPE,
            V_FORMAT, V_ASSEMBLY, IS_WHOLE and IS_UNMASKED, HEAD_DIM_VO, PADDED_VO,
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
        acc_odd = dot(weights, v_odd, acc_odd * rescale[:, None])
    return acc, acc_odd, new_max, row_sum, value_unit


@triton.jit
def load_query(q_ptr, starts, is_live, dim, stride_dim, HEAD_DIM: tl.constexpr):  # [TILE_M] twice, [DIMS]
    """Some dimensions of a tile's query rows, [TILE_M, DIMS]; 0 in lanes of no row."""
    ptrs = q_ptr + starts[:, None] + (dim.to(tl.int64) * stride_dim)[None, :]
    return tl.load(ptrs, mask=is_live[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def locate_keys(
    key, is_key,  # [TILE_KV] entries of a list, or positions
    page_row, k_cache, v_cache, lists,
    PAGE_SIZE: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    NEEDS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Position, page and slot of every key, and where its K and V start from the cache's head. [COORD-SLOT, COORD-WIDE]

    The position is the logical one where it is needed.
    """
    kv_idx = key
    if HAS_LISTS:
        slot = tl.load(lists[0] + key, mask=is_key, other=0)
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
    return kv_idx, page, slot, k_start, v_start


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
def load_tile(ptrs, is_read, is_dim, IS_WHOLE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Keys or values of a tile, 0 where a lane is masked; a mask that is known to be true is left out."""
    IS_PADDED: tl.constexpr = (HEAD_DIM & (HEAD_DIM - 1)) != 0 or HEAD_DIM < 16
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


@triton.jit
def store_rows(
    acc, row_max, row_sum,  # [TILE_M, PADDED_VO], [TILE_M], [TILE_M]
    rows, heads, is_live,  # [TILE_M]
    out_ptr, lse_ptr, out_strides, lse_strides, sink_logits_ptr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_VO: tl.constexpr,
    HAS_SINK: tl.constexpr,
):  # fmt: skip
    """Normalizes and writes finished rows; the sink logit joins the denominator here, once. [LSE-SINK, EMPTY-OUT]"""
    is_empty = row_sum == 0
    empty_lse = tl.full(row_sum.shape, float("-inf"), tl.float32)
    if HAS_SINK:
        empty_lse = tl.load(sink_logits_ptr + heads, mask=is_live, other=0.0)
        sink = empty_lse * LOG2_E
        new_max = tl.maximum(row_max, sink)
        rescale = tl.exp2(row_max - new_max)
        acc *= rescale[:, None]
        row_sum = row_sum * rescale + tl.exp2(sink - new_max)
        row_max = new_max
    denominator = tl.where(is_empty, 1.0, row_sum)
    out = tl.where(is_empty[:, None], 0.0, acc / denominator[:, None])
    lse = tl.where(is_empty, empty_lse, (row_max + tl.log2(denominator)) * LN_2)
    rows = rows.to(tl.int64)
    heads = heads.to(tl.int64)
    dim_vo = tl.arange(0, PADDED_VO)
    out_offset = (rows * out_strides[0] + heads * out_strides[1])[:, None]
    out_ptrs = out_ptr + out_offset + (dim_vo.to(tl.int64) * out_strides[2])[None, :]
    tl.store(out_ptrs, narrow(out, out_ptr.dtype.element_ty), mask=is_live[:, None] & (dim_vo < HEAD_DIM_VO)[None, :])
    tl.store(lse_ptr + rows * lse_strides[0] + heads * lse_strides[1], lse, mask=is_live)


@triton.jit
def merge_kernel(
    out_ptr, lse_ptr, out_strides, lse_strides,
    merges_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr, sink_logits_ptr,
    MERGE_WIDTH: tl.constexpr,
    TILE_M: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_VO: tl.constexpr,
    HAS_SINK: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merges the partial states of one row and writes it; states of no keys change nothing. [MERGE-DISJOINT]"""
    merge_ptr = merges_ptr + tl.program_id(0).to(tl.int64) * MERGE_WIDTH
    q_start = tl.load(merge_ptr)
    q_count = tl.load(merge_ptr + 1)
    head_start = tl.load(merge_ptr + 2)
    head_count = tl.load(merge_ptr + 3)
    first_partial = tl.load(merge_ptr + 4).to(tl.int64)
    num_partials = tl.load(merge_ptr + 5)
    lane_m = tl.program_id(1)
    rows = q_start + lane_m // HEADS + tl.arange(0, 1)
    heads = head_start + lane_m % HEADS + tl.arange(0, 1)
    is_live = (rows < q_start + q_count) & (heads < head_start + head_count)
    if (lane_m // HEADS < q_count) & (lane_m % HEADS < head_count):
        dim_vo = tl.arange(0, PADDED_VO)
        row_max = tl.full([1], float("-inf"), tl.float32)
        row_sum = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, PADDED_VO], tl.float32)
        # A few chunks at a time, so that their loads are in flight together.
        for first in range(0, num_partials, TILE_SPLITS):
            chunk = first + tl.arange(0, TILE_SPLITS)
            is_chunk = chunk < num_partials
            state = (first_partial + chunk) * TILE_M + lane_m
            chunk_max = tl.load(partial_max_ptr + state, mask=is_chunk, other=float("-inf"))
            chunk_sum = tl.load(partial_sum_ptr + state, mask=is_chunk, other=0.0)
            acc_mask = is_chunk[:, None] & (dim_vo < HEAD_DIM_VO)[None, :]
            acc_ptrs = partial_acc_ptr + state[:, None] * HEAD_DIM_VO + dim_vo[None, :]
            chunk_acc = tl.load(acc_ptrs, mask=acc_mask, other=0.0)
            new_max = tl.maximum(row_max, tl.max(chunk_max, axis=0))
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            rescale = tl.exp2(row_max - base)
            weight = tl.exp2(chunk_max - base)
            row_sum = row_sum * rescale + tl.sum(chunk_sum * weight, axis=0)
            acc = acc * rescale[:, None] + tl.sum(chunk_acc * weight[:, None], axis=0)[None, :]
            row_max = new_max
        store_rows(
            acc, row_max, row_sum, rows, heads, is_live, out_ptr, lse_ptr, out_strides, lse_strides, sink_logits_ptr,
            HEAD_DIM_VO, PADDED_VO, HAS_SINK,
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
