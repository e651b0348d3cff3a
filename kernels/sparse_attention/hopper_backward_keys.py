"""The Hopper kernel of dK and dV: two groups that multiply hold half a tile of slots each, a warp brings them rows.

What `backward_keys` sums, over the same items and pairs. A group keeps the sums of its 64 slots in registers. Of every
pair, 64 rows times heads, it forms the scores and the products of values keys first, so that P^T and dS^T are where
wgmma takes them from: dV += P^T dO and dK += dS^T Q follow from registers, while the next pair's probabilities are
worked out, and the other group's products run beside them.

Lanes of a pair are ordered head by head. TMA reads whole boxes: rows of no reader, or of none with a key, the warp that
loads zeroes before a product sums over them. [GRAD-FORMULA, GRAD-ZERO, MASK-INTERFERE, COORD-WIDE]

It imports Gluon, so that only `hopper_backward` imports this module, where it launches.
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from attnconform.kernels.sparse_attention.hopper_scores import (
    ALIBI,
    LEAST_FACTOR,
    LOG2_E,
    PLAIN,
    SOFT_CAP,
    missing_of_cap,
    slope_of_cap,
    spread,
)
from attnconform.kernels.sparse_attention.hopper_tiles import (
    BY_WARP,
    CLEARED,
    CLEARING,
    SWIZZLED,
    arrive_each,
    clear_unless,
    finish_writing,
    group_barrier,
    load_box,
    load_boxes,
    load_numbers,
    make_barriers,
)

TILE_M = gl.constexpr(64)  # rows times heads of a pair
HALF = gl.constexpr(64)  # slots of a group
PAIR_WIDTH = gl.constexpr(4)


# Numbers of a batch or a rule: a kernel compiled for one value of them must serve every other.
@jit(do_not_specialize=["total_q"])
def hopper_keys_kernel(
    q_desc, dout_desc, k_desc, v_desc, lse_log2_ptr, delta_ptr,
    dk_ptr, dv_ptr, partial_dk_ptr, partial_dv_ptr,
    q_places, dout_places, k_places, v_places, dk_strides, dv_strides,
    item_tile_ptr, item_begin_ptr, item_full_begin_ptr, item_end_ptr, item_partial_ptr,
    tile_slot_ptr, tile_kv_head_ptr, pairs_ptr, codes_ptr, is_touched_ptr,
    row_positions_ptr, mask_starts_ptr, mask_ends_ptr, score_params_ptr,
    sm_scale, total_q,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,  # slots of a box
    STAGES: gl.constexpr,  # pairs of the ring
    SCORE: gl.constexpr,
    HAS_HEAD_MASK: gl.constexpr,
):  # fmt: skip
    """dK and dV of one item's slot tile, written or left as a part."""
    dtype: gl.constexpr = q_desc.dtype
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, HEAD_DIM], dtype)
    k_tiles = gl.allocate_shared_memory(dtype, [2, HALF, HEAD_DIM], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [2, HALF, HEAD_DIM], tile_layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_M, HEAD_DIM], tile_layout)
    dout_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_M, HEAD_DIM], tile_layout)
    vector_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_rows = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], vector_layout)
    delta_rows = gl.allocate_shared_memory(gl.float32, [STAGES, TILE_M], vector_layout)
    slopes = gl.allocate_shared_memory(gl.float32, [STAGES, HEADS], vector_layout)
    kv_full = make_barriers(1, 4)
    q_full = make_barriers(STAGES + 1, BY_WARP)  # TMA's of q, and one of every thread that loads
    dout_full = make_barriers(STAGES + 1, 1)
    empty = make_barriers(STAGES, 2)
    finish_writing()

    ring = (k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows, slopes, kv_full, q_full, dout_full, empty)
    item = gl.program_id(0)
    tile = gl.load(item_tile_ptr + item)
    begin = gl.load(item_begin_ptr + item)
    span = (pairs_ptr + begin * PAIR_WIDTH,
            (gl.load(item_full_begin_ptr + item) - begin).to(gl.int32),
            (gl.load(item_end_ptr + item) - begin).to(gl.int32))  # fmt: skip
    kv_head = gl.load(tile_kv_head_ptr + tile).to(gl.int32) + gl.program_id(1)
    slots = (gl.load(tile_slot_ptr + tile).to(gl.int32), kv_head, is_touched_ptr + tile * (2 * HALF))
    rows = (row_positions_ptr, mask_starts_ptr, mask_ends_ptr, codes_ptr, total_q)
    scores = (sm_scale, score_params_ptr)
    partial = gl.load(item_partial_ptr + item)
    outputs = (dk_ptr, dv_ptr, partial_dk_ptr, partial_dv_ptr, dk_strides, dv_strides, partial)
    gl.warp_specialize(
        [
            (sum_slots, (
                ring, span, slots, rows, scores, outputs,
                0, HEADS, HEAD_DIM, PAGE_SIZE, STAGES, SCORE, HAS_HEAD_MASK, dtype,
            )),
            (sum_slots, (
                ring, span, slots, rows, scores, outputs,
                1, HEADS, HEAD_DIM, PAGE_SIZE, STAGES, SCORE, HAS_HEAD_MASK, dtype,
            )),
            (load_rows, (
                q_desc, dout_desc, k_desc, v_desc, q_places, dout_places, k_places, v_places, ring, span, slots,
                lse_log2_ptr, delta_ptr, score_params_ptr, total_q, sm_scale,
                HEADS, GROUP, HEAD_DIM, PAGE_SIZE, BOX, STAGES, SCORE,
            )),
        ],
        [4, 1],
        # a thread's registers, of either group and of the warp that loads; under a cap 240 were slower
        [240, 24] if SCORE != SOFT_CAP else [232, 40],
    )  # fmt: skip


