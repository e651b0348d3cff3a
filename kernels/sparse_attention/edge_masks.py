"""Mask rules and dropout edge by edge, for paths that hold all edges of a request at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.block_rules import lower_block_rule, rule_allows
from attnconform.kernels.sparse_attention.dropout import Dropout, is_kept
from attnconform.kernels.sparse_attention.rules import (
    And,
    Custom,
    MaskRule,
    Or,
    QueryRows,
    lower_mask,
)

TILE_ROWS, TILE_COLUMNS = 16, 128


def allowed_edges(rule: MaskRule | None, request: int, num_heads: int, q_idx: Tensor, seqlen_kv: int) -> Tensor:
    """What a rule allows, (num_heads, seqlen_q, seqlen_kv) bool, of consecutive queries q_idx.

    Rules of intervals take torch operations alone; a Custom rule anywhere takes a launch. [MASK-COMPOSE]
    """
    if _has_custom(rule):
        return _by_kernel(rule, request, num_heads, q_idx, seqlen_kv)
    requests = torch.full_like(q_idx, request)
    lengths = torch.full_like(q_idx, seqlen_kv)
    mask = lower_mask(rule, QueryRows(requests, q_idx, lengths, _batch_size(rule, request), num_heads))
    kv_idx = torch.arange(seqlen_kv, device=q_idx.device)
    allowed = (kv_idx >= mask.starts[..., None]) & (kv_idx < mask.ends[..., None])
    return allowed.expand(num_heads, -1, -1)


def _has_custom(rule: MaskRule | None) -> bool:
    match rule:
        case And(parts) | Or(parts):
            return any(_has_custom(part) for part in parts)
    return isinstance(rule, Custom)


def _batch_size(rule: MaskRule | None, request: int) -> int:
    """Of a rule that has numbers per request; of any other one that holds the request."""
    match rule:
        case And(parts) | Or(parts):
            return max(_batch_size(part, request) for part in parts)
    numbers = getattr(rule, "prefix_len", None) or getattr(rule, "starts", None)
    return len(numbers) if numbers else request + 1


def _by_kernel(rule: MaskRule | None, request: int, num_heads: int, q_idx: Tensor, seqlen_kv: int) -> Tensor:
    lowered = lower_block_rule(rule, request=request, num_heads=num_heads, device=q_idx.device)
    allowed = torch.empty((num_heads, len(q_idx), seqlen_kv), dtype=torch.bool, device=q_idx.device)
    if allowed.numel():
        allowed_kernel[_grid(allowed)](
            allowed, lowered.data, lowered.custom_data, q_idx, request, len(q_idx), seqlen_kv,
            CODES=lowered.codes, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
        )  # fmt: skip
    return allowed


def kept_edges(dropout: Dropout, request: int, num_heads: int, q_idx: Tensor, seqlen_kv: int) -> Tensor:
    """Which edges dropout keeps, (num_heads, seqlen_q, seqlen_kv) bool. [DROPOUT-COUNTER]"""
    kept = torch.empty((num_heads, len(q_idx), seqlen_kv), dtype=torch.bool, device=q_idx.device)
    if kept.numel():
        kept_kernel[_grid(kept)](
            kept, dropout.words(q_idx.device), q_idx, request, len(q_idx), seqlen_kv,
            ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
        )  # fmt: skip
    return kept


def _grid(edges: Tensor) -> tuple[int, int, int]:
    heads, rows, columns = edges.shape
    return heads, triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS)


@triton.jit(do_not_specialize=["request", "seqlen_q", "seqlen_kv"])
def allowed_kernel(
    edges_ptr, data_ptr, custom_data, q_idx_ptr, request, seqlen_q, seqlen_kv,
    CODES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """What a rule allows in one tile of one head's edges."""
    head, row, column, place, is_edge = locate_edges(seqlen_q, seqlen_kv, ROWS, COLUMNS)
    q_idx = tl.load(q_idx_ptr + row, mask=row < seqlen_q, other=0)
    allowed = rule_allows(q_idx, column, row, head, request, data_ptr, custom_data, None, None, CODES)
    tl.store(edges_ptr + place, allowed, mask=is_edge)


@triton.jit(do_not_specialize=["request", "seqlen_q", "seqlen_kv"])
def kept_kernel(
    edges_ptr, words_ptr, q_idx_ptr, request, seqlen_q, seqlen_kv,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """What dropout keeps in one tile of one head's edges."""
    head, row, column, place, is_edge = locate_edges(seqlen_q, seqlen_kv, ROWS, COLUMNS)
    q_idx = tl.load(q_idx_ptr + row, mask=row < seqlen_q, other=0)
    heads = head + tl.zeros([ROWS], tl.int32)
    kept = is_kept(words_ptr, request + tl.zeros([1, 1], tl.int32), heads[:, None], q_idx[:, None], column[None, :])
    tl.store(edges_ptr + place, kept, mask=is_edge)


@triton.jit
def locate_edges(seqlen_q, seqlen_kv, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Head, rows [ROWS] and columns [COLUMNS] of a program's tile; where its edges stand, and which there are."""
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    place = (head.to(tl.int64) * seqlen_q + row)[:, None] * seqlen_kv + column[None, :]
    return head, row, column, place, (row < seqlen_q)[:, None] & (column < seqlen_kv)[None, :]
