"""What the kernels of Hopper share about query rows: whose they are, what each may see, how they are read and written.

[GQA-MAP, COORD-STRIDE, EMPTY-OUT, LSE-NATURAL, LSE-SINK]
"""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from attnconform.kernels.sparse_attention.hopper_scores import ALIBI, LEAST_FACTOR, LOG2_E, SOFT_CAP
from attnconform.kernels.sparse_attention.hopper_tiles import finish_writing

LN_2 = gl.constexpr(0.6931471805599453)


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
    finish_writing()


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
