"""The Hopper kernel of dQ over union tiles: groups of warps share blocks that any row of a tile lists. [BLOCK-MEMBER]

What `backward_query` sums for rows with lists of their own, where neighbouring rows list many of the same blocks. Two
groups hold 64 lanes each, a lane being one query row and head; the warp that loads is that of `hopper_union_kernel`,
and its ring. A group keeps q, dO and the sum of its lanes; of every tile of 64 keys that one of its rows lists it forms
S = Q K^T and dP = dO V^T, from them dS, and adds dS K. The two groups fill each other's waits.

Whatever a row does not list or may not see is dropped from dS, after both products: what foreign keys and values hold
reaches no row as long as it is finite, and keys that no row of the task admits may be anything, NaN included: the warp
that loads zeroes them before a product sums over them. The order of additions is that of the blocks, so that every run
gives the same bits. [GRAD-FORMULA, GRAD-SET, MASK-INTERFERE, EMPTY-GRAD, COORD-SLOT, COORD-STRIDE]

It imports Gluon, so that only `hopper_backward` imports this module, where it launches.
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from attnconform.kernels.sparse_attention.hopper_backward_query import load_rows, load_states
from attnconform.kernels.sparse_attention.hopper_rows import find_rows
from attnconform.kernels.sparse_attention.hopper_scores import LOG2_E, PLAIN
from attnconform.kernels.sparse_attention.hopper_tiles import finish_writing, group_barrier, make_barriers
from attnconform.kernels.sparse_attention.hopper_union_kernel import (
    LANES,
    SEEN_ROWS,
    count_tiles,
    is_whole_tile,
    load_blocks,
    load_units,
)


# Numbers of a batch: a kernel compiled for one value of them must serve every other.
@jit(do_not_specialize=["num_tasks", "total_q", "max_pages"])
def hopper_union_query_kernel(
    q_ptr, dout_ptr, k_desc, v_desc, lse_log2_ptr, delta_ptr, dq_ptr,
    q_strides, dout_strides, k_places, v_places, dq_strides,
    tasks_ptr, blocks_ptr, members_ptr, page_table_ptr, row_positions_ptr, mask_starts_ptr, mask_ends_ptr,
    sm_scale, num_tasks, total_q, max_pages,
    TASK_WIDTH: gl.constexpr,
    TILE_Q: gl.constexpr,  # rows of a task at most
    TILE_KV: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,  # keys of a tile that one entry's bits speak of
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,  # keys of a box
    STAGES: gl.constexpr,  # tiles of the ring
    HAS_WIDE_ROWS: gl.constexpr,  # q and dO can be read by 16 bytes
):  # fmt: skip
    """dQ of the rows of the tasks program_id, program_id + num_programs, ..."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_KV, HEAD_DIM], dtype)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_KV, HEAD_DIM], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_KV, HEAD_DIM], tile_layout)
    row_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LANES, HEAD_DIM], dtype)
    row_tiles = gl.allocate_shared_memory(dtype, [4, LANES, HEAD_DIM], row_layout)
    k_full = make_barriers(STAGES + 1, 1)
    v_full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 2)
    finish_writing()

    ring = (k_tiles, v_tiles, k_full, v_full, empty)
    tasks = (tasks_ptr, num_tasks)
    entries = (blocks_ptr, members_ptr)
    rows = (
        q_ptr, q_strides, dout_ptr, dout_strides, lse_log2_ptr, delta_ptr,
        row_positions_ptr, mask_starts_ptr, mask_ends_ptr, total_q,
    )  # fmt: skip
    intervals = (mask_starts_ptr, mask_ends_ptr)
    scores = (sm_scale, q_ptr)  # no rule has parameters
    outputs = (dq_ptr, dq_strides)
    gl.warp_specialize(
        [
            (sum_members, (
                row_tiles, ring, tasks, entries, rows, scores, outputs,
                0, TASK_WIDTH, TILE_Q, TILE_KV, HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, UNIT, STAGES, HAS_WIDE_ROWS,
            )),
            (sum_members, (
                row_tiles, ring, tasks, entries, rows, scores, outputs,
                1, TASK_WIDTH, TILE_Q, TILE_KV, HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, UNIT, STAGES, HAS_WIDE_ROWS,
            )),
            (load_blocks, (
                k_desc, v_desc, k_places, v_places, ring, tasks, entries, page_table_ptr, max_pages, intervals,
                TASK_WIDTH, TILE_KV, HEAD_DIM, BLOCK_SIZE, UNIT, PAGE_SIZE, BOX, STAGES, True,
            )),
        ],
        [4, 1],
        [216, 72],
    )  # fmt: skip