@jit
def load_rows(
    q_desc, dout_desc, k_desc, v_desc,
    q_places, dout_places, k_places, v_places,  # as `Grid.places`: rows a page, rows a head, columns a head
    ring, span, slots, lse_log2_ptr, delta_ptr, score_params_ptr, total_q, sm_scale,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    SCORE: gl.constexpr,
):  # fmt: skip
    """The warp that loads: the slots' K and V, then every pair's q and dO, lse and delta.

    Under a bias products are added to what is taken off, so that -delta is left, and -lse before sm_scale. It waits
    itself for a pair with lanes that are no row of it, or one without keys, by the barriers after those of the ring.
    """
    k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows, slopes, kv_full, q_full, dout_full, empty = ring
    pairs_ptr, num_masked, num_pairs = span
    first_slot, kv_head, _is_touched_ptr = slots
    for half in gl.static_range(2):
        pages, offsets = find_slots(first_slot + half * HALF, PAGE_SIZE, BOX)
        bar = kv_full.index(0)
        load_boxes(k_desc, k_places, k_tiles.index(half), bar, kv_head, pages, offsets, HALF, HEAD_DIM, BOX)
        load_boxes(v_desc, v_places, v_tiles.index(half), bar, kv_head, pages, offsets, HALF, HEAD_DIM, BOX)
    lane_layout: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    lane = gl.arange(0, TILE_M, layout=lane_layout)
    ROWS: gl.constexpr = TILE_M // HEADS
    lane_row = lane % ROWS
    lane_head = lane // ROWS
    cleared = 0
    for i in range(0, num_pairs):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        q_start = gl.load(pairs_ptr + i * PAIR_WIDTH)
        q_count = gl.load(pairs_ptr + i * PAIR_WIDTH + 1)
        first_head = (gl.load(pairs_ptr + i * PAIR_WIDTH + 2) + gl.program_id(1)) * HEADS
        place = place_lanes(q_start + lane_row, first_head + lane_head, total_q, GROUP)
        is_row = lane_row < q_count
        row_bar = stage
        if i < num_masked:  # only there can lanes be of no row, or of one without keys
            lse = gl.load(lse_log2_ptr + place, mask=is_row, other=float("inf"))
            row_bar = gl.where(gl.max(lse, axis=0) == float("inf"), STAGES, stage)
        if SCORE == ALIBI:
            # what a bias takes off for the row's own place, relative to the pair's first row
            slope = gl.load(score_params_ptr + first_head + lane_head) * LOG2_E
            lse = gl.load(lse_log2_ptr + place, mask=is_row, other=float("inf"))  # again: held, it would cost registers
            lse = (lse + slope * lane_row.to(gl.float32)) * (-1.0 / (sm_scale * LOG2_E))
            delta = gl.load(delta_ptr + place, mask=is_row, other=0.0)
            head_slopes = gl.load(score_params_ptr + first_head + gl.arange(0, HEADS, layout=lane_layout)) * LOG2_E
        mbarrier.wait(empty.index(stage), phase ^ 1)
        if SCORE == ALIBI:
            slopes.index(stage).store(head_slopes)
            lse_rows.index(stage).store(lse)
            delta_rows.index(stage).store(-delta)
            group_barrier()
        else:  # 0 in lanes of no row, whose edges mask_edges takes out
            load_numbers(lse_rows.index(stage), lse_log2_ptr + place, mask=is_row)
            load_numbers(delta_rows.index(stage), delta_ptr + place, mask=is_row)
        q_tile, dout_tile = q_tiles.index(stage), dout_tiles.index(stage)
        load_heads(q_desc, q_places, q_tile, q_full.index(row_bar), q_start, first_head, HEADS, HEAD_DIM)
        load_heads(dout_desc, dout_places, dout_tile, dout_full.index(row_bar), q_start, first_head, HEADS, HEAD_DIM)
        arrive_each(q_full.index(row_bar), increment_count=False)
        if row_bar == STAGES:
            mbarrier.wait(q_full.index(STAGES), cleared & 1)
            mbarrier.wait(dout_full.index(STAGES), cleared & 1)
            clear_lanes(q_tile, dout_tile, lse_rows.index(stage), q_count, HEADS, SCORE)
            mbarrier.arrive(q_full.index(stage), count=1)
            arrive_each(q_full.index(stage), increment_count=False)
            mbarrier.arrive(dout_full.index(stage), count=1)
            cleared += 1


