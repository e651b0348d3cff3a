"""Attention over the tasks of a plan by Hopper's own means: TMA, wgmma, and warps that do one thing each.

The kernel is in `hopper_kernel`, what it takes in `hopper_choice`. TMA reads a cache as rows of tokens: where pages,
heads and tokens do not lie in one such grid, or not at multiples of 16 bytes, the launch is left to `attend_kernel`.
[COORD-STRIDE, COORD-WIDE]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from attnconform.kernels.sparse_attention.arguments import cache_strides
from attnconform.kernels.sparse_attention.plan import Plan, count_processors
from attnconform.kernels.sparse_attention.prepared import PreparedLaunch
from attnconform.kernels.sparse_attention.rules import SOFT_CAP
from attnconform.kernels.sparse_attention.tasks import TASK_FIELDS, Launch
from attnconform.kernels.sparse_attention.tuning import (
    HOPPER_CAPPED_STAGES,
    HOPPER_CAPPED_TILE_KV,
    HOPPER_STAGES,
    HOPPER_TILE_KV,
)

if TYPE_CHECKING:
    from attnconform.kernels.sparse_attention.forward import RunTensors

TMA_BYTES = 16  # bases and strides are multiples of it
WIDE_BYTES = 16  # what a thread reads or writes at once
INT32_LIMIT = 2**31


class Grid(NamedTuple):
    """A cache as TMA sees it: rows of equal stride, one a token, with one head's numbers in them or all heads'."""

    num_rows: int
    num_columns: int
    row_stride: int  # elements
    page_rows: int  # rows from a page to the next
    head_rows: int  # from a head to the next
    head_columns: int

    @property
    def places(self) -> tuple[int, int, int]:
        """What a page and a head add to a row, and a head to a column."""
        return self.page_rows, self.head_rows, self.head_columns


def launch_hopper(plan: Plan, launch: Launch, tensors: RunTensors) -> bool:
    """Whether it was launched: one program a processor, which takes its share of the tasks.

    Descriptors are made for each run, as the addresses of its caches, and reach the kernel by value.
    """
    k_grid, v_grid = (grid_of(plan, launch.shape.box, cache) for cache in (tensors.k_cache, tensors.v_cache))
    if k_grid is None or v_grid is None:
        return False
    q, out, lse = tensors.q, tensors.out, tensors.lse
    is_wide = has_wide_rows(q) and has_wide_rows(out)
    prepared = launch.prepared.setdefault("hopper", {})
    if is_wide not in prepared:
        prepared[is_wide] = prepare(plan, launch, is_wide)
    box = launch.shape.box
    k_desc, v_desc = describe(tensors.k_cache, k_grid, box), describe(tensors.v_cache, v_grid, box)
    strides = (q.stride(), k_grid.places, v_grid.places, out.stride(), lse.stride())
    prepared[is_wide]((q, k_desc, v_desc, out, lse), strides)
    return True


def has_wide_rows(rows: Tensor) -> bool:
    """Whether every row of every head can be read and written 16 bytes at once."""
    *of_rows, of_dims = rows.stride()
    is_aligned = rows.data_ptr() % WIDE_BYTES == 0
    return is_aligned and of_dims == 1 and all(stride * rows.element_size() % WIDE_BYTES == 0 for stride in of_rows)


def grid_of(plan: Plan, box: int, cache: Tensor) -> Grid | None:
    """The grid of a cache, None where its base, strides or pages do not suit TMA."""
    if cache.numel() == 0 or cache.data_ptr() % TMA_BYTES or plan.page_size % box:
        return None
    page, token, head, dim = cache_strides(plan, cache)
    sizes = (plan.num_pages, plan.page_size, plan.num_kv_heads, plan.head_dim_qk)
    return find_grid((plan.page_size * token if page is None else page, token, head, dim), sizes, cache.element_size())


def find_grid(
    strides: tuple[int, int, int, int],  # elements: page, token in page, head, dimension
    sizes: tuple[int, int, int, int],  # likewise
    element_size: int,
) -> Grid | None:
    """Rows and columns of pages, tokens and heads of these strides; an axis of one element may have any."""
    page, token, head, dim = strides
    num_pages, page_size, num_heads, head_dim = sizes
    page, head = (0 if size == 1 else stride for size, stride in ((num_pages, page), (num_heads, head)))
    if dim != 1 or token < 1 or page % token or token * element_size % TMA_BYTES:
        return None
    is_row = head % token == 0
    if not is_row and (head > token or head * element_size % TMA_BYTES):
        return None
    head_rows, head_columns = (head // token, 0) if is_row else (0, head)
    num_rows = (num_pages - 1) * (page // token) + (num_heads - 1) * head_rows + page_size
    num_columns = (num_heads - 1) * head_columns + head_dim
    if num_rows >= INT32_LIMIT or num_columns >= INT32_LIMIT:
        return None
    return Grid(num_rows, num_columns, token, page // token, head_rows, head_columns)


def describe(cache: Tensor, grid: Grid, box: int) -> Any:
    """The descriptor of a cache, for boxes of so many rows and as many columns as a swizzle holds."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from attnconform.kernels.sparse_attention.hopper_tiles import SWIZZLED

    block = [box, SWIZZLED.value]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)  # of any numbers of 16 bits
    shape, strides = [grid.num_rows, grid.num_columns], [grid.row_stride, 1]
    return TensorDescriptor(cache, shape, strides, block, layout)


