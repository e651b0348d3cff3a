"""What the kernels of Hopper share about tiles of K and V: how TMA brings them, and what is cleared of them.

A box is some neighbouring keys of one page and 64 dimensions, as far as a swizzle goes, and is read whole. What a
product would sum with a factor of 0 is zeroed in shared memory by the warp that loads, before it tells the groups of
the tile: nobody else writes what they read. Numbers that warps write for others they hand over.
[COORD-SLOT, COORD-WIDE, COORD-STRIDE]
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

SWIZZLED = gl.constexpr(64)  # 16-bit numbers of a row that a swizzle holds
CLEARED = gl.constexpr(8)  # rows of a tile that are looked at together
CLEARING = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0]))  # of the one warp that loads

# Arrivals at a barrier, one and one of every thread: of a warp, and of a group of four.
BY_WARP = gl.constexpr(1 + 32)
BY_GROUP = gl.constexpr(1 + 128)

# Triton 3.6 has other names for some of them than later ones.
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
load_numbers = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
# An arrival of every thread of these warps, each when what it had `load_numbers` bring is there.
arrive_each = async_copy.mbarrier_arrive


@jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Barriers that are through when so many have arrived; `finish_writing` must follow."""
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@jit
def finish_writing():
    """From here on TMA, products and whoever a barrier lets through see what these warps wrote to shared memory."""
    fence_async_shared()
    group_barrier()


@jit
def hand_over(bar):
    """Tells a barrier of numbers that these warps wrote for others to read: one arrival, and one of every thread.

    After a barrier of the warps the one is enough. compute-sanitizer's racecheck seems to take an arrival to tell
    of what its own thread wrote alone, and reports the other threads' numbers: `tests/kernels/hand_over.py`.
    """
    group_barrier()
    mbarrier.arrive(bar, count=1)
    arrive_each(bar, increment_count=False)


