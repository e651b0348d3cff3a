"""Gradients over a backward's tasks and transposed lists by Hopper's own means: TMA, wgmma, warps that do one thing.

The kernels are in `hopper_backward_keys`, `hopper_backward_rows`, `hopper_backward_query` and `hopper_backward_union`,
what they take in `hopper_backward_choice`. Where TMA cannot read the tensors of a call as they lie, the launch is left
to the kernels of `backward_keys` and `backward_query`. [COORD-STRIDE, COORD-WIDE]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from attnconform.kernels.sparse_attention.backward_query import cache_strides
from attnconform.kernels.sparse_attention.backward_tasks import QUERY_FIELDS, QueryLaunch
from attnconform.kernels.sparse_attention.backward_transpose import TransposedPlan
from attnconform.kernels.sparse_attention.hopper import (
    INT32_LIMIT,
    TMA_BYTES,
    describe,
    find_grid,
    has_wide_rows,
    score_code,
)
from attnconform.kernels.sparse_attention.hopper_backward_choice import PAIR_LANES, HopperKeys, HopperQueries
from attnconform.kernels.sparse_attention.hopper_backward_rows_choice import HopperRows
from attnconform.kernels.sparse_attention.hopper_backward_union_choice import HopperUnion
from attnconform.kernels.sparse_attention.plan import Plan, count_processors
from attnconform.kernels.sparse_attention.tuning import union_unit
from attnconform.kernels.sparse_attention.union import UNION_FIELDS

if TYPE_CHECKING:
    from attnconform.kernels.sparse_attention.backward_query import RowInputs


class Descriptions(NamedTuple):
    """A tensor as TMA sees it."""

    descriptor: Any
    places: tuple[int, int, int]


def describe_cache(plan: Plan, cache: Tensor, box: int) -> Descriptions | None:
    """Rows of a cache in boxes of slots, None where TMA cannot read them."""
    if cache.numel() == 0 or cache.data_ptr() % TMA_BYTES:
        return None
    sizes = (plan.num_pages, plan.page_size, plan.num_kv_heads, cache.shape[3])
    grid = find_grid(cache_strides(plan, cache), sizes, cache.element_size())
    return None if grid is None else Descriptions(describe(cache, grid, box), grid.places)


def describe_rows(rows: Tensor, box: int) -> Descriptions | None:
    """q or dO, (total_q, num_qo_heads, head_dim), in boxes of rows of one head, None where TMA cannot read them."""
    total_q, num_heads, head_dim = rows.shape
    if rows.numel() == 0 or rows.data_ptr() % TMA_BYTES:
        return None
    token, head, dim = rows.stride()
    grid = find_grid((0, token, head, dim), (1, total_q, num_heads, head_dim), rows.element_size())
    return None if grid is None else Descriptions(describe(rows, grid, box), grid.places)


def launch_hopper_keys(
    plan: Plan,
    transposed: TransposedPlan,
    inputs: RowInputs,
    dk: Tensor,
    dv: Tensor,
    parts: tuple[Tensor, Tensor],  # float32, (*transposed.partial_rows, head_dim)
    shape: HopperKeys,
) -> bool:
    """Whether it was launched: what launch_key_gradients writes."""
    from attnconform.kernels.sparse_attention.hopper_backward_keys import hopper_keys_kernel

    q, k_cache, v_cache, dout, lse_log2, delta = inputs
    heads, tiles, items = transposed.pair_shape.heads, transposed.tiles, transposed.items
    found = (
        *(describe_rows(rows, PAIR_LANES // heads) for rows in (q, dout)),
        *(describe_cache(plan, cache, shape.box) for cache in (k_cache, v_cache)),
    )
    if any(description is None for description in found):
        return False
    descriptions = [description for description in found if description is not None]
    hopper_keys_kernel[(items.item_tile.numel(), transposed.num_head_programs)](
        *(description.descriptor for description in descriptions), lse_log2, delta,
        dk, dv, *parts,
        *(description.places for description in descriptions), cache_strides(plan, dk), cache_strides(plan, dv),
        items.item_tile, items.item_begin, items.item_full_begin, items.item_end, items.item_partial,
        tiles.tile_slot, tiles.tile_kv_head, transposed.pairs, tiles.codes, tiles.is_touched,
        plan.row_positions, plan.mask_starts, plan.mask_ends, plan.score_params,
        plan.sm_scale, plan.total_q,
        HEADS=heads,
        GROUP=plan.group_size,
        HEAD_DIM=plan.head_dim_qk,
        PAGE_SIZE=plan.page_size,
        BOX=shape.box,
        STAGES=shape.stages,
        SCORE=score_code(plan),
        HAS_HEAD_MASK=plan.has_head_mask,
        num_warps=4,
    )  # fmt: skip
    return True


class HeadRows(NamedTuple):
    """q or dO as rows of heads, a token's one after another."""

    descriptor: Any
    token_rows: int  # from a token to the next