@jit
def clear_lanes(q_tile, dout_tile, lse_row, q_count, HEADS: gl.constexpr, SCORE: gl.constexpr):
    """Zeroes what is no row, or one without keys, whose lse is +inf: it may hold NaN. Of a bias lse is negated."""
    SIGN: gl.constexpr = -1.0 if SCORE == ALIBI else 1.0
    layout: gl.constexpr = gl.SliceLayout(1, CLEARING)
    for n in gl.static_range(TILE_M // CLEARED):
        lane = n * CLEARED + gl.arange(0, CLEARED, layout=layout)
        lse = lse_row.slice(n * CLEARED, CLEARED).load(layout)
        is_kept = (lane % (TILE_M // HEADS) < q_count) & (SIGN * lse < float("inf"))
        clear_unless(q_tile.slice(n * CLEARED, CLEARED, dim=0), is_kept, CLEARING)
        clear_unless(dout_tile.slice(n * CLEARED, CLEARED, dim=0), is_kept, CLEARING)
    finish_writing()


@jit
def place_lanes(rows, heads, total_q, GROUP: gl.constexpr):
    """Where lse and delta of rows and query heads are, as place_rows says; int64."""
    return ((heads // GROUP).to(gl.int64) * total_q + rows) * GROUP + heads % GROUP


@jit
def find_slots(first_slot, PAGE_SIZE: gl.constexpr, BOX: gl.constexpr):
    """Page of every box of a group's slots, and its place in the page."""
    pages = ()
    offsets = ()
    for n in gl.static_range(HALF // BOX):
        slot = first_slot + n * BOX
        pages += (slot // PAGE_SIZE,)
        offsets += (slot % PAGE_SIZE,)
    return pages, offsets


@jit
def load_heads(desc, places, tile, bar, q_start, first_head, HEADS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """Has a pair's rows copied, head by head; the barrier is through when all of them are there."""
    ROWS: gl.constexpr = TILE_M // HEADS
    mbarrier.expect(bar, TILE_M * HEAD_DIM * 2)
    _page_rows, head_rows, head_columns = places
    for n in gl.static_range(HEADS):
        head = first_head + n
        for part in gl.static_range(HEAD_DIM // SWIZZLED):
            box = tile.slice(n * ROWS, ROWS, dim=0).slice(part * SWIZZLED, SWIZZLED, dim=1)
            load_box(desc, [q_start + head * head_rows, head * head_columns + part * SWIZZLED], bar, box)


@jit
def sum_slots(
    ring, span, slots, rows, scores, outputs,
    PART: gl.constexpr,  # which half of the slots
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_HEAD_MASK: gl.constexpr,
    dtype: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: its half of the slots against every pair.

    Longer than a screen: where products are begun and waited for must be seen in one piece.
    """
    k_tiles, v_tiles, q_tiles, dout_tiles, lse_rows, delta_rows, slopes, kv_full, q_full, dout_full, empty = ring
    pairs_ptr, num_masked, num_pairs = span
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    sum_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout, 2)
    column: gl.constexpr = gl.SliceLayout(0, s_layout)
    row: gl.constexpr = gl.SliceLayout(1, s_layout)
    k_tile, v_tile = k_tiles.index(PART), v_tiles.index(PART)
    zero = gl.full([HALF, TILE_M], 0.0, gl.float32, layout=s_layout)
    dk = gl.full([HALF, HEAD_DIM], 0.0, gl.float32, layout=sum_layout)
    dv = gl.full([HALF, HEAD_DIM], 0.0, gl.float32, layout=sum_layout)
    # A pair's probabilities are worked out beside the last products of the pair before; a cap's slope needs their room.
    IS_AHEAD: gl.constexpr = SCORE != SOFT_CAP
    if IS_AHEAD:
        # of no pair, which add nothing
        weights = gl.full([HALF, TILE_M], 0.0, dtype, layout=weight_layout)
        grads = gl.full([HALF, TILE_M], 0.0, dtype, layout=weight_layout)
    place = find_places(0, span, rows, PART, SCORE, row)
    mbarrier.wait(kv_full.index(0), 0)
    mbarrier.wait(dout_full.index(0), 0)

    for i in range(0, num_pairs):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        before = gl.maximum(i - 1, 0) % STAGES
        is_masked = i < num_masked
        mbarrier.wait(q_full.index(stage), phase)
        start = zero
        if SCORE == ALIBI:
            start = gl.broadcast(lse_rows.index(stage).load(column)[None, :], zero)[0]
        s_token = warpgroup_mma(
            k_tile, q_tiles.index(stage).permute((1, 0)), start, use_acc=SCORE == ALIBI, is_async=True
        )
        if IS_AHEAD:
            # what was added before the first pair's own products is not kept: 0 times an infinity in its rows
            is_sum = i > 1
            dv_token = warpgroup_mma(weights, dout_tiles.index(before), dv, use_acc=is_sum, is_async=True)
            dk_token = warpgroup_mma(grads, q_tiles.index(before), dk, use_acc=is_sum, is_async=True)
            s = warpgroup_mma_wait(num_outstanding=2, deps=[s_token])
        else:
            s = warpgroup_mma_wait(num_outstanding=0, deps=[s_token])
        pair_ptr = pairs_ptr + i * PAIR_WIDTH
        lse = lse_rows.index(stage).load(column)
        bias = (slopes.index(stage), place)
        # Apart from each other from here on: what both would share had to wait in registers for the mask.
        if is_masked:
            if IS_AHEAD:
                dk, dv = warpgroup_mma_wait(num_outstanding=0, deps=[dk_token, dv_token])
            probs, factors = weigh_edges(s, lse, bias, pair_ptr, rows, scores, True, PART, HEADS, SCORE, HAS_HEAD_MASK)
            mbarrier.wait(dout_full.index(stage), phase)
        else:
            probs, factors = weigh_edges(s, lse, bias, pair_ptr, rows, scores, False, PART, HEADS, SCORE, HAS_HEAD_MASK)
            # A wait for dO stands between the probabilities and the wait for products: within a block of instructions
            # the assembler would move the latter above the former.
            mbarrier.wait(dout_full.index(stage), phase)
            if IS_AHEAD:
                dk, dv = warpgroup_mma_wait(num_outstanding=0, deps=[dk_token, dv_token])
        if IS_AHEAD:
            group_barrier()
            mbarrier.arrive(empty.index(before), count=1, pred=i > 0)
        # The assembler keeps products apart where what enters one is worked out while another is under way.
        weights = gl.convert_layout(probs.to(dtype), weight_layout)
        dout_t = dout_tiles.index(stage).permute((1, 0))
        delta = delta_rows.index(stage).load(column)
        if SCORE == ALIBI:
            start = gl.broadcast(delta[None, :], zero)[0]
        dp_token = warpgroup_mma(v_tile, dout_t, start, use_acc=SCORE == ALIBI, is_async=True)
        place = find_places(i + 1, span, rows, PART, SCORE, row)  # a pair ahead: its addresses would be waited for
        dp = warpgroup_mma_wait(num_outstanding=0, deps=[dp_token])
        if is_masked:
            # what a masked slot's V holds may be no number
            dp = gl.where(factors == 0, 0.0, dp)
        if SCORE != ALIBI:
            dp -= delta[None, :]
        grads = gl.convert_layout((factors * dp).to(dtype), weight_layout)
        if not IS_AHEAD:
            dv_token = warpgroup_mma(weights, dout_tiles.index(stage), dv, is_async=True)
            dk_token = warpgroup_mma(grads, q_tiles.index(stage), dk, is_async=True)
            dk, dv = warpgroup_mma_wait(num_outstanding=0, deps=[dk_token, dv_token])
            group_barrier()
            mbarrier.arrive(empty.index(stage), count=1)
    if IS_AHEAD:
        last = (num_pairs - 1) % STAGES
        dv_token = warpgroup_mma(weights, dout_tiles.index(last), dv, use_acc=num_pairs > 1, is_async=True)
        dk_token = warpgroup_mma(grads, q_tiles.index(last), dk, use_acc=num_pairs > 1, is_async=True)
        dk, dv = warpgroup_mma_wait(num_outstanding=0, deps=[dk_token, dv_token])
    store_sums(dk * scores[0], dv, slots, outputs, PART, HEAD_DIM, PAGE_SIZE)


@jit
def find_places(i, span, rows, PART: gl.constexpr, SCORE: gl.constexpr, layout: gl.constexpr):
    """How far a group's slots are from a pair's first row, for a bias, float32 [HALF]; lse has the rest of the way.

    From that row on, so that little is lost in float32.
    """
    if SCORE == ALIBI:
        pairs_ptr, _num_masked, num_pairs = span
        pair_ptr = pairs_ptr + gl.minimum(i, num_pairs - 1) * PAIR_WIDTH
        return (load_positions(rows[3], pair_ptr, PART, layout) - gl.load(rows[0] + gl.load(pair_ptr))).to(gl.float32)
    else:
        return gl.full([HALF], 0.0, gl.float32, layout=layout)


@jit
def weigh_edges(
    s, lse, bias, pair_ptr, rows, scores,
    IS_MASKED: gl.constexpr,
    PART: gl.constexpr,
    HEADS: gl.constexpr,
    SCORE: gl.constexpr,
    HAS_HEAD_MASK: gl.constexpr,
):  # fmt: skip
    """Probabilities of a pair's edges, slots by lanes, and what their scores' gradients are multiplied by.

    The latter holds the slope of a cap. Both are 0 off the edges. [GRAD-FORMULA, GRAD-SOFTCAP, MASK-BEFORE-MAX]
    """
    sm_scale, score_params_ptr = scores
    if SCORE == PLAIN:
        exponents = s * (sm_scale * LOG2_E) - lse[None, :]
    elif SCORE == ALIBI:
        exponents = add_bias(s * (sm_scale * LOG2_E), bias, HEADS)
    else:
        # tanh(x / cap) = 1 - 1 / (1/2 + exp2(x * factor) / 2); one cap serves all heads
        cap = gl.load(score_params_ptr)
        cap_factor = gl.maximum(sm_scale * (2 * LOG2_E) / cap, LEAST_FACTOR)
        cap = cap * LOG2_E
        if IS_MASKED:  # a score off the edges would reach its neighbour by their one reciprocal
            s = mask_edges(s, pair_ptr, rows, PART, HEADS, HAS_HEAD_MASK)
        missing = missing_of_cap(s, cap_factor)
        exponents = missing * (-cap) + (cap - lse)[None, :]
    if IS_MASKED:
        exponents = mask_edges(exponents, pair_ptr, rows, PART, HEADS, HAS_HEAD_MASK)
    probs = gl.exp2(exponents)
    factors = probs
    if SCORE == SOFT_CAP:
        factors = probs * slope_of_cap(missing)
        if IS_MASKED:
            factors = gl.where(probs == 0, 0.0, factors)
    return probs, factors


@jit
def add_bias(s, bias, HEADS: gl.constexpr):
    """Scores with the bias of a slot's way to the pair's first row; a head's lanes are together, and have one slope."""
    slopes, place = bias
    by_head = s.reshape([HALF, HEADS, TILE_M // HEADS])
    layout: gl.constexpr = by_head.type.layout
    slope = slopes.load(gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    by_head += slope[None, :, None] * spread(place, layout)
    return gl.convert_layout(by_head.reshape([HALF, TILE_M]), s.type.layout)


@jit
def load_positions(codes_ptr, pair_ptr, PART: gl.constexpr, layout: gl.constexpr):
    """Logical positions of a group's slots in a pair's list, [HALF]; -1 where the list has none."""
    cell = gl.load(pair_ptr + 3)
    return gl.load(codes_ptr + cell.to(gl.int64) * (2 * HALF) + PART * HALF + gl.arange(0, HALF, layout=layout))


@jit
def mask_edges(
    exponents, pair_ptr, rows, PART: gl.constexpr, HEADS: gl.constexpr, HAS_HEAD_MASK: gl.constexpr
):  # fmt: skip
    """-inf where a row may not see a slot's position, or the pair's list does not have the slot."""
    _row_positions_ptr, mask_starts_ptr, mask_ends_ptr, codes_ptr, total_q = rows
    q_start, q_count = gl.load(pair_ptr), gl.load(pair_ptr + 1)
    ROWS: gl.constexpr = TILE_M // HEADS
    lane = gl.arange(0, TILE_M, layout=gl.SliceLayout(0, exponents.type.layout))
    interval = q_start + lane % ROWS
    if HAS_HEAD_MASK:
        first_head = (gl.load(pair_ptr + 2) + gl.program_id(1)) * HEADS
        interval = (first_head + lane // ROWS).to(gl.int64) * total_q + interval
    is_row = lane % ROWS < q_count
    mask_start = gl.load(mask_starts_ptr + interval, mask=is_row, other=0)
    mask_end = gl.load(mask_ends_ptr + interval, mask=is_row, other=0)
    kv_idx = load_positions(codes_ptr, pair_ptr, PART, gl.SliceLayout(1, exponents.type.layout))
    is_admitted = (kv_idx[:, None] >= mask_start[None, :]) & (kv_idx[:, None] < mask_end[None, :])
    return gl.where(is_admitted, exponents, float("-inf"))


@jit
def store_sums(dk, dv, slots, outputs, PART: gl.constexpr, HEAD_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Writes a group's slots, or its share of the item's part where the tile was cut."""
    first_slot, kv_head, is_touched_ptr = slots
    dk_ptr, dv_ptr, partial_dk_ptr, partial_dv_ptr, dk_strides, dv_strides, partial = outputs
    layout: gl.constexpr = dk.type.layout
    lane = PART * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout)).to(gl.int64)
    is_written = (gl.load(is_touched_ptr + lane) != 0)[:, None]
    if partial >= 0:
        states = ((partial * gl.num_programs(1) + gl.program_id(1)) * (2 * HALF) + lane) * HEAD_DIM
        gl.store(partial_dk_ptr + states[:, None] + dim[None, :], dk, mask=is_written)
        gl.store(partial_dv_ptr + states[:, None] + dim[None, :], dv, mask=is_written)
    else:
        slot = first_slot + lane
        page, offset = (slot // PAGE_SIZE).to(gl.int64), (slot % PAGE_SIZE).to(gl.int64)
        starts = page * dk_strides[0] + offset * dk_strides[1] + kv_head.to(gl.int64) * dk_strides[2]
        ptrs = dk_ptr + starts[:, None] + (dim * dk_strides[3])[None, :]
        gl.store(ptrs, dk.to(dk_ptr.dtype.element_ty), mask=is_written)
        starts = page * dv_strides[0] + offset * dv_strides[1] + kv_head.to(gl.int64) * dv_strides[2]
        ptrs = dv_ptr + starts[:, None] + (dim * dv_strides[3])[None, :]
        gl.store(ptrs, dv.to(dv_ptr.dtype.element_ty), mask=is_written)
