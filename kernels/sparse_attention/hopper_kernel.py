"""The kernel of `hopper`: groups of warps that multiply, and a warp that brings them keys and values.

Two groups hold half a tile of query rows each; a warp of its own has TMA copy K and V into a ring of tiles in shared
memory, box by box: a box is some neighbouring keys of one page and 64 dimensions, as far as a swizzle goes. While a
group works out the weights of a tile of keys, its product P V of the tile before is under way, and the other group's
products: the two take turns. Under a cap, whose weights take longest, the next tile's scores are under way too, and
nobody waits for a turn. Programs stay, and take every so-many-th task of the list.

A box is read whole. What it holds before and after the task's keys may be anything, NaN included: scores of such keys
are masked before the maximum, and their rows of V are zeroed in shared memory before they meet a weight of 0.
[MASK-BEFORE-MAX, COORD-SLOT, COORD-WIDE, COORD-STRIDE, GQA-MAP, EMPTY-OUT, LSE-NATURAL, LSE-SINK]

It imports Gluon, Triton's layer below tiles, so that only `hopper` imports this module, where it launches.
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
SWIZZLED = gl.constexpr(64)  # 16-bit numbers of a row that a swizzle holds
CLEARED = gl.constexpr(16)  # rows of V that are looked at together

PLAIN = gl.constexpr(0)
ALIBI = gl.constexpr(1)
SOFT_CAP = gl.constexpr(2)
# 2^30 + 1 is 2^30 to a tanh: nothing larger changes a capped score, and two of them multiply without overflow
LARGEST_POWER = gl.constexpr(30.0)
LEAST_FACTOR = gl.constexpr(2.0**-126)

# Triton 3.6 has other names for them than later ones.
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


# Numbers of a batch or a rule: a kernel compiled for one value of them must serve every other.
@jit(do_not_specialize=["num_tasks", "total_q", "max_pages"])
def hopper_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr,
    q_strides, k_places, v_places, out_strides, lse_strides,
    tasks_ptr, partial_acc_ptr, partial_max_ptr, partial_sum_ptr,
    page_table_ptr, list_slots_ptr, list_positions_ptr,
    row_positions_ptr, mask_starts_ptr, mask_ends_ptr, score_params_ptr, sink_logits_ptr,
    sm_scale, num_tasks, total_q, max_pages,
    TASK_WIDTH: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_KV: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,  # keys of a box
    STAGES: gl.constexpr,  # tiles of the ring
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_HEAD_MASK: gl.constexpr,
    HAS_WIDE_ROWS: gl.constexpr,  # q and out can be read and written by 16 bytes
):  # fmt: skip
    """Attends the tasks program_id, program_id + num_programs, ...; writes rows, or partial states of cut tiles."""
    ROWS: gl.constexpr = TILE_M // 2
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_KV, HEAD_DIM], dtype)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_KV, HEAD_DIM], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_KV, HEAD_DIM], tile_layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, HEAD_DIM], q_layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    fence_async_shared()
    group_barrier()

    ring = (k_tiles, v_tiles, k_full, k_empty, v_full, v_empty)
    tasks = (tasks_ptr, num_tasks)
    lists = (list_slots_ptr, list_positions_ptr)
    rows = (q_ptr, q_strides, row_positions_ptr, mask_starts_ptr, mask_ends_ptr, total_q)
    scores = (sm_scale, score_params_ptr)
    outputs = (
        out_ptr, lse_ptr, out_strides, lse_strides, partial_acc_ptr, partial_max_ptr, partial_sum_ptr, sink_logits_ptr,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (attend_rows, (
                q_tiles.index(0), ring, turns, tasks, lists, rows, scores, outputs,
                0, TASK_WIDTH, ROWS, HEADS, TILE_KV, HEAD_DIM, BOX, STAGES, SCORE, HAS_LISTS, HAS_SINK, HAS_HEAD_MASK,
                HAS_WIDE_ROWS,
            )),
            (attend_rows, (
                q_tiles.index(1), ring, turns, tasks, lists, rows, scores, outputs,
                1, TASK_WIDTH, ROWS, HEADS, TILE_KV, HEAD_DIM, BOX, STAGES, SCORE, HAS_LISTS, HAS_SINK, HAS_HEAD_MASK,
                HAS_WIDE_ROWS,
            )),
            (load_tiles, (
                k_desc, v_desc, k_places, v_places, ring, tasks, page_table_ptr, max_pages, list_slots_ptr,
                TASK_WIDTH, TILE_KV, HEAD_DIM, PAGE_SIZE, BOX, STAGES, HAS_LISTS,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


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
):  # fmt: skip
    """The warp that loads: every tile of K, then its V, as places in the ring fall free."""
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    tasks_ptr, num_tasks = tasks
    done = 0
    for task in range(gl.program_id(0), num_tasks, gl.num_programs(0)):
        task_ptr = tasks_ptr + task.to(gl.int64) * TASK_WIDTH
        page_row = page_table_ptr + gl.load(task_ptr).to(gl.int64) * max_pages
        kv_head = gl.load(task_ptr + 5)
        _kv_start, kv_end, first, num_tiles = find_run(task_ptr, list_slots_ptr, TILE_KV, BOX, HAS_LISTS)
        last_box = first + (kv_end - 1 - first) // BOX * BOX
        for i in range(done, done + num_tiles):
            stage = i % STAGES
            phase = (i // STAGES) & 1
            pages, offsets = find_boxes(
                first + (i - done) * TILE_KV, last_box, page_row, list_slots_ptr, TILE_KV, PAGE_SIZE, BOX, HAS_LISTS
            )
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            load_boxes(
                k_desc, k_places, k_tiles.index(stage), k_full.index(stage), kv_head, pages, offsets,
                TILE_KV, HEAD_DIM, BOX,
            )  # fmt: skip
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            load_boxes(
                v_desc, v_places, v_tiles.index(stage), v_full.index(stage), kv_head, pages, offsets,
                TILE_KV, HEAD_DIM, BOX,
            )  # fmt: skip
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
def attend_rows(
    q_tile, ring, turns, tasks, lists, rows, scores, outputs,
    PART: gl.constexpr,  # which half of a tile's rows
    TASK_WIDTH: gl.constexpr,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    TILE_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_HEAD_MASK: gl.constexpr,
    HAS_WIDE_ROWS: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: its half of the rows of every task against every tile of keys."""
    tasks_ptr, num_tasks = tasks
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KV, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    row_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_tile.dtype
    eights = gl.full([ROWS, TILE_KV], 0.0, gl.float32, layout=s_layout).reshape([ROWS, TILE_KV // 8, 8])
    lanes_s: gl.constexpr = gl.SliceLayout(1, eights.type.layout)

    done = 0  # tiles of the tasks before
    turn = 0  # turns taken
    for task in range(gl.program_id(0), num_tasks, gl.num_programs(0)):
        task_ptr = tasks_ptr + task.to(gl.int64) * TASK_WIDTH
        kv_start, kv_end, first, num_tiles = find_run(task_ptr, lists[0], TILE_KV, BOX, HAS_LISTS)
        load_queries(q_tile, task_ptr, rows, PART, ROWS, HEADS, HEAD_DIM, HAS_WIDE_ROWS)
        run = (kv_start, kv_end, gl.load(task_ptr + 8), gl.load(task_ptr + 9), lists[1])
        bounds = load_bounds(task_ptr, run, rows, scores, PART, ROWS, HEADS, SCORE, HAS_LISTS, HAS_HEAD_MASK, row_s)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, layout=row_s)
        row_sum = gl.full([ROWS, 8], 0.0, gl.float32, layout=lanes_s)  # of every lane of eight keys
        acc = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, layout=o_layout)

        if num_tiles > 0:
            tiles = (done, first, num_tiles)
            if SCORE == SOFT_CAP:
                acc, row_max, row_sum = attend_ahead(
                    q_tile, acc, row_max, row_sum, ring, tiles, run, bounds, TILE_KV, HEAD_DIM, STAGES, HAS_LISTS
                )
            else:
                acc, row_max, row_sum = attend_in_turns(
                    q_tile, acc, row_max, row_sum, ring, turns, turn, tiles, run, bounds,
                    PART, TILE_KV, HEAD_DIM, STAGES, SCORE, HAS_LISTS,
                )  # fmt: skip
                turn += num_tiles - 1
            done += num_tiles

        row_sum = gl.convert_layout(gl.sum(row_sum, axis=1), row_s)
        if gl.load(task_ptr + 10) >= 0:
            store_state(acc, row_max, row_sum, task_ptr, outputs, PART, ROWS, HEADS, HEAD_DIM, row_s, row_o)
        else:
            store_rows(
                acc, row_max, row_sum, task_ptr, outputs, PART, ROWS, HEADS, HEAD_DIM, HAS_SINK, HAS_WIDE_ROWS, dtype,
                row_s,
            )  # fmt: skip


