"""Union tiles: neighbouring query rows with block lists of their own share one tile of the union of their blocks.

Every row keeps its own set: a bit per row says whose an entry is, and rows without the bit admit none of its tokens.
A block that several rows list is read once for all of them; the price is products for rows that do not want it. How
many rows share a tile is a choice by what the lists overlap, and 1, no union, where they do not. Blocks here are those
of the lists, or single tokens. [BLOCK-MEMBER, SET-IDENTITY]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.candidates import (
    POSITION_BITS,
    CandidateLists,
    RowBlocks,
    cut_row_blocks,
    listed_keys,
)
from attnconform.kernels.sparse_attention.rules import LoweredMask
from attnconform.kernels.sparse_attention.tasks import head_tiles, heads_per_tile, mask_spans, order_tasks
from attnconform.kernels.sparse_attention.tuning import (
    UNION_ROWS,
    Geometry,
    TileShape,
    choose_union_shape,
    hopper_union_cost,
    hopper_union_shape,
    row_bits_of_groups,
    union_cost,
    union_tile_m,
)

UNION_FIELDS = (
    "request",
    "q_start",  # global row
    "q_count",
    "head_start",  # query head
    "head_count",
    "kv_head",
    "entry_start",
    "entry_end",
    "full_start",  # the mask admits every token of the blocks from this entry
    "full_end",  # up to this one, to all rows
)
_ID_MASK = (1 << POSITION_BITS) - 1


@dataclass(frozen=True, eq=False)
class UnionLists:
    """Blocks that some row of a tile lists, ascending within a tile and head list, and whose they are."""

    block_size: int
    shape: TileShape
    tasks: Tensor  # (num_tasks, len(UNION_FIELDS)) int32, as order_tasks has them
    blocks: Tensor  # (num_entries,) int32
    members: Tensor  # (num_entries,) int32, bit r: row r of the tile lists the block
    prepared: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Requests:
    """What tiles are cut from."""

    qo_indptr: Tensor  # (batch_size + 1,) int64
    q_offset: Tensor  # (batch_size,) int64


def build_union(
    candidates: CandidateLists | None,
    qo_indptr: Tensor,  # (batch_size + 1,) int64
    q_offset: Tensor,  # (batch_size,) int64
    mask: LoweredMask,
    geometry: Geometry,
    has_local: bool,  # window or sinks, which join each row's list apart
    rows_per_union: int | None,  # None: by what the lists overlap
    box: int = 0,  # keys of a TMA box where `hopper_union` can run, else 0
) -> UnionLists | None:
    """Union tiles of checked lists; None where rows have to be, or had better be, apart."""
    if candidates is None or candidates.q_block_size > 1 or has_local or mask.starts.shape[0] > 1:
        return None
    if rows_per_union == 1 or not bool((qo_indptr.diff() > 1).any()):
        return None
    if rows_per_union is None and not box and (geometry.element_size > 2 or not geometry.num_processors):
        return None
    requests = _Requests(qo_indptr, q_offset)
    heads = heads_per_tile(geometry, union_tile_m(geometry))
    lists_per_row = _lists_per_row(candidates, qo_indptr)
    keys = listed_keys(candidates, candidates.indptr.numel() - 1, qo_indptr.device)
    shapes = _shapes(rows_per_union, heads, geometry, box)
    if not shapes:
        return None
    unions = {shape: _unite(keys, requests, lists_per_row, shape.tile_q) for shape in shapes}
    best = min(shapes, key=lambda shape: _cost(unions[shape], shape, geometry))
    is_asked_for = rows_per_union is not None or (box > 0 and geometry.choice.forward == "hopper")
    # rows apart read every key of the lists, each of which a row has once
    if not is_asked_for and union_cost(len(keys), 1, heads, geometry) <= _cost(unions[best], best, geometry):
        return None
    return _assemble(candidates.block_size, requests, lists_per_row, unions[best], best, mask, geometry)


def unite_blocks(
    keys: Tensor,  # (num_listed,) int64, (list << 32) | block of every listed block, ascending, each once
    block_size: int,
    lists_per_row: int,
    qo_indptr: Tensor,  # (batch_size + 1,) int64
    q_offset: Tensor,  # (batch_size,) int64
    mask: LoweredMask,
    geometry: Geometry,
    shape: TileShape,
) -> UnionLists:
    """Union tiles of this shape, of rows that each have lists of their own."""
    requests = _Requests(qo_indptr, q_offset)
    union = _unite(keys, requests, lists_per_row, shape.tile_q)
    return _assemble(block_size, requests, lists_per_row, union, shape, mask, geometry)


def _shapes(rows_per_union: int | None, heads: int, geometry: Geometry, box: int) -> list[TileShape]:
    """Tiles to choose from, all of more than one row: that of `hopper_union` alone where it can run."""
    if box:
        return [hopper_union_shape(heads, box)]
    sizes = [rows_per_union] if rows_per_union else [r for r in UNION_ROWS[1:] if r * heads <= union_tile_m(geometry)]
    return [choose_union_shape(size, heads, geometry) for size in sizes]


def _cost(union: tuple[Tensor, Tensor], shape: TileShape, geometry: Geometry) -> float:
    keys, members = union
    if not shape.box:
        return union_cost(len(keys), shape.tile_q, shape.heads_per_tile, geometry)
    num_group_entries = sum(int(((members & bits) != 0).sum()) for bits in row_bits_of_groups(shape))
    return hopper_union_cost(len(keys), num_group_entries, geometry)


def _lists_per_row(candidates: CandidateLists, qo_indptr: Tensor) -> int:
    """Head lists of a row; counts were checked against it."""
    return (candidates.indptr.numel() - 1) // max(int(qo_indptr[-1]), 1)


def _row_blocks(requests: _Requests, size: int) -> RowBlocks:
    return cut_row_blocks(requests.qo_indptr, requests.q_offset, size)


def _unite(keys: Tensor, requests: _Requests, lists_per_row: int, size: int) -> tuple[Tensor, Tensor]:
    """(tile list << 32) | block of every block that a row of the tile lists, ascending, each once; and whose it is."""
    tiles = _row_blocks(requests, size)
    tile_of_row = torch.arange(tiles.request.numel(), device=keys.device).repeat_interleave(tiles.q_count)
    list_idx, block = keys >> POSITION_BITS, keys & _ID_MASK
    row, head = list_idx // lists_per_row, list_idx % lists_per_row
    tile = tile_of_row[row]
    united, place = torch.unique(((tile * lists_per_row + head) << POSITION_BITS) | block, return_inverse=True)
    # a row lists a block once, so that the sum of its bits is their union
    bits = torch.ones_like(row, dtype=torch.int32) << (row - tiles.q_start[tile]).int()
    return united, torch.zeros(len(united), dtype=torch.int32, device=keys.device).index_add_(0, place, bits)


def _assemble(
    block: int,  # tokens of a block
    requests: _Requests,
    lists_per_row: int,
    union: tuple[Tensor, Tensor],
    shape: TileShape,
    mask: LoweredMask,
    geometry: Geometry,
) -> UnionLists:
    """The tasks of every tile and head tile, over the entries that the mask can allow any of its rows."""
    keys, members = union
    tiles = _row_blocks(requests, shape.tile_q)
    head_start, head_count, kv_head, list_head = head_tiles(geometry, shape.heads_per_tile, keys.device)
    tile = torch.arange(tiles.request.numel(), device=keys.device).repeat_interleave(head_start.numel())
    head = torch.arange(head_start.numel(), device=keys.device).repeat(tiles.request.numel())
    spans = (span[0, tile] for span in mask_spans(tiles.q_start, tiles.q_count, head_count, mask))
    kv_start, kv_end, full_start, full_end = spans
    bounds = [kv_start // block, -(-kv_end // block), -(-full_start // block), full_end // block]
    first = (tile * lists_per_row + list_head[head]) << POSITION_BITS
    entries = torch.searchsorted(keys, first + torch.stack(bounds))
    entries[3] = torch.maximum(entries[2], entries[3])
    rows = [tiles.request[tile], tiles.q_start[tile], tiles.q_count[tile], head_start[head], head_count[head]]
    tasks = torch.stack([*rows, kv_head[head], *entries], dim=1).int()
    order = order_tasks(tiles.request[tile], kv_head[head], entries[1] - entries[0], geometry.num_processors)
    return UnionLists(
        block_size=block,
        shape=shape,
        tasks=tasks[order].contiguous(),
        blocks=(keys & _ID_MASK).int(),
        members=members,
    )
