"""The kernels of `block_mask`: runs of columns, states of blocks, and the lists that follow from them."""

import triton
import triton.language as tl

from attnconform.kernels.sparse_attention.block_rules import rule_allows, rule_interval

# of a block
EMPTY = tl.constexpr(0)
PARTIAL = tl.constexpr(1)
FULL = tl.constexpr(2)

SIZES = ["first_position", "seqlen_q", "seqlen_kv", "q_block_size", "kv_block_size"]


@triton.jit(do_not_specialize=SIZES)
def interval_kernel(
    full_counts_ptr, full_indices_ptr, partial_counts_ptr, partial_indices_ptr,
    data_ptr, first_position, seqlen_q, seqlen_kv, q_block_size, kv_block_size,
    CODES: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Lists of one block row of a rule of intervals: a full run, and what is listed on both its sides."""
    row = tl.program_id(0).to(tl.int64)
    num_q_blocks = tl.cdiv(seqlen_q, q_block_size)
    num_kv_blocks = tl.cdiv(seqlen_kv, kv_block_size)
    first, last, full_first, full_last = column_runs(
        row // num_q_blocks, row % num_q_blocks, data_ptr,
        first_position, seqlen_q, seqlen_kv, q_block_size, kv_block_size, CODES,
    )  # fmt: skip
    num_full = tl.maximum(full_last - full_first + 1, 0)
    num_left = tl.where(num_full > 0, full_first - first, tl.maximum(last - first + 1, 0))
    num_right = tl.where(num_full > 0, last - full_last, 0)
    tl.store(full_counts_ptr + row, num_full.to(tl.int32))
    tl.store(partial_counts_ptr + row, (num_left + num_right).to(tl.int32))
    for start in range(0, num_full, STEP):
        lane = start + tl.arange(0, STEP)
        tl.store(full_indices_ptr + row * num_kv_blocks + lane, (full_first + lane).to(tl.int32), mask=lane < num_full)
    for start in range(0, num_left + num_right, STEP):
        lane = start + tl.arange(0, STEP)
        column = tl.where(lane < num_left, first + lane, full_last + 1 + lane - num_left)
        is_column = lane < num_left + num_right
        tl.store(partial_indices_ptr + row * num_kv_blocks + lane, column.to(tl.int32), mask=is_column)


@triton.jit
def column_runs(
    head, q_block, data_ptr,
    first_position, seqlen_q, seqlen_kv, q_block_size, kv_block_size,
    CODES: tl.constexpr,
):  # fmt: skip
    """First and last listed column of a block row, and first and last one sure to be full; first > last for none.

    Neither end of an interval falls as the query goes on: some query of a .. b sees all of [lo(a), hi(b)], every one
    sees [lo(b), hi(a)]. [BLOCK-COMPLETE, BLOCK-FULL]
    """
    # lane 0 is the first query, lane 1 the last
    is_last = tl.arange(0, 2) == 1
    q_end = tl.minimum((q_block + 1) * q_block_size, seqlen_q) - 1
    q_idx = first_position + tl.where(is_last, q_end, q_block * q_block_size).to(tl.int64)
    lo, hi = rule_interval(q_idx, head, data_ptr, CODES, False)
    inner_lo, inner_hi = rule_interval(q_idx, head, data_ptr, CODES, True)
    first, last = tl.maximum(pick(lo, ~is_last), 0), tl.minimum(pick(hi, is_last), seqlen_kv - 1)
    inner_first = tl.maximum(pick(inner_lo, is_last), 0)
    inner_last = tl.minimum(pick(inner_hi, ~is_last), seqlen_kv - 1)
    # a ragged last block lies inside when all the keys that it has do
    past = tl.where(inner_last == seqlen_kv - 1, tl.cdiv(seqlen_kv, kv_block_size), (inner_last + 1) // kv_block_size)
    is_none = first > last
    is_inner_none = is_none | (inner_first > inner_last)
    return (
        tl.where(is_none, 0, first // kv_block_size),
        tl.where(is_none, -1, last // kv_block_size),
        tl.where(is_inner_none, 0, tl.cdiv(inner_first, kv_block_size)),
        tl.where(is_inner_none, -1, past - 1),
    )


@triton.jit
def pick(pair, is_it):  # [2] twice
    """The number of one lane of two."""
    return tl.sum(tl.where(is_it, pair, 0), axis=0)


@triton.jit(do_not_specialize=["request", *SIZES])
def classify_kernel(
    states_ptr, data_ptr, custom_data, dense_ptr, dense_strides,
    request, first_position, seqlen_q, seqlen_kv, q_block_size, kv_block_size,
    CODES: tl.constexpr,
    PADDED_Q: tl.constexpr,
    TILE_KV: tl.constexpr,
    COLUMNS: tl.constexpr,  # blocks of a program; more than 1 only where a block is one tile
):  # fmt: skip
    """States of a few blocks of a row: what the rule's intervals say, or else their elements. [BLOCK-CONSERVATIVE]"""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    num_q_blocks = tl.cdiv(seqlen_q, q_block_size)
    num_kv_blocks = tl.cdiv(seqlen_kv, kv_block_size)
    head, q_block = row // num_q_blocks, row % num_q_blocks
    first, last, full_first, full_last = column_runs(
        head, q_block, data_ptr, first_position, seqlen_q, seqlen_kv, q_block_size, kv_block_size, CODES
    )
    is_full = (column >= full_first) & (column <= full_last)
    is_open = (column >= first) & (column <= last) & ~is_full
    state = tl.where(is_full, FULL, EMPTY)
    if tl.sum(is_open.to(tl.int32), axis=0) > 0:
        local = tl.arange(0, PADDED_Q)
        q_row = (q_block * q_block_size).to(tl.int32) + local
        is_row = (local < q_block_size) & (q_row < seqlen_q)
        lane = tl.arange(0, COLUMNS * TILE_KV)
        num_allowed, num_elements = tl.zeros([COLUMNS], tl.int32), tl.zeros([COLUMNS], tl.int32)
        for start in range(0, kv_block_size, TILE_KV):
            offset = start + lane % TILE_KV
            kv_idx = (tl.program_id(1) * COLUMNS + lane // TILE_KV) * kv_block_size + offset
            is_element = is_row[:, None] & ((offset < kv_block_size) & (kv_idx < seqlen_kv))[None, :]
            allowed = is_element & rule_allows(
                first_position + q_row.to(tl.int64), kv_idx, q_row, head, request, data_ptr, custom_data,
                dense_ptr, dense_strides, CODES,
            )  # fmt: skip
            num_allowed += count_by_block(allowed, COLUMNS, TILE_KV)
            num_elements += count_by_block(is_element, COLUMNS, TILE_KV)
        counted = tl.where(num_allowed == 0, EMPTY, tl.where(num_allowed == num_elements, FULL, PARTIAL))
        state = tl.where(is_open, counted, state)
    tl.store(states_ptr + row * num_kv_blocks + column, state.to(tl.int8), mask=column < num_kv_blocks)


@triton.jit
def count_by_block(is_it, COLUMNS: tl.constexpr, TILE_KV: tl.constexpr):  # [PADDED_Q, COLUMNS * TILE_KV]
    """How many elements of every block are marked, [COLUMNS]."""
    by_column = tl.sum(is_it.to(tl.int32), axis=0)
    return tl.sum(tl.reshape(by_column, [COLUMNS, TILE_KV]), axis=1)


@triton.jit(do_not_specialize=["num_kv_blocks"])
def collect_kernel(
    full_counts_ptr, full_indices_ptr, partial_counts_ptr, partial_indices_ptr,
    states_ptr, num_kv_blocks,
    STEP: tl.constexpr,
):  # fmt: skip
    """Lists of one block row from the states of its blocks. [BLOCK-EXCLUSIVE]"""
    row = tl.program_id(0).to(tl.int64)
    states_ptr += row * num_kv_blocks
    full_indices_ptr += row * num_kv_blocks
    partial_indices_ptr += row * num_kv_blocks
    num_full = tl.zeros([1], tl.int32)
    num_partial = tl.zeros([1], tl.int32)
    for start in range(0, num_kv_blocks, STEP):
        column = start + tl.arange(0, STEP)
        state = tl.load(states_ptr + column, mask=column < num_kv_blocks, other=EMPTY)
        num_full = append(full_indices_ptr, num_full, column, state == FULL)
        num_partial = append(partial_indices_ptr, num_partial, column, state == PARTIAL)
    one = tl.arange(0, 1)
    tl.store(full_counts_ptr + row + one, num_full)
    tl.store(partial_counts_ptr + row + one, num_partial)


@triton.jit
def append(list_ptr, count, column, is_listed):  # count: [1]; column, is_listed: [STEP]
    """Writes the listed columns behind the `count` that a list has; the new count."""
    listed = is_listed.to(tl.int32)
    tl.store(list_ptr + count + tl.cumsum(listed, axis=0) - listed, column, mask=is_listed)
    return count + tl.sum(listed, axis=0)


@triton.jit(do_not_specialize=["num_kv_blocks"])
def scatter_kernel(
    full_counts_ptr, full_indices_ptr, partial_counts_ptr, partial_indices_ptr, states_ptr, num_kv_blocks,
    STEP: tl.constexpr,
):  # fmt: skip
    """States of one block row from its lists; blocks that no list has are EMPTY already."""
    row = tl.program_id(0).to(tl.int64)
    states_ptr += row * num_kv_blocks
    mark_columns(states_ptr, full_indices_ptr + row * num_kv_blocks, tl.load(full_counts_ptr + row), FULL, STEP)
    mark_columns(
        states_ptr, partial_indices_ptr + row * num_kv_blocks, tl.load(partial_counts_ptr + row), PARTIAL, STEP
    )


@triton.jit
def mark_columns(states_ptr, list_ptr, count, state, STEP: tl.constexpr):
    """Gives the columns of one list a state."""
    for start in range(0, count, STEP):
        lane = start + tl.arange(0, STEP)
        column = tl.load(list_ptr + lane, mask=lane < count, other=0)
        tl.store(states_ptr + column, tl.zeros([STEP], tl.int8) + state, mask=lane < count)