@jit
def attend_in_turns(
    q_tile, acc, row_max, row_sum, ring, turns, turn, tiles, run, bounds,
    PART: gl.constexpr,
    TILE_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """A task's tiles, one at least: products of one tile under the weights of the next, the groups in turns.

    Longer than a screen: where products are begun and waited for must be seen in one piece.
    """
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    done, first, num_tiles = tiles
    kv_start, kv_end, _full_start, _full_end, _list_positions_ptr = run
    dtype: gl.constexpr = q_tile.dtype
    ROWS: gl.constexpr = acc.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    row_o: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    zero = gl.full([ROWS, TILE_KV], 0.0, gl.float32, layout=s_layout)

    stop = done + num_tiles
    stage = done % STAGES
    mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
    start = start_scores(zero, first, bounds, TILE_KV, SCORE)
    s = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), start, use_acc=SCORE == ALIBI, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
    group_barrier()
    mbarrier.arrive(k_empty.index(stage), count=1)
    weights, rescale, row_max, row_sum = weigh_lanes(s, row_max, row_sum, first, run, bounds, TILE_KV, SCORE, HAS_LISTS)
    p = gl.convert_layout(weights.to(dtype), p_layout)
    if first < kv_start:
        mbarrier.wait(v_full.index(stage), (done // STAGES) & 1)
        clear_outside(v_tiles.index(stage), first, kv_start, kv_end, TILE_KV, HEAD_DIM)
    mbarrier.wait(k_full.index((done + 1) % STAGES), ((done + 1) // STAGES) & 1, pred=num_tiles > 1)
    for i in range(done + 1, stop):
        stage = i % STAGES
        before = (i - 1) % STAGES
        start = start_scores(zero, first + (i - done) * TILE_KV, bounds, TILE_KV, SCORE)
        # the first group's first turn is its own
        mbarrier.wait(turns.index(PART), (turn & 1) ^ (1 - PART))
        turn += 1
        s_token = warpgroup_mma(
            q_tile, k_tiles.index(stage).permute((1, 0)), start, use_acc=SCORE == ALIBI, is_async=True
        )
        mbarrier.wait(v_full.index(before), ((i - 1) // STAGES) & 1)
        acc_token = warpgroup_mma(p, v_tiles.index(before), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - PART), count=1)
        s = warpgroup_mma_wait(num_outstanding=1, deps=[s_token])
        weights, rescale, row_max, row_sum = weigh_lanes(
            s, row_max, row_sum, first + (i - done) * TILE_KV, run, bounds, TILE_KV, SCORE, HAS_LISTS
        )
        next_p = gl.convert_layout(weights.to(dtype), p_layout)
        # The wait for the next K stands between the weights and the wait for P V: within a block of
        # instructions the assembler would move that wait above the weights.
        after = i + 1
        mbarrier.wait(k_full.index(after % STAGES), (after // STAGES) & 1, pred=after < stop)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc_token])
        # one barrier of the group for both: K is done with by then, and not asked for before
        group_barrier()
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(rescale, row_o)[:, None]
        p = next_p
    stage = (stop - 1) % STAGES
    last_first = first + (num_tiles - 1) * TILE_KV
    mbarrier.wait(v_full.index(stage), ((stop - 1) // STAGES) & 1)
    if last_first + TILE_KV > kv_end:
        clear_outside(v_tiles.index(stage), last_first, kv_start, kv_end, TILE_KV, HEAD_DIM)
    acc_token = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc_token])
    group_barrier()
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc, row_max, row_sum


@jit
def attend_ahead(
    q_tile, acc, row_max, row_sum, ring, tiles, run, bounds,
    TILE_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """A task's tiles under a cap, one at least: the next tile's scores are under way while this one's are weighed.

    The work on the scores takes longer than both products. q is held in registers: products of so few keys would wait
    for shared memory. The first tile has no product P V before it, and the last no scores after it: what is multiplied
    there is left out of the sums. Longer than a screen, as above.
    """
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    done, first, num_tiles = tiles
    kv_start, kv_end, _full_start, _full_end, _list_positions_ptr = run
    dtype: gl.constexpr = q_tile.dtype
    ROWS: gl.constexpr = acc.shape[0]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KV, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    row_o: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    zero = gl.full([ROWS, TILE_KV], 0.0, gl.float32, layout=s_layout)
    q = q_tile.load(gl.DotOperandLayout(0, s_layout, 2))

    stop = done + num_tiles
    stage = done % STAGES
    mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
    s = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
    group_barrier()
    mbarrier.arrive(k_empty.index(stage), count=1)
    p = gl.full([ROWS, TILE_KV], 0.0, dtype, layout=p_layout)
    mbarrier.wait(k_full.index((done + 1) % STAGES), ((done + 1) // STAGES) & 1, pred=num_tiles > 1)
    mbarrier.wait(v_full.index(stage), (done // STAGES) & 1)
    if first < kv_start:
        clear_outside(v_tiles.index(stage), first, kv_start, kv_end, TILE_KV, HEAD_DIM)
    for i in range(done, stop):
        after = i + 1
        stage = gl.minimum(after, stop - 1) % STAGES
        before = gl.maximum(i - 1, done)
        s_token = warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before % STAGES), (before // STAGES) & 1)
        acc_token = warpgroup_mma(p, v_tiles.index(before % STAGES), acc, use_acc=before > done, is_async=True)
        weights, rescale, row_max, row_sum = weigh_lanes(
            s, row_max, row_sum, first + (i - done) * TILE_KV, run, bounds, TILE_KV, SOFT_CAP, HAS_LISTS
        )
        next_p = gl.convert_layout(weights.to(dtype), p_layout)
        # as above, between the weights and the wait for the products
        mbarrier.wait(k_full.index((i + 2) % STAGES), ((i + 2) // STAGES) & 1, pred=i + 2 < stop)
        s, acc = warpgroup_mma_wait(num_outstanding=0, deps=[s_token, acc_token])
        group_barrier()
        mbarrier.arrive(k_empty.index(stage), count=1, pred=after < stop)
        mbarrier.arrive(v_empty.index(before % STAGES), count=1, pred=i > done)
        acc = acc * gl.convert_layout(rescale, row_o)[:, None]
        p = next_p
    stage = (stop - 1) % STAGES
    last_first = first + (num_tiles - 1) * TILE_KV
    mbarrier.wait(v_full.index(stage), ((stop - 1) // STAGES) & 1)
    if last_first + TILE_KV > kv_end:
        clear_outside(v_tiles.index(stage), last_first, kv_start, kv_end, TILE_KV, HEAD_DIM)
    acc_token = warpgroup_mma(p, v_tiles.index(stage), acc, use_acc=num_tiles > 1, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc_token])
    group_barrier()
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc, row_max, row_sum


@jit
def find_rows(task_ptr, PART: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, layout: gl.constexpr):
    """Lane, query row, query head and whether there is one, of a group's lanes; [ROWS] each."""
    lane = PART * ROWS + gl.arange(0, ROWS, layout=layout)
    rows = gl.load(task_ptr + 1) + lane // HEADS
    heads = gl.load(task_ptr + 3) + lane % HEADS
    is_live = (lane // HEADS < gl.load(task_ptr + 2)) & (lane % HEADS < gl.load(task_ptr + 4))
    return lane, rows.to(gl.int64), heads.to(gl.int64), is_live


@jit
def by_sixteen_bytes(starts, offsets):
    """Addresses of rows from where each starts, which eights of 16-bit numbers may be read from at once.

    What Triton knows of the kernel's arguments does not reach the groups of a warp_specialize. It is said of the sum,
    which is made here: said of a function's argument it would be lost.
    """
    return gl.max_contiguous(gl.multiple_of(starts + offsets, [1, 16]), [1, 8])


@jit
def load_queries(
    q_tile, task_ptr, rows,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HAS_WIDE_ROWS: gl.constexpr,
):  # fmt: skip
    """A group's query rows into shared memory; 0 in lanes of no row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    _lane, row, head, is_live = find_rows(task_ptr, PART, ROWS, HEADS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    strides = rows[1]
    starts = row * strides[0] + head * strides[1]
    ptrs = rows[0] + starts[:, None]
    if HAS_WIDE_ROWS:
        ptrs = by_sixteen_bytes(ptrs, dim[None, :])
    else:
        ptrs += (dim.to(gl.int64) * strides[2])[None, :]
    q_tile.store(gl.load(ptrs, mask=is_live[:, None], other=0.0))
    fence_async_shared()
    group_barrier()


@jit
def load_bounds(
    task_ptr, run, rows, scores,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
    HAS_HEAD_MASK: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """What every row may see, and what becomes of its scores.

    mask_start and mask_end, of positions, cut to the task's keys where those are positions too; the position of each
    row, its slope, and that of the product before sm_scale; what makes a score of a product, and of a capped one; the
    cap. All in base 2.
    """
    _q_ptr, _q_strides, row_positions_ptr, mask_starts_ptr, mask_ends_ptr, total_q = rows
    sm_scale, score_params_ptr = scores
    _lane, row, head, is_live = find_rows(task_ptr, PART, ROWS, HEADS, layout)
    interval = row
    if HAS_HEAD_MASK:
        interval = head * total_q + row
    mask_start = gl.load(mask_starts_ptr + interval, mask=is_live, other=0)
    mask_end = gl.load(mask_ends_ptr + interval, mask=is_live, other=0)
    if not HAS_LISTS:
        mask_start = gl.maximum(mask_start, run[0])
        mask_end = gl.minimum(mask_end, run[1])
    q_idx = gl.load(row_positions_ptr + row, mask=is_live, other=0)
    slope = gl.full([ROWS], 0.0, gl.float32, layout=layout)
    score_scale = sm_scale * LOG2_E
    cap_factor = 0.0
    cap = 0.0
    if SCORE == ALIBI:
        slope = gl.load(score_params_ptr + head, mask=is_live, other=0.0) * LOG2_E
    if SCORE == SOFT_CAP:
        # tanh(x / cap) = 1 - 2 / (1 + exp2(x * cap_factor)), x in base e; one cap serves all heads
        cap = gl.load(score_params_ptr)
        cap_factor = gl.maximum(sm_scale * (2 * LOG2_E) / cap, LEAST_FACTOR)
        cap = cap * LOG2_E
    return mask_start, mask_end, q_idx, slope, slope / score_scale, score_scale, cap_factor, cap


@jit
def weigh(
    s, row_max, row_sum, first, run, bounds,
    TILE_KV: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """Weights of a tile against the new maximum, what rescales what came before, the maximum and the sum."""
    weights, rescale, new_max, lane_sums = find_weights(s, row_max, first, run, bounds, TILE_KV, SCORE, HAS_LISTS)
    tile_sum = gl.convert_layout(gl.sum(lane_sums, axis=1), row_max.type.layout)
    return weights, rescale, new_max, row_sum * rescale + tile_sum


@jit
def weigh_lanes(
    s, row_max, row_sum, first, run, bounds,
    TILE_KV: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """As `weigh`, with a sum of every lane of eight keys, [ROWS, 8]: no tile has to add them up across threads."""
    weights, rescale, new_max, lane_sums = find_weights(s, row_max, first, run, bounds, TILE_KV, SCORE, HAS_LISTS)
    of_rows: gl.constexpr = gl.SliceLayout(1, lane_sums.type.layout)
    return weights, rescale, new_max, row_sum * gl.convert_layout(rescale, of_rows)[:, None] + lane_sums


@jit
def find_weights(
    s, row_max, first, run, bounds,
    TILE_KV: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """Weights of a tile against the new maximum, what rescales what came before, the maximum, the tile's lane sums.

    Keys are taken as eights of neighbours, [ROWS, TILE_KV / 8, 8]: a thread holds two keys of every eight, and reduces
    over the eights first, in two chains a row that do not wait for each other. Keys that every row admits need no mask.
    [MASK-BEFORE-MAX]
    """
    _kv_start, _kv_end, full_start, full_end, _list_positions_ptr = run
    _mask_start, _mask_end, _q_idx, _slope, _product_slope, score_scale, cap_factor, cap = bounds
    x = s.reshape([s.shape[0], TILE_KV // 8, 8])
    layout: gl.constexpr = x.type.layout
    of_lanes: gl.constexpr = gl.SliceLayout(1, layout)  # [ROWS, 8]
    of_rows: gl.constexpr = gl.SliceLayout(1, of_lanes)
    eight = gl.arange(0, TILE_KV // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))) * 8
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, of_lanes))
    is_masked = (first < full_start) | (first + TILE_KV > full_end)
    if SCORE == ALIBI:
        rest = rest_of_bias(first, bounds, TILE_KV, layout)
    if is_masked:
        x = mask_scores(x, first, eight, lane, run, bounds, HAS_LISTS)
    tile_max = gl.max(x, axis=1)
    if SCORE == ALIBI:
        tile_max = tile_max * score_scale + rest
    tile_max = gl.convert_layout(gl.max(tile_max, axis=1), row_max.type.layout)
    if SCORE == PLAIN:
        tile_max = tile_max * score_scale
    if SCORE == SOFT_CAP:
        # A cap keeps the order, so that the maximum goes through it alone; a masked score would come out as -cap.
        capped_max = cap - 2 * cap * reciprocal(1.0 + gl.exp2(tile_max * cap_factor))
        tile_max = gl.where(tile_max == float("-inf"), tile_max, capped_max)
    new_max = gl.maximum(row_max, tile_max)
    # A row that has admitted nothing yet would subtract -inf from -inf. [EMPTY-OUT]
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    if SCORE == PLAIN:
        x = x * score_scale - spread(base, layout)
    elif SCORE == ALIBI:
        x = x * score_scale - (gl.convert_layout(base, of_rows)[:, None] - rest).expand_dims(1)
    else:
        x = shares_of_cap(x, cap_factor) * (-2 * cap) + spread(cap - base, layout)
        if is_masked:
            x = mask_scores(x, first, eight, lane, run, bounds, HAS_LISTS)
    weights = gl.exp2(x)
    rescale = gl.exp2(row_max - base)
    lane_sums = gl.sum(weights, axis=1)
    weights = gl.convert_layout(weights.reshape(s.shape), s.type.layout)
    return weights, rescale, new_max, lane_sums


@jit
def start_scores(zero, first, bounds, TILE_KV: gl.constexpr, SCORE: gl.constexpr):
    """What the product of q and k is added to: of a bias, where its eights of keys begin, before sm_scale.

    slope (kv - q) in two parts, that of the eight, from the tile's key nearest to the row so that little is lost in
    float32, and that of row and lane alone, which `rest_of_bias` has.
    """
    if SCORE == ALIBI:
        x = zero.reshape([zero.shape[0], TILE_KV // 8, 8])
        layout: gl.constexpr = x.type.layout
        eight = gl.arange(0, TILE_KV // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))) * 8
        way, _far = find_ways(first, bounds[2], TILE_KV, layout)
        slope = gl.convert_layout(bounds[4], gl.SliceLayout(1, way.type.layout))[:, None]
        begin = (slope * way).expand_dims(1)
        x = gl.fma(slope.expand_dims(1) + x, eight.to(gl.float32)[None, :, None] + x, begin + x)
        return gl.convert_layout(x.reshape(zero.shape), zero.type.layout)
    else:
        return zero


@jit
def rest_of_bias(first, bounds, TILE_KV: gl.constexpr, layout: gl.constexpr):
    """What scores that began with `start_scores` still lack of their bias, [ROWS, 8], in base 2."""
    way, far = find_ways(first, bounds[2], TILE_KV, layout)
    of_rows: gl.constexpr = gl.SliceLayout(1, way.type.layout)
    slope = gl.convert_layout(bounds[4], of_rows)[:, None]
    # what rounding moved the begin of the eights by, exactly
    moved = gl.fma(slope + 0.0 * way, way, -(slope * way))
    return (gl.convert_layout(bounds[3], of_rows) * far)[:, None] + moved * bounds[5]


@jit
def find_ways(first, q_idx, TILE_KV: gl.constexpr, layout: gl.constexpr):
    """From the tile's key nearest to the row to the first eight, for every lane, [ROWS, 8]; to the row, [ROWS]."""
    of_lanes: gl.constexpr = gl.SliceLayout(1, layout)
    of_rows: gl.constexpr = gl.SliceLayout(1, of_lanes)
    near = gl.convert_layout(gl.minimum(gl.maximum(q_idx - first, 0), TILE_KV), of_rows)
    lane = gl.arange(0, 8, layout=gl.SliceLayout(0, of_lanes))
    far = gl.convert_layout(first - q_idx, of_rows) + near
    return (lane[None, :] - near[:, None]).to(gl.float32), far.to(gl.float32)


@jit
def spread(row, layout: gl.constexpr):
    """A number a row, [ROWS, 1, 1]."""
    return gl.convert_layout(row, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]


@jit
def find_positions(first, run, TILE_KV: gl.constexpr, HAS_LISTS: gl.constexpr, layout: gl.constexpr):
    """Logical positions of a tile's keys, [TILE_KV]; of entries that are not the task's, -1."""
    return load_positions(first + gl.arange(0, TILE_KV, layout=layout), run, HAS_LISTS)


@jit
def load_positions(key, run, HAS_LISTS: gl.constexpr):
    """Logical positions of keys; of entries that are not the task's, -1."""
    if HAS_LISTS:
        return gl.load(run[4] + key, mask=(key >= run[0]) & (key < run[1]), other=-1)
    else:
        return key


@jit
def mask_scores(x, first, eight, lane, run, bounds, HAS_LISTS: gl.constexpr):
    """The scores of what a row may see, -inf for all other keys of the tile."""
    layout: gl.constexpr = x.type.layout
    kv_idx = load_positions(first + eight[None, :, None] + lane[None, None, :], run, HAS_LISTS)
    is_admitted = (kv_idx >= spread(bounds[0], layout)) & (kv_idx < spread(bounds[1], layout))
    return gl.where(is_admitted, x, float("-inf"))


@jit
def clear_outside(tile, first, kv_start, kv_end, TILE_KV: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Zeroes the rows of a tile of V that are not the task's, whose weight is 0: they may hold NaN.

    Both groups do it for themselves, before their product, and write the same zeros; the ring's place falls free after
    both.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for n in gl.static_range(TILE_KV // CLEARED):
        start = first + n * CLEARED
        if (start < kv_start) | (start + CLEARED > kv_end):
            part = tile.slice(n * CLEARED, CLEARED, dim=0)
            key = start + gl.arange(0, CLEARED, layout=gl.SliceLayout(1, layout))
            is_key = (key >= kv_start) & (key < kv_end)
            v = part.load(layout)
            part.store(gl.where(is_key[:, None], v, gl.full([CLEARED, HEAD_DIM], 0.0, v.dtype, layout=layout)))
    fence_async_shared()
    group_barrier()


@jit
def store_state(
    acc, row_max, row_sum, task_ptr, outputs,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    row_s: gl.constexpr,
    row_o: gl.constexpr,
):  # fmt: skip
    """Writes one chunk's state to its row of the workspace, as `merging` reads it."""
    partial = gl.load(task_ptr + 10).to(gl.int64) * (2 * ROWS)
    lane, _row, _head, _is_live = find_rows(task_ptr, PART, ROWS, HEADS, row_s)
    gl.store(outputs[5] + partial + lane, row_max)
    gl.store(outputs[6] + partial + lane, row_sum)
    lane, _row, _head, is_live = find_rows(task_ptr, PART, ROWS, HEADS, row_o)
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, acc.type.layout))
    ptrs = outputs[4] + ((partial + lane) * HEAD_DIM)[:, None] + dim[None, :]
    gl.store(ptrs, acc, mask=is_live[:, None])


@jit
def store_rows(
    acc, row_max, row_sum, task_ptr, outputs,
    PART: gl.constexpr,
    ROWS: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_WIDE_ROWS: gl.constexpr,
    dtype: gl.constexpr,
    row_s: gl.constexpr,
):  # fmt: skip
    """Normalizes and writes finished rows; the sink logit joins the denominator here, once. [LSE-SINK, EMPTY-OUT]"""
    out_ptr, lse_ptr, out_strides, lse_strides, _acc_ptr, _max_ptr, _sum_ptr, sink_logits_ptr = outputs
    _lane, row, head, is_live = find_rows(task_ptr, PART, ROWS, HEADS, row_s)
    is_empty = row_sum == 0
    empty_lse = gl.full([ROWS], float("-inf"), gl.float32, layout=row_s)
    factor = gl.full([ROWS], 1.0, gl.float32, layout=row_s)
    if HAS_SINK:
        empty_lse = gl.load(sink_logits_ptr + head, mask=is_live, other=0.0)
        sink = empty_lse * LOG2_E
        new_max = gl.maximum(row_max, sink)
        factor = gl.exp2(row_max - new_max)
        row_sum = row_sum * factor + gl.exp2(sink - new_max)
        row_max = new_max
    denominator = gl.where(is_empty, 1.0, row_sum)
    lse = gl.where(is_empty, empty_lse, (row_max + gl.log2(denominator)) * LN_2)
    gl.store(lse_ptr + row * lse_strides[0] + head * lse_strides[1], lse, mask=is_live)

    factor = gl.where(is_empty, 0.0, factor / denominator)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    out = gl.where(factor[:, None] == 0, 0.0, acc * factor[:, None])
    out = gl.convert_layout(out.to(dtype), layout)
    _lane, row, head, is_live = find_rows(task_ptr, PART, ROWS, HEADS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    starts = row * out_strides[0] + head * out_strides[1]
    ptrs = out_ptr + starts[:, None]
    if HAS_WIDE_ROWS:
        ptrs = by_sixteen_bytes(ptrs, dim[None, :])
    else:
        ptrs += (dim.to(gl.int64) * out_strides[2])[None, :]
    gl.store(ptrs, out, mask=is_live[:, None])


@jit
def shares_of_cap(x, cap_factor):
    """(1 - tanh) / 2 of products by what makes 2 log2(e) times tanh's argument of them."""
    return reciprocal_of_pairs(1.0 + gl.exp2(gl.minimum(x * cap_factor, LARGEST_POWER)))


@jit
def reciprocal(x):
    """1 / x to a unit in its last place, of x from 1 on."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def reciprocal_of_pairs(x):
    """1 / x, one reciprocal for two neighbours, whose product must not overflow: half the work of a scarce unit."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 t; mul.ftz.f32 t, $2, $3; rcp.approx.ftz.f32 t, t; "
        "mul.ftz.f32 $0, t, $3; mul.ftz.f32 $1, t, $2; }",
        "=&f,=&f,f,f", [x], dtype=gl.float32, is_pure=True, pack=2,
    )  # fmt: skip
