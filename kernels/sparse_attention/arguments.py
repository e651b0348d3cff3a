"""What a plan fixes of its kernels' arguments, in their order, and the compiler's options."""

from __future__ import annotations

from torch import Tensor

from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.quantization import pair_assembly
from attnconform.kernels.sparse_attention.tasks import MERGE_FIELDS, TASK_FIELDS, Launch
from attnconform.kernels.sparse_attention.tuning import (
    MERGE_LAUNCH_SPLITS,
    MERGE_SPLITS,
    SMALLEST_SCALE,
    TileShape,
    lanes_of_merge,
    power_of_two_from,
)
from attnconform.kernels.sparse_attention.union import UNION_FIELDS, UnionLists

MIN_DIM = 16  # the least a tensor core takes


def attend_arguments(plan: Plan, launch: Launch) -> tuple[dict[str, object], dict[str, int]]:
    """Arguments of attend_kernel that a plan fixes, in order, and compiler options."""
    shape = launch.shape
    fixed = {
        "tasks_ptr": launch.tasks,
        "merges_ptr": launch.merges,
        "tickets_ptr": launch.tickets,
        "partial_acc_ptr": launch.partial_acc,
        "partial_max_ptr": launch.partial_max,
        "partial_sum_ptr": launch.partial_sum,
        "generations_ptr": plan.generations,
        "page_table_ptr": plan.page_table,
        "list_slots_ptr": plan.list_slots,
        "list_positions_ptr": plan.list_positions,
        "list_members_ptr": plan.list_members,
        **_rule_arguments(plan),
        "sm_scale": plan.sm_scale,
        "window": plan.window or 0,
        "total_q": plan.total_q,
        "num_qo_heads": plan.num_qo_heads,
        "max_pages": plan.page_table.shape[1],
        "batch_size": plan.batch_size,
        "TASK_WIDTH": len(TASK_FIELDS),
        "MERGE_WIDTH": len(MERGE_FIELDS),
        **_tile_constants(plan, shape),
        "SCORE_CODES": plan.score_codes,
        "IS_SCALED_LATE": _is_scaled_late(plan),
        "MASK_FN": plan.mask_fn,
        "HAS_LISTS": plan.list_slots is not None,
        "HAS_WINDOW": bool(plan.window),
        "HAS_SINK": plan.sink_logits is not None,
        "HAS_HEAD_MASK": plan.has_head_mask,
        "HAS_DROPOUT": plan.dropout_words is not None,
        **_code_constants(plan),
        "IS_ONE_ROW": shape.tile_q == 1 and not plan.has_head_mask,
        "IS_UNMASKED": _is_unmasked(plan, shape),
        "MERGE_LANES": lanes_of_merge(plan.head_dim_vo, shape.num_warps),
        "MERGE_SPLITS": MERGE_SPLITS,
    }
    return fixed, {"num_warps": shape.num_warps, "num_stages": shape.num_stages}


def union_arguments(plan: Plan, union: UnionLists) -> tuple[dict[str, object], dict[str, int]]:
    """Arguments of attend_union_kernel that a plan fixes, in order, and compiler options."""
    fixed = {
        "tasks_ptr": union.tasks,
        "blocks_ptr": union.blocks,
        "members_ptr": union.members,
        "page_table_ptr": plan.page_table,
        **_rule_arguments(plan),
        "sm_scale": plan.sm_scale,
        "num_qo_heads": plan.num_qo_heads,
        "max_pages": plan.page_table.shape[1],
        "TASK_WIDTH": len(UNION_FIELDS),
        "BLOCK_SIZE": union.block_size,
        **_tile_constants(plan, union.shape),
        "SCORE_CODES": plan.score_codes,
        "IS_SCALED_LATE": _is_scaled_late(plan),
        "MASK_FN": plan.mask_fn,
        "HAS_SINK": plan.sink_logits is not None,
        "HAS_DROPOUT": plan.dropout_words is not None,
        **_code_constants(plan),
    }
    return fixed, {"num_warps": union.shape.num_warps, "num_stages": union.shape.num_stages}


def _rule_arguments(plan: Plan) -> dict[str, object]:
    """Where rows stand, what they may see and what becomes of their scores."""
    return {
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
    }


