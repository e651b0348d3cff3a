"""Canonical candidate lists on the GPU, in one launch and without a synchronization.

A program takes one list. It marks every listed id in a bitmap of the request's ids, which drops holes and duplicates
whatever the order; reads the bitmap back in ascending order, which sorts; and expands each id to its tokens, with the
slot of each. It then cuts the list into the chunks that attention tasks take. What is refused (an id outside its
request, a page outside the pool, a list longer than the tier) is recorded; a refused list leaves its rows unwritten.

Limits: one query row a request; token positions below 2^31; the bitmap is in global memory, cleared by each program.
[SET-IDENTITY, SET-DUPLICATE, SET-ORDER, SET-HOLE, SET-RANGE, BLOCK-EXPAND, COORD-SLOT, COORD-PAGE-RANGE]
"""

import triton
import triton.language as tl

# rows of the error record; each holds the smallest offender, or NO_ERROR
ENTRY_ERROR, PAGE_ERROR, CAPACITY_ERROR = 0, 1, 2
NO_ERROR = 2**62


@triton.jit(do_not_specialize=["capacity", "max_pages", "num_pages", "num_words", "max_ids"])
def index_kernel(
    indptr_ptr, indices_ptr, seqlen_kv_ptr, page_table_ptr,
    list_slots_ptr, list_positions_ptr, list_lengths_ptr, row_positions_ptr, mask_ends_ptr,
    tasks_ptr, merges_ptr, errors_ptr, bitmap_ptr, ids_ptr,
    capacity, max_pages, num_pages, num_words, max_ids,
    LISTS_PER_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILES_PER_LIST: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    TASK_WIDTH: tl.constexpr,
    MERGE_WIDTH: tl.constexpr,
    TILE_KV: tl.constexpr,
    STEP: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    ENTRY_ROW: tl.constexpr,
    PAGE_ROW: tl.constexpr,
    CAPACITY_ROW: tl.constexpr,
):  # fmt: skip
    """Entries, slots and tasks of one list."""
    list_idx = tl.program_id(0).to(tl.int64)
    request = list_idx // LISTS_PER_ROW
    seqlen_kv = tl.load(seqlen_kv_ptr + request).to(tl.int64)
    bitmap_ptr += list_idx * num_words
    ids_ptr += list_idx * max_ids
    clear_bitmap(bitmap_ptr, num_words, STEP)
    tl.debug_barrier()
    is_sound = mark_entries(
        indptr_ptr, indices_ptr, bitmap_ptr, errors_ptr + ENTRY_ROW, list_idx, seqlen_kv, num_words, BLOCK_SIZE, STEP
    )
    tl.debug_barrier()
    num_ids = read_marks(bitmap_ptr, ids_ptr, num_words, max_ids, TILE_WORDS)
    tl.debug_barrier()
    # only the request's last block can be short, and it is the last of the list
    last = tl.load(ids_ptr + tl.maximum(tl.minimum(num_ids, max_ids) - 1, 0), cache_modifier=".cg").to(tl.int64)
    missing = tl.maximum((last + 1) * BLOCK_SIZE - seqlen_kv, 0)
    num_tokens = tl.where(num_ids > 0, num_ids * BLOCK_SIZE - missing, 0)
    fits = (num_ids <= max_ids) & (num_tokens <= capacity)
    tl.atomic_min(errors_ptr + CAPACITY_ROW, list_idx, mask=~fits)
    num_tokens = tl.where(fits, num_tokens, 0)
    has_pages = expand_ids(
        ids_ptr, page_table_ptr + request * max_pages, list_slots_ptr + list_idx * capacity,
        list_positions_ptr + list_idx * capacity, errors_ptr + PAGE_ROW, request * max_pages,
        num_tokens, num_pages, BLOCK_SIZE, PAGE_SIZE, STEP,
    )  # fmt: skip
    is_accepted = is_sound & fits & has_pages
    num_tokens = tl.where(is_accepted, num_tokens, 0)
    tl.store(list_lengths_ptr + list_idx, num_tokens.to(tl.int32))
    if list_idx % LISTS_PER_ROW == 0:
        tl.store(row_positions_ptr + request, (seqlen_kv - 1).to(tl.int32))
        tl.store(mask_ends_ptr + request, seqlen_kv.to(tl.int32))
    write_tasks(
        tasks_ptr, merges_ptr, list_idx, capacity, num_tokens, is_accepted,
        TILES_PER_LIST, NUM_SPLITS, PADDED_SPLITS, TASK_WIDTH, MERGE_WIDTH, TILE_KV,
    )  # fmt: skip


@triton.jit
def clear_bitmap(bitmap_ptr, num_words, STEP: tl.constexpr):
    """No id is marked."""
    for start in range(0, num_words, STEP):
        word = start + tl.arange(0, STEP)
        tl.store(bitmap_ptr + word, tl.zeros([STEP], tl.int32), mask=word < num_words)


