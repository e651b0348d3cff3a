"""Block masks from mask rules: by interval ends where a rule has them, by its elements only where it has not."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from attnconform.reference.block_mask import BlockLists, BlockMask
from attnconform.reference.blocks.intervals import inner_intervals, is_interval_rule, outer_intervals
from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.rules import MaskRule

# (head, query positions (m, 1), key positions (n,)) -> (m, n); positions are logical, never rows of a slice
ElementMask = Callable[[int, IntArray, IntArray], BoolArray]


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Where a mask's rows and columns lie, and how they are cut into blocks."""

    seqlen_q: int
    seqlen_kv: int
    q_block_size: int
    kv_block_size: int
    q_offset: int = 0  # logical position of the first row

    @property
    def num_q_blocks(self) -> int:
        return -(-self.seqlen_q // self.q_block_size)

    @property
    def num_kv_blocks(self) -> int:
        return -(-self.seqlen_kv // self.kv_block_size)

    def queries(self, q_block: int) -> IntArray:
        """Logical positions of a block's rows that exist."""
        start = q_block * self.q_block_size
        return self.q_offset + np.arange(start, min(start + self.q_block_size, self.seqlen_q))

    def keys(self, kv_block: int) -> IntArray:
        """Positions of a block's keys that exist. [BLOCK-RAGGED]"""
        start = kv_block * self.kv_block_size
        return np.arange(start, min(start + self.kv_block_size, self.seqlen_kv))


@dataclass(frozen=True)
class Ranges:
    """One run of block columns per block row, both ends included; empty where first > last."""

    first: IntArray
    last: IntArray


def rule_block_mask(
    rule: MaskRule | None,
    extent: Extent,
    *,
    request: int = 0,
    num_heads: int = 1,
    settle: bool = True,
) -> BlockMask:
    """The block mask of a rule, in O(block rows + listed blocks) where the rule is made of intervals. [BLOCK-INTERVAL]

    Another rule is bounded by the intervals it has, and the blocks that stay in doubt are settled by their elements;
    with settle=False they stay partial. [BLOCK-CONSERVATIVE] Raises RefusedInput for sizes below 1.

    >>> extent = Extent(seqlen_q=8, seqlen_kv=8, q_block_size=2, kv_block_size=2)
    >>> from attnconform.reference.rules import And, Causal, Window
    >>> blocks = rule_block_mask(And((Causal(), Window(left=3))), extent)
    >>> len(blocks.full.indices), len(blocks.partial.indices)
    (3, 6)
    """
    check_extent_sizes(extent)
    heads = [_bounded(rule, extent, request, head) for head in range(num_heads)]
    block_mask = assemble(extent, num_heads, stack([f for f, _ in heads]), stack([p for _, p in heads]))
    if is_interval_rule(rule) or not settle:
        return block_mask

    def element(head: int, q_idx: IntArray, kv_idx: IntArray) -> BoolArray:
        return mask_allows(rule, request, q_idx, kv_idx, head)

    return settle_blocks(block_mask, extent, element)


def generic_block_mask(element: ElementMask, extent: Extent, *, num_heads: int = 1) -> BlockMask:
    """The block mask of any rule, every block by its elements, one block in memory at a time. [BLOCK-COMPLETE]"""
    check_extent_sizes(extent)
    rows = num_heads * extent.num_q_blocks
    every = Ranges(np.zeros(rows, dtype=np.int64), np.full(rows, extent.num_kv_blocks - 1))
    none = BlockLists(np.zeros(rows + 1, dtype=np.int64), np.empty(0, dtype=np.int64))
    return settle_blocks(assemble(extent, num_heads, none, expand_ranges(every)), extent, element)


def settle_blocks(block_mask: BlockMask, extent: Extent, element: ElementMask) -> BlockMask:
    """The same mask with every partial block looked at: empty ones dropped, full ones called full. [BLOCK-FULL]"""
    full: list[IntArray] = []
    partial: list[IntArray] = []
    for row in range(block_mask.num_rows):
        head, q_block = divmod(row, block_mask.num_q_blocks)
        q_idx = extent.queries(q_block)[:, None]
        doubted = block_mask.partial.of(row)
        cells = [element(head, q_idx, extent.keys(column)) for column in doubted.tolist()]
        are_full = np.array([bool(cell.all()) for cell in cells], dtype=bool)
        have_edges = np.array([bool(cell.any()) for cell in cells], dtype=bool)
        full.append(np.sort(np.concatenate([block_mask.full.of(row), doubted[are_full]])))
        partial.append(doubted[have_edges & ~are_full])
    return replace(block_mask, full=to_lists(full), partial=to_lists(partial))


def element_mask(rule: MaskRule | None, extent: Extent, *, request: int = 0, num_heads: int = 1) -> BoolArray:
    """The dense mask of a rule, (num_heads, seqlen_q, seqlen_kv), at the rows' logical positions. [BLOCK-OFFSET]"""
    q_idx = extent.q_offset + np.arange(extent.seqlen_q)[:, None]
    heads = [mask_allows(rule, request, q_idx, np.arange(extent.seqlen_kv), head) for head in range(num_heads)]
    return np.stack(heads)


def assemble(extent: Extent, num_heads: int, full: BlockLists, partial: BlockLists) -> BlockMask:
    """A block mask of an extent from its lists."""
    return BlockMask(
        num_heads=num_heads,
        seqlen_q=extent.seqlen_q,
        seqlen_kv=extent.seqlen_kv,
        q_block_size=extent.q_block_size,
        kv_block_size=extent.kv_block_size,
        full=full,
        partial=partial,
    )


def expand_ranges(ranges: Ranges) -> BlockLists:
    """Lists of the columns of every run."""
    lengths = np.maximum(ranges.last - ranges.first + 1, 0)
    indptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return BlockLists(indptr, np.arange(indptr[-1]) + np.repeat(ranges.first - indptr[:-1], lengths))


def to_lists(rows: list[IntArray]) -> BlockLists:
    """CSR lists of one array a row."""
    indptr = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return BlockLists(indptr, np.concatenate([np.empty(0, dtype=np.int64), *rows]))


def stack(parts: list[BlockLists]) -> BlockLists:
    """The lists of several heads, one after the other."""
    return to_lists([part.of(row) for part in parts for row in range(len(part.indptr) - 1)])


def check_extent_sizes(extent: Extent) -> None:
    """Refuses block sizes below 1 and negative lengths. [BLOCK-EXTENT]"""
    for name, least in (("q_block_size", 1), ("kv_block_size", 1), ("seqlen_q", 0), ("seqlen_kv", 0)):
        if getattr(extent, name) < least:
            raise RefusedInput("BLOCK-EXTENT", name, getattr(extent, name), f"must be at least {least}")


def _bounded(rule: MaskRule | None, extent: Extent, request: int, head: int) -> tuple[BlockLists, BlockLists]:
    """Full blocks, and the listed blocks that are not known to be full."""
    listed, full = _listed_ranges(rule, extent, request, head), _full_ranges(rule, extent, request, head)
    is_full = full.first <= full.last
    # what is listed around the full run: a run on its left and a run on its right
    left_last = np.where(is_full, full.first - 1, listed.last)
    right_first = np.where(is_full, full.last + 1, listed.last + 1)
    sides = Ranges(
        np.stack([listed.first, right_first], axis=1).ravel(), np.stack([left_last, listed.last], axis=1).ravel()
    )
    both = expand_ranges(sides)
    return expand_ranges(full), BlockLists(both.indptr[::2], both.indices)


def _listed_ranges(rule: MaskRule | None, extent: Extent, request: int, head: int) -> Ranges:
    """Blocks that meet [lo(a), hi(b)], what some row of the block may see. [BLOCK-COMPLETE]"""
    a, b = _block_ends(extent)
    lo = np.maximum(outer_intervals(rule, request, a, head).lo, 0)
    hi = np.minimum(outer_intervals(rule, request, b, head).hi, extent.seqlen_kv - 1)
    first, last = lo // extent.kv_block_size, hi // extent.kv_block_size
    return Ranges(np.where(lo <= hi, first, 0), np.where(lo <= hi, last, -1))


def _full_ranges(rule: MaskRule | None, extent: Extent, request: int, head: int) -> Ranges:
    """Blocks that lie in [lo(b), hi(a)], what every row of the block sees. [BLOCK-FULL]"""
    a, b = _block_ends(extent)
    lo = np.maximum(inner_intervals(rule, request, b, head).lo, 0)
    hi = np.minimum(inner_intervals(rule, request, a, head).hi, extent.seqlen_kv - 1)
    first = -(-lo // extent.kv_block_size)
    # a ragged last block lies inside when all the keys that it has do
    last = np.where(hi == extent.seqlen_kv - 1, extent.num_kv_blocks, (hi + 1) // extent.kv_block_size) - 1
    return Ranges(np.where(lo <= hi, first, 0), np.where(lo <= hi, last, -1))


def _block_ends(extent: Extent) -> tuple[IntArray, IntArray]:
    """Logical positions of the first and the last row of every block of rows."""
    starts = np.arange(extent.num_q_blocks) * extent.q_block_size
    ends = np.minimum(starts + extent.q_block_size, extent.seqlen_q) - 1
    return extent.q_offset + starts, extent.q_offset + ends
