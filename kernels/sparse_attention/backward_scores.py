"""Gradients of the numbers inside score rules: ALiBi slopes, soft caps, bias tables and custom data. [GRAD-RULE]

For every edge, g = P * (dout.v - delta) is the gradient of the score after all rules; going back through the rules in
reverse order multiplies it by the slope of each. A rule's own number receives the sum over edges of g, at the rule,
times the derivative of the rule by the number: the distance for a slope, tanh u - u (1 - tanh^2 u) with u = score / cap
for a cap, 1 for the entry of a bias table that the edge's clipped distance names, and what the user's own derivative
says for an entry of a CustomScore's data.

A program walks a task as the query-centric backward does. Slopes, caps, data and the two ends of a table, where
clipped distances meet, are summed per row and head in registers, and chunks of a tile added in order. Inside a table a
row has at most one edge per entry, since positions in a list are unique: the edge's g is stored, not added, in a table
of the row's own, and the tables of all rows are summed afterwards. Rows are taken in slabs, so that their tables fit in
TABLE_BYTES. No atomics anywhere: bitwise repeatable in every mode of the backward, g in float32, sums of rows in
float64. Dtypes, head_dim and page_size are those of the forward.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.backward_edges import (
    apply_rule_with_slope,
    form_edges,
    load_row_state,
    load_vectors,
    place_rows,
    score_slopes,
    square_sech,
)
from attnconform.kernels.sparse_attention.backward_hints import TABLE_BYTES
from attnconform.kernels.sparse_attention.backward_query import (
    FULL_END,
    FULL_START,
    HEAD_COUNT,
    HEAD_START,
    KV_END,
    KV_HEAD,
    KV_START,
    PARTIAL,
    Q_COUNT,
    Q_START,
    REQUEST,
    TASK_WIDTH,
    RowInputs,
    cache_strides,
    find_keys,
    launch_chunk_sums,
    load_key_ids,
    padded_dim,
)
from attnconform.kernels.sparse_attention.backward_tasks import QueryLaunch
from attnconform.kernels.sparse_attention.dropout import is_kept
from attnconform.kernels.sparse_attention.element_loads import launcher
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.rules import (
    ALIBI,
    RELATIVE_BIAS,
    SOFT_CAP,
    CustomScore,
    clip_distance,
    interval_rows,
    tanh,
)

MAX_DATA = 32  # entries of one CustomScore that can have a gradient: each is a column of sums, held in registers


def compute_score_gradients(
    plan: Plan, launches: tuple[QueryLaunch, ...], inputs: RowInputs, *, table_bytes: int = TABLE_BYTES
) -> tuple[Tensor, ...]:
    """One gradient per score rule, in float32: (num_qo_heads,), () for a cap, (num_qo_heads, 2 D + 1), (len(data),).

    table_bytes bounds the workspace and changes no edge; a row's own tables are the least it can be.
    """
    if not plan.score_codes:
        return ()
    layout = lay_out_sums(plan)
    rows, heads = plan.total_q, plan.num_qo_heads
    row_sums = inputs.delta.new_zeros((rows, heads, layout.num_sums))
    chunk_sums = [row_sums.new_empty((*launch.partial_rows, layout.num_sums)) for launch in launches]
    tables = row_sums.new_zeros((heads, layout.width), dtype=torch.float64)
    slab = max(1, table_bytes // (4 * heads * layout.width)) if layout.width else max(1, rows)
    for first in range(0, rows, slab):
        row_tables = row_sums.new_zeros((min(slab, rows - first), heads, layout.width))
        for launch, partial_sums in zip(launches, chunk_sums, strict=True):
            _launch_tasks(plan, launch, layout, inputs, row_sums, partial_sums, row_tables, first)
        tables += row_tables.sum(0, dtype=torch.float64)
    for launch, partial_sums in zip(launches, chunk_sums, strict=True):
        if launch.sums.shape[0]:
            launch_chunk_sums(launch, partial_sums, row_sums)
    return _split_by_rule(plan, layout, row_sums.sum(0, dtype=torch.float64), tables)


class SumLayout(NamedTuple):
    """Where each rule's sums and tables stand in those of a row and head, compiled in."""

    starts: tuple[int, ...]  # (num_rules,) first column of sums: one for a number, two for the ends of a table
    num_sums: int
    table_starts: tuple[int, ...]  # (num_rules,) first column of tables
    width: int  # of all tables
    data_sizes: tuple[int, ...]  # (num_rules,) entries of a CustomScore's data, else 0
    data_fns: tuple[triton.JITFunction | None, ...]


