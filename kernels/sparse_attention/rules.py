"""Mask and score rules of the sparse attention kernels, and how they reach the GPU.

Every built-in mask rule lets a query see one interval around its own position. Intervals that share a point intersect
and join to intervals, so any tree of And and Or comes down to one interval per query row, and per query head where a
HeadWindow is in it, computed when a plan is made. A kernel compares positions with it: window sizes, prefixes and
documents are data, nothing of a tree is compiled in, and the work list skips what no interval touches. Score rules
become a short program of codes, compiled in, over a table of per-head parameters and, for relative biases, tables that
are data too. Rules see logical positions and query heads only. [COORD-LOGICAL]
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.numerics import reciprocal

_FAR = 1 << 40  # beyond every position on either side


@dataclass(frozen=True)
class Causal:
    """A query sees its own position and earlier ones. [MASK-CAUSAL]"""


@dataclass(frozen=True)
class Window:
    """A query sees `left` positions before its own and `right` after it; None is unlimited. [MASK-WINDOW]"""

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for name, size in (("window_left", self.left), ("window_right", self.right)):
            if size is not None and size < 0:
                raise PlanError("MASK-WINDOW", name, size, "must be None or at least 0")


@dataclass(frozen=True)
class HeadWindow:
    """Each query head has a window of its own. [MASK-HEAD-WINDOW]"""

    left: tuple[int | None, ...]  # (num_qo_heads,) positions before the query's own; None is unlimited
    right: tuple[int | None, ...]  # (num_qo_heads,) positions after it

    def __post_init__(self) -> None:
        _check_length("right", len(self.right), len(self.left))
        for name, sizes in (("left", self.left), ("right", self.right)):
            for h, size in enumerate(sizes):
                if size is not None and size < 0:
                    raise PlanError("MASK-HEAD-WINDOW", name, size, "must be None or at least 0", (h,))


@dataclass(frozen=True)
class PrefixLM:
    """Every query sees the whole prefix of its request; past the prefix the mask is causal. [MASK-PREFIX]"""

    prefix_len: tuple[int, ...]  # (batch_size,)


@dataclass(frozen=True)
class Document:
    """A query sees only its own document; documents run from one start to the next. [MASK-DOCUMENT]"""

    starts: tuple[tuple[int, ...], ...]  # per request, ascending

    def __post_init__(self) -> None:
        for n, row in enumerate(self.starts):
            for k, (before, start) in enumerate(pairwise(row)):
                if start <= before:
                    raise PlanError("MASK-DOCUMENT", "starts", start, f"must lie after {before}", (n, k + 1))


@dataclass(frozen=True)
class And:
    """What every one of the rules allows. [MASK-COMPOSE]"""

    rules: tuple[MaskRule, ...]

    def __post_init__(self) -> None:
        _check_not_empty(self.rules)


@dataclass(frozen=True)
class Or:
    """What at least one of the rules allows. [MASK-COMPOSE]"""

    rules: tuple[MaskRule, ...]

    def __post_init__(self) -> None:
        _check_not_empty(self.rules)


@dataclass(frozen=True, eq=False)
class Custom:
    """What a Triton jit function allows; alone, or as a direct part of an And.

    mask_fn(q_idx, kv_idx, request, data) sees int32 tensors of shapes (rows, 1) and (1, TILE_KV), a request number and
    a pointer to `data`, and returns booleans that broadcast to (rows, TILE_KV). It must be pure.
    """

    mask_fn: triton.JITFunction
    data: Tensor | None = None  # values may be edited between runs


@dataclass(frozen=True)
class Alibi:
    """Adds slope[h] * (kv_idx - q_idx) to the score. [SCORE-ALIBI, SCORE-HEAD]"""

    slopes: tuple[float, ...]  # (num_qo_heads,)


@dataclass(frozen=True)
class SoftCap:
    """Replaces the score by cap * tanh(score / cap). [SCORE-SOFTCAP]"""

    cap: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cap) and self.cap > 0):
            raise PlanError("SAFE-FINITE", "cap", self.cap, "must be finite and above 0")


@dataclass(frozen=True)
class RelativeBias:
    """Adds tables[h][clip(kv_idx - q_idx, -D, D) + D] to the score. [SCORE-RELATIVE, SCORE-HEAD]"""

    tables: tuple[tuple[float, ...], ...]  # (num_qo_heads, 2 D + 1)

    def __post_init__(self) -> None:
        for h, table in enumerate(self.tables):
            _check_length(f"tables[{h}]", len(table), len(self.tables[0]))
            if len(table) % 2 == 0:
                raise PlanError("SCORE-RELATIVE", f"len(tables[{h}])", len(table), "must be odd")
            _check_finite("tables", table, (h,))


@dataclass(frozen=True, eq=False)
class CustomScore:
    """Replaces the score by what a Triton jit function makes of it.

    score_fn(scores, q_idx, kv_idx, heads, data_ptr) sees float32 scores (rows, TILE_KV), int32 positions (rows, 1) and
    (rows or 1, TILE_KV), query heads (rows, 1) and a pointer to `data`, and returns scores of the same shape. It must
    be pure. A backward needs slope_fn, the derivative by the score, in the same form, and for a gradient of data
    data_fn(..., entry), the derivative by data[entry].
    """

    score_fn: triton.JITFunction
    data: tuple[float, ...] = ()
    slope_fn: triton.JITFunction | None = None
    data_fn: triton.JITFunction | None = None

    def __post_init__(self) -> None:
        _check_finite("data", self.data)


MaskRule = Causal | Window | HeadWindow | PrefixLM | Document | And | Or | Custom
ScoreRule = Alibi | SoftCap | RelativeBias | CustomScore


def _check_not_empty(rules: tuple[MaskRule, ...]) -> None:
    if not rules:
        raise PlanError("MASK-COMPOSE", "rules", "()", "a composition needs at least one rule")


@dataclass(frozen=True, eq=False)
class QueryRows:
    """Where every query row stands: its request, its logical position and its request's length."""

    request: Tensor  # (total_q,) int64
    position: Tensor  # (total_q,) int64, may be negative
    seqlen_kv: Tensor  # (total_q,) int64
    batch_size: int
    num_qo_heads: int = 1