@jit
def find_run(task_ptr, list_slots_ptr, TILE_KV: gl.constexpr, BOX: gl.constexpr, HAS_LISTS: gl.constexpr):
    """The keys of a task, where the box of the first one starts, and how many tiles that makes.

    Boxes lie in a page as blocks and positions do: how far a key is into its box, its slot or its position says.
    """
    kv_start = gl.load(task_ptr + 6)
    kv_end = gl.load(task_ptr + 7)
    if HAS_LISTS:
        first = kv_start - (gl.load(list_slots_ptr + kv_start, mask=kv_start < kv_end, other=0) % BOX).to(gl.int32)
    else:
        first = kv_start - kv_start % BOX
    num_tiles = gl.where(kv_start < kv_end, (kv_end - first + TILE_KV - 1) // TILE_KV, 0)
    return kv_start, kv_end, first, num_tiles


@jit
def load_tiles(
    k_desc, v_desc,
    k_places, v_places,  # rows a page, rows a head and columns a head of the descriptors
    ring, tasks, page_table_ptr, max_pages, list_slots_ptr,
    TASK_WIDTH: gl.constexpr,
    TILE_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_LISTS: gl.constexpr,
    SUMS_KEYS: gl.constexpr,  # whether a product sums over K's rows, and not over V's
):  # fmt: skip
    """The warp that loads: every tile of K, then its V, as places in the ring fall free.

    It waits itself for a tile that has rows of no key of the task, by the barrier after those of the ring, and zeroes
    them: their weight is 0, and they may hold NaN.
    """
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    tasks_ptr, num_tasks = tasks
    if SUMS_KEYS:
        summed_tiles, summed_full = k_tiles, k_full
    else:
        summed_tiles, summed_full = v_tiles, v_full
    done = 0
    cleared = 0
    for task in range(gl.program_id(0), num_tasks, gl.num_programs(0)):
        task_ptr = tasks_ptr + task.to(gl.int64) * TASK_WIDTH
        page_row = page_table_ptr + gl.load(task_ptr).to(gl.int64) * max_pages
        kv_head = gl.load(task_ptr + 5)
        kv_start, kv_end, first, num_tiles = find_run(task_ptr, list_slots_ptr, TILE_KV, BOX, HAS_LISTS)
        last_box = first + (kv_end - 1 - first) // BOX * BOX
        for i in range(done, done + num_tiles):
            stage = i % STAGES
            phase = (i // STAGES) & 1
            start = first + (i - done) * TILE_KV
            pages, offsets = find_boxes(start, last_box, page_row, list_slots_ptr, TILE_KV, PAGE_SIZE, BOX, HAS_LISTS)
            is_whole = (start >= kv_start) & (start + TILE_KV <= kv_end)
            summed_bar = gl.where(is_whole, stage, STAGES)
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            load_boxes(
                k_desc, k_places, k_tiles.index(stage), k_full.index(summed_bar if SUMS_KEYS else stage),
                kv_head, pages, offsets, TILE_KV, HEAD_DIM, BOX,
            )  # fmt: skip
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            load_boxes(
                v_desc, v_places, v_tiles.index(stage), v_full.index(stage if SUMS_KEYS else summed_bar),
                kv_head, pages, offsets, TILE_KV, HEAD_DIM, BOX,
            )  # fmt: skip
            if not is_whole:
                mbarrier.wait(summed_full.index(STAGES), cleared & 1)
                clear_outside(summed_tiles.index(stage), start, kv_start, kv_end, TILE_KV)
                mbarrier.arrive(summed_full.index(stage), count=1)
                cleared += 1
        done += num_tiles


@jit
def find_boxes(
    first, last_box, page_row, list_slots_ptr,
    TILE_KV: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """Page of every box of a tile, and its place in the page; past the last box, that one again."""
    pages = ()
    offsets = ()
    for n in gl.static_range(TILE_KV // BOX):
        key = gl.minimum(first + n * BOX, last_box)
        if HAS_LISTS:
            slot = gl.load(list_slots_ptr + key)
            pages += ((slot // PAGE_SIZE).to(gl.int32),)
            offsets += ((slot % PAGE_SIZE).to(gl.int32),)
        else:
            pages += (gl.load(page_row + key // PAGE_SIZE),)
            offsets += (key % PAGE_SIZE,)
    return pages, offsets


@jit
def load_boxes(
    desc, places, tile, bar, kv_head, pages, offsets,
    TILE_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """Has the boxes of a tile copied; the barrier is through when all of them are there. [COORD-SLOT]"""
    mbarrier.expect(bar, TILE_KV * HEAD_DIM * 2)
    page_rows, head_rows, head_columns = places
    for n in gl.static_range(TILE_KV // BOX):
        row = pages[n] * page_rows + kv_head * head_rows + offsets[n]
        for part in gl.static_range(HEAD_DIM // SWIZZLED):
            box = tile.slice(n * BOX, BOX, dim=0).slice(part * SWIZZLED, SWIZZLED, dim=1)
            load_box(desc, [row, kv_head * head_columns + part * SWIZZLED], bar, box)


@jit
def clear_outside(tile, first, kv_start, kv_end, TILE_KV: gl.constexpr):
    """Zeroes the rows of a tile that are not the task's."""
    for n in gl.static_range(TILE_KV // CLEARED):
        start = first + n * CLEARED
        if (start < kv_start) | (start + CLEARED > kv_end):
            key = start + gl.arange(0, CLEARED, layout=gl.SliceLayout(1, CLEARING))
            clear_unless(tile.slice(n * CLEARED, CLEARED, dim=0), (key >= kv_start) & (key < kv_end), CLEARING)
    finish_writing()


@jit
def clear_unless(tile, is_kept, layout: gl.constexpr):
    """Zeroes rows of a tile, those not kept."""
    x = tile.load(layout)
    tile.store(gl.where(is_kept[:, None], x, gl.zeros_like(x)))
