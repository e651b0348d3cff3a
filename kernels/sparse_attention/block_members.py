"""From token lists to blocks: what a kernel of blocks loads, and a bitmap per row of the tokens that are the row's.

A program takes one block of query rows. It marks the blocks of all tokens in a bitmap, reads them back in ascending
order with the marks before every word counted, and then sets each token's bit at the place of its block: one launch, no
sort, no synchronization. [FORMAT-COVER, FORMAT-MEMBERS, BLOCK-MEMBER]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.index import NO_ERROR, clear_bitmap, count_bits, read_marks, record
from attnconform.kernels.sparse_attention.tuning import INDEX_STEP, TILE_WORDS

WORD_BITS = 64


@dataclass(frozen=True, eq=False)
class BlockMembers:
    """Blocks of every block of query rows, ascending, with a bitmap per row.

    Bit `o % 64` of word `o // 64` stands for token `block * block_size + o`. Entries past the count mean nothing.
    """

    counts: Tensor  # (num_q_blocks,) int32
    blocks: Tensor  # (num_q_blocks, capacity) int32
    bitmaps: Tensor  # (num_q_blocks, capacity, q_block_size, ceil(block_size / 64)) int64, of those bits
    errors: Tensor  # (1,) int64: the first entry outside [-1, max_seqlen_kv), or NO_ERROR

    def raise_if_refused(self) -> None:
        """Raises PlanError for an entry that no token has; synchronizes. [SET-RANGE]"""
        if int(self.errors) != NO_ERROR:
            raise PlanError(
                "SET-RANGE", "positions", "refused", "it is neither a hole nor a token", (int(self.errors),)
            )


def expand_to_blocks(
    indptr: Tensor,  # (num_rows + 1,) lists of one request and head
    positions: Tensor,  # (total,) int32 tokens, holes and duplicates anywhere
    *,
    block_size: int,
    q_block_size: int,
    max_seqlen_kv: int,
    capacity: int,  # blocks that a block of rows can list
) -> BlockMembers:
    """The least blocks around every row's tokens, each once, and the tokens' bitmaps."""
    for name, size in (("block_size", block_size), ("q_block_size", q_block_size), ("capacity", capacity)):
        if size < 1:
            raise PlanError("FORMAT-COVER", name, size, "must be at least 1")
    device, num_rows = positions.device, indptr.numel() - 1
    num_q_blocks = -(-num_rows // q_block_size)
    num_words = -(-max(-(-max_seqlen_kv // block_size), 1) // 32)
    words = -(-block_size // WORD_BITS)
    counts, marks, before = (
        torch.zeros(shape, dtype=torch.int32, device=device)
        for shape in (num_q_blocks, (num_q_blocks, num_words), (num_q_blocks, num_words))
    )
    blocks = torch.empty((num_q_blocks, capacity), dtype=torch.int32, device=device)
    bitmaps = torch.zeros((num_q_blocks, capacity, q_block_size, words), dtype=torch.int64, device=device)
    errors = torch.full((1,), NO_ERROR, dtype=torch.int64, device=device)
    if num_q_blocks:
        members_kernel[(num_q_blocks,)](
            indptr, positions, counts, blocks, bitmaps.view(torch.int32), errors, marks, before,
            num_rows, max_seqlen_kv, num_words, capacity,
            BLOCK_SIZE=block_size, Q_BLOCK=q_block_size, WORDS=2 * words, STEP=INDEX_STEP, TILE_WORDS=TILE_WORDS,
        )  # fmt: skip
    return BlockMembers(counts, blocks, bitmaps, errors)


@triton.jit(do_not_specialize=["num_rows", "max_seqlen_kv", "num_words", "capacity"])
def members_kernel(
    indptr_ptr, positions_ptr, counts_ptr, blocks_ptr, bitmaps_ptr, error_ptr, marks_ptr, before_ptr,
    num_rows, max_seqlen_kv, num_words, capacity,
    BLOCK_SIZE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    WORDS: tl.constexpr,  # of 32 bits, of a block's bitmap
    STEP: tl.constexpr,
    TILE_WORDS: tl.constexpr,
):  # fmt: skip
    """Blocks and bitmaps of one block of query rows."""
    q_block = tl.program_id(0).to(tl.int64)
    first_row = q_block * Q_BLOCK
    past_row = tl.minimum(first_row + Q_BLOCK, num_rows)
    start = tl.load(indptr_ptr + first_row)
    end = tl.load(indptr_ptr + past_row)
    marks_ptr += q_block * num_words
    before_ptr += q_block * num_words
    clear_bitmap(marks_ptr, num_words, STEP)
    tl.debug_barrier()
    bad = tl.full([STEP], 2**31 - 1, tl.int32)
    for first in range(start, end, STEP):
        entry = first + tl.arange(0, STEP)
        token = tl.load(positions_ptr + entry, mask=entry < end, other=-1)
        is_bad = (entry < end) & ((token < -1) | (token >= max_seqlen_kv))
        bad = tl.minimum(bad, tl.where(is_bad, entry.to(tl.int32), 2**31 - 1))
        is_token = (token >= 0) & ~is_bad
        block = tl.where(is_token, token, 0) // BLOCK_SIZE
        bit = tl.full([STEP], 1, tl.int32) << (block & 31).to(tl.int32)
        tl.atomic_or(marks_ptr + (block >> 5), bit, mask=is_token, sem="relaxed")
    record(error_ptr, tl.min(bad, axis=0), tl.zeros([], tl.int64))
    tl.debug_barrier()
    num_blocks = read_marks(marks_ptr, blocks_ptr + q_block * capacity, num_words, capacity, TILE_WORDS)
    count_before(marks_ptr, before_ptr, num_words, TILE_WORDS)
    tl.debug_barrier()
    tl.store(counts_ptr + q_block, num_blocks)
    for row in range(first_row, past_row):
        bitmap_ptr = bitmaps_ptr + (q_block * capacity * Q_BLOCK + row - first_row) * WORDS
        set_members(
            positions_ptr, tl.load(indptr_ptr + row), tl.load(indptr_ptr + row + 1), marks_ptr, before_ptr, bitmap_ptr,
            max_seqlen_kv, capacity, BLOCK_SIZE, Q_BLOCK * WORDS, STEP,
        )  # fmt: skip


@triton.jit
def count_before(marks_ptr, before_ptr, num_words, TILE_WORDS: tl.constexpr):
    """Marks in the words before every word."""
    found = tl.zeros([1], tl.int32)
    for start in range(0, num_words, TILE_WORDS):
        word = start + tl.arange(0, TILE_WORDS)
        bits = tl.load(marks_ptr + word, mask=word < num_words, other=0, cache_modifier=".cg")
        count = count_bits(bits.to(tl.uint32, bitcast=True))
        tl.store(before_ptr + word, found + tl.cumsum(count, axis=0) - count, mask=word < num_words)
        found += tl.sum(count, axis=0)


@triton.jit
def set_members(
    positions_ptr, start, end, marks_ptr, before_ptr, bitmap_ptr, max_seqlen_kv, capacity,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,  # from one block's bitmaps to the next one's
    STEP: tl.constexpr,
):  # fmt: skip
    """Sets the bit of every token of one row, at the place of its block."""
    for first in range(start, end, STEP):
        entry = first + tl.arange(0, STEP)
        token = tl.load(positions_ptr + entry, mask=entry < end, other=-1)
        is_token = (token >= 0) & (token < max_seqlen_kv)
        token = tl.where(is_token, token, 0)
        block = token // BLOCK_SIZE
        marks = tl.load(marks_ptr + (block >> 5), mask=is_token, other=0, cache_modifier=".cg")
        below = marks.to(tl.uint32, bitcast=True) & ((tl.full([STEP], 1, tl.uint32) << (block & 31).to(tl.uint32)) - 1)
        place = tl.load(before_ptr + (block >> 5), mask=is_token, other=0, cache_modifier=".cg") + count_bits(below)
        offset = token % BLOCK_SIZE
        bit = tl.full([STEP], 1, tl.int32) << (offset & 31).to(tl.int32)
        word_ptrs = bitmap_ptr + place.to(tl.int64) * BLOCK_WORDS + (offset >> 5)
        tl.atomic_or(word_ptrs, bit, mask=is_token & (place < capacity), sem="relaxed")
