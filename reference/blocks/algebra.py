"""Block masks of intersections and unions of masks, from their lists alone."""

from dataclasses import replace

import numpy as np

from attnconform.reference.block_mask import BlockLists, BlockMask
from attnconform.reference.coordinates import IntArray
from attnconform.reference.errors import RefusedInput


def intersect_block_masks(a: BlockMask, b: BlockMask) -> BlockMask:
    """The block mask of the masks' intersection: listed where both list it, full where both are full.

    [BLOCK-INTERSECT, BLOCK-CONSERVATIVE]

    A partial block may turn out empty. Raises RefusedInput where lengths, heads or block sizes differ.
    """
    check_same_grid(a, b)
    full = np.intersect1d(pairs_of(a.full, a.num_kv_blocks), pairs_of(b.full, b.num_kv_blocks))
    listed = np.intersect1d(listed_pairs(a), listed_pairs(b))
    return _with_pairs(a, full, np.setdiff1d(listed, full))


def unite_block_masks(a: BlockMask, b: BlockMask) -> BlockMask:
    """The block mask of the masks' union: listed where either lists it, full where either is full.

    [BLOCK-UNITE, BLOCK-CONSERVATIVE]

    Two partial blocks may together be full, and stay partial. Raises RefusedInput as intersect_block_masks does.
    """
    check_same_grid(a, b)
    full = np.union1d(pairs_of(a.full, a.num_kv_blocks), pairs_of(b.full, b.num_kv_blocks))
    listed = np.union1d(listed_pairs(a), listed_pairs(b))
    return _with_pairs(a, full, np.setdiff1d(listed, full))


def pairs_of(lists: BlockLists, num_kv_blocks: int) -> IntArray:
    """Every (row, column) that is listed, as row * num_kv_blocks + column."""
    rows = np.repeat(np.arange(len(lists.indptr) - 1), np.diff(lists.indptr))
    return rows * num_kv_blocks + lists.indices


def listed_pairs(block_mask: BlockMask) -> IntArray:
    """Pairs of the full and the partial blocks together, ascending."""
    both = [pairs_of(lists, block_mask.num_kv_blocks) for lists in (block_mask.full, block_mask.partial)]
    return np.sort(np.concatenate(both))


def lists_from_pairs(pairs: IntArray, block_mask: BlockMask) -> BlockLists:
    """Lists of ascending pairs, on the grid of a block mask."""
    columns = max(block_mask.num_kv_blocks, 1)
    counts = np.bincount(pairs // columns, minlength=block_mask.num_rows)
    return BlockLists(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), pairs % columns)


def check_same_grid(a: BlockMask, b: BlockMask) -> None:
    """Refuses block masks of other lengths, heads or block sizes. [BLOCK-EXTENT]"""
    for name in ("num_heads", "seqlen_q", "seqlen_kv", "q_block_size", "kv_block_size"):
        if getattr(a, name) != getattr(b, name):
            raise RefusedInput("BLOCK-EXTENT", name, getattr(b, name), f"the other block mask has {getattr(a, name)}")


def _with_pairs(block_mask: BlockMask, full: IntArray, partial: IntArray) -> BlockMask:
    return replace(block_mask, full=lists_from_pairs(full, block_mask), partial=lists_from_pairs(partial, block_mask))