@triton.jit
def mark_entries(
    indptr_ptr, indices_ptr, bitmap_ptr, error_ptr, list_idx, seqlen_kv, num_words,
    BLOCK_SIZE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Sets the bit of every listed id; True where none lies outside the request. [SET-RANGE, SET-HOLE]"""
    start = tl.load(indptr_ptr + list_idx)
    end = tl.load(indptr_ptr + list_idx + 1)
    num_ids = (seqlen_kv + BLOCK_SIZE - 1) // BLOCK_SIZE
    num_bad = tl.zeros([STEP], tl.int32)
    for first in range(start, end, STEP):
        entry = first + tl.arange(0, STEP)
        is_entry = entry < end
        idx = tl.load(indices_ptr + entry, mask=is_entry, other=-1)
        # a bitmap of a tier may be shorter than a request that has outgrown it
        is_bad = is_entry & ((idx < -1) | (idx >= num_ids) | (idx >= num_words * 32))
        tl.atomic_min(error_ptr + tl.zeros([STEP], tl.int32), entry.to(tl.int64), mask=is_bad)
        num_bad += is_bad.to(tl.int32)
        is_id = is_entry & (idx >= 0) & ~is_bad
        safe = tl.where(is_id, idx, 0)
        bit = tl.full([STEP], 1, tl.int32) << (safe & 31)
        tl.atomic_or(bitmap_ptr + (safe >> 5), bit, mask=is_id)
    return tl.sum(num_bad, axis=0) == 0


@triton.jit
def read_marks(bitmap_ptr, ids_ptr, num_words, max_ids, TILE_WORDS: tl.constexpr):
    """Writes the marked ids in ascending order; their number, those past max_ids included. [SET-DUPLICATE]"""
    found = tl.zeros([1], tl.int32)
    bit = tl.arange(0, 32)
    for start in range(0, num_words, TILE_WORDS):
        word = start + tl.arange(0, TILE_WORDS)
        # marks are made by atomics in L2, and a line of L1 may be older than they are
        bits = tl.load(bitmap_ptr + word, mask=word < num_words, other=0, cache_modifier=".cg")
        count = count_bits(bits)
        before = found + tl.cumsum(count, axis=0) - count
        # [TILE_WORDS, 32]
        below = (tl.full([32], 1, tl.int32) << bit) - 1
        rank = before[:, None] + count_bits(bits[:, None] & below[None, :])
        is_marked = ((bits[:, None] >> bit[None, :]) & 1) != 0
        idx = word[:, None] * 32 + bit[None, :]
        tl.store(ids_ptr + rank, idx, mask=is_marked & (rank < max_ids))
        found += tl.sum(count, axis=0)
    return tl.sum(found, axis=0)


@triton.jit
def count_bits(x):
    """Ones in each 32-bit word: sums of neighbouring 1, 2, 4 and 8 bits, then of the four bytes."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x & 0x3F).to(tl.int32)


@triton.jit
def expand_ids(
    ids_ptr, page_row_ptr, slots_ptr, positions_ptr, error_ptr, first_page,
    num_tokens, num_pages,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Position and slot of every token of every id; True where all pages lie in the pool. [BLOCK-EXPAND, COORD-SLOT]"""
    num_bad = tl.zeros([STEP], tl.int32)
    for start in range(0, num_tokens, STEP):
        token = start + tl.arange(0, STEP)
        is_token = token < num_tokens
        idx = tl.load(ids_ptr + token // BLOCK_SIZE, mask=is_token, other=0, cache_modifier=".cg")
        position = idx * BLOCK_SIZE + token % BLOCK_SIZE
        logical = position // PAGE_SIZE
        page = tl.load(page_row_ptr + logical, mask=is_token, other=0)
        is_bad = is_token & ((page < 0) | (page >= num_pages))
        tl.atomic_min(error_ptr + tl.zeros([STEP], tl.int32), first_page + logical, mask=is_bad)
        num_bad += is_bad.to(tl.int32)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        tl.store(slots_ptr + token, slot, mask=is_token & ~is_bad)
        tl.store(positions_ptr + token, position, mask=is_token)
    return tl.sum(num_bad, axis=0) == 0


@triton.jit
def write_tasks(
    tasks_ptr, merges_ptr, list_idx, capacity, num_tokens, is_accepted,
    TILES_PER_LIST: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    TASK_WIDTH: tl.constexpr,
    MERGE_WIDTH: tl.constexpr,
    TILE_KV: tl.constexpr,
):  # fmt: skip
    """Keys of every chunk of the list's tiles; a refused list has no query row, so nothing of it is written."""
    split = tl.arange(0, PADDED_SPLITS)
    is_split = split < NUM_SPLITS
    num_steps = (num_tokens + TILE_KV - 1) // TILE_KV
    chunk = (num_steps + NUM_SPLITS - 1) // NUM_SPLITS * TILE_KV
    begin = list_idx * capacity
    kv_start = begin + tl.minimum(split * chunk, num_tokens)
    kv_end = begin + tl.minimum((split + 1) * chunk, num_tokens)
    q_count = tl.where(is_accepted, 1, 0)
    for tile in tl.static_range(TILES_PER_LIST):
        row = (list_idx * TILES_PER_LIST + tile) * NUM_SPLITS + split
        task_ptr = tasks_ptr + row * TASK_WIDTH
        tl.store(task_ptr + 2, tl.zeros([PADDED_SPLITS], tl.int32) + q_count, mask=is_split)
        tl.store(task_ptr + 6, kv_start.to(tl.int32), mask=is_split)
        tl.store(task_ptr + 7, kv_end.to(tl.int32), mask=is_split)
        tl.store(task_ptr + 8, kv_start.to(tl.int32), mask=is_split)
        tl.store(task_ptr + 9, kv_end.to(tl.int32), mask=is_split)
        if NUM_SPLITS > 1:
            tl.store(merges_ptr + (list_idx * TILES_PER_LIST + tile) * MERGE_WIDTH + 1, q_count)
