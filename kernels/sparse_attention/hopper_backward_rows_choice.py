"""Lists per token on Hopper's kernel of rows: whether it takes them, and its order of a tile's pairs.

Its steps are the heads of several rows, so that a reader is one row. The last step of an item may be short of readers
and masks those that are missing: a tile's masked pairs come last, where the mask is formed anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.backward_hints import BackwardHints
from attnconform.kernels.sparse_attention.backward_transpose import TransposedPlan
from attnconform.kernels.sparse_attention.plan import Plan

ROW_LANES = 64  # rows times heads of a step
ROW_SLOTS = 64
ROW_HEADS = (8, 16, 32, 64)  # a row's heads are one box, of a swizzle's height at least
LEAST_BOX = 8  # slots: of a swizzle's height
FEWEST_STEPS = 4  # of an item, on average, so that K and V are worth their way to shared memory


@dataclass(frozen=True, eq=False)
class HopperRows:
    """What is compiled into the kernel of rows, and a transposed plan's pairs in its order."""

    box: int  # slots of a TMA box
    pairs: Tensor  # (num_pairs, len(PAIR_FIELDS)) int32, a tile's full ones first
    item_full_end: Tensor  # (num_items,) int64, full pairs up to here
    stages: int = 4  # steps in shared memory: products hold two


def choose_rows(plan: Plan, hints: BackwardHints, keys: TransposedPlan | None) -> HopperRows | str:
    """The kernel's work, or why it takes none of a plan that other kernels of Hopper can say."""
    reason = why_not_rows(plan, hints, keys)
    if reason is not None or keys is None:
        return reason or "no page is gathered"
    return HopperRows(gcd(plan.page_size, ROW_SLOTS), *order_pairs(keys))


def why_not_rows(plan: Plan, hints: BackwardHints, keys: TransposedPlan | None) -> str | None:
    """What of the pairs the kernel of rows cannot take, or had better not; None where it takes all of them."""
    if keys is None or not keys.pairs.numel():
        return "no page is gathered"
    pair = keys.pair_shape
    if keys.shape.tile_kv != ROW_SLOTS or pair.rows_per_pair != pair.heads:
        return f"its kernel of rows takes {ROW_SLOTS} slots, and a list for every row"
    num_lanes, num_items = keys.pairs.shape[0] * pair.heads, keys.items.item_tile.numel()
    limits = (
        (pair.heads not in ROW_HEADS, f"its kernel of rows takes groups of {ROW_HEADS} heads"),
        (bool(plan.score_codes), "its kernel of rows knows no score rule"),
        (plan.has_head_mask, "its kernel of rows knows no mask of a head's own"),
        (plan.page_size % LEAST_BOX != 0, f"pages must be whole boxes of {LEAST_BOX} slots or more"),
        (
            hints.kernels is None and num_lanes < FEWEST_STEPS * ROW_LANES * num_items,
            "too few rows list a block for its kernel of rows",
        ),
    )
    return next((limit for is_outside, limit in limits if is_outside), None)


def order_pairs(keys: TransposedPlan) -> tuple[Tensor, Tensor]:
    """Every tile's pairs in reverse, so that its full ones come first, and where those of every item end.

    Tiles and items stay where they are.
    """
    items, tile_indptr = keys.items, keys.tiles.tile_indptr
    begin, end = tile_indptr[:-1], tile_indptr[1:]
    num_masked = torch.zeros_like(begin).index_add_(0, items.item_tile, items.item_full_begin - items.item_begin)
    tile = torch.repeat_interleave(tile_indptr.diff())
    pair = torch.arange(tile.numel(), device=begin.device)
    pairs = keys.pairs[begin[tile] + end[tile] - 1 - pair]
    return pairs, torch.clamp((end - num_masked)[items.item_tile], items.item_begin, items.item_end)
