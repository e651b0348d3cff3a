"""Mask and score rules of the sparse attention kernels, and how they reach the GPU.

Every built-in mask rule lets a query see one interval around its own position. Intervals that share a point intersect
and join to intervals, so any tree of And and Or comes down to one interval per query row, computed when a plan is
made. A kernel compares positions with it: window sizes, prefixes and documents are data, nothing of a tree is compiled
in, and the work list skips what no interval touches. Score rules become a short program of codes, compiled in, over a
table of per-head parameters. Rules see logical positions and query heads only. [COORD-LOGICAL]
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


MaskRule = Causal | Window | PrefixLM | Document | And | Or | Custom
ScoreRule = Alibi | SoftCap


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


@dataclass(frozen=True, eq=False)
class LoweredMask:
    """Row r may see kv position j where starts[0, r] <= j < ends[0, r], and mask_fn agrees."""

    starts: Tensor  # (1, total_q) int32, within [0, seqlen_kv]
    ends: Tensor  # (1, total_q) int32, at least starts
    mask_fn: triton.JITFunction | None
    mask_data: Tensor | None


Interval = tuple[Tensor, Tensor]  # first position and past the last, (total_q,) int64, around the row's own position


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
        starts=torch.clamp(start, zero, rows.seqlen_kv).int()[None],
        ends=torch.clamp(end, zero, rows.seqlen_kv).int()[None],
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


@dataclass(frozen=True, eq=False)
class LoweredScore:
    """Codes in order of application, compiled in, and one parameter per rule and query head, data."""

    codes: tuple[int, ...]
    params: Tensor  # (num_rules, num_qo_heads) float32: slope, or cap


def lower_score(rules: tuple[ScoreRule, ...], num_qo_heads: int, device: torch.device) -> LoweredScore:
    """The program of the score rules. [SCORE-ORDER, SCORE-HEAD]"""
    codes: list[int] = []
    params: list[tuple[float, ...]] = []
    for rule in rules:
        match rule:
            case Alibi(slopes):
                _check_length("slopes", len(slopes), num_qo_heads)
                _check_finite(slopes)
                codes.append(ALIBI.value)
                params.append(tuple(slopes))
            case SoftCap(cap):
                codes.append(SOFT_CAP.value)
                params.append((cap,) * num_qo_heads)
            case _:
                raise PlanError("SCORE-ORDER", "score_rules", repr(rule), "must be Alibi or SoftCap")
    table = torch.tensor(params, dtype=torch.float32, device=device).reshape(len(codes), num_qo_heads)
    return LoweredScore(codes=tuple(codes), params=table)


def _check_finite(slopes: tuple[float, ...]) -> None:
    for h, slope in enumerate(slopes):
        if not math.isfinite(slope):
            raise PlanError("SAFE-FINITE", "slopes", slope, "must be finite", (h,))


@triton.jit
def is_in_intervals(
    rows,  # [ROWS] global query rows
    is_row,  # [ROWS] False: padding, allowed nothing
    kv_idx,  # [TILE_KV] logical positions
    mask_starts_ptr,
    mask_ends_ptr,
    total_q,
    NUM_INTERVALS: tl.constexpr,
):
    """Which positions the lowered mask allows each row, [ROWS, TILE_KV]. [MASK-BEFORE-MAX]"""
    allowed = kv_idx[None, :] < 0
    for interval in tl.static_range(NUM_INTERVALS):
        start = tl.load(mask_starts_ptr + interval * total_q + rows, mask=is_row, other=0)
        end = tl.load(mask_ends_ptr + interval * total_q + rows, mask=is_row, other=0)
        allowed = allowed | ((kv_idx[None, :] >= start[:, None]) & (kv_idx[None, :] < end[:, None]))
    return allowed


@triton.jit
def apply_score_rules(
    scores,  # [TILE_M, TILE_KV] float32, sm_scale * q.k, times unit
    heads,  # [TILE_M] query heads
    is_live,  # [TILE_M]
    q_idx,  # [ROWS] logical positions, ROWS being 1 or TILE_M
    kv_idx,  # [TILE_KV]
    score_params_ptr,
    num_qo_heads,
    unit,  # LOG2_E where scores are to be in base 2
    CODES: tl.constexpr,
):
    """Scores after every rule, in the order listed and in the unit given. [SCORE-ORDER]

    Slopes and caps are scores themselves, so in another unit they are as many times larger.
    """
    for rule in tl.static_range(len(CODES)):
        param = tl.load(score_params_ptr + rule * num_qo_heads + heads, mask=is_live, other=1.0) * unit
        if CODES[rule] == ALIBI:
            # Converting an integer costs four products. Positions relative to a row's are converted one by one and
            # not pair by pair, and lose no more than the distance itself would.
            origin = tl.max(q_idx, axis=0)
            q_place = (q_idx - origin).to(tl.float32)
            kv_place = (kv_idx - origin).to(tl.float32)
            scores += param[:, None] * (kv_place[None, :] - q_place[:, None])
        else:
            scores = param[:, None] * tanh(scores * (1.0 / param)[:, None])
    return scores


@triton.jit
def tanh(x):
    """Hyperbolic tangent to about 2^-23 absolutely, which is what a soft cap's bound is made of. [SCORE-SOFTCAP]"""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * 2.8853900817779268))
