"""Block masks of one request: which blocks of a mask hold an edge, and which of those hold every edge.

A block is *empty* (listed nowhere), *partial* (its elements need the mask) or *full* (they do not).
"""

from dataclasses import dataclass

import numpy as np

from attnconform.reference.blocks.transpose import transpose_csr
from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.errors import RefusedInput


@dataclass(frozen=True)
class BlockLists:
    """Block columns of every (head, block row), as CSR; the end of a row is exclusive."""

    indptr: IntArray  # (num_heads * num_q_blocks + 1,)
    indices: IntArray  # (total,) ascending within a row

    def of(self, row: int) -> IntArray:
        return self.indices[self.indptr[row] : self.indptr[row + 1]]


@dataclass(frozen=True, kw_only=True)
class BlockMask:
    """Full and partial blocks of a mask (num_heads, seqlen_q, seqlen_kv)."""

    num_heads: int
    seqlen_q: int
    seqlen_kv: int
    q_block_size: int
    kv_block_size: int
    full: BlockLists
    partial: BlockLists

    @property
    def num_q_blocks(self) -> int:
        return -(-self.seqlen_q // self.q_block_size)

    @property
    def num_kv_blocks(self) -> int:
        return -(-self.seqlen_kv // self.kv_block_size)

    @property
    def num_rows(self) -> int:
        """Rows of the lists: one per head and block of queries."""
        return self.num_heads * self.num_q_blocks

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the mask that it stands for."""
        return self.num_heads, self.seqlen_q, self.seqlen_kv


def block_view(mask: BoolArray, q_block_size: int, kv_block_size: int) -> BoolArray:
    """A mask (heads, q, kv) as blocks (heads, q blocks, kv blocks, q_block_size, kv_block_size); padding is False."""
    heads, seqlen_q, seqlen_kv = mask.shape
    rows, columns = -(-seqlen_q // q_block_size), -(-seqlen_kv // kv_block_size)
    padded = np.zeros((heads, rows * q_block_size, columns * kv_block_size), dtype=bool)
    padded[:, :seqlen_q, :seqlen_kv] = mask
    return padded.reshape(heads, rows, q_block_size, columns, kv_block_size).swapaxes(2, 3)


def build_block_mask(mask: BoolArray, *, q_block_size: int, kv_block_size: int) -> BlockMask:
    """The block mask of a dense one. [BLOCK-COMPLETE, BLOCK-EXCLUSIVE, BLOCK-FULL]

    A block is full only when each of its elements inside the data is allowed; a ragged last block counts the
    elements that exist.
    """
    heads, seqlen_q, seqlen_kv = mask.shape
    blocks = block_view(mask, q_block_size, kv_block_size)
    exists = block_view(np.ones_like(mask), q_block_size, kv_block_size)
    some = np.asarray(blocks.any(axis=(-2, -1)))
    full = np.asarray((blocks | ~exists).all(axis=(-2, -1)))
    return BlockMask(
        num_heads=heads,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        q_block_size=q_block_size,
        kv_block_size=kv_block_size,
        full=list_blocks(full & some),
        partial=list_blocks(some & ~full),
    )


def list_blocks(chosen: BoolArray) -> BlockLists:
    """CSR lists of the chosen blocks of (heads, block rows, block columns)."""
    # the row count is spelled out: reshape(-1) cannot tell it where there are no columns
    flat = chosen.reshape(int(np.prod(chosen.shape[:-1])), chosen.shape[-1])
    indptr = np.concatenate([[0], np.cumsum(flat.sum(axis=1))]).astype(np.int64)
    return BlockLists(indptr, np.nonzero(flat)[1].astype(np.int64))


def decode_block_mask(block_mask: BlockMask, element_mask: BoolArray) -> BoolArray:
    """The dense mask a block mask stands for: this loop defines the format. [BLOCK-DECODE]

    element_mask (num_heads, seqlen_q, seqlen_kv) is consulted in partial blocks alone. Raises RefusedInput where it has
    another shape. [BLOCK-EXTENT]
    """
    check_extent(block_mask, element_mask.shape)
    dense = np.zeros_like(element_mask)
    q_size, kv_size = block_mask.q_block_size, block_mask.kv_block_size
    for row in range(block_mask.num_heads * block_mask.num_q_blocks):
        head, q_block = divmod(row, block_mask.num_q_blocks)
        queries = slice(q_block * q_size, (q_block + 1) * q_size)
        for column in block_mask.full.of(row):
            dense[head, queries, column * kv_size : (column + 1) * kv_size] = True
        for column in block_mask.partial.of(row):
            keys = slice(column * kv_size, (column + 1) * kv_size)
            dense[head, queries, keys] = element_mask[head, queries, keys]
    return dense


def check_extent(block_mask: BlockMask, shape: tuple[int, ...]) -> None:
    """Refuses a block mask that was made for other data than (num_heads, seqlen_q, seqlen_kv). [BLOCK-EXTENT]"""
    for name, got, want in zip(("num_heads", "seqlen_q", "seqlen_kv"), block_mask.shape, shape, strict=True):
        if got != want:
            raise RefusedInput("BLOCK-EXTENT", name, got, f"the data has {want}")


def check_block_mask(block_mask: BlockMask) -> None:
    """Refuses lists that do not fit their lengths, name a block twice or name one outside the data.

    [BLOCK-EXTENT, BLOCK-EXCLUSIVE]
    """
    for name in ("q_block_size", "kv_block_size"):
        if getattr(block_mask, name) < 1:
            raise RefusedInput("BLOCK-EXTENT", name, getattr(block_mask, name), "must be at least 1")
    for name, lists in (("full", block_mask.full), ("partial", block_mask.partial)):
        if len(lists.indptr) != block_mask.num_rows + 1:
            limit = (
                f"{block_mask.num_heads} heads of {block_mask.num_q_blocks} block rows need {block_mask.num_rows + 1}"
            )
            raise RefusedInput("BLOCK-EXTENT", f"len({name}.indptr)", len(lists.indptr), limit)
        outside = np.flatnonzero((lists.indices < 0) | (lists.indices >= block_mask.num_kv_blocks))
        if outside.size:
            at, limit = int(outside[0]), f"there are {block_mask.num_kv_blocks} block columns"
            raise RefusedInput("BLOCK-EXTENT", f"{name}.indices", int(lists.indices[at]), limit, (at,))
    for row in range(block_mask.num_rows):
        listed, times = np.unique(
            np.concatenate([block_mask.full.of(row), block_mask.partial.of(row)]), return_counts=True
        )
        if (times > 1).any():
            raise RefusedInput("BLOCK-EXCLUSIVE", "block", int(listed[times > 1][0]), "it is listed twice", (row,))


def transpose_lists(lists: BlockLists, *, num_heads: int, num_rows: int, num_columns: int) -> BlockLists:
    """For every (head, block column) the block rows that list it: the same pairs, exactly. [BLOCK-TRANSPOSE]"""
    heads = np.repeat(np.arange(num_heads * num_rows) // max(num_rows, 1), np.diff(lists.indptr))
    # a column of each head is a column of its own
    indptr, rows = transpose_csr(lists.indptr, lists.indices + heads * num_columns, num_heads * num_columns)
    return BlockLists(indptr, rows % max(num_rows, 1))


def transpose_block_mask(block_mask: BlockMask) -> BlockMask:
    """The block mask of the transposed mask, as a backward pass needs it. [BLOCK-TRANSPOSE]"""
    shape = {"num_rows": block_mask.num_q_blocks, "num_columns": block_mask.num_kv_blocks}
    full, partial = (
        transpose_lists(lists, num_heads=block_mask.num_heads, **shape)
        for lists in (block_mask.full, block_mask.partial)
    )
    return BlockMask(
        num_heads=block_mask.num_heads,
        seqlen_q=block_mask.seqlen_kv,
        seqlen_kv=block_mask.seqlen_q,
        q_block_size=block_mask.kv_block_size,
        kv_block_size=block_mask.q_block_size,
        full=full,
        partial=partial,
    )
