"""Union tiles by Hopper's own means: TMA brings every block of a union once, and groups of wgmma share it.

The kernel is in `hopper_union_kernel`, what it takes in `hopper_union_choice`. Where the caches of a run do not
lie as TMA reads them, its rows are attended apart, by the tasks that every plan has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnconform.kernels.sparse_attention.hopper import describe, grid_of, has_wide_rows
from attnconform.kernels.sparse_attention.plan import Plan, count_processors
from attnconform.kernels.sparse_attention.prepared import PreparedLaunch
from attnconform.kernels.sparse_attention.tuning import union_unit
from attnconform.kernels.sparse_attention.union import UNION_FIELDS, UnionLists

if TYPE_CHECKING:
    from attnconform.kernels.sparse_attention.forward import RunTensors


def launch_hopper_union(plan: Plan, union: UnionLists, tensors: RunTensors) -> bool:
    """Whether it was launched: one program a processor, which takes its share of the tasks."""
    box = union.shape.box
    k_grid, v_grid = (grid_of(plan, box, cache) for cache in (tensors.k_cache, tensors.v_cache))
    if k_grid is None or v_grid is None:
        return False
    q, out, lse = tensors.q, tensors.out, tensors.lse
    is_wide = has_wide_rows(q) and has_wide_rows(out)
    prepared = union.prepared.setdefault("hopper", {})
    if is_wide not in prepared:
        prepared[is_wide] = prepare(plan, union, is_wide)
    k_desc, v_desc = describe(tensors.k_cache, k_grid, box), describe(tensors.v_cache, v_grid, box)
    strides = (q.stride(), k_grid.places, v_grid.places, out.stride(), lse.stride())
    prepared[is_wide]((q, k_desc, v_desc, out, lse), strides)
    return True


def prepare(plan: Plan, union: UnionLists, is_wide: bool) -> PreparedLaunch:
    """The kernel with what a plan fixes of its arguments."""
    from attnconform.kernels.sparse_attention.hopper_union_kernel import hopper_union_kernel

    grid = (max(1, min(union.tasks.shape[0], count_processors(plan.device))), 1, 1)
    return PreparedLaunch(hopper_union_kernel, grid, hopper_union_arguments(plan, union, is_wide), {"num_warps": 4})


def hopper_union_arguments(plan: Plan, union: UnionLists, is_wide: bool) -> dict[str, object]:
    """Arguments of hopper_union_kernel that a plan fixes, in order."""
    shape = union.shape
    return {
        "tasks_ptr": union.tasks,
        "blocks_ptr": union.blocks,
        "members_ptr": union.members,
        "page_table_ptr": plan.page_table,
        "row_positions_ptr": plan.row_positions,
        "mask_starts_ptr": plan.mask_starts,
        "mask_ends_ptr": plan.mask_ends,
        "score_params_ptr": plan.score_params,
        "sink_logits_ptr": plan.sink_logits,
        "sm_scale": plan.sm_scale,
        "num_tasks": union.tasks.shape[0],
        "max_pages": plan.page_table.shape[1],
        "TASK_WIDTH": len(UNION_FIELDS),
        "TILE_Q": shape.tile_q,
        "TILE_KV": shape.tile_kv,
        "HEADS": shape.heads_per_tile,
        "HEAD_DIM": plan.head_dim_qk,
        "BLOCK_SIZE": union.block_size,
        "UNIT": union_unit(union.block_size),
        "PAGE_SIZE": plan.page_size,
        "BOX": shape.box,
        "STAGES": shape.num_stages,
        "HAS_SINK": plan.sink_logits is not None,
        "HAS_WIDE_ROWS": is_wide,
    }
