"""The work list: which program handles which query rows, heads and keys.

A *tile* is a few neighbouring query rows of one request with the heads that share a list and a KV head: the M
dimension of the products. Its keys are a run of list entries, or of positions where no lists are given, cut to what the
mask can allow any of its rows. A *task* is a tile, or one chunk of a tile whose run is long; chunks leave partial
states that a second kernel merges. Everything is computed with torch operations over all tiles at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.candidates import (
    POSITION_BITS,
    CanonicalLists,
    RowBlocks,
    cut_ranges,
    enumerate_runs,
)
from attnconform.kernels.sparse_attention.rules import LoweredMask
from attnconform.kernels.sparse_attention.tuning import (
    MANY_TASKS,
    MAX_SPLITS,
    PROGRAMS_PER_PROCESSOR,
    SMALL_TILE_M,
    Geometry,
    TileShape,
    choose_shape,
    largest_tile_m,
    least_steps,
    merges_in_launch,
    programs_at_once,
    runs_on_hopper,
)

# Columns of the two tables, in order; the kernels load them by number.
TASK_FIELDS = (
    "request",
    "q_start",  # global row
    "q_count",
    "head_start",  # query head
    "head_count",
    "kv_head",
    "kv_start",  # list entry, or position where no lists are given
    "kv_end",
    "full_start",  # every row admits every key from here
    "full_end",  # up to here
    "partial",  # row of the workspace, -1 where the task writes the output itself
    "merge",  # row of the merge table, -1 likewise
)
MERGE_FIELDS = ("q_start", "q_count", "head_start", "head_count", "first_partial", "num_partials", "request")


@dataclass(frozen=True, eq=False)
class Launch:
    """Tiles of one shape and the workspace of their partial states."""

    shape: TileShape
    tasks: Tensor  # (num_tasks, len(TASK_FIELDS)) int32, as order_tasks has them
    merges: Tensor  # (num_merges, len(MERGE_FIELDS)) int32
    partial_acc: Tensor  # (num_partials, tile_m, head_dim_vo) float32, not normalized
    partial_max: Tensor  # (num_partials, tile_m) float32, base 2
    partial_sum: Tensor  # (num_partials, tile_m) float32
    # (num_merges,) int32, chunks of a tile that are done, 0 between runs; None where a launch of its own merges
    tickets: Tensor | None
    prepared: dict[str, Any] = field(default_factory=dict)  # kernel launches, filled by the first run


@dataclass(frozen=True, eq=False)
class Tiles:
    """One row per tile, int64."""

    request: Tensor
    q_start: Tensor
    q_count: Tensor
    head_start: Tensor
    head_count: Tensor
    kv_head: Tensor
    kv_start: Tensor
    kv_end: Tensor
    full_start: Tensor
    full_end: Tensor


def build_launches(
    blocks: RowBlocks,
    lists: CanonicalLists | None,
    mask: LoweredMask,
    geometry: Geometry,
    window: int | None,
    device: torch.device,  # of the kernels; the tables may be made elsewhere
) -> tuple[Launch, ...]:
    """Work for blocks of few rows (decode) and of many (prefill) apart, so that neither pays for the other's tile."""
    largest = largest_tile_m(geometry)
    heads = heads_per_tile(geometry, largest)
    is_small = (blocks.q_count * heads <= SMALL_TILE_M) | (largest <= SMALL_TILE_M)
    if runs_on_hopper(0, geometry):  # whatever the rows
        is_small = torch.zeros_like(is_small)
    launches = []
    for chosen, cap in ((is_small, min(largest, SMALL_TILE_M)), (~is_small, largest)):
        if bool(chosen.any()):
            shape = choose_shape(int(blocks.q_count[chosen].max()), cap, heads, geometry, int(chosen.sum()))
            tiles = _build_tiles(blocks, chosen, lists, mask, shape, geometry, window)
            launches.append(_cut_tasks(tiles, shape, geometry, device))
    return tuple(launches)