def _tile_constants(plan: Plan, shape: TileShape) -> dict[str, int]:
    """What a tile is compiled for."""
    return {
        "TILE_M": shape.tile_m,
        "TILE_KV": shape.tile_kv,
        "HEADS": shape.heads_per_tile,
        "HEAD_DIM_QK": plan.head_dim_qk,
        "HEAD_DIM_VO": plan.head_dim_vo,
        **part_constants(plan),
        "PAGE_SIZE": plan.page_size,
    }


def _code_constants(plan: Plan) -> dict[str, object]:
    """How codes of a quantized cache are read, None where it holds numbers."""
    return {
        "K_FORMAT": plan.k_quant.format if plan.k_quant else None,
        "V_FORMAT": plan.v_quant.format if plan.v_quant else None,
        "K_GRANULARITY": plan.k_quant.granularity if plan.k_quant else None,
        "V_GRANULARITY": plan.v_quant.granularity if plan.v_quant else None,
        "K_ASSEMBLY": pair_assembly(plan.k_quant, plan.dtype, plan.device),
        "V_ASSEMBLY": pair_assembly(plan.v_quant, plan.dtype, plan.device),
    }


def merge_arguments(plan: Plan, launch: Launch) -> tuple[dict[str, object], dict[str, int]]:
    """Arguments of merge_kernel that a plan fixes, in order, and compiler options."""
    fixed = {
        "merges_ptr": launch.merges,
        "partial_acc_ptr": launch.partial_acc,
        "partial_max_ptr": launch.partial_max,
        "partial_sum_ptr": launch.partial_sum,
        "sink_logits_ptr": plan.sink_logits,
        "generations_ptr": plan.generations,
        "batch_size": plan.batch_size,
        "MERGE_WIDTH": len(MERGE_FIELDS),
        "TILE_M": launch.shape.tile_m,
        "HEADS": launch.shape.heads_per_tile,
        "HEAD_DIM_VO": plan.head_dim_vo,
        "PADDED_VO": padded_dim(plan.head_dim_vo),
        "HAS_SINK": plan.sink_logits is not None,
        "TILE_SPLITS": MERGE_LAUNCH_SPLITS,
    }
    return fixed, {"num_warps": 4}


def _is_scaled_late(plan: Plan) -> bool:
    """Whether the largest product of a tile gives its largest score, so that the scale waits for the maximum.

    A scale that is 0 in float32 would make NaN of a masked score.
    """
    return plan.sm_scale >= SMALLEST_SCALE and not plan.score_codes and plan.k_quant is None


def _is_unmasked(plan: Plan, shape: TileShape) -> bool:
    """Whether a task's keys are exactly those its single row may see, as the work list has cut them."""
    is_row_of_block = plan.q_block_size == 1 or not plan.window
    return shape.tile_q == 1 and plan.mask_fn is None and is_row_of_block and not plan.has_head_mask


def part_constants(plan: Plan) -> dict[str, int]:
    """Parts of the head dimensions, in the order of the kernels' arguments."""
    padded_qk, rest_qk = cut_dim(plan.head_dim_qk, plan.k_quant is not None)
    padded_vo, rest_vo = cut_dim(plan.head_dim_vo, plan.v_quant is not None)
    return {"PADDED_QK": padded_qk, "PADDED_VO": padded_vo, "REST_QK": rest_qk, "REST_VO": rest_vo}


def cut_dim(head_dim: int, is_halved: bool = False) -> tuple[int, int]:
    """A head dimension as a power of two and another one for the rest, 0 where one padded power is as good.

    Both are what a tensor core takes; even and odd dimensions of codes go apart and are not cut any further.
    """
    padded = padded_dim(head_dim, is_halved)
    main = padded // 2
    rest = padded_dim(head_dim - main) if not is_halved and MIN_DIM <= main < head_dim else padded
    return (main, rest) if main + rest < padded else (padded, 0)


def padded_dim(head_dim: int, is_halved: bool = False) -> int:
    """A power of two that a tensor core takes, its half too where even and odd dimensions go apart."""
    return max(2 * MIN_DIM if is_halved else MIN_DIM, power_of_two_from(head_dim))


def cache_strides(plan: Plan, cache: Tensor) -> tuple[int | None, int, int, int]:
    """Strides of page, token in page, head and dimension, whatever the layout; None for pages that follow as tokens do.

    There a slot is one product away from its address, where it is two and a division otherwise.
    """
    page, a, b, dim = cache.stride()
    token, head = (a, b) if plan.layout == "NHD" else (b, a)
    return None if page == plan.page_size * token else page, token, head, dim
