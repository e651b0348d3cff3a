"""One set of block lists for many heads or many requests, and when that keeps the meaning."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from attnconform.reference.block_mask import BlockLists, BlockMask, check_extent, decode_block_mask
from attnconform.reference.blocks.algebra import check_same_grid, lists_from_pairs, pairs_of
from attnconform.reference.coordinates import BoolArray
from attnconform.reference.errors import RefusedInput


def repeat_heads(block_mask: BlockMask, num_heads: int) -> BlockMask:
    """What lists of one head mean for num_heads heads: the same lists for each. [BLOCK-BROADCAST-HEADS]

    Lists of num_heads heads are returned as they are. Raises RefusedInput for any other number.
    """
    if block_mask.num_heads == num_heads:
        return block_mask
    if block_mask.num_heads != 1:
        limit = f"lists of 1 or {num_heads} heads serve {num_heads} heads"
        raise RefusedInput("BLOCK-BROADCAST-HEADS", "num_heads", block_mask.num_heads, limit)
    full, partial = (_repeated(lists, num_heads) for lists in (block_mask.full, block_mask.partial))
    return replace(block_mask, num_heads=num_heads, full=full, partial=partial)


def serves_heads(block_mask: BlockMask, element_mask: BoolArray) -> bool:
    """Whether lists of one head decode to every head's own mask, (num_heads, seqlen_q, seqlen_kv).

    [BLOCK-BROADCAST-HEADS]
    """
    spread = repeat_heads(block_mask, element_mask.shape[0])
    return bool(np.array_equal(decode_block_mask(spread, element_mask), element_mask))


def serves_requests(block_mask: BlockMask, element_masks: Sequence[BoolArray]) -> bool:
    """Whether one block mask decodes to every request's own mask, each (num_heads, seqlen_q, seqlen_kv).

    [BLOCK-BROADCAST-BATCH]
    """
    for element_mask in element_masks:
        if element_mask.shape[1:] != block_mask.shape[1:] or not serves_heads(block_mask, element_mask):
            return False
    return True


def joint_block_mask(block_masks: Sequence[BlockMask]) -> BlockMask:
    """Lists that serve several requests of equal lengths, each with its own element mask. [BLOCK-BROADCAST-BATCH]

    A block is listed where any request lists it, and full only where all of them call it full.
    Raises RefusedInput without requests, and where lengths, heads or block sizes differ.
    """
    if not block_masks:
        raise RefusedInput("BLOCK-BROADCAST-BATCH", "len(block_masks)", 0, "must be at least 1")
    first = block_masks[0]
    for other in block_masks[1:]:
        check_same_grid(first, other)
        check_extent(other, first.shape)
    full = reduce(np.intersect1d, [pairs_of(m.full, m.num_kv_blocks) for m in block_masks])
    listed = [pairs_of(lists, m.num_kv_blocks) for m in block_masks for lists in (m.full, m.partial)]
    partial = np.setdiff1d(reduce(np.union1d, listed), full)
    return replace(first, full=lists_from_pairs(full, first), partial=lists_from_pairs(partial, first))


def _repeated(lists: BlockLists, times: int) -> BlockLists:
    shifts = np.arange(times)[:, None] * len(lists.indices)
    starts = (lists.indptr[:-1] + shifts).ravel()
    indptr = np.append(starts, times * len(lists.indices)).astype(np.int64)
    return BlockLists(indptr, np.tile(lists.indices, times))
