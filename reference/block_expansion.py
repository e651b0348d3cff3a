"""From token candidates to blocks: the blocks U that a kernel loads, and which of their tokens are candidates S."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attnconform.reference.candidates import HOLE
from attnconform.reference.coordinates import IntArray, Positions
from attnconform.reference.errors import RefusedInput
from attnconform.reference.formats import check_csr

WORD_BITS = 64
Bitmaps = npt.NDArray[np.uint64]


@dataclass(frozen=True, kw_only=True)
class BlockMembers:
    """Blocks of every block of query rows, with a bitmap per row of the tokens that the row lists. [FORMAT-MEMBERS]

    Bit `o % 64` of word `o // 64` stands for token `block * block_size + o`.
    """

    block_size: int  # tokens
    q_block_size: int  # query rows that share a list of blocks
    num_rows: int
    indptr: IntArray  # (num_q_blocks + 1,)
    blocks: IntArray  # (total,) ascending within a block of rows
    bitmaps: Bitmaps  # (total, q_block_size, ceil(block_size / 64))

    def of(self, q_block: int) -> IntArray:
        """Blocks that a block of rows loads."""
        return self.blocks[self.indptr[q_block] : self.indptr[q_block + 1]]


def expand_to_blocks(
    indptr: IntArray,  # (num_rows + 1,) lists of one request and head
    positions: IntArray,  # (total,) token positions, holes and duplicates anywhere
    *,
    block_size: int,
    q_block_size: int = 1,
) -> BlockMembers:
    """The least blocks around every row's tokens, each once, and the tokens' bitmaps. [FORMAT-COVER, FORMAT-MEMBERS]

    Raises RefusedInput for a negative position that is no hole and for sizes below 1.

    >>> members = expand_to_blocks(np.array([0, 6]), np.array([1, 2, 63, 64, 65, 127]), block_size=64)
    >>> members.blocks, [[hex(word) for word in block.ravel()] for block in members.bitmaps]
    (array([0, 1]), [['0x8000000000000006'], ['0x8000000000000003']])
    """
    check_csr(indptr, positions)
    _check_expansion(positions, block_size, q_block_size)
    num_rows = len(indptr) - 1
    blocks, bitmaps = [], []
    for first in range(0, num_rows, q_block_size):
        rows = range(first, min(first + q_block_size, num_rows))
        listed = [_tokens(positions[indptr[row] : indptr[row + 1]]) for row in rows]
        loaded = np.unique(np.concatenate(listed) // block_size)
        blocks.append(loaded)
        bitmaps.append(_bitmaps(loaded, listed, block_size, q_block_size))
    words = -(-block_size // WORD_BITS)
    return BlockMembers(
        block_size=block_size,
        q_block_size=q_block_size,
        num_rows=num_rows,
        indptr=np.cumsum([0, *map(len, blocks)], dtype=np.int64),
        blocks=np.concatenate([np.empty(0, dtype=np.int64), *blocks]),
        bitmaps=np.concatenate([np.empty((0, q_block_size, words), dtype=np.uint64), *bitmaps]),
    )


def decode_members(members: BlockMembers) -> list[list[int]]:
    """Tokens that each row lists, ascending: this loop defines the format. [FORMAT-MEMBERS]"""
    lists: list[list[int]] = [[] for _ in range(members.num_rows)]
    for row in range(members.num_rows):
        q_block, lane = divmod(row, members.q_block_size)
        for at in range(int(members.indptr[q_block]), int(members.indptr[q_block + 1])):
            for offset in range(members.block_size):
                word = int(members.bitmaps[at, lane, offset // WORD_BITS])
                if word >> offset % WORD_BITS & 1:
                    lists[row].append(int(members.blocks[at]) * members.block_size + offset)
    return lists


def loaded_positions(members: BlockMembers, q_block: int, *, seqlen_kv: int) -> Positions:
    """U: every committed token of the blocks that a block of rows loads. [BLOCK-MEMBER]"""
    tokens = (members.of(q_block)[:, None] * members.block_size + np.arange(members.block_size)).ravel()
    return Positions(tokens[tokens < seqlen_kv])


def _tokens(entries: IntArray) -> IntArray:
    return np.unique(entries[entries != HOLE])


def _bitmaps(blocks: IntArray, listed: list[IntArray], block_size: int, q_block_size: int) -> Bitmaps:
    words = -(-block_size // WORD_BITS)
    bits = np.zeros((len(blocks), q_block_size, words * WORD_BITS), dtype=bool)
    for lane, tokens in enumerate(listed):
        bits[np.searchsorted(blocks, tokens // block_size), lane, tokens % block_size] = True
    return np.packbits(bits, axis=-1, bitorder="little").view("<u8").astype(np.uint64)


def _check_expansion(positions: IntArray, block_size: int, q_block_size: int) -> None:
    for name, size in (("block_size", block_size), ("q_block_size", q_block_size)):
        if size < 1:
            raise RefusedInput("FORMAT-COVER", name, size, "must be at least 1")
    negative = np.flatnonzero((positions < 0) & (positions != HOLE))
    if negative.size:
        at = int(negative[0])
        raise RefusedInput("SET-RANGE", "positions", int(positions[at]), f"only a hole, {HOLE}, is negative", (at,))