def heads_per_tile(geometry: Geometry, most: int) -> int:
    """Heads of a group read the same keys, so they share a tile; a wide group is cut."""
    if geometry.sharing == "query_head":
        return 1
    return min(geometry.num_qo_heads // geometry.num_kv_heads, 64, most)


def _build_tiles(
    blocks: RowBlocks,
    chosen: Tensor,  # (num_blocks,) bool: blocks of this shape
    lists: CanonicalLists | None,
    mask: LoweredMask,
    shape: TileShape,
    geometry: Geometry,
    window: int | None,
) -> Tiles:
    """Row tiles of the chosen blocks times head tiles, with the keys of each."""
    block = torch.nonzero(chosen).flatten()
    owner, start, q_count = cut_ranges(blocks.q_count[block], shape.tile_q)
    block = block[owner]
    q_start = blocks.q_start[block] + start
    head_start, head_count, kv_head, list_head = head_tiles(geometry, shape.heads_per_tile, block.device)
    numhead_tiles = head_start.numel()
    spans = mask_spans(q_start, q_count, head_count, mask)
    row_tile = torch.arange(block.numel(), device=block.device).repeat_interleave(numhead_tiles)
    head_tile = torch.arange(numhead_tiles, device=block.device).repeat(block.numel())
    # One row of spans serves all head tiles unless the mask tells heads apart.
    span_row = head_tile if mask.starts.shape[0] > 1 else torch.zeros_like(head_tile)
    kv_start, kv_end, full_start, full_end = (bound[span_row, row_tile] for bound in spans)
    if lists is not None:
        full_end = _before_partial_windows(full_end, blocks, block[row_tile], window)
        list_idx = block[row_tile] * (int(list_head.max()) + 1) + list_head[head_tile]
        bounds = torch.stack([kv_start, kv_end, full_start, full_end])
        kv_start, kv_end, full_start, full_end = torch.searchsorted(lists.keys, (list_idx << POSITION_BITS) + bounds)
    return Tiles(
        request=blocks.request[block][row_tile],
        q_start=q_start[row_tile],
        q_count=q_count[row_tile],
        head_start=head_start[head_tile],
        head_count=head_count[head_tile],
        kv_head=kv_head[head_tile],
        kv_start=kv_start,
        kv_end=kv_end,
        full_start=full_start,
        full_end=torch.maximum(full_start, full_end),
    )


def head_tiles(geometry: Geometry, heads: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """First query head, head count, KV head and list head of every head tile."""
    group_size = geometry.num_qo_heads // geometry.num_kv_heads
    groups = torch.full((geometry.num_kv_heads,), group_size, device=device)
    kv_head, start, count = cut_ranges(groups, heads)
    head_start = kv_head * group_size + start
    list_head = {"query_head": head_start, "kv_head": kv_head}.get(geometry.sharing or "", torch.zeros_like(kv_head))
    return head_start, count, kv_head, list_head


def mask_spans(
    q_start: Tensor,
    q_count: Tensor,
    head_count: Tensor,  # (numhead_tiles,)
    mask: LoweredMask,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions that some row and head of a tile may see (a hull), and a run that all of them may see.

    (numhead_tiles, num_row_tiles), or (1, num_row_tiles) where heads see alike.
    """
    owner, rank = enumerate_runs(q_count)
    rows = q_start[owner] + rank
    starts, ends = mask.starts[:, rows].long(), mask.ends[:, rows].long()
    is_empty = starts >= ends

    def reduce(values: Tensor, how: str) -> Tensor:
        """Over the rows of every row tile, then over the heads of every head tile."""
        values = reduce_groups(values.T, owner, q_count.numel(), how).T
        if len(values) == 1:
            return values
        return reduce_groups(values, enumerate_runs(head_count)[0], head_count.numel(), how)

    kv_end = reduce(torch.where(is_empty, 0, ends), "amax")
    kv_start = torch.minimum(reduce(torch.where(is_empty, _NO_POSITION, starts), "amin"), kv_end)
    full_start = torch.clamp(reduce(starts, "amax"), kv_start, kv_end)
    full_end = torch.clamp(reduce(ends, "amin"), full_start, kv_end)
    # A jit function may refuse any key, so that no run is known to be allowed.
    return kv_start, kv_end, full_start, full_end if mask.mask_fn is None else full_start


_NO_POSITION = 2**31 - 1  # lengths are below it


def reduce_groups(values: Tensor, group: Tensor, num_groups: int, how: str) -> Tensor:
    """Values (n, m) reduced over the rows of each group, (num_groups, m)."""
    index = group[:, None].expand_as(values)
    return values.new_zeros((num_groups, values.shape[1])).scatter_reduce(0, index, values, how, include_self=False)


def _before_partial_windows(full_end: Tensor, blocks: RowBlocks, block: Tensor, window: int | None) -> Tensor:
    """Where rows of a block have different windows, entries from the first window on may be no members."""
    if not window:
        return full_end
    first_window = torch.clamp(blocks.first_position[block] - window + 1, min=0)
    return torch.where(blocks.q_count[block] > 1, torch.minimum(full_end, first_window), full_end)


def _cut_tasks(tiles: Tiles, shape: TileShape, geometry: Geometry, device: torch.device) -> Launch:
    """Tasks, longest first, with chunks of long tiles apart and a workspace row for each chunk."""
    num_steps = (tiles.kv_end - tiles.kv_start + shape.tile_kv - 1) // shape.tile_kv
    steps_per_task = _steps_per_task(num_steps, shape, geometry)
    num_chunks = torch.clamp((num_steps + steps_per_task - 1) // steps_per_task, min=1)
    tile, rank = enumerate_runs(num_chunks)
    kv_start = tiles.kv_start[tile] + rank * steps_per_task[tile] * shape.tile_kv
    kv_end = torch.minimum(kv_start + steps_per_task[tile] * shape.tile_kv, tiles.kv_end[tile])
    is_chunk = num_chunks[tile] > 1
    partial = torch.where(is_chunk, is_chunk.cumsum(0) - 1, -1)
    columns = {
        **{name: getattr(tiles, name)[tile] for name in TASK_FIELDS[:6]},
        "kv_start": kv_start,
        "kv_end": kv_end,
        "full_start": torch.minimum(torch.maximum(tiles.full_start[tile], kv_start), kv_end),
        "full_end": torch.minimum(torch.maximum(tiles.full_end[tile], kv_start), kv_end),
        "partial": partial,
        "merge": torch.where(is_chunk, (num_chunks > 1).cumsum(0)[tile] - 1, -1),
    }
    tasks = torch.stack([columns[name] for name in TASK_FIELDS], dim=1).int()
    is_row_of_its_own = geometry.sharing is not None and shape.tile_q == 1
    order = order_tasks(
        tiles.request[tile], tiles.kv_head[tile], kv_end - kv_start, geometry.num_processors if is_row_of_its_own else 0
    )
    return make_launch(
        tasks[order].contiguous().to(device, non_blocking=True),
        _merge_table(tiles, num_chunks).to(device, non_blocking=True),
        shape,
        int(is_chunk.sum()),
        geometry.head_dim_vo,
    )


def order_tasks(
    request: Tensor,  # (num_tasks,) ascending, as are the rows of a request
    kv_head: Tensor,
    length: Tensor,  # of its keys or blocks
    num_processors: int,  # 0: longest first
) -> Tensor:
    """Longest first, so that no long one is last; or one KV head of a request after another, its rows in order.

    The latter where a head of a request has many tasks, none of them long against a processor's share: what they read
    of its cache stays in L2 meanwhile. 131,072 rows apart took 8.3 ms so, and 8.8 longest first.
    """
    least = MANY_TASKS * num_processors
    is_many = bool(least) and request.numel() >= least * (int(request.max()) + 1 if request.numel() else 1)
    if is_many and int(length.max()) * least <= int(length.sum()):
        return torch.argsort(request * (int(kv_head.max()) + 1) + kv_head, stable=True)
    return torch.argsort(-length, stable=True)


def make_launch(tasks: Tensor, merges: Tensor, shape: TileShape, num_partials: int, head_dim_vo: int) -> Launch:
    """The tasks with a workspace row for each chunk."""
    state = torch.empty((num_partials, shape.tile_m), dtype=torch.float32, device=tasks.device)
    return Launch(
        shape=shape,
        tasks=tasks,
        merges=merges,
        partial_acc=state.new_empty((num_partials, shape.tile_m, head_dim_vo)),
        partial_max=state,
        partial_sum=torch.empty_like(state),
        tickets=merges.new_zeros(len(merges)) if merges_in_launch(shape) else None,
    )


def _steps_per_task(num_steps: Tensor, shape: TileShape, geometry: Geometry) -> Tensor:
    """Steps of each tile's chunks: as asked, or so that all processors are busy and no task is much longer than others.

    Chunks of a tile are equally long but for the last.
    """
    asked = geometry.num_kv_splits or geometry.choice.num_kv_splits
    if asked is not None:
        num_chunks = torch.full_like(num_steps, asked)
    else:
        longest = max(least_steps(shape), _longest_task(num_steps, shape, geometry))
        num_chunks = torch.clamp((num_steps + longest - 1) // longest, max=MAX_SPLITS)
    num_chunks = torch.clamp(num_chunks, min=1)
    return torch.clamp((num_steps + num_chunks - 1) // num_chunks, min=1)


def _longest_task(num_steps: Tensor, shape: TileShape, geometry: Geometry) -> int:
    """Steps from which on a tile is cut: the fewest that leave all decode tasks running side by side, if any do."""
    total = int(num_steps.sum())
    # A prefill tile's partial state is large; only tiles far above the mean are worth cutting.
    slack = 4 if shape.tile_m > SMALL_TILE_M else 1
    share = -(-total * slack // max(1, geometry.num_processors * PROGRAMS_PER_PROCESSOR))
    at_once = programs_at_once(shape, geometry)
    if slack > 1 or num_steps.numel() > at_once:
        return share
    least, most = max(1, -(-total // at_once)), max(1, int(num_steps.max()) if num_steps.numel() else 1)
    while least < most:
        middle = (least + most) // 2
        if int(torch.clamp((num_steps + middle - 1) // middle, min=1).sum()) <= at_once:
            most = middle
        else:
            least = middle + 1
    return least


def _merge_table(tiles: Tiles, num_chunks: Tensor) -> Tensor:
    is_cut = num_chunks > 1
    first_partial = torch.where(is_cut, num_chunks, 0).cumsum(0) - num_chunks
    columns = [tiles.q_start, tiles.q_count, tiles.head_start, tiles.head_count, first_partial, num_chunks]
    columns.append(tiles.request)
    return torch.stack([column[is_cut] for column in columns], dim=1).int().contiguous()
