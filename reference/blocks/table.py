"""Block lists as a padded table with counts, the form in which FlexAttention keeps them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attnconform.reference.block_mask import BlockLists
from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.errors import RefusedInput


@dataclass(frozen=True)
class BlockTable:
    """Block columns per batch entry, head and block row; size 1 in the first two axes broadcasts. [FORMAT-TABLE]"""

    num_blocks: IntArray  # (batch_size or 1, num_heads or 1, num_q_blocks)
    indices: IntArray  # (..., width): entries from num_blocks on mean nothing, whatever they hold


def to_block_table(
    lists: Sequence[BlockLists],  # per batch entry, or one for all; each (num_heads * num_q_blocks) rows
    *,
    num_heads: int,
    width: int,
    filler: int = 0,  # written after each list's end
) -> BlockTable:
    """The table of some block lists; batch entries with fewer block rows get rows without blocks. [FORMAT-TABLE]

    Raises RefusedInput where a list is longer than width. [FORMAT-WIDTH]
    """
    rows = max((len(one.indptr) - 1) // num_heads for one in lists)
    num_blocks = np.zeros((len(lists), num_heads, rows), dtype=np.int64)
    indices = np.full((len(lists), num_heads, rows, width), filler, dtype=np.int64)
    for b, one in enumerate(lists):
        own_rows = (len(one.indptr) - 1) // num_heads
        for row in range(num_heads * own_rows):
            at, blocks = (b, *divmod(row, own_rows)), one.of(row)
            if len(blocks) > width:
                raise RefusedInput("FORMAT-WIDTH", "len(list)", len(blocks), f"width is {width}", at)
            num_blocks[at] = len(blocks)
            indices[at][: len(blocks)] = blocks
    return BlockTable(num_blocks, indices)


def decode_block_table(table: BlockTable, *, batch_size: int, num_heads: int, num_kv_blocks: int) -> BoolArray:
    """(batch_size, num_heads, num_q_blocks, num_kv_blocks), True where a block is listed: this loop defines the format.

    [FORMAT-TABLE] Raises RefusedInput for a count above the width and a block outside the data. [BLOCK-EXTENT]
    """
    listed = np.zeros((batch_size, num_heads, table.num_blocks.shape[2], num_kv_blocks), dtype=bool)
    for b, head, row in np.ndindex(listed.shape[:3]):
        at = (b if table.num_blocks.shape[0] > 1 else 0, head if table.num_blocks.shape[1] > 1 else 0, row)
        count = int(table.num_blocks[at])
        if count > table.indices.shape[3]:
            raise RefusedInput("FORMAT-TABLE", "num_blocks", count, f"width is {table.indices.shape[3]}", at)
        for column in range(count):
            block = int(table.indices[(*at, column)])
            if not 0 <= block < num_kv_blocks:
                raise RefusedInput("BLOCK-EXTENT", "indices", block, f"there are {num_kv_blocks} blocks", (*at, column))
            listed[b, head, row, block] = True
    return listed


def table_to_lists(table: BlockTable) -> list[BlockLists]:
    """Block lists of every batch entry of the table, head-major, as they stand in it. [FORMAT-ROUND-TRIP]"""
    lists = []
    for num_blocks, indices in zip(table.num_blocks, table.indices, strict=True):
        kept = np.arange(table.indices.shape[3]) < num_blocks[..., None]
        indptr = np.concatenate([[0], np.cumsum(num_blocks.ravel())]).astype(np.int64)
        lists.append(BlockLists(indptr, indices[kept].astype(np.int64)))
    return lists
