"""dQ of rows with lists of their own over union tiles: whether Hopper's kernel takes them, and which rows share a tile.

A plan keeps its lists as tokens. Where all of them are whole blocks, as large as a tile of keys or parts of one, whose
they are is found again here, whatever the forward did. The rest is a comparison of what would be multiplied with what
rows apart read; figures are from one H200, of dQ alone over 16 blocks of 64 for each of 32,768 rows and 4 KV heads of
16 heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.backward_hints import BackwardHints
from attnconform.kernels.sparse_attention.candidates import POSITION_BITS, enumerate_runs
from attnconform.kernels.sparse_attention.hopper_choice import LEAST_BOX
from attnconform.kernels.sparse_attention.plan import Plan, count_processors
from attnconform.kernels.sparse_attention.rules import LoweredMask
from attnconform.kernels.sparse_attention.tasks import heads_per_tile
from attnconform.kernels.sparse_attention.tuning import (
    HOPPER_UNION_LANES,
    HOPPER_UNION_ROWS,
    UNION_TILE_KV,
    Geometry,
    TileShape,
    row_bits_of_groups,
)
from attnconform.kernels.sparse_attention.union import UNION_FIELDS, UnionLists, unite_blocks

GROUPS = 2
STAGES = 5  # tiles of keys in shared memory; four were no faster
BLOCK_SIZES = (64, 32, 16)  # of lists, the largest that they are made of
# random lists: 1,689,297 tiles multiplied took 9.6 ms, rows apart 10.3 for 2,066,432 blocks; clustered ones, of which
# 828,110 are multiplied, 5.1 and 10.3
FLOPS_PER_SECOND = 5.4e14
BYTES_PER_SECOND = 6.5e12
BYTES_PER_SECOND_APART = 6.6e12  # out of L2


@dataclass(frozen=True, eq=False)
class HopperUnion:
    """What is compiled into the kernel of dQ over unions, and its lists."""

    lists: UnionLists
    stages: int = STAGES


def choose_union(plan: Plan, hints: BackwardHints) -> HopperUnion | str:
    """The kernel's work, or why it takes none of a plan that other kernels of Hopper can say."""
    reason = why_not_union(plan, hints)
    if reason is not None:
        return reason
    sizes = [size for size in BLOCK_SIZES if gcd(plan.page_size, size) >= LEAST_BOX]
    for size in sizes:
        keys = find_blocks(plan, size)
        if keys is not None:
            lists = unite_rows(plan, keys, size)
            is_better = cost_united(plan, lists) < cost_apart(plan, lists)
            return HopperUnion(lists) if is_better or hints.kernels == "hopper" else "lists overlap too little"
    return f"pages and lists must be whole blocks of {LEAST_BOX} keys or more"


def why_not_union(plan: Plan, hints: BackwardHints) -> str | None:
    """What of a plan the kernel cannot say, beside what no kernel of Hopper can; None where it can say all of it."""
    has_lists = plan.list_indptr is not None and plan.q_block_size == 1
    limits = (
        (not has_lists, "its kernel of unions takes rows with lists of their own"),
        (hints.mode != "kv_centric", "its kernel of unions adds to no dK and dV"),
        (bool(plan.score_codes), "its kernel of unions knows no score rule"),
        (plan.has_head_mask, "its kernel of unions knows no mask of a head's own"),
        (bool(plan.window), "its kernel of unions reads no window beside a list"),
        (not bool((plan.qo_indptr.diff() > 1).any()), "its kernel of unions takes several rows of a request"),
    )
    return next((limit for is_outside, limit in limits if is_outside), None)


