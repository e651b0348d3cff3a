"""The Hopper kernel of dK and dV of lists per token: every step is the heads of several rows, wherever they lie.

What `backward_keys` sums, over the same items, where every reader is one row. A step is 64 lanes, the heads of several
readers, each row brought by TMA as one box. Two groups that multiply hold the whole tile of 64 slots and take every
other step; at the end each hands the other one of its two sums, so that the order of additions is fixed. Products are
formed slots first, as in `hopper_backward_keys`, so that P^T and dS^T are where wgmma takes them from.

dQ is gathered by the rows' own tasks, or over unions of them. Added here instead, where K is at hand, it is no faster:
as measured on an H200 over 16 blocks of 64 for each of 32,768 rows, atomic additions alone take as long as that
gathering (both are bounded by L2), and in an order that repeats they take twice as long.
[GRAD-FORMULA, GRAD-ZERO, GRAD-SUM, MASK-INTERFERE, COORD-WIDE]

It imports Gluon, so that only `hopper_backward` imports this module, where it launches.
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from attnconform.kernels.sparse_attention.hopper_backward_keys import find_slots, place_lanes
from attnconform.kernels.sparse_attention.hopper_scores import LOG2_E
from attnconform.kernels.sparse_attention.hopper_tiles import (
    BY_GROUP,
    BY_WARP,
    SWIZZLED,
    clear_unless,
    finish_writing,
    group_barrier,
    hand_over,
    load_box,
    load_boxes,
    make_barriers,
)

LANES = gl.constexpr(64)  # rows times heads of a step
SLOTS = gl.constexpr(64)  # of a tile
PAIR_WIDTH = gl.constexpr(4)


# Numbers of a batch: a kernel compiled for one value of them must serve every other.
@jit(do_not_specialize=["total_q"])
def hopper_rows_kernel(
    q_desc, dout_desc, k_desc, v_desc, lse_log2_ptr, delta_ptr,
    dk_ptr, dv_ptr, partial_dk_ptr, partial_dv_ptr,
    q_rows, dout_rows, k_places, v_places, dk_strides, dv_strides,
    item_tile_ptr, item_begin_ptr, item_full_end_ptr, item_end_ptr, item_partial_ptr,
    tile_slot_ptr, tile_kv_head_ptr, pairs_ptr, codes_ptr, is_touched_ptr,
    mask_starts_ptr, mask_ends_ptr,
    sm_scale, total_q,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,  # slots of a box
    STAGES: gl.constexpr,  # steps of the ring
):  # fmt: skip
    """dK and dV of one item's slot tile, written or left as a part."""
    dtype: gl.constexpr = q_desc.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SLOTS, HEAD_DIM], dtype)
    k_tile = gl.allocate_shared_memory(dtype, [SLOTS, HEAD_DIM], tile_layout)
    v_tile = gl.allocate_shared_memory(dtype, [SLOTS, HEAD_DIM], tile_layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, LANES, HEAD_DIM], tile_layout)
    dout_tiles = gl.allocate_shared_memory(dtype, [STAGES, LANES, HEAD_DIM], tile_layout)
    sum_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SLOTS, HEAD_DIM], gl.float32)
    sums = gl.allocate_shared_memory(gl.float32, [SLOTS, HEAD_DIM], sum_layout)
    vector_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, LANES], vector_layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, LANES], vector_layout)
    kv_full = make_barriers(1, 2)
    q_full = make_barriers(STAGES, 1 + BY_WARP)  # of q by TMA, of the rest by the warp that loads
    dout_full = make_barriers(STAGES, 1)
    empty = make_barriers(STAGES, 1)
    ends = make_barriers(2, BY_GROUP)
    finish_writing()

    ring = (k_tile, v_tile, q_tiles, dout_tiles, lse_rows, delta_rows, kv_full, q_full, dout_full, empty)
    item = gl.program_id(0)
    tile = gl.load(item_tile_ptr + item)
    begin = gl.load(item_begin_ptr + item)
    span = (pairs_ptr + begin * PAIR_WIDTH,
            (gl.load(item_full_end_ptr + item) - begin).to(gl.int32),
            (gl.load(item_end_ptr + item) - begin).to(gl.int32))  # fmt: skip
    kv_head = gl.load(tile_kv_head_ptr + tile).to(gl.int32) + gl.program_id(1)
    slots = (gl.load(tile_slot_ptr + tile).to(gl.int32), kv_head, is_touched_ptr + tile * SLOTS)
    rows = (mask_starts_ptr, mask_ends_ptr, codes_ptr)
    partial = gl.load(item_partial_ptr + item)
    outputs = (dk_ptr, dv_ptr, partial_dk_ptr, partial_dv_ptr, dk_strides, dv_strides, partial)
    gl.warp_specialize(
        [
            (sum_slots, (
                ring, span, slots, rows, sm_scale, outputs, sums, ends, 0, HEADS, HEAD_DIM, PAGE_SIZE, STAGES,
            )),
            (sum_slots, (
                ring, span, slots, rows, sm_scale, outputs, sums, ends, 1, HEADS, HEAD_DIM, PAGE_SIZE, STAGES,
            )),
            (load_rows, (
                q_desc, dout_desc, k_desc, v_desc, q_rows, dout_rows, k_places, v_places, ring, span, slots,
                lse_log2_ptr, delta_ptr, total_q,
                HEADS, GROUP, HEAD_DIM, PAGE_SIZE, BOX, STAGES,
            )),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip


@jit
def load_rows(
    q_desc, dout_desc, k_desc, v_desc,
    q_rows, dout_rows,  # heads' rows from a token to the next
    k_places, v_places, ring, span, slots, lse_log2_ptr, delta_ptr, total_q,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warp that loads: the slots' K and V, then every step's q and dO, lse and delta."""
    k_tile, v_tile, q_tiles, dout_tiles, lse_rows, delta_rows, kv_full, q_full, dout_full, empty = ring
    pairs_ptr, _full_pairs, num_pairs = span
    first_slot, kv_head, _is_touched_ptr = slots
    pages, offsets = find_slots(first_slot, PAGE_SIZE, BOX)
    load_boxes(k_desc, k_places, k_tile, kv_full.index(0), kv_head, pages, offsets, SLOTS, HEAD_DIM, BOX)
    load_boxes(v_desc, v_places, v_tile, kv_full.index(0), kv_head, pages, offsets, SLOTS, HEAD_DIM, BOX)
    lane_layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    lane = gl.arange(0, LANES, layout=lane_layout)
    READERS: gl.constexpr = LANES // HEADS
    readers = find_readers(pairs_ptr, 0, num_pairs, READERS, HEADS)
    states = load_states(pairs_ptr, 0, num_pairs, lane, lse_log2_ptr, delta_ptr, total_q, HEADS, GROUP)
    for i in range(0, (num_pairs + READERS - 1) // READERS):
        stage = i % STAGES
        lse, delta = states
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        load_readers(q_desc, q_rows, q_tiles.index(stage), q_full.index(stage), readers, HEADS, HEAD_DIM)
        load_readers(dout_desc, dout_rows, dout_tiles.index(stage), dout_full.index(stage), readers, HEADS, HEAD_DIM)
        lse_rows.index(stage).store(lse)
        delta_rows.index(stage).store(delta)
        hand_over(q_full.index(stage))
        # a step ahead: what they say would be waited for
        readers = find_readers(pairs_ptr, i + 1, num_pairs, READERS, HEADS)
        states = load_states(pairs_ptr, i + 1, num_pairs, lane, lse_log2_ptr, delta_ptr, total_q, HEADS, GROUP)


@jit
def find_readers(pairs_ptr, i, num_pairs, READERS: gl.constexpr, HEADS: gl.constexpr):
    """Row and first head of a step's readers; the last one's in place of those past it."""
    readers = ()
    for n in gl.static_range(READERS):
        pair_ptr = pairs_ptr + gl.minimum(i * READERS + n, num_pairs - 1) * PAIR_WIDTH
        readers += (gl.load(pair_ptr), (gl.load(pair_ptr + 2) + gl.program_id(1)) * HEADS)
    return readers


@jit
def load_states(
    pairs_ptr, i, num_pairs, lane, lse_log2_ptr, delta_ptr, total_q,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """lse in base 2 and delta of a step's lanes; +inf and 0 past the last pair."""
    READERS: gl.constexpr = LANES // HEADS
    pair = i * READERS + lane // HEADS
    is_pair = pair < num_pairs
    pair_ptrs = pairs_ptr + gl.minimum(pair, num_pairs - 1) * PAIR_WIDTH
    row = gl.load(pair_ptrs)
    head = (gl.load(pair_ptrs + 2) + gl.program_id(1)) * HEADS + lane % HEADS
    state = place_lanes(row, head, total_q, GROUP)
    lse = gl.load(lse_log2_ptr + state, mask=is_pair, other=float("inf"))
    delta = gl.load(delta_ptr + state, mask=is_pair, other=0.0)
    return lse, delta


@jit
def load_readers(desc, token_rows, tile, bar, readers, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Has the rows of a step's readers copied; the barrier is through when all of them are there."""
    mbarrier.expect(bar, LANES * HEAD_DIM * 2)
    for n in gl.static_range(LANES // HEADS):
        row = readers[2 * n] * token_rows + readers[2 * n + 1]
        for part in gl.static_range(HEAD_DIM // SWIZZLED):
            box = tile.slice(n * HEADS, HEADS, dim=0).slice(part * SWIZZLED, SWIZZLED, dim=1)
            load_box(desc, [row, part * SWIZZLED], bar, box)


@jit
def sum_slots(
    ring, span, slots, rows, sm_scale, outputs, sums, ends,
    PART: gl.constexpr,  # of the steps, every other one
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: the slots against every other step."""
    _pairs_ptr, full_pairs, num_pairs = span
    READERS: gl.constexpr = LANES // HEADS
    steps = (full_pairs // READERS, (num_pairs + READERS - 1) // READERS)
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    dk = gl.full([SLOTS, HEAD_DIM], 0.0, gl.float32, layout=sum_layout)
    dv = gl.full([SLOTS, HEAD_DIM], 0.0, gl.float32, layout=sum_layout)
    kv_full = ring[6]
    mbarrier.wait(kv_full.index(0), 0)
    dk, dv = sum_keys(dk, dv, steps, ring, span, rows, sm_scale, PART, HEADS, STAGES)
    exchange_sums(dk, dv, sm_scale, slots, outputs, sums, ends, PART, HEAD_DIM, PAGE_SIZE)


@jit
def sum_keys(
    dk, dv,
    steps,  # full ones, and all
    ring, span, rows, sm_scale,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dK and dV of a group's steps. Products of a step run beside the next one's scores."""
    num_full, num_steps = steps
    q_tiles, dout_tiles = ring[2], ring[3]
    dtype: gl.constexpr = q_tiles.dtype
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    # What stands for the first step's, of whatever shared memory holds, is overwritten by the second's.
    weights = gl.full([SLOTS, LANES], 0.0, dtype, layout=weight_layout)
    grads = gl.full([SLOTS, LANES], 0.0, dtype, layout=weight_layout)
    sums = (dk, dv, weights, grads)
    for i in range(PART, num_steps, 2):
        sums = add_keys(sums, i, i >= num_full, ring, span, rows, sm_scale, PART, HEADS, STAGES)
    dk, dv, weights, grads = sums
    if num_steps > PART:
        last = num_steps - 1 - (num_steps - 1 - PART) % 2
        is_sum = last >= PART + 2
        dv_token = warpgroup_mma(weights, dout_tiles.index(last % STAGES), dv, use_acc=is_sum, is_async=True)
        dk_token = warpgroup_mma(grads, q_tiles.index(last % STAGES), dk, use_acc=is_sum, is_async=True)
        dk, dv = warpgroup_mma_wait(num_outstanding=0, deps=[dk_token, dv_token])
    return dk, dv


@jit
def add_keys(
    sums, i, is_masked, ring, span, rows, sm_scale,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """dK and dV with the products of the group's step before, and what enters those of this one."""
    k_tile, v_tile, q_tiles, dout_tiles, lse_rows, delta_rows, _kv_full, q_full, dout_full, empty = ring
    dk, dv, weights, grads = sums
    dtype: gl.constexpr = k_tile.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LANES, 16])
    column: gl.constexpr = gl.SliceLayout(0, s_layout)
    weight_layout: gl.constexpr = weights.type.layout
    zero = gl.full([SLOTS, LANES], 0.0, gl.float32, layout=s_layout)
    stage = i % STAGES
    phase = (i // STAGES) & 1
    before = gl.maximum(i - 2, PART) % STAGES
    is_sum = i >= PART + 4
    mbarrier.wait(q_full.index(stage), phase)
    if is_masked:
        mbarrier.wait(dout_full.index(stage), phase)
        clear_step(q_tiles.index(stage), dout_tiles.index(stage), lse_rows.index(stage), column)
    s_token = warpgroup_mma(k_tile, q_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    dv_token = warpgroup_mma(weights, dout_tiles.index(before), dv, use_acc=is_sum, is_async=True)
    dk_token = warpgroup_mma(grads, q_tiles.index(before), dk, use_acc=is_sum, is_async=True)
    s = warpgroup_mma_wait(num_outstanding=2, deps=[s_token])
    lse = lse_rows.index(stage).load(column)
    exponents = s * (sm_scale * LOG2_E) - lse[None, :]
    # Apart from each other from here on: what both would share had to wait in registers for the mask.
    if is_masked:
        dk, dv = warpgroup_mma_wait(num_outstanding=0, deps=[dk_token, dv_token])
        probs = gl.exp2(mask_edges(exponents, i, span, rows, HEADS))
    else:
        probs = gl.exp2(exponents)
        # A wait for dO stands between the probabilities and the wait for products: within a block of instructions the
        # assembler would move the latter above the former.
        mbarrier.wait(dout_full.index(stage), phase)
        dk, dv = warpgroup_mma_wait(num_outstanding=0, deps=[dk_token, dv_token])
    group_barrier()
    mbarrier.arrive(empty.index(before), count=1, pred=i > PART)
    # The assembler keeps products apart where what enters one is worked out while another is under way.
    weights = gl.convert_layout(probs.to(dtype), weight_layout)
    dout_t = dout_tiles.index(stage).permute((1, 0))
    dp_token = warpgroup_mma(v_tile, dout_t, zero, use_acc=False, is_async=True)
    delta = delta_rows.index(stage).load(column)
    dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp_token])
    if is_masked:
        # what a masked slot's V holds may be no number
        dp = gl.where(probs == 0, 0.0, dp)
    grads = gl.convert_layout((probs * (dp - delta[None, :])).to(dtype), weight_layout)
    return dk, dv, weights, grads


@jit
def clear_step(q_tile, dout_tile, lse_row, column: gl.constexpr):
    """Zeroes the lanes of no pair, or of a row without keys, whose lse is +inf: they may hold NaN.

    A step is one group's alone, so that nobody else reads what it writes.
    """
    if gl.max(lse_row.load(column), axis=0) == float("inf"):
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        has_keys = lse_row.load(gl.SliceLayout(1, layout)) < float("inf")
        clear_unless(q_tile, has_keys, layout)
        clear_unless(dout_tile, has_keys, layout)
        finish_writing()


@jit
def mask_edges(exponents, i, span, rows, HEADS: gl.constexpr):
    """-inf where a row may not see a slot's position, its list does not have the slot, or there is no pair."""
    mask_starts_ptr, mask_ends_ptr, codes_ptr = rows
    pairs_ptr, _full_pairs, num_pairs = span
    READERS: gl.constexpr = LANES // HEADS
    by_reader = exponents.reshape([SLOTS, READERS, HEADS])
    layout: gl.constexpr = gl.SliceLayout(2, by_reader.type.layout)
    pair = i * READERS + gl.arange(0, READERS, layout=gl.SliceLayout(0, layout))
    is_pair = pair < num_pairs
    pair_ptrs = pairs_ptr + gl.minimum(pair, num_pairs - 1) * PAIR_WIDTH
    row = gl.load(pair_ptrs)
    mask_start = gl.load(mask_starts_ptr + row, mask=is_pair, other=0)
    mask_end = gl.load(mask_ends_ptr + row, mask=is_pair, other=0)
    cells = gl.load(pair_ptrs + 3).to(gl.int64) * SLOTS
    slot = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, layout))
    kv_idx = gl.load(codes_ptr + cells[None, :] + slot[:, None])
    is_admitted = (kv_idx >= mask_start[None, :]) & (kv_idx < mask_end[None, :])
    by_reader = gl.where(is_admitted[:, :, None], by_reader, float("-inf"))
    return gl.convert_layout(by_reader.reshape([SLOTS, LANES]), exponents.type.layout)


@jit
def exchange_sums(
    dk, dv, sm_scale, slots, outputs, sums, ends,
    PART: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """The first group adds and writes both groups' dK, the second their dV, each with the other's sum."""
    dk_ptr, dv_ptr, partial_dk_ptr, partial_dv_ptr, dk_strides, dv_strides, partial = outputs
    # one after the other, in the same place
    if PART == 0:
        mbarrier.wait(ends.index(0), 0)
        dk += sums.load(dk.type.layout)
        group_barrier()
        sums.store(dv)
        hand_over(ends.index(1))
        store_sums(dk * sm_scale, slots, dk_ptr, partial_dk_ptr, dk_strides, partial, HEAD_DIM, PAGE_SIZE)
    else:
        sums.store(dk)
        hand_over(ends.index(0))
        mbarrier.wait(ends.index(1), 0)
        dv += sums.load(dv.type.layout)
        store_sums(dv, slots, dv_ptr, partial_dv_ptr, dv_strides, partial, HEAD_DIM, PAGE_SIZE)


@jit
def store_sums(
    sums, slots, ptr, partial_ptr, strides, partial,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Writes a gradient of the tile's slots, or the item's part of it where the tile was cut."""
    first_slot, kv_head, is_touched_ptr = slots
    layout: gl.constexpr = sums.type.layout
    lane = gl.arange(0, SLOTS, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout)).to(gl.int64)
    is_written = (gl.load(is_touched_ptr + lane) != 0)[:, None]
    if partial >= 0:
        states = ((partial * gl.num_programs(1) + gl.program_id(1)) * SLOTS + lane) * HEAD_DIM
        gl.store(partial_ptr + states[:, None] + dim[None, :], sums, mask=is_written)
    else:
        slot = first_slot + lane
        page, offset = (slot // PAGE_SIZE).to(gl.int64), (slot % PAGE_SIZE).to(gl.int64)
        starts = page * strides[0] + offset * strides[1] + kv_head.to(gl.int64) * strides[2]
        ptrs = ptr + starts[:, None] + (dim * strides[3])[None, :]
        gl.store(ptrs, sums.to(ptr.dtype.element_ty), mask=is_written)
