"""The query-centric work list of a backward: its own tiles and chunks, whatever the forward cut. [PLAN]

A *tile* is a few neighbouring query rows of one request with the heads that share a list and a KV head. Its keys are a
run of list entries, or of positions where no lists are given, cut to what the mask can allow any of its rows. A *task*
is a tile, or one chunk of a tile whose run is long; chunks leave partial sums that are added in chunk order. A backward
step holds about twice what a forward step does and dQ has no split that the forward's states need, so sizes differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.backward_hints import (
    MAX_CHUNKS,
    MIN_STEPS_PER_TASK,
    NUM_TASKS_WANTED,
    SMALL_TILE_M,
    BackwardHints,
    QueryShape,
    choose_query_shape,
)
from attnconform.kernels.sparse_attention.candidates import (
    POSITION_BITS,
    RowBlocks,
    cut_ranges,
    cut_row_blocks,
    enumerate_runs,
)
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.tasks import reduce_groups

# Columns of the two tables, in order; the kernels load them by number.
QUERY_FIELDS = (
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
    "partial",  # row of the workspace, -1 where the task writes dQ itself
)
SUM_FIELDS = ("q_start", "q_count", "head_start", "head_count", "first_partial", "num_partials")
MAX_HEADS_PER_TILE = 64
NO_POSITION = 2**31 - 1  # lengths are below it


@dataclass(frozen=True, eq=False)
class QueryLaunch:
    """Tasks of one shape."""

    shape: QueryShape
    heads_per_tile: int
    tasks: Tensor  # (num_tasks, len(QUERY_FIELDS)) int32, longest first
    sums: Tensor  # (num_cut_tiles, len(SUM_FIELDS)) int32
    num_partials: int

    @property
    def partial_rows(self) -> tuple[int, int]:
        """Chunks and lanes of the partial sums."""
        return self.num_partials, self.shape.tile_m


@dataclass(frozen=True, eq=False)
class QueryTiles:
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


def build_query_launches(plan: Plan, hints: BackwardHints) -> tuple[QueryLaunch, ...]:
    """Blocks of few rows (decode) and of many (prefill) apart, so that neither pays for the other's tile."""
    blocks = cut_row_blocks(plan.qo_indptr, plan.q_offset, plan.q_block_size or max(1, plan.total_q))
    heads = 1 if plan.sharing == "query_head" else min(plan.group_size, MAX_HEADS_PER_TILE)
    is_small = blocks.q_count * heads <= SMALL_TILE_M
    launches = []
    for is_chosen in (is_small, ~is_small):
        chosen = torch.nonzero(is_chosen).flatten()
        if chosen.numel():
            lanes = int(blocks.q_count[chosen].max()) * heads
            shape = hints.query_shape or choose_query_shape(plan, lanes, is_added=hints.mode != "kv_centric")
            tiles = build_query_tiles(plan, blocks, chosen, shape, min(heads, shape.tile_m))
            launches.append(_cut_tasks(tiles, shape, min(heads, shape.tile_m), hints.steps_per_task))
    return tuple(launches)