@dataclass(frozen=True, eq=False)
class LoweredMask:
    """Row r and head h may see kv position j where starts[h, r] <= j < ends[h, r], and mask_fn agrees.

    One row of intervals serves all heads unless a rule tells them apart.
    """

    starts: Tensor  # (1 or num_qo_heads, total_q) int32, within [0, seqlen_kv]
    ends: Tensor  # likewise
    mask_fn: triton.JITFunction | None
    mask_data: Tensor | None


# First position and past the last, around the row's own position; (total_q,) or (num_qo_heads, total_q) int64.
Interval = tuple[Tensor, Tensor]


def lower_mask(rule: MaskRule | None, rows: QueryRows) -> LoweredMask:
    """The interval a mask rule allows every row, and the jit function it may add. [MASK-COMPOSE]"""
    parts = rule.rules if isinstance(rule, And) else () if rule is None else (rule,)
    customs = [part for part in parts if isinstance(part, Custom)]
    if len(customs) > 1:
        raise PlanError(
            "MASK-COMPOSE", "mask_rule", len(customs), "one Custom rule per plan; join them in one function"
        )
    unlimited = (rows.position - _FAR, rows.position + _FAR)
    allowed = [_allowed_interval(part, rows) for part in parts if not isinstance(part, Custom)]
    start, end = reduce(_intersect, allowed, unlimited)
    zero = torch.zeros_like(start)
    custom = customs[0] if customs else None
    return LoweredMask(
        starts=torch.atleast_2d(torch.clamp(start, zero, rows.seqlen_kv).int()).contiguous(),
        ends=torch.atleast_2d(torch.clamp(end, zero, rows.seqlen_kv).int()).contiguous(),
        mask_fn=custom.mask_fn if custom else None,
        mask_data=custom.data if custom else None,
    )