def describe_heads(rows: Tensor, heads: int) -> HeadRows | None:
    """q or dO, (total_q, num_qo_heads, head_dim), in boxes of a row's heads, None where TMA cannot read them."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from attnconform.kernels.sparse_attention.hopper_tiles import SWIZZLED

    total_q, num_heads, head_dim = rows.shape
    token, head, dim = rows.stride()
    token = num_heads * head if total_q == 1 else token
    if rows.numel() == 0 or dim != 1 or head < 1 or token % head:
        return None
    if rows.data_ptr() % TMA_BYTES or head * rows.element_size() % TMA_BYTES:
        return None
    num_rows = (total_q - 1) * (token // head) + num_heads
    if num_rows >= INT32_LIMIT:
        return None
    block = [heads, SWIZZLED.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)  # of any numbers of 16 bits
    return HeadRows(TensorDescriptor(rows, [num_rows, head_dim], [head, 1], block, layout), token // head)


def launch_hopper_rows(
    plan: Plan,
    transposed: TransposedPlan,
    inputs: RowInputs,
    dk: Tensor,
    dv: Tensor,
    parts: tuple[Tensor, Tensor],  # float32, (*transposed.partial_rows, head_dim)
    shape: HopperRows,
) -> bool:
    """Whether it was launched: what launch_key_gradients writes."""
    from attnconform.kernels.sparse_attention.hopper_backward_rows import hopper_rows_kernel

    heads, tiles, items = transposed.pair_shape.heads, transposed.tiles, transposed.items
    q, dout = (describe_heads(rows, heads) for rows in (inputs.q, inputs.dout))
    k, v = (describe_cache(plan, cache, shape.box) for cache in (inputs.k_cache, inputs.v_cache))
    if q is None or dout is None or k is None or v is None:
        return False
    hopper_rows_kernel[(items.item_tile.numel(), transposed.num_head_programs)](
        q.descriptor, dout.descriptor, k.descriptor, v.descriptor, inputs.lse_log2, inputs.delta,
        dk, dv, *parts,
        q.token_rows, dout.token_rows, k.places, v.places, cache_strides(plan, dk), cache_strides(plan, dv),
        items.item_tile, items.item_begin, shape.item_full_end, items.item_end, items.item_partial,
        tiles.tile_slot, tiles.tile_kv_head, shape.pairs, tiles.codes, tiles.is_touched,
        plan.mask_starts, plan.mask_ends,
        plan.sm_scale, plan.total_q,
        HEADS=heads,
        GROUP=plan.group_size,
        HEAD_DIM=plan.head_dim_qk,
        PAGE_SIZE=plan.page_size,
        BOX=shape.box,
        STAGES=shape.stages,
        num_warps=4,
    )  # fmt: skip
    return True


def launch_hopper_queries(
    plan: Plan,
    launch: QueryLaunch,
    inputs: RowInputs,
    dq: Tensor,  # (total_q, num_qo_heads, head_dim), any floating dtype
    parts: Tensor,  # (*launch.partial_rows, head_dim) float32
    shape: HopperQueries,
) -> bool:
    """Whether it was launched: what launch_query_gradients writes without cold pages."""
    from attnconform.kernels.sparse_attention.hopper_backward_query import hopper_query_kernel

    q, k_cache, v_cache, dout, lse_log2, delta = inputs
    k, v = (describe_cache(plan, cache, shape.box) for cache in (k_cache, v_cache))
    if k is None or v is None:
        return False
    num_tasks = launch.tasks.shape[0]
    hopper_query_kernel[(max(1, min(num_tasks, count_processors(plan.device))),)](
        q, dout, k.descriptor, v.descriptor, lse_log2, delta, dq, parts,
        q.stride(), dout.stride(), k.places, v.places, dq.stride(),
        launch.tasks, plan.page_table, plan.list_slots, plan.list_positions,
        plan.row_positions, plan.mask_starts, plan.mask_ends, plan.score_params,
        plan.sm_scale, num_tasks, plan.total_q, plan.page_table.shape[1],
        TASK_WIDTH=len(QUERY_FIELDS),
        TILE_KV=shape.tile_kv,
        HEADS=launch.heads_per_tile,
        GROUP=plan.group_size,
        HEAD_DIM=plan.head_dim_qk,
        PAGE_SIZE=plan.page_size,
        BOX=shape.box,
        STAGES=shape.stages,
        SCORE=score_code(plan),
        HAS_LISTS=plan.list_slots is not None,
        HAS_HEAD_MASK=plan.has_head_mask,
        HAS_WIDE_ROWS=has_wide_rows(q) and has_wide_rows(dout),
        num_warps=4,
    )  # fmt: skip
    return True


def launch_hopper_union_queries(
    plan: Plan,
    inputs: RowInputs,
    dq: Tensor,  # (total_q, num_qo_heads, head_dim), any floating dtype
    union: HopperUnion,
) -> bool:
    """Whether it was launched: all of dQ, every row written."""
    from attnconform.kernels.sparse_attention.hopper_backward_union import hopper_union_query_kernel

    lists, shape = union.lists, union.lists.shape
    q, k_cache, v_cache, dout, lse_log2, delta = inputs
    k, v = (describe_cache(plan, cache, shape.box) for cache in (k_cache, v_cache))
    if k is None or v is None:
        return False
    num_tasks = lists.tasks.shape[0]
    hopper_union_query_kernel[(max(1, min(num_tasks, count_processors(plan.device))),)](
        q, dout, k.descriptor, v.descriptor, lse_log2, delta, dq,
        q.stride(), dout.stride(), k.places, v.places, dq.stride(),
        lists.tasks, lists.blocks, lists.members, plan.page_table,
        plan.row_positions, plan.mask_starts, plan.mask_ends,
        plan.sm_scale, num_tasks, plan.total_q, plan.page_table.shape[1],
        TASK_WIDTH=len(UNION_FIELDS),
        TILE_Q=shape.tile_q,
        TILE_KV=shape.tile_kv,
        HEADS=shape.heads_per_tile,
        GROUP=plan.group_size,
        HEAD_DIM=plan.head_dim_qk,
        BLOCK_SIZE=lists.block_size,
        UNIT=union_unit(lists.block_size),
        PAGE_SIZE=plan.page_size,
        BOX=shape.box,
        STAGES=union.stages,
        HAS_WIDE_ROWS=has_wide_rows(q) and has_wide_rows(dout),
        num_warps=4,
    )  # fmt: skip
    return True
