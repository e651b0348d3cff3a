"""Canonical candidate lists on the GPU, in one launch and without a synchronization. S = unique(D u W u A).

A program marks the listed ids of one list in a bitmap of the request's ids, which drops holes and duplicates whatever
the order, and reads the bitmap back in ascending order, which sorts. Sinks come before the ids and the window after
them, so ids that either covers are left out and the one id that an edge cuts gives only its tokens beyond the edge.
Tokens that are in one page whatever the id make a unit: pages are looked up unit by unit, all of them before slots are
written, which then wait for nothing far away. Several programs a list do so where lists are few: each marks all ids and
writes a share of the tokens. The last to finish cuts the list into the chunks that attention tasks take. What is
refused (an id outside its request, a page outside the pool or another request's, a list longer than the tier) is
recorded; a refused list leaves its rows unwritten.

Limits: one query row a request, at the last position; token positions below 2^31; the bitmap is in global memory.
Atomics are relaxed: a barrier orders what one program does, and a fence for each would cost more than all the rest.
[SET-IDENTITY, SET-DUPLICATE, SET-ORDER, SET-HOLE, SET-UNION, SET-RANGE, BLOCK-EXPAND, COORD-SLOT, COORD-PAGE-RANGE,
SAFE-OWNER]
"""

import triton
import triton.language as tl

# rows of the error record; each holds the smallest offender, or NO_ERROR
ENTRY_ERROR, PAGE_ERROR, CAPACITY_ERROR, OWNER_ERROR = 0, 1, 2, 3
NUM_ERRORS = 4
NO_ERROR = 2**62
NONE_YET = tl.constexpr(2**31 - 1)  # of the places that one program looks at


