"""What a block mask costs to run and to keep, from its lists: row lengths, kinds of blocks, amplification, bytes."""

from dataclasses import dataclass

import numpy as np

from attnconform.reference.block_mask import BlockMask
from attnconform.reference.coordinates import IntArray
from attnconform.reference.cost.tiles import execution_amplification
from attnconform.reference.cost.traffic import block_mask_bytes
from attnconform.reference.errors import RefusedInput


@dataclass(frozen=True, kw_only=True)
class BlockStatistics:
    """Figures of one block mask over all its heads. [BLOCK-STATISTICS]"""

    row_mean: float  # listed blocks per block row
    row_p50: int  # the least length that half of the rows do not exceed
    row_p95: int
    row_max: int
    num_full: int
    num_partial: int
    num_empty: int
    amplification: float  # elements computed per edge, gamma
    metadata_bytes: int  # of the lists and their counts


def block_statistics(
    block_mask: BlockMask, *, num_edges: int, index_bytes: int = 4, transposed: bool = False
) -> BlockStatistics:
    """The figures of a block mask; num_edges is the number of allowed elements it stands for. [BLOCK-STATISTICS]

    A block counts with all its elements, also where it is ragged: that is what a tile computes. Raises RefusedInput for
    more edges than the listed blocks have elements.

    >>> from attnconform.reference.blocks.build import Extent, rule_block_mask
    >>> from attnconform.reference.rules import And, Causal, Window
    >>> mask = rule_block_mask(And((Causal(), Window(left=3))), Extent(
    ...     seqlen_q=8, seqlen_kv=8, q_block_size=2, kv_block_size=2))
    >>> s = block_statistics(mask, num_edges=26)
    >>> s.row_mean, s.row_p50, s.row_p95, s.row_max, s.num_full, s.num_partial, s.num_empty
    (2.25, 2, 3, 3, 3, 6, 7)
    >>> round(s.amplification, 4), s.metadata_bytes
    (1.3846, 68)
    """
    lengths = row_lengths(block_mask)
    num_full, num_partial = len(block_mask.full.indices), len(block_mask.partial.indices)
    executed = (num_full + num_partial) * block_mask.q_block_size * block_mask.kv_block_size
    if num_edges > executed:
        raise RefusedInput("BLOCK-STATISTICS", "num_edges", num_edges, f"the listed blocks have {executed} elements")
    return BlockStatistics(
        row_mean=float(lengths.mean()) if len(lengths) else 0.0,
        row_p50=nearest_rank(lengths, 50),
        row_p95=nearest_rank(lengths, 95),
        row_max=int(lengths.max(initial=0)),
        num_full=num_full,
        num_partial=num_partial,
        num_empty=block_mask.num_rows * block_mask.num_kv_blocks - num_full - num_partial,
        amplification=execution_amplification(executed, num_edges),
        metadata_bytes=_metadata_bytes(block_mask, index_bytes, transposed),
    )


def row_lengths(block_mask: BlockMask) -> IntArray:
    """Listed blocks of every (head, block row), full and partial together."""
    return np.asarray(np.diff(block_mask.full.indptr) + np.diff(block_mask.partial.indptr))


def nearest_rank(values: IntArray, percent: int) -> int:
    """The least value that `percent` of the values do not exceed; 0 where there are none. [BLOCK-STATISTICS]

    >>> nearest_rank(np.array([1, 2, 3, 100]), 50), nearest_rank(np.array([1, 2, 3, 100]), 95)
    (2, 100)
    """
    if not len(values):
        return 0
    return int(np.sort(values)[max(-(-percent * len(values) // 100), 1) - 1])


def _metadata_bytes(block_mask: BlockMask, index_bytes: int, transposed: bool) -> int:
    rows = [block_mask.num_rows]
    if transposed:
        rows.append(block_mask.num_heads * block_mask.num_kv_blocks)
    return sum(
        block_mask_bytes(len(lists.indices), num_rows, index_bytes=index_bytes)
        for num_rows in rows
        for lists in (block_mask.full, block_mask.partial)
    )
