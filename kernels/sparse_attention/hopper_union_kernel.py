"""The kernel of `hopper_union`: groups of warps share blocks that any row of a union tile lists. [BLOCK-MEMBER]

Three groups hold 64 lanes each, a lane being one query row and head; a warp of its own has TMA copy the blocks of the
union, each once, into a ring of tiles in shared memory. A tile is 64 keys: a block, a part of one, or a few small ones.
A group leaves out a tile that none of its own rows lists, and of any other, by a row's bit, what the row does not list.
Programs stay, and take every so-many-th task, so that neighbouring tiles of one KV head are under way together.

A tile is read whole. Tokens that no row of the task admits may be anything, NaN included: their scores are masked
before the maximum, and the warp that loads zeroes their rows of V before they meet a weight of 0. Tokens that some row
admits must be finite for the others. [MASK-INTERFERE, MASK-BEFORE-MAX, COORD-SLOT, COORD-WIDE, COORD-STRIDE, GQA-MAP,
EMPTY-OUT, LSE-NATURAL, LSE-SINK]

It imports Gluon, so that only `hopper_union` imports this module, where it launches.
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from attnconform.kernels.sparse_attention.hopper_rows import load_bounds, load_queries, store_rows
from attnconform.kernels.sparse_attention.hopper_scores import PLAIN, spread, weigh
from attnconform.kernels.sparse_attention.hopper_tiles import (
    CLEARED,
    CLEARING,
    clear_unless,
    finish_writing,
    group_barrier,
    load_boxes,
    make_barriers,
)

LANES = gl.constexpr(64)  # of a group
SEEN_ROWS = gl.constexpr(32)  # as many bits as an entry has for the rows of a tile
GROUP_REGISTERS = gl.constexpr(152)  # of a thread that multiplies: three groups and the warp that loads
LOADER_REGISTERS = gl.constexpr(56)


# Numbers of a batch: a kernel compiled for one value of them must serve every other.
@jit(do_not_specialize=["num_tasks", "max_pages"])
def hopper_union_kernel(
    q_ptr, k_desc, v_desc, out_ptr, lse_ptr,
    q_strides, k_places, v_places, out_strides, lse_strides,
    tasks_ptr, blocks_ptr, members_ptr, page_table_ptr,
    row_positions_ptr, mask_starts_ptr, mask_ends_ptr, score_params_ptr, sink_logits_ptr,
    sm_scale, num_tasks, max_pages,
    TASK_WIDTH: gl.constexpr,
    TILE_Q: gl.constexpr,  # rows of a task at most
    TILE_KV: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,  # keys of a tile that one entry's bits speak of
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,  # keys of a box
    STAGES: gl.constexpr,  # tiles of the ring
    HAS_SINK: gl.constexpr,
    HAS_WIDE_ROWS: gl.constexpr,  # q and out can be read and written by 16 bytes
):  # fmt: skip
    """Attends the tasks program_id, program_id + num_programs, ... and writes their rows."""
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE_KV, HEAD_DIM], dtype)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_KV, HEAD_DIM], tile_layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, TILE_KV, HEAD_DIM], tile_layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([LANES, HEAD_DIM], dtype)
    q_tiles = gl.allocate_shared_memory(dtype, [3, LANES, HEAD_DIM], q_layout)
    k_full = make_barriers(STAGES, 1)
    v_full = make_barriers(STAGES + 1, 1)
    empty = make_barriers(STAGES, 3)
    finish_writing()

    ring = (k_tiles, v_tiles, k_full, v_full, empty)
    tasks = (tasks_ptr, num_tasks)
    entries = (blocks_ptr, members_ptr)
    rows = (q_ptr, q_strides, row_positions_ptr, mask_starts_ptr, mask_ends_ptr, 0)
    intervals = (mask_starts_ptr, mask_ends_ptr)
    scores = (sm_scale, score_params_ptr)
    outputs = (out_ptr, lse_ptr, out_strides, lse_strides, q_ptr, q_ptr, q_ptr, sink_logits_ptr)
    gl.warp_specialize(
        [
            (attend_members, (
                q_tiles.index(0), ring, tasks, entries, rows, scores, outputs,
                0, TASK_WIDTH, TILE_Q, TILE_KV, HEADS, HEAD_DIM, BLOCK_SIZE, UNIT, STAGES, HAS_SINK, HAS_WIDE_ROWS,
            )),
            (attend_members, (
                q_tiles.index(1), ring, tasks, entries, rows, scores, outputs,
                1, TASK_WIDTH, TILE_Q, TILE_KV, HEADS, HEAD_DIM, BLOCK_SIZE, UNIT, STAGES, HAS_SINK, HAS_WIDE_ROWS,
            )),
            (attend_members, (
                q_tiles.index(2), ring, tasks, entries, rows, scores, outputs,
                2, TASK_WIDTH, TILE_Q, TILE_KV, HEADS, HEAD_DIM, BLOCK_SIZE, UNIT, STAGES, HAS_SINK, HAS_WIDE_ROWS,
            )),
            (load_blocks, (
                k_desc, v_desc, k_places, v_places, ring, tasks, entries, page_table_ptr, max_pages, intervals,
                TASK_WIDTH, TILE_KV, HEAD_DIM, BLOCK_SIZE, UNIT, PAGE_SIZE, BOX, STAGES, False,
            )),
        ],
        [4, 4, 1],
        [GROUP_REGISTERS, GROUP_REGISTERS, LOADER_REGISTERS],
    )  # fmt: skip


@jit
def count_tiles(entry_start, entry_end, BLOCK_SIZE: gl.constexpr, UNIT: gl.constexpr, TILE_KV: gl.constexpr):
    """Tiles of a task: its blocks as units, so many to a tile."""
    units = (entry_end - entry_start) * (BLOCK_SIZE // UNIT)
    return (units + TILE_KV // UNIT - 1) // (TILE_KV // UNIT)


@jit
def find_unit(
    tile, entry_start,
    NUMBER: gl.constexpr,  # of the unit within its tile
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,
    TILE_KV: gl.constexpr,
):  # fmt: skip
    """The entry whose keys a unit of a tile holds, and how far into the block they start."""
    unit = tile * (TILE_KV // UNIT) + NUMBER
    return entry_start + unit // (BLOCK_SIZE // UNIT), unit % (BLOCK_SIZE // UNIT) * UNIT


@jit
def is_whole_tile(
    tile, entry_start, full,
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,
    TILE_KV: gl.constexpr,
):  # fmt: skip
    """Whether every row that lists keys of a tile may see them."""
    first, _start = find_unit(tile, entry_start, 0, BLOCK_SIZE, UNIT, TILE_KV)
    last, _start = find_unit(tile, entry_start, TILE_KV // UNIT - 1, BLOCK_SIZE, UNIT, TILE_KV)
    return (first >= full[0]) & (last < full[1])


@jit
def load_blocks(
    k_desc, v_desc,
    k_places, v_places,  # rows a page, rows a head and columns a head of the descriptors
    ring, tasks, entries, page_table_ptr, max_pages,
    intervals,  # of positions, a row's
    TASK_WIDTH: gl.constexpr,
    TILE_KV: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
    STAGES: gl.constexpr,
    SUMS_KEYS: gl.constexpr,  # whether a product sums over K's rows, and not over V's
):  # fmt: skip
    """The warp that loads: every tile of K, then its V, as places in the ring fall free.

    It waits itself for a tile that has tokens that no row admits, by the barrier after those of the ring, and zeroes
    them: their weight is 0, and they may hold NaN.
    """
    k_tiles, v_tiles, k_full, v_full, empty = ring
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
        entry_start = gl.load(task_ptr + 6)
        entry_end = gl.load(task_ptr + 7)
        full = (gl.load(task_ptr + 8), gl.load(task_ptr + 9))
        num_tiles = count_tiles(entry_start, entry_end, BLOCK_SIZE, UNIT, TILE_KV)
        # where the next tile lies is looked up while the one before is on its way
        boxes = find_boxes(
            0, entry_start, entry_end, entries[0], page_row, max_pages, BLOCK_SIZE, UNIT, TILE_KV, PAGE_SIZE, BOX
        )
        for i in range(num_tiles):
            stage = (done + i) % STAGES
            phase = ((done + i) // STAGES) & 1
            pages, offsets = boxes
            boxes = find_boxes(
                i + 1, entry_start, entry_end, entries[0], page_row, max_pages, BLOCK_SIZE, UNIT, TILE_KV, PAGE_SIZE,
                BOX,
            )  # fmt: skip
            is_whole = is_whole_tile(i, entry_start, full, BLOCK_SIZE, UNIT, TILE_KV)
            summed_bar = gl.where(is_whole, stage, STAGES)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            load_boxes(
                k_desc, k_places, k_tiles.index(stage), k_full.index(summed_bar if SUMS_KEYS else stage),
                kv_head, pages, offsets, TILE_KV, HEAD_DIM, BOX,
            )  # fmt: skip
            load_boxes(
                v_desc, v_places, v_tiles.index(stage), v_full.index(stage if SUMS_KEYS else summed_bar),
                kv_head, pages, offsets, TILE_KV, HEAD_DIM, BOX,
            )  # fmt: skip
            if not is_whole:
                positions, members = load_units(i, entry_start, entry_end, entries, BLOCK_SIZE, UNIT, TILE_KV)
                mbarrier.wait(summed_full.index(STAGES), cleared & 1)
                clear_unseen(summed_tiles.index(stage), positions, members, task_ptr, intervals, UNIT, TILE_KV)
                mbarrier.arrive(summed_full.index(stage), count=1)
                cleared += 1
        done += num_tiles


@jit
def find_boxes(
    tile, entry_start, entry_end, blocks_ptr, page_row, max_pages,
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,
    TILE_KV: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """Page of every box of a tile, and its place in the page. [COORD-SLOT]

    Past the last entry, and past the last page of a request within its last block, some page: nobody admits what it
    holds.
    """
    pages = ()
    offsets = ()
    for n in gl.static_range(TILE_KV // BOX):
        entry, start = find_unit(tile, entry_start, n * BOX // UNIT, BLOCK_SIZE, UNIT, TILE_KV)
        block = gl.load(blocks_ptr + entry, mask=entry < entry_end, other=0)
        position = block * BLOCK_SIZE + start + n * BOX % UNIT
        page = gl.load(page_row + position // PAGE_SIZE, mask=position // PAGE_SIZE < max_pages, other=0)
        pages += (gl.maximum(page, 0),)
        offsets += (position % PAGE_SIZE,)
    return pages, offsets


@jit
def attend_members(
    q_tile, ring, tasks, entries, rows, scores, outputs,
    PART: gl.constexpr,  # which lanes of a tile
    TASK_WIDTH: gl.constexpr,
    TILE_Q: gl.constexpr,
    TILE_KV: gl.constexpr,
    HEADS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_SINK: gl.constexpr,
    HAS_WIDE_ROWS: gl.constexpr,
):  # fmt: skip
    """A group that multiplies: its lanes of every task against the tiles that any of their rows lists.

    Longer than a screen: where products are begun and waited for must be seen in one piece.
    """
    k_tiles, v_tiles, k_full, v_full, empty = ring
    tasks_ptr, num_tasks = tasks
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_KV, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    row_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    dtype: gl.constexpr = q_tile.dtype
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
        load_queries(q_tile, task_ptr, rows, PART, LANES, HEADS, HEAD_DIM, HAS_WIDE_ROWS)
        bounds = load_bounds(task_ptr, (0, 0), rows, scores, PART, LANES, HEADS, PLAIN, True, False, row_s)
        row_max = gl.full([LANES], float("-inf"), gl.float32, layout=row_s)
        row_sum = gl.full([LANES], 0.0, gl.float32, layout=row_s)
        acc = gl.full([LANES, HEAD_DIM], 0.0, gl.float32, layout=o_layout)
        zero = gl.full([LANES, TILE_KV], 0.0, gl.float32, layout=s_layout)
        for i in range(num_tiles):
            stage = (done + i) % STAGES
            phase = ((done + i) // STAGES) & 1
            positions, members = units
            listed = members[0]
            for n in gl.static_range(1, TILE_KV // UNIT):
                listed |= members[n]
            mbarrier.wait(k_full.index(stage), phase)
            if ((listed >> FIRST_ROW) & ((1 << NUM_ROWS) - 1)) != 0:
                s = warpgroup_mma(q_tile, k_tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
                units = load_units(i + 1, entry_start, entry_end, entries, BLOCK_SIZE, UNIT, TILE_KV)
                is_whole = is_whole_tile(i, entry_start, full, BLOCK_SIZE, UNIT, TILE_KV)
                s = warpgroup_mma_wait(num_outstanding=0, deps=[s])
                # Waited for before the weights: with nothing between them and the product, the assembler scales acc
                # beside the exponentials.
                mbarrier.wait(v_full.index(stage), phase)
                if UNIT < TILE_KV:
                    s = mask_members(s, members, local_row, UNIT, TILE_KV)
                if not is_whole:
                    s = mask_positions(s, positions, bounds[0], bounds[1], UNIT, TILE_KV)
                if UNIT < TILE_KV:
                    weights, rescale, row_max, row_sum = weigh(
                        s, row_max, row_sum, 0, (0, 0, 0, TILE_KV, 0), bounds, TILE_KV, PLAIN, False
                    )
                else:
                    is_member = ((members[0] >> local_row) & 1) != 0
                    weights, rescale, row_max, row_sum = weigh_members(
                        s, is_member, row_max, row_sum, bounds[5], TILE_KV
                    )
                acc = acc * gl.convert_layout(rescale, row_o)[:, None]
                p = gl.convert_layout(weights.to(dtype), p_layout)
                if UNIT == TILE_KV:
                    p = keep_members(p, is_member)
                acc = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
                group_barrier()
            else:
                units = load_units(i + 1, entry_start, entry_end, entries, BLOCK_SIZE, UNIT, TILE_KV)
                mbarrier.wait(v_full.index(stage), phase)
            mbarrier.arrive(empty.index(stage), count=1)
        done += num_tiles
        store_rows(
            acc, row_max, row_sum, task_ptr, outputs, PART, LANES, HEADS, HEAD_DIM, HAS_SINK, HAS_WIDE_ROWS, dtype,
            row_s,
        )  # fmt: skip


@jit
def load_units(
    tile, entry_start, entry_end, entries,
    BLOCK_SIZE: gl.constexpr,
    UNIT: gl.constexpr,
    TILE_KV: gl.constexpr,
):  # fmt: skip
    """First position of every unit of a tile, and a bit for every row that lists it; past the last entry, no row."""
    blocks_ptr, members_ptr = entries
    positions = ()
    members = ()
    for n in gl.static_range(TILE_KV // UNIT):
        entry, start = find_unit(tile, entry_start, n, BLOCK_SIZE, UNIT, TILE_KV)
        positions += (gl.load(blocks_ptr + entry, mask=entry < entry_end, other=0) * BLOCK_SIZE + start,)
        members += (gl.load(members_ptr + entry, mask=entry < entry_end, other=0),)
    return positions, members


@jit
def mask_members(s, members, local_row, UNIT: gl.constexpr, TILE_KV: gl.constexpr):
    """The scores of units that a lane's row lists, -inf for those of all others. [BLOCK-MEMBER]"""
    key = gl.arange(0, TILE_KV, layout=gl.SliceLayout(0, s.type.layout))
    for n in gl.static_range(TILE_KV // UNIT):
        is_foreign = (((members[n] >> local_row) & 1) == 0)[:, None]
        if UNIT < TILE_KV:
            is_foreign = is_foreign & (key // UNIT == n)[None, :]
        s = gl.where(is_foreign, float("-inf"), s)
    return s


@jit
def weigh_members(s, is_member, row_max, row_sum, score_scale, TILE_KV: gl.constexpr):
    """As `weigh`, of a tile that a row lists whole or not at all; the weights of rows that do not may be anything.

    A row that lists nothing of the tile keeps its maximum and its sum: two selects a row in place of one a score.
    [BLOCK-MEMBER, MASK-BEFORE-MAX]
    """
    x = s.reshape([s.shape[0], TILE_KV // 8, 8])
    layout: gl.constexpr = x.type.layout
    tile_max = gl.convert_layout(gl.max(gl.max(x, axis=1), axis=1), row_max.type.layout) * score_scale
    new_max = gl.maximum(row_max, gl.where(is_member, tile_max, float("-inf")))
    # A row that has admitted nothing yet would subtract -inf from -inf. [EMPTY-OUT]
    base = gl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = gl.exp2(row_max - base)
    weights = gl.exp2(x * score_scale - spread(base, layout))
    tile_sum = gl.convert_layout(gl.sum(gl.sum(weights, axis=1), axis=1), row_max.type.layout)
    row_sum = row_sum * rescale + gl.where(is_member, tile_sum, 0.0)
    return gl.convert_layout(weights.reshape(s.shape), s.type.layout), rescale, new_max, row_sum


@jit
def keep_members(p, is_member):
    """Weights of rows that list the tile, 0 of all others, NaN included; two neighbours of 16 bits at once."""
    kept = gl.where(is_member, -1, 0).to(gl.int16)
    kept = gl.convert_layout(kept, gl.SliceLayout(1, p.type.layout))[:, None]
    return gl.inline_asm_elementwise("and.b32 $0, $1, $2;", "=r,r,r", [p, kept], dtype=p.dtype, is_pure=True, pack=2)


@jit
def mask_positions(s, positions, mask_start, mask_end, UNIT: gl.constexpr, TILE_KV: gl.constexpr):
    """The scores of what a lane's row may see, -inf for all other keys of the tile."""
    key = gl.arange(0, TILE_KV, layout=gl.SliceLayout(0, s.type.layout))
    kv_idx = positions[0] + key
    for n in gl.static_range(1, TILE_KV // UNIT):
        kv_idx = gl.where(key >= n * UNIT, positions[n] + key - n * UNIT, kv_idx)
    is_admitted = (kv_idx[None, :] >= mask_start[:, None]) & (kv_idx[None, :] < mask_end[:, None])
    return gl.where(is_admitted, s, float("-inf"))


@jit
def clear_unseen(tile, positions, members, task_ptr, intervals, UNIT: gl.constexpr, TILE_KV: gl.constexpr):
    """Zeroes the rows of a tile that no row of the task admits. [MASK-INTERFERE]"""
    mask_starts_ptr, mask_ends_ptr = intervals
    pairs: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [1, 1], [1, 0])
    row = gl.arange(0, SEEN_ROWS, layout=gl.SliceLayout(0, pairs))
    q_start = gl.load(task_ptr + 1)
    is_row = row < gl.load(task_ptr + 2)
    mask_start = gl.load(mask_starts_ptr + q_start + row, mask=is_row, other=0)
    mask_end = gl.load(mask_ends_ptr + q_start + row, mask=is_row, other=0)
    for n in gl.static_range(TILE_KV // CLEARED):
        is_listed = ((members[n * CLEARED // UNIT] >> row) & 1) != 0
        first = positions[n * CLEARED // UNIT] + n * CLEARED % UNIT
        kv_idx = first + gl.arange(0, CLEARED, layout=gl.SliceLayout(1, pairs))
        # [CLEARED, SEEN_ROWS]
        admits = (kv_idx[:, None] >= mask_start[None, :]) & (kv_idx[:, None] < mask_end[None, :]) & is_listed[None, :]
        is_seen = gl.convert_layout(gl.max(admits.to(gl.int32), axis=1), gl.SliceLayout(1, CLEARING)) != 0
        clear_unless(tile.slice(n * CLEARED, CLEARED, dim=0), is_seen, CLEARING)
    finish_writing()