def find_blocks(plan: Plan, size: int) -> Tensor | None:
    """(list << 32) | block of every block of `size` positions that a list has, ascending.

    None where some list has a block in part, or in pieces; of a request's last block there are as many as it has.
    """
    assert plan.list_indptr is not None
    assert plan.list_positions is not None
    indptr = plan.list_indptr.long()
    num_entries = int(indptr[-1])
    positions = plan.list_positions[:num_entries]
    first = torch.nonzero(positions % size == 0).flatten()
    owner = torch.searchsorted(indptr, first, right=True) - 1
    start = positions[first].long()
    length = plan.seqlen_kv[plan.row_requests[owner // plan.lists_per_block].long()]
    count = torch.clamp(length - start, max=size)
    # one block ends where the next one begins, each within its list
    ends = torch.cat([first[1:], first.new_tensor([num_entries])]) if first.numel() else first
    is_partition = bool((first + count == ends).all()) and bool((ends <= indptr[owner + 1]).all())
    if not is_partition or num_entries != (int(ends[-1]) - int(first[0]) if first.numel() else 0):
        return None
    ranks = torch.arange(num_entries, dtype=torch.int32, device=positions.device)
    if not torch.equal(positions, torch.repeat_interleave((start - first).int(), count) + ranks):
        return None
    return ((owner << POSITION_BITS) | (start // size)).sort().values


def unite_rows(plan: Plan, keys: Tensor, size: int) -> UnionLists:
    """The union tiles of listed blocks, as many rows of a request to a tile as two groups have lanes for."""
    geometry = Geometry(
        num_qo_heads=plan.num_qo_heads,
        num_kv_heads=plan.num_kv_heads,
        head_dim_qk=plan.head_dim_qk,
        head_dim_vo=plan.head_dim_vo,
        element_size=plan.dtype.itemsize,
        sharing=plan.sharing,
        tile_kv=None,
        num_kv_splits=None,
        num_processors=count_processors(plan.device),
    )
    heads = heads_per_tile(geometry, HOPPER_UNION_LANES)
    shape = TileShape(
        tile_q=min(GROUPS * HOPPER_UNION_LANES // heads, HOPPER_UNION_ROWS),
        heads_per_tile=heads,
        tile_m=GROUPS * HOPPER_UNION_LANES,
        tile_kv=UNION_TILE_KV,
        num_warps=4 * GROUPS,
        num_stages=STAGES,
        box=gcd(plan.page_size, size),
    )
    mask = LoweredMask(plan.mask_starts, plan.mask_ends, plan.mask_fn, plan.mask_data)
    return unite_blocks(keys, size, plan.lists_per_block, plan.qo_indptr, plan.q_offset, mask, geometry, shape)


def cost_united(plan: Plan, lists: UnionLists) -> float:
    """Seconds of the kernel: tiles of keys are read once a task, and multiplied by groups that have a row for them."""
    task, tile, members = _walk_tiles(lists)
    is_first = torch.ones_like(tile, dtype=torch.bool)
    is_first[1:] = (tile[1:] != tile[:-1]) | (task[1:] != task[:-1])
    number = is_first.cumsum(0) - 1
    num_products = sum(
        torch.unique_consecutive(number[(members & mask) != 0]).numel() for mask in row_bits_of_groups(lists.shape)
    )
    dims = plan.head_dim_qk + plan.head_dim_vo
    multiply = num_products * 2 * HOPPER_UNION_LANES * UNION_TILE_KV * (plan.head_dim_qk + dims) / FLOPS_PER_SECOND
    read = int(is_first.sum()) * UNION_TILE_KV * dims * plan.dtype.itemsize / BYTES_PER_SECOND
    # few tasks leave processors without work
    return max(multiply, read) * max(1.0, count_processors(plan.device) / max(1, lists.tasks.shape[0]))


def cost_apart(plan: Plan, lists: UnionLists) -> float:
    """Seconds of rows apart, each of which reads the blocks of its own list."""
    _, _, members = _walk_tiles(lists)
    num_blocks = sum(int(((members >> row) & 1).sum()) for row in range(lists.shape.tile_q))
    dims = plan.head_dim_qk + plan.head_dim_vo
    return num_blocks * lists.block_size * dims * plan.dtype.itemsize / BYTES_PER_SECOND_APART


def _walk_tiles(lists: UnionLists) -> tuple[Tensor, Tensor, Tensor]:
    """Task, tile within the task and members of every entry that a task comes to."""
    start, end = (lists.tasks[:, UNION_FIELDS.index(name)].long() for name in ("entry_start", "entry_end"))
    task, rank = enumerate_runs(end - start)
    return task, rank * lists.block_size // UNION_TILE_KV, lists.members[start[task] + rank]