@jit
def sum_members(
    row_tiles, ring, tasks, entries, rows, scores, outputs,
    PART: gl.constexpr,  # which half of a tile's lanes
    TASK_WIDTH: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_KV: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_WIDE_ROWS: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: its lanes of every task against the tiles that any of their rows lists.

    Longer than a screen: where products are begun and waited for must be seen in one piece.
    """
    k_tiles, v_tiles, k_full, v_full, empty = ring
    tasks_ptr, num_tasks = tasks
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KV, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    grad_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    dtype: gl.constexpr = row_tiles.dtype
    q_tile, dout_tile = row_tiles.index(2 * PART), row_tiles.index(2 * PART + 1)
    zero = gl.full([LANES, TILE_KV], 0.0, gl.float32, layout=s_layout)
    # Bits of the rows of which the group has a head; where it has none, a bit that no entry has.
    FIRST_ROW: gl.constexpr = min(PART * LANES // HEADS, SEEN_ROWS - 1)
    NUM_ROWS: gl.constexpr = max(1, min(TILE_Q, ((PART + 1) * LANES - 1) // HEADS + 1) - FIRST_ROW)
    local_row = gl.minimum((PART * LANES + gl.arange(0, LANES, layout=row_s)) // HEADS, SEEN_ROWS - 1)

    done = 0  # tiles of the tasks before
    for task in range(gl.program_id(0), num_tasks, gl.num_programs(0)):
        task_ptr = tasks_ptr + task.to(gl.int64) * TASK_WIDTH
        entry_start = gl.load(task_ptr + 6)
        entry_end = gl.load(task_ptr + 7)
        full = (gl.load(task_ptr + 8), gl.load(task_ptr + 9))
        num_tiles = count_tiles(entry_start, entry_end, BLOCK_SIZE, UNIT, TILE_KV)
        units = load_units(0, entry_start, entry_end, entries, BLOCK_SIZE, UNIT, TILE_KV)
        load_rows(q_tile, dout_tile, task_ptr, rows, PART, HEADS, GROUP, HEAD_DIM, HAS_WIDE_ROWS)
        bounds = load_states(task_ptr, (0, 0), rows, scores, PART, HEADS, GROUP, PLAIN, True, False, s_layout)
        mask_start, mask_end, lse, delta = bounds[0], bounds[1], bounds[2], bounds[3]
        dq = gl.full([LANES, HEAD_DIM], 0.0, gl.float32, layout=sum_layout)
        for i in range(num_tiles):
            stage = (done + i) % STAGES
            phase = ((done + i) // STAGES) & 1
            positions, members = units
            units = load_units(i + 1, entry_start, entry_end, entries, BLOCK_SIZE, UNIT, TILE_KV)
            listed = members[0]
            for n in gl.static_range(1, TILE_KV // UNIT):
                listed |= members[n]
            mbarrier.wait(k_full.index(stage), phase)
            if ((listed >> FIRST_ROW) & ((1 << NUM_ROWS) - 1)) != 0:
                is_whole = is_whole_tile(i, entry_start, full, BLOCK_SIZE, UNIT, TILE_KV)
                s_token = warpgroup_mma(
                    q_tile, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                mbarrier.wait(v_full.index(stage), phase)
                dp_token = warpgroup_mma(
                    dout_tile, v_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                s = warpgroup_mma_wait(num_outstanding=1, deps=[s_token])
                factors = gl.exp2(s * (scores[0] * LOG2_E) - lse[:, None])
                dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp_token])
                # Dropped here and not before: the product dP of finite values may be no number. [MASK-INTERFERE]
                grad = keep_members(factors * (dp - delta[:, None]), members, local_row, UNIT, TILE_KV)
                if not is_whole:
                    grad = keep_positions(grad, positions, mask_start, mask_end, UNIT, TILE_KV)
                grad = gl.convert_layout(grad.to(dtype), grad_layout)
                dq = warpgroup_mma(grad, k_tiles.index(stage), dq, is_async=True)
                dq = warpgroup_mma_wait(num_outstanding=0, deps=[dq])
                group_barrier()
            else:
                mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(empty.index(stage), count=1)
        done += num_tiles
        store_sums(dq * scores[0], task_ptr, outputs, PART, HEADS, HEAD_DIM)


@jit
def keep_members(grad, members, local_row, UNIT: gl.constexpr, TILE_KV: gl.constexpr):
    """Gradients of the scores of units that a lane's row lists, 0 of all others. [BLOCK-MEMBER]"""
    key = gl.arange(0, TILE_KV, layout=gl.SliceLayout(0, grad.type.layout))
    for n in gl.static_range(TILE_KV // UNIT):
        is_foreign = (((members[n] >> local_row) & 1) == 0)[:, None]
        if UNIT < TILE_KV:
            is_foreign = is_foreign & (key // UNIT == n)[None, :]
        grad = gl.where(is_foreign, 0.0, grad)
    return grad


@jit
def keep_positions(grad, positions, mask_start, mask_end, UNIT: gl.constexpr, TILE_KV: gl.constexpr):
    """Gradients of the scores of what a lane's row may see, 0 of all other keys of the tile."""
    key = gl.arange(0, TILE_KV, layout=gl.SliceLayout(0, grad.type.layout))
    kv_idx = positions[0] + key
    for n in gl.static_range(1, TILE_KV // UNIT):
        kv_idx = gl.where(key >= n * UNIT, positions[n] + key - n * UNIT, kv_idx)
    is_admitted = (kv_idx[None, :] >= mask_start[:, None]) & (kv_idx[None, :] < mask_end[:, None])
    return gl.where(is_admitted, grad, 0.0)


@jit
def store_sums(dq, task_ptr, outputs, PART: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Writes a group's rows, those without keys as 0."""
    dq_ptr, dq_strides = outputs
    _lane, row, head, is_live = find_rows(task_ptr, PART, LANES, HEADS, gl.SliceLayout(1, dq.type.layout))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, dq.type.layout)).to(gl.int64)
    ptrs = dq_ptr + (row * dq_strides[0] + head * dq_strides[1])[:, None] + (dim * dq_strides[2])[None, :]
    gl.store(ptrs, dq.to(dq_ptr.dtype.element_ty), mask=is_live[:, None])
