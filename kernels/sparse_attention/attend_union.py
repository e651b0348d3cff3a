"""The kernel of union tiles: a task walks the blocks that any of its rows lists; bits say whose each is. [BLOCK-MEMBER]

Blocks that the mask admits whole, to every row of the task, need only the bits, and have a loop of their own: some row
has the bit, so that every token read is one that a row selects. A token of any other block is read only where some row
admits it.
"""

import triton
import triton.language as tl

from attnconform.kernels.sparse_attention.attend import load_queries, scale_sums
from attnconform.kernels.sparse_attention.merging import store_rows
from attnconform.kernels.sparse_attention.rules import is_in_intervals
from attnconform.kernels.sparse_attention.tile import attend_keys, locate_keys


# Numbers of a batch or a rule: a kernel compiled for one value of them must serve every other.
@triton.jit(do_not_specialize=["num_qo_heads", "max_pages"])
def attend_union_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, lse_ptr,
    q_strides, k_strides, v_strides, k_scale_strides, v_scale_strides, out_strides, lse_strides,
    tasks_ptr, blocks_ptr, members_ptr, page_table_ptr,
    row_positions_ptr, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
    score_params_ptr, score_tables_ptr, score_reaches_ptr, sink_logits_ptr, dropout_words_ptr, dropout_scale,
    sm_scale, num_qo_heads, max_pages,
    TASK_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    REST_QK: tl.constexpr,
    REST_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCORE_CODES: tl.constexpr,
    IS_SCALED_LATE: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_SINK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_GRANULARITY: tl.constexpr,
    V_GRANULARITY: tl.constexpr,
    K_ASSEMBLY: tl.constexpr,
    V_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Attends one task and writes its rows."""
    task_ptr = tasks_ptr + tl.program_id(0).to(tl.int64) * TASK_WIDTH
    request = tl.load(task_ptr)
    q_start = tl.load(task_ptr + 1)
    q_count = tl.load(task_ptr + 2)
    head_start = tl.load(task_ptr + 3)
    head_count = tl.load(task_ptr + 4)
    kv_head = tl.load(task_ptr + 5).to(tl.int64)
    entry_start = tl.load(task_ptr + 6)
    entry_end = tl.load(task_ptr + 7)
    full_start = tl.load(task_ptr + 8)
    full_end = tl.load(task_ptr + 9)

    lane_m = tl.arange(0, TILE_M)
    rows = q_start + lane_m // HEADS
    heads = head_start + lane_m % HEADS
    is_live = (lane_m // HEADS < q_count) & (lane_m % HEADS < head_count)
    q_idx = tl.load(row_positions_ptr + rows, mask=is_live, other=0)
    q_starts = rows.to(tl.int64) * q_strides[0] + heads.to(tl.int64) * q_strides[1]
    queries, score_scale = load_queries(
        q_ptr, q_starts, is_live, q_strides[2], k_scale_ptr, k_scale_strides, kv_head, sm_scale,
        HEAD_DIM_QK, PADDED_QK, REST_QK, K_FORMAT, K_GRANULARITY,
    )  # fmt: skip
    page_row = page_table_ptr + request.to(tl.int64) * max_pages
    k_cache = (k_ptr + kv_head * k_strides[2], k_strides, k_scale_ptr, k_scale_strides, kv_head)
    v_cache = (v_ptr + kv_head * v_strides[2], v_strides, v_scale_ptr, v_scale_strides, kv_head)
    mask = (mask_starts_ptr, mask_ends_ptr, mask_data_ptr)
    score = (
        score_scale, IS_SCALED_LATE, score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads,
        dropout_words_ptr,
    )  # fmt: skip
    where = (rows, lane_m // HEADS, q_idx, request, heads, is_live)
    row_max = tl.full([TILE_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, PADDED_VO if V_FORMAT is None else PADDED_VO // 2], tl.float32)
    acc_rest = tl.zeros([TILE_M, max(REST_VO, 1) if V_FORMAT is None else PADDED_VO // 2], tl.float32)
    value_unit = tl.zeros([TILE_M], tl.float32)

    # Blocks that the mask admits whole.
    num_keys = (full_end - full_start) * BLOCK_SIZE
    for first in range(0, num_keys, TILE_KV):
        acc, acc_rest, row_max, row_sum, value_unit = attend_blocks(
            acc, acc_rest, row_max, row_sum, value_unit, queries, first, num_keys, full_start, 0, 0,
            where, page_row, k_cache, v_cache, blocks_ptr, members_ptr, mask, score,
            True, BLOCK_SIZE, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO, REST_QK, REST_VO, PAGE_SIZE,
            SCORE_CODES, MASK_FN, HAS_DROPOUT, K_FORMAT, V_FORMAT, K_GRANULARITY, V_GRANULARITY,
            K_ASSEMBLY, V_ASSEMBLY, q_ptr.dtype.element_ty == tl.float32,
        )  # fmt: skip
    # Blocks before and after those, masked token by token.
    num_full = full_end - full_start
    num_keys = (entry_end - entry_start - num_full) * BLOCK_SIZE
    for first in range(0, num_keys, TILE_KV):
        acc, acc_rest, row_max, row_sum, value_unit = attend_blocks(
            acc, acc_rest, row_max, row_sum, value_unit, queries, first, num_keys, entry_start,
            full_start - entry_start, num_full,
            where, page_row, k_cache, v_cache, blocks_ptr, members_ptr, mask, score,
            False, BLOCK_SIZE, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO, REST_QK, REST_VO, PAGE_SIZE,
            SCORE_CODES, MASK_FN, HAS_DROPOUT, K_FORMAT, V_FORMAT, K_GRANULARITY, V_GRANULARITY,
            K_ASSEMBLY, V_ASSEMBLY, q_ptr.dtype.element_ty == tl.float32,
        )  # fmt: skip

    acc, acc_rest = scale_sums(
        acc, acc_rest, value_unit, v_scale_ptr, v_scale_strides, kv_head, dropout_scale,
        HEAD_DIM_VO, PADDED_VO, HAS_DROPOUT, V_FORMAT, V_GRANULARITY, q_ptr.dtype.element_ty == tl.float32,
    )  # fmt: skip
    store_rows(
        acc, acc_rest, row_max, row_sum, rows, heads, is_live,
        out_ptr, lse_ptr, out_strides, lse_strides, sink_logits_ptr, HEAD_DIM_VO, PADDED_VO, REST_VO, HAS_SINK,
    )  # fmt: skip


@triton.jit
def attend_blocks(
    acc, acc_rest, row_max, row_sum, value_unit, queries,  # as attend_tile has them
    first, limit,  # tokens of this tile, counted over the blocks of a walk: from first, below limit
    walk_start, num_before, num_skipped,  # entries: where the walk starts, and what it leaves out after so many
    where,  # [TILE_M] rows, numbers of rows in the tile, and q_idx; request; [TILE_M] heads and is_live
    page_row, k_cache, v_cache, blocks_ptr, members_ptr, mask, score,
    IS_FULL: tl.constexpr,  # the mask admits every token to every row
    BLOCK_SIZE: tl.constexpr,
    TILE_KV: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    REST_QK: tl.constexpr,
    REST_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCORE_CODES: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_GRANULARITY: tl.constexpr,
    V_GRANULARITY: tl.constexpr,
    K_ASSEMBLY: tl.constexpr,
    V_ASSEMBLY: tl.constexpr,
    IS_FLOAT32: tl.constexpr,
):  # fmt: skip
    """The state after one more tile of the blocks' tokens. [BLOCK-MEMBER, MASK-BEFORE-MAX]"""
    rows, local_row, q_idx, request, heads, is_live = where
    token = first + tl.arange(0, TILE_KV)
    is_key = token < limit
    step = token // BLOCK_SIZE
    entry = walk_start + step + tl.where(step >= num_before, num_skipped, 0)
    block = tl.load(blocks_ptr + entry, mask=is_key, other=0)
    members = tl.load(members_ptr + entry, mask=is_key, other=0)
    position = block * BLOCK_SIZE + token % BLOCK_SIZE
    # [TILE_M, TILE_KV]
    admitted = ((members[None, :] >> local_row[:, None]) & 1) != 0
    is_read = is_key
    if not IS_FULL:
        admitted = admitted & is_in_intervals(rows, is_live, position[None, :], mask[0], mask[1])
        if MASK_FN is not None:
            admitted = admitted & MASK_FN(q_idx[:, None], position[None, :], request, mask[2])
        is_read = tl.max(admitted.to(tl.int32), axis=0) > 0
    kv_idx, slots = locate_keys(position, is_read, page_row, k_cache, v_cache, (), PAGE_SIZE, False, True)
    return attend_keys(
        acc, acc_rest, row_max, row_sum, value_unit, queries, kv_idx, slots, admitted, is_read,
        q_idx, request, heads, is_live, k_cache, v_cache, score,
        False, False, TILE_KV, HEAD_DIM_QK, HEAD_DIM_VO, PADDED_QK, PADDED_VO, REST_QK, REST_VO, SCORE_CODES,
        HAS_DROPOUT, K_FORMAT, V_FORMAT, K_GRANULARITY, V_GRANULARITY, K_ASSEMBLY, V_ASSEMBLY, IS_FLOAT32,
    )  # fmt: skip
