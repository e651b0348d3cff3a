"""The Hopper kernel of dQ: two groups that multiply hold half a tile of rows each, a warp brings them keys and values.

What `backward_query` sums without cold pages, over the same tasks. A group keeps q, dO and the sum of its 64 rows, and
of every tile of keys forms S = Q K^T and dP = dO V^T, from them dS, and adds dS K. The product of one tile is under
way while the next tile's scores are formed; the loading warp is that of `hopper_kernel`.
[GRAD-FORMULA, GRAD-ZERO, MASK-INTERFERE, COORD-SLOT]

It imports Gluon, so that only `hopper_backward` imports this module, where it launches.
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from attnconform.kernels.sparse_attention.hopper_backward_keys import place_lanes
from attnconform.kernels.sparse_attention.hopper_rows import by_sixteen_bytes, find_rows
from attnconform.kernels.sparse_attention.hopper_scores import (
    ALIBI,
    LEAST_FACTOR,
    LOG2_E,
    PLAIN,
    SOFT_CAP,
    find_positions,
    missing_of_cap,
    slope_of_cap,
    spread,
)
from attnconform.kernels.sparse_attention.hopper_tiles import (
    find_run,
    finish_writing,
    group_barrier,
    load_tiles,
    make_barriers,
)

ROWS = gl.constexpr(64)  # rows times heads of a group


# Numbers of a batch or a rule: a kernel compiled for one value of them must serve every other.
@jit(do_not_specialize=["num_tasks", "total_q", "max_pages"])
def hopper_query_kernel(
    q_ptr, dout_ptr, k_desc, v_desc, lse_log2_ptr, delta_ptr, dq_ptr, partial_dq_ptr,
    q_strides, dout_strides, k_places, v_places, dq_strides,
    tasks_ptr, page_table_ptr, list_slots_ptr, list_positions_ptr,
    row_positions_ptr, mask_starts_ptr, mask_ends_ptr, score_params_ptr,
    sm_scale, num_tasks, total_q, max_pages,
    TASK_WIDTH: gl.constexpr,
    TILE_KV: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,  # keys of a box
    STAGES: gl.constexpr,  # tiles of the ring
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
    HAS_HEAD_MASK: gl.constexpr,
    HAS_WIDE_ROWS: gl.constexpr,  # q and dO can be read by 16 bytes
):  # fmt: skip
    """dQ of the tasks program_id, program_id + num_programs, ..., or their chunks of it."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_KV, HEAD_DIM], dtype)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_KV, HEAD_DIM], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_KV, HEAD_DIM], tile_layout)
    row_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD_DIM], dtype)
    row_tiles = gl.allocate_shared_memory(dtype, [4, ROWS, HEAD_DIM], row_layout)
    k_full = make_barriers(STAGES + 1, 1)
    k_empty = make_barriers(STAGES, 2)
    v_full = make_barriers(STAGES, 1)
    v_empty = make_barriers(STAGES, 2)
    finish_writing()

    ring = (k_tiles, v_tiles, k_full, k_empty, v_full, v_empty)
    tasks = (tasks_ptr, num_tasks)
    lists = (list_slots_ptr, list_positions_ptr)
    rows = (
        q_ptr, q_strides, dout_ptr, dout_strides, lse_log2_ptr, delta_ptr,
        row_positions_ptr, mask_starts_ptr, mask_ends_ptr, total_q,
    )  # fmt: skip
    scores = (sm_scale, score_params_ptr)
    outputs = (dq_ptr, partial_dq_ptr, dq_strides)
    gl.warp_specialize(
        [
            (sum_rows, (
                row_tiles, ring, tasks, lists, rows, scores, outputs,
                0, TASK_WIDTH, HEADS, GROUP, TILE_KV, HEAD_DIM, BOX, STAGES, SCORE, HAS_LISTS, HAS_HEAD_MASK,
                HAS_WIDE_ROWS,
            )),
            (sum_rows, (
                row_tiles, ring, tasks, lists, rows, scores, outputs,
                1, TASK_WIDTH, HEADS, GROUP, TILE_KV, HEAD_DIM, BOX, STAGES, SCORE, HAS_LISTS, HAS_HEAD_MASK,
                HAS_WIDE_ROWS,
            )),
            (load_tiles, (
                k_desc, v_desc, k_places, v_places, ring, tasks, page_table_ptr, max_pages, list_slots_ptr,
                TASK_WIDTH, TILE_KV, HEAD_DIM, PAGE_SIZE, BOX, STAGES, HAS_LISTS, True,
            )),
        ],
        [4, 1],
        [224, 56],
    )  # fmt: skip