def prepare(plan: Plan, launch: Launch, is_wide: bool) -> PreparedLaunch:
    """The kernel with what a plan fixes of its arguments."""
    from attnconform.kernels.sparse_attention.hopper_kernel import hopper_kernel

    grid = (max(1, min(launch.tasks.shape[0], count_processors(plan.device))), 1, 1)
    return PreparedLaunch(hopper_kernel, grid, hopper_arguments(plan, launch, is_wide), {"num_warps": 4})


def hopper_arguments(plan: Plan, launch: Launch, is_wide: bool) -> dict[str, object]:
    """Arguments of hopper_kernel that a plan fixes, in order."""
    is_capped = plan.score_codes == (int(SOFT_CAP),)
    return {
        "tasks_ptr": launch.tasks,
        "partial_acc_ptr": launch.partial_acc,
        "partial_max_ptr": launch.partial_max,
        "partial_sum_ptr": launch.partial_sum,
        "page_table_ptr": plan.page_table,
        "list_slots_ptr": plan.list_slots,
        "list_positions_ptr": plan.list_positions,
        "row_positions_ptr": plan.row_positions,
        "mask_starts_ptr": plan.mask_starts,
        "mask_ends_ptr": plan.mask_ends,
        "score_params_ptr": plan.score_params,
        "sink_logits_ptr": plan.sink_logits,
        "sm_scale": plan.sm_scale,
        "num_tasks": launch.tasks.shape[0],
        "total_q": plan.total_q,
        "max_pages": plan.page_table.shape[1],
        "TASK_WIDTH": len(TASK_FIELDS),
        "TILE_M": launch.shape.tile_m,
        "TILE_KV": HOPPER_CAPPED_TILE_KV if is_capped else HOPPER_TILE_KV,
        "HEADS": launch.shape.heads_per_tile,
        "HEAD_DIM": plan.head_dim_qk,
        "PAGE_SIZE": plan.page_size,
        "BOX": launch.shape.box,
        "STAGES": HOPPER_CAPPED_STAGES if is_capped else HOPPER_STAGES,
        "SCORE": score_code(plan),
        "HAS_LISTS": plan.list_slots is not None,
        "HAS_SINK": plan.sink_logits is not None,
        "HAS_HEAD_MASK": plan.has_head_mask,
        "HAS_WIDE_ROWS": is_wide,
    }


def score_code(plan: Plan) -> int:
    """0 without a rule, else one more than the rule's own code, as hopper_kernel has them."""
    # a CustomScore's code is its function, which hopper_choice has turned away
    return int(plan.score_codes[0]) + 1 if plan.score_codes else 0  # type: ignore[call-overload]