def _allowed_interval(rule: MaskRule, rows: QueryRows) -> Interval:
    """What one rule allows, not yet cut to the request."""
    first, past = rows.position - _FAR, rows.position + _FAR
    match rule:
        case Causal():
            return first, rows.position + 1
        case Window(left, right):
            first = first if left is None else rows.position - left
            return first, past if right is None else rows.position + right + 1
        case HeadWindow(left, right):
            before = _window_sizes("left", left, rows)
            return rows.position - before, rows.position + _window_sizes("right", right, rows) + 1
        case PrefixLM(prefix_len):
            return first, torch.maximum(_per_row("prefix_len", prefix_len, rows), rows.position + 1)
        case Document(starts):
            return _document_bounds(starts, rows)
        case And(parts):
            return reduce(_intersect, [_allowed_interval(part, rows) for part in parts])
        case Or(parts):
            return reduce(_join, [_allowed_interval(part, rows) for part in parts])
        case Custom():
            raise PlanError("MASK-COMPOSE", "mask_rule", "Custom", "must stand alone or directly inside an And")
    raise PlanError("MASK-COMPOSE", "mask_rule", repr(rule), "must be a rule of this module")


def _intersect(a: Interval, b: Interval) -> Interval:
    return torch.maximum(a[0], b[0]), torch.minimum(a[1], b[1])


def _join(a: Interval, b: Interval) -> Interval:
    """Both hold the row's own position, so nothing lies between them."""
    return torch.minimum(a[0], b[0]), torch.maximum(a[1], b[1])


def _window_sizes(name: str, sizes: tuple[int | None, ...], rows: QueryRows) -> Tensor:
    """Positions on one side of each head's queries, (num_qo_heads, 1)."""
    _check_length(name, len(sizes), rows.num_qo_heads)
    reaches = [_FAR if size is None else size for size in sizes]
    return torch.tensor(reaches, dtype=torch.int64, device=rows.position.device)[:, None]


def _per_row(name: str, per_request: tuple[int, ...], rows: QueryRows) -> Tensor:
    _check_length(name, len(per_request), rows.batch_size)
    return torch.tensor(per_request, dtype=torch.int64, device=rows.request.device)[rows.request]


def _document_bounds(starts: tuple[tuple[int, ...], ...], rows: QueryRows) -> Interval:
    """First and past-the-last position of the document of each row."""
    _check_length("starts", len(starts), rows.batch_size)
    lengths = torch.tensor([len(row) for row in starts], dtype=torch.int64)
    request = torch.repeat_interleave(torch.arange(len(starts)), lengths)
    # A wall on both sides of each request keeps neighbours' documents apart in one ascending array of keys.
    walls = torch.arange(rows.batch_size + 1) * _KEY_STRIDE - _KEY_STRIDE // 2
    flat = torch.tensor([start for row in starts for start in row], dtype=torch.int64)
    flat = torch.clamp(flat, -(2**31), 2**31)
    keys = torch.cat([walls, request * _KEY_STRIDE + flat]).sort().values.to(rows.request.device)
    row_key = rows.request * _KEY_STRIDE + rows.position
    after = torch.searchsorted(keys, row_key, right=True)
    base = rows.request * _KEY_STRIDE
    return keys[after - 1] - base, keys[after] - base


_KEY_STRIDE = 1 << 34  # positions lie in +-2^31, so that a request's keys stay between its walls


def _check_length(name: str, got: int, want: int) -> None:
    if got != want:
        raise PlanError("SAFE-SHAPE", f"len({name})", got, f"must be {want}")


ALIBI = tl.constexpr(0)
SOFT_CAP = tl.constexpr(1)
RELATIVE_BIAS = tl.constexpr(2)

