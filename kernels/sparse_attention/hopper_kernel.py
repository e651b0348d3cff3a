"""The kernel of `hopper`: groups of warps that multiply, and a warp that brings them keys and values.

Two groups hold half a tile of query rows each; a warp of its own has TMA copy K and V into a ring of tiles in shared
memory, box by box: a box is some neighbouring keys of one page and 64 dimensions, as far as a swizzle goes. While a
group works out the weights of a tile of keys, its product P V of the tile before is under way, and the other group's
products: the two take turns. Under a cap, whose weights take longest, the next tile's scores are under way too, and
nobody waits for a turn. Programs stay, and take every so-many-th task of the list.

A box is read whole. What it holds before and after the task's keys may be anything, NaN included: scores of such keys
are masked before the maximum, and their rows of V are zeroed by the warp that loads before they meet a weight of 0.
[MASK-BEFORE-MAX, COORD-SLOT, COORD-WIDE, COORD-STRIDE, GQA-MAP, EMPTY-OUT, LSE-NATURAL, LSE-SINK]

It imports Gluon, Triton's layer below tiles, so that only `hopper` imports this module, where it launches.
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from attnconform.kernels.sparse_attention.hopper_rows import load_bounds, load_queries, store_rows, store_state
from attnconform.kernels.sparse_attention.hopper_scores import ALIBI, SOFT_CAP, start_scores, weigh_lanes
from attnconform.kernels.sparse_attention.hopper_tiles import (
    find_run,
    finish_writing,
    group_barrier,
    load_tiles,
    make_barriers,
)


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
    k_full = make_barriers(STAGES, 1)
    k_empty = make_barriers(STAGES, 2)
    v_full = make_barriers(STAGES + 1, 1)
    v_empty = make_barriers(STAGES, 2)
    turns = make_barriers(2, 1)
    finish_writing()

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
                TASK_WIDTH, TILE_KV, HEAD_DIM, PAGE_SIZE, BOX, STAGES, HAS_LISTS, False,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


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
    mbarrier.wait(v_full.index(stage), ((stop - 1) // STAGES) & 1)
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
    mbarrier.wait(v_full.index(stage), ((stop - 1) // STAGES) & 1)
    acc_token = warpgroup_mma(p, v_tiles.index(stage), acc, use_acc=num_tiles > 1, is_async=True)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc_token])
    group_barrier()
    mbarrier.arrive(v_empty.index(stage), count=1)
    return acc, row_max, row_sum