@jit
def sum_rows(
    row_tiles, ring, tasks, lists, rows, scores, outputs,
    PART: gl.constexpr,  # which half of a tile's rows
    TASK_WIDTH: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    TILE_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
    HAS_HEAD_MASK: gl.constexpr,
    HAS_WIDE_ROWS: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: its half of the rows of every task against every tile of keys.

    Longer than a screen: where products are begun and waited for must be seen in one piece.
    """
    k_tiles, v_tiles, k_full, k_empty, v_full, v_empty = ring
    tasks_ptr, num_tasks = tasks
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KV, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    grad_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    dtype: gl.constexpr = row_tiles.dtype
    q_tile, dout_tile = row_tiles.index(2 * PART), row_tiles.index(2 * PART + 1)
    zero = gl.full([ROWS, TILE_KV], 0.0, gl.float32, layout=s_layout)

    done = 0  # tiles of the tasks before
    for task in range(gl.program_id(0), num_tasks, gl.num_programs(0)):
        task_ptr = tasks_ptr + task.to(gl.int64) * TASK_WIDTH
        kv_start, kv_end, first, num_tiles = find_run(task_ptr, lists[0], TILE_KV, BOX, HAS_LISTS)
        run = (kv_start, kv_end, gl.load(task_ptr + 8), gl.load(task_ptr + 9), lists[1])
        load_rows(q_tile, dout_tile, task_ptr, rows, PART, HEADS, GROUP, HEAD_DIM, HAS_WIDE_ROWS)
        bounds = load_states(task_ptr, run, rows, scores, PART, HEADS, GROUP, SCORE, HAS_LISTS, HAS_HEAD_MASK, s_layout)
        dq = gl.full([ROWS, HEAD_DIM], 0.0, gl.float32, layout=sum_layout)
        q = q_tile.load(gl.DotOperandLayout(0, s_layout, 2))

        if num_tiles > 0:
            stop = done + num_tiles
            stage = done % STAGES
            mbarrier.wait(k_full.index(stage), (done // STAGES) & 1)
            start = start_scores(zero, first, run, bounds, TILE_KV, SCORE, HAS_LISTS)
            s_token = warpgroup_mma(
                q, k_tiles.index(stage).permute((1, 0)), start, use_acc=SCORE == ALIBI, is_async=True
            )
            mbarrier.wait(v_full.index(stage), (done // STAGES) & 1)
            dp_token = warpgroup_mma(
                dout_tile, v_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            s = warpgroup_mma_wait(num_outstanding=1, deps=[s_token])
            factors = weigh_keys(s, first, run, bounds, TILE_KV, SCORE, HAS_LISTS)
            dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp_token])
            group_barrier()
            mbarrier.arrive(v_empty.index(stage), count=1)
            grad = gl.convert_layout(differentiate(factors, dp, first, run, bounds, TILE_KV).to(dtype), grad_layout)
            for i in range(done + 1, stop):
                stage = i % STAGES
                before = (i - 1) % STAGES
                first_key = first + (i - done) * TILE_KV
                start = start_scores(zero, first_key, run, bounds, TILE_KV, SCORE, HAS_LISTS)
                mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
                s_token = warpgroup_mma(
                    q, k_tiles.index(stage).permute((1, 0)), start, use_acc=SCORE == ALIBI, is_async=True
                )
                dq_token = warpgroup_mma(grad, k_tiles.index(before), dq, is_async=True)
                mbarrier.wait(v_full.index(stage), (i // STAGES) & 1)
                dp_token = warpgroup_mma(
                    dout_tile, v_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                s = warpgroup_mma_wait(num_outstanding=2, deps=[s_token])
                factors = weigh_keys(s, first_key, run, bounds, TILE_KV, SCORE, HAS_LISTS)
                dp, dq = warpgroup_mma_wait(num_outstanding=0, deps=[dp_token, dq_token])
                group_barrier()
                mbarrier.arrive(k_empty.index(before), count=1)
                mbarrier.arrive(v_empty.index(stage), count=1)
                next_grad = differentiate(factors, dp, first_key, run, bounds, TILE_KV)
                grad = gl.convert_layout(next_grad.to(dtype), grad_layout)
            stage = (stop - 1) % STAGES
            dq_token = warpgroup_mma(grad, k_tiles.index(stage), dq, is_async=True)
            dq = warpgroup_mma_wait(num_outstanding=0, deps=[dq_token])
            group_barrier()
            mbarrier.arrive(k_empty.index(stage), count=1)
            done = stop
        store_rows(dq * scores[0], task_ptr, outputs, PART, HEADS, HEAD_DIM)


@jit
def load_rows(
    q_tile, dout_tile, task_ptr, rows,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HAS_WIDE_ROWS: gl.constexpr,
):  # fmt: skip
    """A group's rows of q and dO into shared memory; 0 in lanes of no row, or of one without keys."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    _lane, row, head, is_live = find_rows(task_ptr, PART, ROWS, HEADS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout)).to(gl.int64)
    lse = gl.load(rows[4] + place_lanes(row, head, rows[9], GROUP), mask=is_live, other=float("inf"))
    has_key = (lse < float("inf"))[:, None]
    q_ptrs = rows[0] + (row * rows[1][0] + head * rows[1][1])[:, None]
    dout_ptrs = rows[2] + (row * rows[3][0] + head * rows[3][1])[:, None]
    if HAS_WIDE_ROWS:
        q_ptrs, dout_ptrs = by_sixteen_bytes(q_ptrs, dim[None, :]), by_sixteen_bytes(dout_ptrs, dim[None, :])
    else:
        q_ptrs, dout_ptrs = q_ptrs + (dim * rows[1][2])[None, :], dout_ptrs + (dim * rows[3][2])[None, :]
    q_tile.store(gl.load(q_ptrs, mask=has_key, other=0.0))
    dout_tile.store(gl.load(dout_ptrs, mask=has_key, other=0.0))
    finish_writing()


@jit
def load_states(
    task_ptr, run, rows, scores,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
    HAS_HEAD_MASK: gl.constexpr,
    s_layout: gl.constexpr,
):  # fmt: skip
    """What every row may see, its lse in base 2 and its delta, and what becomes of its scores.

    mask_start, mask_end, lse, delta; slope of a bias, and a position near the rows: what the bias takes off for the
    row's own place is in lse; what makes a score of a product, and of a capped one; the cap. All in base 2.
    """
    layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    sm_scale, score_params_ptr = scores
    _lane, row, head, is_live = find_rows(task_ptr, PART, ROWS, HEADS, layout)
    interval = row
    if HAS_HEAD_MASK:
        interval = head * rows[9] + row
    mask_start = gl.load(rows[7] + interval, mask=is_live, other=0)
    mask_end = gl.load(rows[8] + interval, mask=is_live, other=0)
    if not HAS_LISTS:
        mask_start = gl.maximum(mask_start, run[0])
        mask_end = gl.minimum(mask_end, run[1])
    place = place_lanes(row, head, rows[9], GROUP)
    lse = gl.load(rows[4] + place, mask=is_live, other=float("inf"))
    delta = gl.load(rows[5] + place, mask=is_live, other=0.0)
    slope = gl.full([ROWS], 0.0, gl.float32, layout=layout)
    origin = 0
    cap_factor = 0.0
    cap = 0.0
    if SCORE == ALIBI:
        q_idx = gl.load(rows[6] + row, mask=is_live, other=0)
        slope = gl.load(score_params_ptr + head, mask=is_live, other=0.0) * LOG2_E
        origin = gl.max(q_idx, axis=0)
        lse += slope * (q_idx - origin).to(gl.float32)
    if SCORE == SOFT_CAP:
        # tanh(x / cap) = 1 - 1 / (1/2 + exp2(x * factor) / 2); one cap serves all heads
        cap = gl.load(score_params_ptr)
        cap_factor = gl.maximum(sm_scale * (2 * LOG2_E) / cap, LEAST_FACTOR)
        cap = cap * LOG2_E
    return mask_start, mask_end, lse, delta, slope, origin, sm_scale * LOG2_E, cap_factor, cap


@jit
def weigh_keys(s, first_key, run, bounds, TILE_KV: gl.constexpr, SCORE: gl.constexpr, HAS_LISTS: gl.constexpr):
    """What gradients of a tile's scores are multiplied by: probabilities, times the slope of a cap; 0 off the edges."""
    # Apart from each other: what both would share had to wait in registers for the mask.
    if (first_key < run[2]) | (first_key + TILE_KV > run[3]):
        factors = weigh_edges(s, first_key, run, bounds, True, TILE_KV, SCORE, HAS_LISTS)
    else:
        factors = weigh_edges(s, first_key, run, bounds, False, TILE_KV, SCORE, HAS_LISTS)
    return factors


@jit
def weigh_edges(
    s, first_key, run, bounds,
    IS_MASKED: gl.constexpr,
    TILE_KV: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_LISTS: gl.constexpr,
):  # fmt: skip
    """Likewise, of a tile with or without edges that are none. [GRAD-FORMULA, GRAD-SOFTCAP, MASK-BEFORE-MAX]"""
    mask_start, mask_end, lse, _delta, _slope, _origin, score_scale, cap_factor, cap = bounds
    column: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    if IS_MASKED:
        kv_idx = find_positions(first_key, run, TILE_KV, HAS_LISTS, column)
        is_admitted = (kv_idx[None, :] >= mask_start[:, None]) & (kv_idx[None, :] < mask_end[:, None])
        if SCORE == SOFT_CAP:
            s = gl.where(is_admitted, s, float("-inf"))  # or it would reach its neighbour by their one reciprocal
    if SCORE == PLAIN:
        exponents = s * score_scale - lse[:, None]
    elif SCORE == ALIBI:
        exponents = s * score_scale
    else:
        missing = missing_of_cap(s, cap_factor)
        exponents = missing * (-cap) + (cap - lse)[:, None]
    if IS_MASKED:
        exponents = gl.where(is_admitted, exponents, float("-inf"))
    factors = gl.exp2(exponents)
    if SCORE == SOFT_CAP:
        probs = factors
        factors = probs * slope_of_cap(missing)
        if IS_MASKED:
            factors = gl.where(probs == 0, 0.0, factors)
    return factors


@jit
def start_scores(
    zero, first_key, run, bounds, TILE_KV: gl.constexpr, SCORE: gl.constexpr, HAS_LISTS: gl.constexpr
):  # fmt: skip
    """What the product of q and k is added to: a bias and lse, before sm_scale.

    Of consecutive positions the bias of a row's eights of keys differs by what is constant.
    """
    if SCORE != ALIBI:
        return zero
    _mask_start, _mask_end, lse, _delta, slope, origin, score_scale, _cap_factor, _cap = bounds
    slope, lse = slope / score_scale, lse / score_scale
    if HAS_LISTS:
        column: gl.constexpr = gl.SliceLayout(0, zero.type.layout)
        place = (find_positions(first_key, run, TILE_KV, True, column) - origin).to(gl.float32)
        return slope[:, None] * place[None, :] - lse[:, None]
    else:
        by_eight = zero.reshape([ROWS, TILE_KV // 8, 8])
        layout: gl.constexpr = by_eight.type.layout
        slope = spread(slope, layout)
        eight = (8 * gl.arange(0, TILE_KV // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))).to(gl.float32)
        one = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
        place = (first_key - origin + one).to(gl.float32)[None, None, :]
        rest = slope * place - spread(lse, layout)
        start = slope * eight[None, :, None] + rest
        return gl.convert_layout(start.reshape([ROWS, TILE_KV]), zero.type.layout)


@jit
def differentiate(factors, dp, first_key, run, bounds, TILE_KV: gl.constexpr):
    """Gradients of a tile's scores before any rule; 0 off the edges, whatever V holds there."""
    if (first_key < run[2]) | (first_key + TILE_KV > run[3]):
        dp = gl.where(factors == 0, 0.0, dp)
    return factors * (dp - bounds[3][:, None])


@jit
def store_rows(dq, task_ptr, outputs, PART: gl.constexpr, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Writes a group's rows, or its share of a chunk where the tile was cut."""
    dq_ptr, partial_dq_ptr, dq_strides = outputs
    lane, row, head, is_live = find_rows(task_ptr, PART, ROWS, HEADS, gl.SliceLayout(1, dq.type.layout))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, dq.type.layout)).to(gl.int64)
    partial = gl.load(task_ptr + 10).to(gl.int64)
    if partial >= 0:
        states = (partial * (2 * ROWS) + lane) * HEAD_DIM
        gl.store(partial_dq_ptr + states[:, None] + dim[None, :], dq, mask=is_live[:, None])
    else:
        starts = row * dq_strides[0] + head * dq_strides[1]
        ptrs = dq_ptr + starts[:, None] + (dim * dq_strides[2])[None, :]
        gl.store(ptrs, dq.to(dq_ptr.dtype.element_ty), mask=is_live[:, None])