TANH_RATE = tl.constexpr(2.8853900817779268)  # 2 / ln 2


@dataclass(frozen=True, eq=False)
class LoweredScore:
    """Codes in order of application, compiled in, and their numbers, data."""

    codes: tuple[int | triton.JITFunction, ...]  # of a CustomScore, its function
    params: Tensor  # (num_rules, num_qo_heads) float32: slope, or cap
    # Both None where no rule is a relative bias: an argument that is absent costs a kernel nothing.
    tables: Tensor | None  # flat float32: relative biases' tables, (num_qo_heads, 2 D + 1), and CustomScores' data
    reaches: Tensor | None  # (num_rules, 2) int32: where a rule's tables start, and its D, or the length of its data
    table_sizes: tuple[int, ...]  # (num_rules,) 2 D + 1; 0 for rules without a table


def lower_score(rules: tuple[ScoreRule, ...], num_qo_heads: int, device: torch.device) -> LoweredScore:
    """The program of the score rules. [SCORE-ORDER, SCORE-HEAD]"""
    codes: list[int | triton.JITFunction] = []
    params: list[tuple[float, ...]] = []
    reaches: list[tuple[int, int]] = []
    entries: list[float] = []
    for rule in rules:
        reaches.append((len(entries), 0))
        match rule:
            case Alibi(slopes):
                _check_length("slopes", len(slopes), num_qo_heads)
                _check_finite("slopes", slopes)
                codes.append(ALIBI.value)
                params.append(tuple(slopes))
            case SoftCap(cap):
                codes.append(SOFT_CAP.value)
                params.append((cap,) * num_qo_heads)
            case RelativeBias(tables):
                _check_length("tables", len(tables), num_qo_heads)
                codes.append(RELATIVE_BIAS.value)
                params.append((0.0,) * num_qo_heads)
                reaches[-1] = (len(entries), len(tables[0]) // 2)
                entries += [entry for table in tables for entry in table]
            case CustomScore(score_fn, data):
                codes.append(score_fn)
                params.append((0.0,) * num_qo_heads)
                reaches[-1] = (len(entries), len(data))
                entries += data or (0.0,)  # a function without data has a pointer all the same
            case _:
                limit = "must be Alibi, SoftCap, RelativeBias or CustomScore"
                raise PlanError("SCORE-ORDER", "score_rules", repr(rule), limit)
    return LoweredScore(
        codes=tuple(codes),
        params=torch.tensor(params, dtype=torch.float32, device=device).reshape(len(codes), num_qo_heads),
        tables=torch.tensor(entries, dtype=torch.float32, device=device) if entries else None,
        reaches=torch.tensor(reaches, dtype=torch.int32, device=device) if entries else None,
        table_sizes=tuple(len(rule.tables[0]) if isinstance(rule, RelativeBias) else 0 for rule in rules),
    )


def _check_finite(name: str, values: tuple[float, ...], index: tuple[int, ...] = ()) -> None:
    for at, value in enumerate(values):
        if not math.isfinite(value):
            raise PlanError("SAFE-FINITE", name, value, "must be finite", (*index, at))


@triton.jit
def interval_rows(rows, heads, total_q, HAS_HEAD_MASK: tl.constexpr):  # [TILE_M]
    """Where the intervals of rows and heads stand in the lowered mask, [TILE_M]."""
    if HAS_HEAD_MASK:
        return heads.to(tl.int64) * total_q + rows
    else:
        return rows


@triton.jit
def is_in_intervals(
    mask_rows,  # [ROWS] as interval_rows gives them
    is_row,  # [ROWS] False: padding, allowed nothing
    kv_idx,  # [ROWS or 1, TILE_KV] logical positions
    mask_starts_ptr,
    mask_ends_ptr,
):
    """Which positions the lowered mask allows each row, [ROWS, TILE_KV]. [MASK-BEFORE-MAX]"""
    start = tl.load(mask_starts_ptr + mask_rows, mask=is_row, other=0)
    end = tl.load(mask_ends_ptr + mask_rows, mask=is_row, other=0)
    return (kv_idx >= start[:, None]) & (kv_idx < end[:, None])


@triton.jit
def apply_score_rules(
    scores,  # [TILE_M, TILE_KV] float32, sm_scale * q.k, times unit
    heads,  # [TILE_M] query heads
    is_live,  # [TILE_M]
    q_idx,  # [ROWS] logical positions, ROWS being 1 or TILE_M
    kv_idx,  # [TILE_KV]
    score_params_ptr,
    score_tables_ptr,
    score_reaches_ptr,
    num_qo_heads,
    unit,  # LOG2_E where scores are to be in base 2
    CODES: tl.constexpr,
):
    """Scores after every rule, in the order listed and in the unit given. [SCORE-ORDER]

    Slopes, caps and biases are scores themselves, so in another unit they are as many times larger.
    """
    for rule in tl.static_range(len(CODES)):
        param = tl.load(score_params_ptr + rule * num_qo_heads + heads, mask=is_live, other=1.0) * unit
        if CODES[rule] == RELATIVE_BIAS:
            distance = kv_idx[None, :] - q_idx[:, None]
            scores += unit * load_biases(distance, heads, is_live, score_tables_ptr, score_reaches_ptr + 2 * rule)
        elif CODES[rule] == ALIBI:
            # Converting an integer costs four products. Positions relative to a row's are converted one by one and
            # not pair by pair, and lose no more than the distance itself would.
            origin = tl.max(q_idx, axis=0)
            q_place = (q_idx - origin).to(tl.float32)
            kv_place = (kv_idx - origin).to(tl.float32)
            scores += param[:, None] * (kv_place[None, :] - q_place[:, None])
        elif CODES[rule] == SOFT_CAP:
            scores = cap_scores(scores, param)
        else:
            data_ptr = score_tables_ptr + tl.load(score_reaches_ptr + 2 * rule)
            scores = unit * CODES[rule](scores / unit, q_idx[:, None], kv_idx[None, :], heads[:, None], data_ptr)
    return scores


@triton.jit
def load_biases(
    distance,  # [TILE_M or 1, TILE_KV] kv_idx - q_idx
    heads,  # [TILE_M] query heads
    is_live,  # [TILE_M]
    score_tables_ptr,
    reach_ptr,  # of one rule
):
    """What a relative bias adds to each edge, [TILE_M, TILE_KV]; 0 in lanes of no row. [SCORE-RELATIVE]"""
    entry, reach = clip_distance(distance, reach_ptr)
    starts = tl.load(reach_ptr) + heads * (2 * reach + 1)
    return tl.load(score_tables_ptr + starts[:, None] + entry, mask=is_live[:, None], other=0.0)


@triton.jit
def clip_distance(distance, reach_ptr):
    """Entry of a distance in a head's table, from 0 to 2 D, and D."""
    reach = tl.load(reach_ptr + 1)
    return tl.minimum(tl.maximum(distance, -reach), reach) + reach, reach


@triton.jit
def cap_scores(scores, cap):  # [TILE_M, TILE_KV], [TILE_M]
    """cap * tanh(scores / cap). [SCORE-SOFTCAP]"""
    return cap[:, None] * base_two_tanh(scores * (1.0 / cap * TANH_RATE)[:, None])


@triton.jit
def tanh(x):
    """Hyperbolic tangent to about 2^-23 absolutely, which is what a soft cap's bound is made of. [SCORE-SOFTCAP]"""
    return base_two_tanh(x * TANH_RATE)


@triton.jit
def base_two_tanh(x):
    """(2^x - 1) / (2^x + 1)."""
    return 1.0 - 2.0 * reciprocal(1.0 + tl.exp2(x))