def build_query_tiles(
    plan: Plan,
    blocks: RowBlocks,
    block: Tensor,  # (num_chosen,) blocks of this shape
    shape: QueryShape,
    heads: int,  # of a tile
) -> QueryTiles:
    """Row tiles of the chosen blocks times head tiles, with the keys of each."""
    owner, start, q_count = cut_ranges(blocks.q_count[block], shape.tile_m // heads)
    block = block[owner]
    q_start = blocks.q_start[block] + start
    head_start, head_count, kv_head = _head_tiles(plan, heads)
    spans = _mask_spans(plan, q_start, q_count, head_start, head_count)
    row_tile = torch.arange(block.numel(), device=block.device).repeat_interleave(head_start.numel())
    head_tile = torch.arange(head_start.numel(), device=block.device).repeat(block.numel())
    # One row of spans serves all head tiles unless the mask tells heads apart.
    span_row = head_tile if plan.has_head_mask else torch.zeros_like(head_tile)
    bounds = torch.stack([bound[span_row, row_tile] for bound in spans])
    if plan.list_indptr is not None:
        bounds[3] = _before_partial_windows(plan, bounds[3], blocks, block[row_tile])
        bounds = _entries_of(plan, bounds, block[row_tile], head_start[head_tile], kv_head[head_tile])
    return QueryTiles(
        request=blocks.request[block][row_tile],
        q_start=q_start[row_tile],
        q_count=q_count[row_tile],
        head_start=head_start[head_tile],
        head_count=head_count[head_tile],
        kv_head=kv_head[head_tile],
        kv_start=bounds[0],
        kv_end=bounds[1],
        full_start=bounds[2],
        full_end=torch.maximum(bounds[2], bounds[3]),
    )


def _head_tiles(plan: Plan, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """First query head, head count and KV head of every head tile; a wide group is cut."""
    groups = torch.full((plan.num_kv_heads,), plan.group_size, device=plan.device)
    kv_head, start, count = cut_ranges(groups, heads)
    return kv_head * plan.group_size + start, count, kv_head


def _mask_spans(
    plan: Plan,
    q_start: Tensor,  # (num_row_tiles,)
    q_count: Tensor,
    head_start: Tensor,  # (num_head_tiles,)
    head_count: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Positions that some row and head of a tile may see (a hull), and a run that all of them may see.

    (num_head_tiles, num_row_tiles), or (1, num_row_tiles) where heads see alike.
    """
    owner, rank = enumerate_runs(q_count)
    rows = q_start[owner] + rank
    head_tile, head_rank = enumerate_runs(head_count)

    def reduce(values: Tensor, how: str) -> Tensor:
        """Over the rows of every row tile, then over the heads of every head tile."""
        by_tile = reduce_groups(values[:, rows].T, owner, q_count.numel(), how).T
        if not plan.has_head_mask:
            return by_tile
        return reduce_groups(by_tile[head_start[head_tile] + head_rank], head_tile, head_count.numel(), how)

    starts, ends = plan.mask_starts.long(), plan.mask_ends.long()
    is_empty = starts >= ends
    kv_end = reduce(torch.where(is_empty, 0, ends), "amax")
    kv_start = torch.minimum(reduce(torch.where(is_empty, NO_POSITION, starts), "amin"), kv_end)
    full_start = torch.clamp(reduce(starts, "amax"), kv_start, kv_end)
    full_end = torch.clamp(reduce(ends, "amin"), full_start, kv_end)
    # A jit function may refuse any key, so that no run is known to be allowed.
    return kv_start, kv_end, full_start, full_end if plan.mask_fn is None else full_start


def _before_partial_windows(plan: Plan, full_end: Tensor, blocks: RowBlocks, block: Tensor) -> Tensor:
    """Where rows of a block have different windows, entries from the first window on may be no members."""
    if not plan.window:
        return full_end
    first_window = torch.clamp(blocks.first_position[block] - plan.window + 1, min=0)
    return torch.where(blocks.q_count[block] > 1, torch.minimum(full_end, first_window), full_end)


def _entries_of(plan: Plan, bounds: Tensor, block: Tensor, head_start: Tensor, kv_head: Tensor) -> Tensor:
    """Entries of each tile's list at which positions reach the bounds, in the shape of bounds."""
    assert plan.list_indptr is not None
    assert plan.list_positions is not None
    head = {"query_head": head_start, "kv_head": kv_head}.get(plan.sharing or "", torch.zeros_like(kv_head))
    owner, _ = enumerate_runs(plan.list_indptr.long().diff())
    keys = (owner << POSITION_BITS) | plan.list_positions.long()
    return torch.searchsorted(keys, ((block * plan.lists_per_block + head) << POSITION_BITS) + bounds)


def _cut_tasks(tiles: QueryTiles, shape: QueryShape, heads: int, steps_per_task: int | None) -> QueryLaunch:
    """Tasks, longest first, with chunks of long tiles apart."""
    num_steps = (tiles.kv_end - tiles.kv_start + shape.tile_kv - 1) // shape.tile_kv
    if steps_per_task is None:
        # Only tiles far above the mean are worth cutting: a part of dQ is as large as dQ.
        steps_per_task = max(MIN_STEPS_PER_TASK, -(-4 * int(num_steps.sum()) // NUM_TASKS_WANTED))
    num_chunks = torch.clamp((num_steps + steps_per_task - 1) // steps_per_task, 1, MAX_CHUNKS)
    length = torch.clamp((num_steps + num_chunks - 1) // num_chunks, min=1) * shape.tile_kv
    tile, rank = enumerate_runs(num_chunks)
    kv_start = torch.minimum(tiles.kv_start[tile] + rank * length[tile], tiles.kv_end[tile])
    kv_end = torch.minimum(kv_start + length[tile], tiles.kv_end[tile])
    is_chunk = num_chunks[tile] > 1
    columns = {
        **{name: getattr(tiles, name)[tile] for name in QUERY_FIELDS[:6]},
        "kv_start": kv_start,
        "kv_end": kv_end,
        "full_start": torch.clamp(tiles.full_start[tile], kv_start, kv_end),
        "full_end": torch.clamp(tiles.full_end[tile], kv_start, kv_end),
        "partial": torch.where(is_chunk, is_chunk.cumsum(0) - 1, -1),
    }
    tasks = torch.stack([columns[name] for name in QUERY_FIELDS], dim=1).int()
    longest_first = torch.argsort(kv_start - kv_end, stable=True)
    sums = _sum_table(tiles, num_chunks)
    return QueryLaunch(shape, heads, tasks[longest_first].contiguous(), sums, int(is_chunk.sum()))


def _sum_table(tiles: QueryTiles, num_chunks: Tensor) -> Tensor:
    """The tiles that were cut, with the rows of their partial sums."""
    is_cut = num_chunks > 1
    first_partial = torch.where(is_cut, num_chunks, 0).cumsum(0) - num_chunks
    columns = [tiles.q_start, tiles.q_count, tiles.head_start, tiles.head_count, first_partial, num_chunks]
    return torch.stack([column[is_cut] for column in columns], dim=1).int().contiguous()