def lay_out_sums(plan: Plan) -> SumLayout:
    """Refuses data that cannot have a gradient. [GRAD-RULE]"""
    customs = [rule if isinstance(rule, CustomScore) else None for rule in plan.score_rules]
    customs += [None] * (len(plan.score_codes) - len(customs))
    for rule in customs:
        if rule is not None and rule.data and rule.data_fn is None:
            raise PlanError("GRAD-RULE", "data_fn", None, "a gradient of data needs the derivative by its entries")
        if rule is not None and len(rule.data) > MAX_DATA:
            raise PlanError("GRAD-RULE", "len(data)", len(rule.data), f"at most {MAX_DATA} entries have a gradient")
    sizes = tuple(0 if rule is None else len(rule.data) for rule in customs)
    counts = [
        2 if code == RELATIVE_BIAS.value else 1 if rule is None else size
        for code, rule, size in zip(plan.score_codes, customs, sizes, strict=True)
    ]
    starts, table_starts = ([0, *accumulate(lengths)] for lengths in (counts, plan.score_table_sizes))
    data_fns = tuple(None if rule is None else rule.data_fn for rule in customs)
    return SumLayout(
        tuple(starts[:-1]), max(1, starts[-1]), tuple(table_starts[:-1]), table_starts[-1], sizes, data_fns
    )


def _split_by_rule(
    plan: Plan,
    layout: SumLayout,
    sums: Tensor,  # (num_qo_heads, num_sums) float64
    tables: Tensor,  # (num_qo_heads, sum of table sizes) float64
) -> tuple[Tensor, ...]:
    """The gradient of each rule's numbers, the ends of a table joined to its inside."""
    gradients = []
    for rule, code in enumerate(plan.score_codes):
        start, table_start = layout.starts[rule], layout.table_starts[rule]
        if code == RELATIVE_BIAS.value:
            table = tables[:, table_start : table_start + plan.score_table_sizes[rule]].clone()
            table[:, 0] += sums[:, start]
            table[:, -1] += sums[:, start + 1]
            gradients.append(table.float())
        elif code == ALIBI.value:
            gradients.append(sums[:, start].float())
        elif code == SOFT_CAP.value:
            gradients.append(sums[:, start].sum().float())
        else:
            gradients.append(sums[:, start : start + layout.data_sizes[rule]].sum(0).float())
    return tuple(gradients)


def _launch_tasks(
    plan: Plan,
    launch: QueryLaunch,
    layout: SumLayout,
    inputs: RowInputs,
    row_sums: Tensor,
    partial_sums: Tensor,
    row_tables: Tensor,
    first_row: int,
) -> None:
    q, k_cache, v_cache, dout, lse_log2, delta = inputs
    shape = launch.shape
    launcher(score_gradient_kernel, (launch.tasks.shape[0],), q, k_cache, v_cache, dout)(
        q, k_cache, v_cache, dout, lse_log2, delta, row_sums, partial_sums, row_tables,
        q.stride(), cache_strides(plan, k_cache), cache_strides(plan, v_cache), dout.stride(),
        launch.tasks, plan.page_table, plan.list_slots, plan.list_positions, plan.list_members,
        plan.row_positions, plan.mask_starts, plan.mask_ends, plan.mask_data,
        plan.score_params, plan.score_tables, plan.score_reaches, plan.dropout_words, plan.dropout_scale,
        plan.sm_scale, plan.window or 0, plan.total_q, plan.num_qo_heads, plan.page_table.shape[1],
        first_row, row_tables.shape[0], row_tables.shape[2],
        TILE_M=shape.tile_m,
        TILE_KV=shape.tile_kv,
        HEADS=launch.heads_per_tile,
        GROUP=plan.group_size,
        HEAD_DIM_QK=plan.head_dim_qk,
        HEAD_DIM_VO=plan.head_dim_vo,
        PADDED_QK=padded_dim(plan.head_dim_qk),
        PADDED_VO=padded_dim(plan.head_dim_vo),
        PAGE_SIZE=plan.page_size,
        SCORE_CODES=plan.score_codes,
        SCORE_SLOPES=score_slopes(plan),
        SUM_STARTS=layout.starts,
        TABLE_STARTS=layout.table_starts,
        DATA_SIZES=layout.data_sizes,
        DATA_FNS=layout.data_fns,
        MOST_DATA=max(layout.data_sizes),
        NUM_SUMS=layout.num_sums,
        PADDED_SUMS=triton.next_power_of_2(layout.num_sums),
        MASK_FN=plan.mask_fn,
        HAS_LISTS=plan.list_slots is not None,
        HAS_WINDOW=bool(plan.window),
        HAS_HEAD_MASK=plan.has_head_mask,
        HAS_DROPOUT=plan.dropout_words is not None,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )  # fmt: skip