@triton.jit(
    do_not_specialize=["capacity", "max_pages", "num_pages", "num_words", "max_ids", "window", "num_sink_tokens"]
)
def index_kernel(
    indptr_ptr, indices_ptr, seqlen_kv_ptr, page_table_ptr, owned_ptr,
    list_slots_ptr, list_positions_ptr, list_lengths_ptr, row_positions_ptr, mask_ends_ptr,
    tasks_ptr, merges_ptr, errors_ptr, bitmap_ptr, ids_ptr, bases_ptr, tickets_ptr, generations_ptr,
    capacity, max_pages, num_pages, num_words, max_ids, window, num_sink_tokens, batch_size,
    LISTS_PER_ROW: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    PARTS: tl.constexpr,
    TILES_PER_LIST: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    TASK_WIDTH: tl.constexpr,
    MERGE_WIDTH: tl.constexpr,
    TILE_KV: tl.constexpr,
    STEP: tl.constexpr,
    EXPAND_STEP: tl.constexpr,
    TILE_WORDS: tl.constexpr,
    ENTRY_ROW: tl.constexpr,
    PAGE_ROW: tl.constexpr,
    CAPACITY_ROW: tl.constexpr,
    OWNER_ROW: tl.constexpr,
):  # fmt: skip
    """A share of the entries and slots of one list; the last program of a list adds its tasks."""
    program = tl.program_id(0).to(tl.int64)
    list_idx = program // PARTS
    part = program % PARTS
    request = list_idx // LISTS_PER_ROW
    # what none of the others waits for is asked for at once
    seqlen_kv = tl.load(seqlen_kv_ptr + request).to(tl.int32)
    entries = (tl.load(indptr_ptr + list_idx), tl.load(indptr_ptr + list_idx + 1))
    # Sinks lie below sinks_end, the window from window_start on; ids add what lies between.
    window_start = tl.maximum(seqlen_kv - window, 0)
    sinks_end = tl.minimum(num_sink_tokens, window_start)
    bitmap_ptr += program * num_words
    ids_ptr += program * max_ids
    bases_ptr += program * max_ids * (BLOCK_SIZE // UNIT)
    first_bad = mark_entries(
        entries, indices_ptr, bitmap_ptr, seqlen_kv, sinks_end, window_start, num_words, BLOCK_SIZE, STEP
    )
    tl.debug_barrier()
    lead, tail = cut_edges(bitmap_ptr, sinks_end, window_start, num_words, BLOCK_SIZE)
    num_ids = read_marks(bitmap_ptr, ids_ptr, num_words, max_ids, TILE_WORDS)
    tl.debug_barrier()
    clear_bitmap(bitmap_ptr, num_words, STEP)  # for the next launch
    num_middle = num_ids * BLOCK_SIZE - lead - tail
    num_tokens = sinks_end + num_middle + seqlen_kv - window_start
    fits = (num_ids <= max_ids) & (num_tokens <= capacity)
    share = tl.cdiv(tl.where(fits, num_tokens, 0), PARTS)
    begin = part.to(tl.int32) * share
    end = tl.where(fits, tl.minimum(begin + share, num_tokens), 0)
    bad_page, bad_owner = write_lists(
        begin, end, sinks_end, num_middle, lead, window_start, ids_ptr, bases_ptr,
        (page_table_ptr + request * max_pages, num_pages, owned_ptr, request * num_pages),
        list_slots_ptr, list_positions_ptr, list_idx * capacity, BLOCK_SIZE, PAGE_SIZE, UNIT, EXPAND_STEP,
    )  # fmt: skip
    record(errors_ptr + ENTRY_ROW, first_bad, tl.zeros([], tl.int64))
    record(errors_ptr + PAGE_ROW, bad_page, request * max_pages)
    record(errors_ptr + OWNER_ROW, bad_owner, request * max_pages)
    record(errors_ptr + CAPACITY_ROW, tl.where(fits, NONE_YET, 0), list_idx)
    is_accepted = fits & (first_bad == NONE_YET) & (bad_page == NONE_YET) & (bad_owner == NONE_YET)
    is_last, is_accepted = finish_part(tickets_ptr + 2 * list_idx, is_accepted, PARTS)
    if is_last:
        num_tokens = tl.where(is_accepted, num_tokens, 0)
        tl.store(list_lengths_ptr + list_idx, num_tokens)
        if list_idx % LISTS_PER_ROW == 0:
            tl.store(row_positions_ptr + request, seqlen_kv - 1)
            tl.store(mask_ends_ptr + request, seqlen_kv)
            if generations_ptr is not None:
                # what the row was planned for, beside what it is now [FORMAT-GENERATION]
                tl.store(generations_ptr + batch_size + request, tl.load(generations_ptr + request))
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
    entries,  # where the list's begin, and end
    indices_ptr, bitmap_ptr, seqlen_kv, sinks_end, window_start, num_words,
    BLOCK_SIZE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Sets the bit of every id that sinks and window do not cover; the first entry outside the request, or none.

    [SET-RANGE, SET-HOLE]
    """
    start, end = entries
    # a bitmap of a tier may be shorter than a request that has outgrown it
    num_ids = tl.minimum((seqlen_kv + BLOCK_SIZE - 1) // BLOCK_SIZE, num_words * 32)
    first_id = sinks_end // BLOCK_SIZE
    past_id = tl.where(sinks_end < window_start, (window_start + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    bad = tl.full([STEP], NONE_YET, tl.int32)
    for first in range(start, end, STEP):
        entry = first + tl.arange(0, STEP)
        is_entry = entry < end
        idx = tl.load(indices_ptr + entry, mask=is_entry, other=-1)
        is_bad = is_entry & ((idx < -1) | (idx >= num_ids))
        bad = tl.minimum(bad, tl.where(is_bad, entry.to(tl.int32), NONE_YET))
        is_id = is_entry & ~is_bad & (idx >= first_id) & (idx < past_id)
        safe = tl.where(is_id, idx, 0)
        bit = tl.full([STEP], 1, tl.int32) << (safe & 31).to(tl.int32)
        tl.atomic_or(bitmap_ptr + (safe >> 5), bit, mask=is_id, sem="relaxed")
    return tl.min(bad, axis=0)


@triton.jit
def read_marks(bitmap_ptr, ids_ptr, num_words, max_ids, TILE_WORDS: tl.constexpr):
    """Writes the marked ids in ascending order; their number, those past max_ids included. [SET-DUPLICATE]"""
    found = tl.zeros([1], tl.int32)
    for start in range(0, num_words, TILE_WORDS):
        word = start + tl.arange(0, TILE_WORDS)
        # marks are made by atomics in L2, and a line of L1 may be older than they are
        bits = tl.load(bitmap_ptr + word, mask=word < num_words, other=0, cache_modifier=".cg")
        bits = bits.to(tl.uint32, bitcast=True)
        count = count_bits(bits)
        rank = found + tl.cumsum(count, axis=0) - count
        # the lowest mark of every word, and again
        for _ in range(0, tl.max(count, axis=0)):
            idx = word * 32 + count_bits(~bits & (bits - 1))
            tl.store(ids_ptr + rank, idx, mask=(bits != 0) & (rank < max_ids))
            bits = bits & (bits - 1)
            rank += 1
        found += tl.sum(count, axis=0)
    return tl.sum(found, axis=0)


@triton.jit
def count_bits(x):
    """Ones in each uint32: sums of neighbouring 1, 2, 4 and 8 bits, then of the four bytes."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x & 0x3F).to(tl.int32)


@triton.jit
def cut_edges(bitmap_ptr, sinks_end, window_start, num_words, BLOCK_SIZE: tl.constexpr):
    """Tokens that the first listed id has among the sinks, and the last one in the window. [SET-UNION]"""
    first_id = sinks_end // BLOCK_SIZE
    last_id = tl.maximum(window_start - 1, 0) // BLOCK_SIZE
    lead = tl.where(is_marked(bitmap_ptr, first_id, num_words), sinks_end % BLOCK_SIZE, 0)
    tail = tl.where(is_marked(bitmap_ptr, last_id, num_words), (last_id + 1) * BLOCK_SIZE - window_start, 0)
    return lead, tail


@triton.jit
def is_marked(bitmap_ptr, idx, num_words):
    """Whether an id is in the bitmap."""
    word = tl.load(bitmap_ptr + (idx >> 5), mask=(idx >> 5) < num_words, other=0, cache_modifier=".cg")
    return ((word >> (idx & 31)) & 1) != 0


@triton.jit
def write_lists(
    begin, end,  # tokens of the list, sinks and window included
    sinks_end, num_middle, lead, window_start, ids_ptr, bases_ptr, pages, slots_ptr, positions_ptr, first_entry,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Writes slots and positions of the list's tokens; the first page outside the pool, and not owned.

    [BLOCK-EXPAND, SET-UNION, COORD-SLOT, COORD-PAGE-RANGE, SAFE-OWNER]
    """
    faults = (tl.full([STEP], NONE_YET, tl.int32), tl.full([STEP], NONE_YET, tl.int32))
    # counted from the first id's first token, which may be among the sinks
    first = tl.maximum(begin - sinks_end, 0) + lead
    past = tl.minimum(end - sinks_end, num_middle) + lead
    first_middle = first_entry + sinks_end - lead
    if UNIT == 1:
        faults = place_units(
            first, past, ids_ptr, pages, slots_ptr + first_middle, positions_ptr, first_middle,
            faults, BLOCK_SIZE, PAGE_SIZE, UNIT, STEP,
        )  # fmt: skip
    else:
        faults = place_units(
            first, past, ids_ptr, pages, bases_ptr, None, first_middle, faults, BLOCK_SIZE, PAGE_SIZE, UNIT, STEP
        )
        tl.debug_barrier()
        write_middle(first, past, ids_ptr, bases_ptr, slots_ptr, positions_ptr, first_middle, BLOCK_SIZE, UNIT, STEP)
    faults = write_run(
        begin, tl.minimum(end, sinks_end), 0, pages, slots_ptr, positions_ptr, first_entry, faults, PAGE_SIZE, STEP
    )
    past_middle = sinks_end + num_middle
    faults = write_run(
        tl.maximum(begin, past_middle), end, window_start - past_middle,
        pages, slots_ptr, positions_ptr, first_entry, faults, PAGE_SIZE, STEP,
    )  # fmt: skip
    return tl.min(faults[0], axis=0), tl.min(faults[1], axis=0)


@triton.jit
def place_units(
    first, past,  # tokens of ids
    ids_ptr, pages, bases_ptr, positions_ptr, first_position,
    faults,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Writes the slot of the first token of every unit of ids, -1 where its page is no page; the faults so far.

    A step asks for the pages of the next one before it writes its own.
    """
    start, end = first // UNIT, (past + UNIT - 1) // UNIT
    next_position, next_page = load_pages(start, end, ids_ptr, pages[0], BLOCK_SIZE, PAGE_SIZE, UNIT, STEP)
    for step in range(start, end, STEP):
        position, page = next_position, next_page
        next_position, next_page = load_pages(step + STEP, end, ids_ptr, pages[0], BLOCK_SIZE, PAGE_SIZE, UNIT, STEP)
        unit = step + tl.arange(0, STEP)
        slot, faults = find_slots(position, page, unit < end, pages, faults, bases_ptr.dtype.element_ty, PAGE_SIZE)
        tl.store(bases_ptr + unit, slot, mask=unit < end)
        if positions_ptr is not None:
            tl.store(positions_ptr + first_position + unit, position, mask=unit < end)
    return faults


@triton.jit
def load_pages(
    start, end, ids_ptr, page_row_ptr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Position and page of the first token of units from start on, [STEP] each; 0 from end on."""
    unit = start + tl.arange(0, STEP)
    idx = tl.load(ids_ptr + unit // (BLOCK_SIZE // UNIT), mask=unit < end, other=0)
    position = idx * BLOCK_SIZE + unit % (BLOCK_SIZE // UNIT) * UNIT
    return position, tl.load(page_row_ptr + position // PAGE_SIZE, mask=unit < end, other=0)


@triton.jit
def find_slots(position, page, is_read, pages, faults, dtype: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Slots of positions, [STEP], as wide as the pool asks for, -1 where the page is no page; the faults so far.

    [COORD-SLOT, COORD-WIDE, COORD-PAGE-RANGE, SAFE-OWNER]
    """
    _, num_pages, owned_ptr, first_owned = pages
    bad, foreign = faults
    logical = position // PAGE_SIZE
    is_sound = (page >= 0) & (page < num_pages)
    bad = tl.minimum(bad, tl.where(is_read & ~is_sound, logical, NONE_YET))
    if owned_ptr is not None:
        is_owned = tl.load(owned_ptr + first_owned + page, mask=is_read & is_sound, other=1) != 0
        foreign = tl.minimum(foreign, tl.where(is_owned, NONE_YET, logical))
    slot = tl.where(is_sound, page.to(dtype) * PAGE_SIZE + position % PAGE_SIZE, -1)
    return slot, (bad, foreign)


@triton.jit
def write_middle(
    first, past,  # tokens of ids
    ids_ptr, bases_ptr, slots_ptr, positions_ptr, first_entry,
    BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Slots of the tokens of ids, from those of their units. [BLOCK-EXPAND]"""
    for start in range(first, past, STEP):
        token = start + tl.arange(0, STEP)
        is_token = token < past
        base = tl.load(bases_ptr + token // UNIT, mask=is_token, other=-1)
        tl.store(slots_ptr + first_entry + token, base + token % UNIT, mask=base >= 0)
        if positions_ptr is not None:
            idx = tl.load(ids_ptr + token // BLOCK_SIZE, mask=is_token, other=0)
            tl.store(positions_ptr + first_entry + token, idx * BLOCK_SIZE + token % BLOCK_SIZE, mask=is_token)


@triton.jit
def write_run(
    begin, end,  # tokens of the list
    shift, pages, slots_ptr, positions_ptr, first_entry, faults,
    PAGE_SIZE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Slots of tokens whose positions follow each other: sinks, or the window; the faults so far."""
    for start in range(begin, end, STEP):
        token = start + tl.arange(0, STEP)
        is_token = token < end
        position = token + shift
        page = tl.load(pages[0] + position // PAGE_SIZE, mask=is_token, other=0)
        slot, faults = find_slots(position, page, is_token, pages, faults, slots_ptr.dtype.element_ty, PAGE_SIZE)
        tl.store(slots_ptr + first_entry + token, slot, mask=is_token & (slot >= 0))
        if positions_ptr is not None:
            tl.store(positions_ptr + first_entry + token, position, mask=is_token)
    return faults


@triton.jit
def record(error_ptr, error, start):
    """Keeps the smallest offender of all programs, by its place in the whole array: `start` and what `error` counts."""
    if error != NONE_YET:
        tl.atomic_min(error_ptr, start + error, sem="relaxed")


@triton.jit
def finish_part(ticket_ptr, is_accepted, PARTS: tl.constexpr):
    """Whether this program is its list's last to finish, and then whether every one of them accepts the list."""
    if PARTS == 1:
        return True, is_accepted
    else:
        tl.atomic_add(ticket_ptr + 1, tl.where(is_accepted, 0, 1), sem="relaxed")
        is_last = tl.atomic_add(ticket_ptr, 1, sem="acq_rel") == PARTS - 1
        num_refusing = 0
        if is_last:
            num_refusing = tl.atomic_xchg(ticket_ptr + 1, 0, sem="acq_rel")
            tl.store(ticket_ptr, 0)
        return is_last, num_refusing == 0


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