@triton.jit(do_not_specialize=["window", "total_q", "num_qo_heads", "max_pages", "first_row", "num_rows", "width"])
def score_gradient_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_log2_ptr, delta_ptr, row_sums_ptr, partial_sums_ptr, row_tables_ptr,
    q_strides, k_strides, v_strides, dout_strides,
    tasks_ptr, page_table_ptr, list_slots_ptr, list_positions_ptr, list_members_ptr,
    row_positions_ptr, mask_starts_ptr, mask_ends_ptr, mask_data_ptr,
    score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_words_ptr, dropout_scale,
    sm_scale, window, total_q, num_qo_heads, max_pages,
    first_row, num_rows, width,  # of the slab, and of a row's tables
    TILE_M: tl.constexpr,
    TILE_KV: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_QK: tl.constexpr,
    HEAD_DIM_VO: tl.constexpr,
    PADDED_QK: tl.constexpr,
    PADDED_VO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SCORE_CODES: tl.constexpr,
    SCORE_SLOPES: tl.constexpr,
    SUM_STARTS: tl.constexpr,
    TABLE_STARTS: tl.constexpr,
    DATA_SIZES: tl.constexpr,
    DATA_FNS: tl.constexpr,
    MOST_DATA: tl.constexpr,
    NUM_SUMS: tl.constexpr,
    PADDED_SUMS: tl.constexpr,
    MASK_FN: tl.constexpr,
    HAS_LISTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_HEAD_MASK: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):  # fmt: skip
    """Sums and tables of those of one task's rows times heads that lie in the slab, or its chunk of them."""
    task_ptr = tasks_ptr + tl.program_id(0).to(tl.int64) * TASK_WIDTH
    q_start = tl.load(task_ptr + Q_START)
    q_count = tl.load(task_ptr + Q_COUNT)
    lane_m = tl.arange(0, TILE_M)
    rows = q_start + lane_m // HEADS
    is_row = (lane_m // HEADS < q_count) & (lane_m % HEADS < tl.load(task_ptr + HEAD_COUNT))
    is_row = is_row & (rows >= first_row) & (rows < first_row + num_rows)
    if tl.max(is_row.to(tl.int32), axis=0) == 0:
        return
    request = tl.load(task_ptr + REQUEST)
    kv_head = tl.load(task_ptr + KV_HEAD).to(tl.int64)
    kv_start = tl.load(task_ptr + KV_START)
    kv_end = tl.load(task_ptr + KV_END)
    full_start = tl.load(task_ptr + FULL_START)
    full_end = tl.load(task_ptr + FULL_END)
    partial = tl.load(task_ptr + PARTIAL).to(tl.int64)

    heads = tl.load(task_ptr + HEAD_START) + lane_m % HEADS
    q_idx = tl.load(row_positions_ptr + rows, mask=is_row, other=0)
    places = place_rows(rows, heads, total_q, GROUP)
    lse_log2, delta, has_key = load_row_state(lse_log2_ptr, delta_ptr, places, is_row)
    rows_wide, heads_wide = rows.to(tl.int64), heads.to(tl.int64)
    q_starts = rows_wide * q_strides[0] + heads_wide * q_strides[1]
    dout_starts = rows_wide * dout_strides[0] + heads_wide * dout_strides[1]
    q = load_vectors(q_ptr, q_starts, has_key, q_strides[2], HEAD_DIM_QK, PADDED_QK)
    dout = load_vectors(dout_ptr, dout_starts, has_key, dout_strides[2], HEAD_DIM_VO, PADDED_VO)

    k_ptr += kv_head * k_strides[2]
    v_ptr += kv_head * v_strides[2]
    page_table_ptr += request.to(tl.int64) * max_pages
    mask_rows = interval_rows(rows, heads, total_q, HAS_HEAD_MASK)
    table_ptrs = row_tables_ptr + ((rows_wide - first_row) * num_qo_heads + heads_wide) * width
    sums = tl.zeros([TILE_M, PADDED_SUMS], tl.float32)

    # Keys that every row admits, and then those before and after, masked row by row.
    num_full = (full_end - full_start) // TILE_KV
    full_stop = full_start + num_full * TILE_KV
    num_before = tl.cdiv(full_start - kv_start, TILE_KV)
    num_after = tl.cdiv(kv_end - full_stop, TILE_KV)
    for step in range(0, num_full + num_before + num_after):
        is_full = step < num_full
        is_before = step < num_full + num_before
        masked_step = step - num_full
        first = tl.where(is_before, kv_start + masked_step * TILE_KV, full_stop + (masked_step - num_before) * TILE_KV)
        first = tl.where(is_full, full_start + step * TILE_KV, first)
        limit = tl.where(is_full, full_stop, tl.where(is_before, full_start, kv_end))
        ids = load_key_ids(first, limit, page_table_ptr, list_slots_ptr, TILE_KV, PAGE_SIZE, HAS_LISTS)
        kv_idx, page, offset, admitted, is_read = find_keys(
            ids, first, limit, list_positions_ptr, list_members_ptr,
            mask_rows, q_idx, has_key, request, mask_starts_ptr, mask_ends_ptr, mask_data_ptr, window,
            False, TILE_KV, PAGE_SIZE, MASK_FN, HAS_LISTS, HAS_WINDOW,
        )  # fmt: skip
        k_starts = page * k_strides[0] + offset * k_strides[1]
        v_starts = page * v_strides[0] + offset * v_strides[1]
        k = load_vectors(k_ptr, k_starts, is_read, k_strides[3], HEAD_DIM_QK, PADDED_QK)
        v = load_vectors(v_ptr, v_starts, is_read, v_strides[3], HEAD_DIM_VO, PADDED_VO)
        kept = admitted
        if HAS_DROPOUT:
            kept = is_kept(dropout_words_ptr, request, heads[:, None], q_idx[:, None], kv_idx[None, :])
        _, score_grads, _, products = form_edges(
            q, k, v, dout, lse_log2, delta, admitted, heads, has_key, q_idx[:, None], kv_idx[None, :], None, kept,
            score_params_ptr, score_tables_ptr, score_reaches_ptr, dropout_scale, sm_scale, num_qo_heads,
            SCORE_CODES, SCORE_SLOPES, False, HAS_DROPOUT,
        )  # fmt: skip
        sums = add_rule_gradients(
            sums, score_grads, products * sm_scale, admitted, heads, has_key, q_idx[:, None], kv_idx[None, :],
            table_ptrs, score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads,
            SCORE_CODES, SCORE_SLOPES, SUM_STARTS, TABLE_STARTS, DATA_SIZES, DATA_FNS, MOST_DATA, PADDED_SUMS,
        )  # fmt: skip

    column = tl.arange(0, PADDED_SUMS)
    is_written = is_row[:, None] & (column < NUM_SUMS)[None, :]
    if partial >= 0:
        state = partial * TILE_M + lane_m
        tl.store(partial_sums_ptr + state[:, None] * NUM_SUMS + column[None, :], sums, mask=is_written)
    else:
        starts = (rows_wide * num_qo_heads + heads_wide) * NUM_SUMS
        tl.store(row_sums_ptr + starts[:, None] + column[None, :], sums, mask=is_written)


@triton.jit
def add_rule_gradients(
    sums,  # [TILE_M, PADDED_SUMS]
    score_grads,  # [TILE_M, TILE_KV] gradients of the scores after all rules
    first_scores,  # [TILE_M, TILE_KV] scores before all rules
    admitted,  # [TILE_M, TILE_KV]
    heads, is_row,  # [TILE_M]
    q_idx, kv_idx,  # [TILE_M, 1] and [1, TILE_KV]
    table_ptrs,  # [TILE_M] of the rows' own tables
    score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads,
    CODES: tl.constexpr,
    SLOPES: tl.constexpr,
    SUM_STARTS: tl.constexpr,
    TABLE_STARTS: tl.constexpr,
    DATA_SIZES: tl.constexpr,
    DATA_FNS: tl.constexpr,
    MOST_DATA: tl.constexpr,
    PADDED_SUMS: tl.constexpr,
):  # fmt: skip
    """The rows' sums with one more tile of edges; the insides of bias tables are stored. [GRAD-RULE]"""
    distance = kv_idx - q_idx
    for rule in tl.static_range(len(CODES)):
        # The scores at this rule, and the gradient brought back to just behind it.
        scores = first_scores
        scores_at_rule = first_scores
        grads = score_grads
        for step in tl.static_range(len(CODES)):
            if step == rule:
                scores_at_rule = scores
            scores, slope = apply_rule_with_slope(
                scores, step, heads, is_row, q_idx, kv_idx, None,
                score_params_ptr, score_tables_ptr, score_reaches_ptr, num_qo_heads, 1.0, CODES, SLOPES,
            )  # fmt: skip
            if step > rule:
                grads = grads * slope
        if CODES[rule] == RELATIVE_BIAS:
            entry, reach = clip_distance(distance, score_reaches_ptr + 2 * rule)
            is_low = entry == 0
            is_high = (entry == 2 * reach) & (entry > 0)
            is_inside = admitted & (entry > 0) & (entry < 2 * reach)
            tl.store(table_ptrs[:, None] + TABLE_STARTS[rule] + entry, grads, mask=is_inside)
            sums = add_row_sums(sums, grads, admitted & is_low, SUM_STARTS[rule], PADDED_SUMS)
            sums = add_row_sums(sums, grads, admitted & is_high, SUM_STARTS[rule] + 1, PADDED_SUMS)
        elif CODES[rule] == ALIBI:
            grads = grads * distance.to(tl.float32)
            sums = add_row_sums(sums, grads, admitted, SUM_STARTS[rule], PADDED_SUMS)
        elif CODES[rule] == SOFT_CAP:
            cap = tl.load(score_params_ptr + rule * num_qo_heads + heads, mask=is_row, other=1.0)[:, None]
            grads = grads * differentiate_cap(scores_at_rule / cap)
            sums = add_row_sums(sums, grads, admitted, SUM_STARTS[rule], PADDED_SUMS)
        else:
            data_ptr = score_tables_ptr + tl.load(score_reaches_ptr + 2 * rule)
            # Triton takes no element of a tuple as the end of a range.
            for datum in tl.static_range(MOST_DATA):
                if datum < DATA_SIZES[rule]:
                    by_entry = DATA_FNS[rule](scores_at_rule, q_idx, kv_idx, heads[:, None], data_ptr, datum)
                    sums = add_row_sums(sums, grads * by_entry, admitted, SUM_STARTS[rule] + datum, PADDED_SUMS)
    return sums


@triton.jit
def add_row_sums(sums, terms, is_term, COLUMN: tl.constexpr, PADDED_SUMS: tl.constexpr):
    """Adds each row's terms to one column; a masked term may be no number."""
    total = tl.sum(tl.where(is_term, terms, 0.0), axis=1)
    return sums + tl.where((tl.arange(0, PADDED_SUMS) == COLUMN)[None, :], total[:, None], 0.0)


@triton.jit
def differentiate_cap(x):
    """d (cap tanh(score / cap)) / d cap where x = score / cap: tanh x - x / cosh^2 x.

    The two cancel to 2 x^3 / 3 near 0; there the series keeps the relative accuracy.
    """
    square = x * x
    series = 0.08863236 * square - 0.17495591
    series = series * square + 0.32380952
    series = series * square - 0.53333333
    series = (series * square + 0.66666667) * square * x
    return tl.where(tl.abs(x) < 0.25, series, tanh(x) - x * square_sech(x))
