"""Mask rules for block masks: a rule as terms of intervals, its numbers as data. [MASK-COMPOSE, BLOCK-INTERVAL]

Causal, windows, prefixes and documents allow a query one interval of positions, and its own position lies in it. The
ends of such intervals under And and Or are minima and maxima, which distribute over each other; so a rule of any depth
is a few terms, each an intersection, whose hull is the rule's interval. Which leaves stand in which term is compiled
in; numbers are data, so that another window, prefix or set of documents compiles nothing.

A Custom rule has no interval: it may allow anything, and is sure to allow nothing. Blocks that this leaves in doubt
are settled by their elements. [BLOCK-CONSERVATIVE]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.rules import (
    And,
    Causal,
    Custom,
    Document,
    HeadWindow,
    MaskRule,
    Or,
    PrefixLM,
    Window,
)

FAR = 1 << 40  # past every position; a limit that no rule sets
FAR_AWAY = tl.constexpr(FAR)

NEXT_TERM = 0  # what follows is an alternative to what came before
CAUSAL, WINDOW, PREFIX, DOCUMENT, DENSE = 1, 2, 3, 4, 5
MAX_RULES = 256  # kept in the form the kernels take, on their device
HEADER = 2  # numbers of a leaf that come before its own: where those start, and how many there are

Leaf = Causal | Window | HeadWindow | PrefixLM | Document | Custom
Code = int | triton.JITFunction
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class BlockRule:
    """A rule for one request, as the kernels take it."""

    codes: tuple[Code, ...]  # compiled in: leaves, terms apart by NEXT_TERM; of a Custom rule, its function
    data: Tensor  # int64: HEADER numbers for every code, then every leaf's own
    custom_data: tuple[Tensor | None, ...]  # one for every code

    @property
    def is_interval(self) -> bool:
        """Whether the rule is made of intervals throughout."""
        return all(isinstance(code, int) and code != DENSE for code in self.codes)


@lru_cache(maxsize=MAX_RULES)
def lower_block_rule(rule: MaskRule | None, *, request: int, num_heads: int, device: torch.device) -> BlockRule:
    """The terms of a rule, and one tensor of all its numbers."""
    leaves: list[Leaf | None] = []
    for term in _terms(rule):
        leaves += [None, *term] if leaves else term
    numbers = [_numbers(leaf, request, num_heads) for leaf in leaves]
    headers, start = [], HEADER * len(leaves)
    for own in numbers:
        headers += [start, len(own)]
        start += len(own)
    flat = [*headers, *(number for own in numbers for number in own)]
    return BlockRule(
        codes=tuple(_code(leaf) for leaf in leaves),
        data=torch.tensor(flat or [0], dtype=torch.int64, device=device),
        custom_data=tuple(leaf.data if isinstance(leaf, Custom) else None for leaf in leaves),
    )


def _terms(rule: MaskRule | None) -> list[list[Leaf]]:
    """Alternatives of a rule, each a list of leaves that must all agree."""
    match rule:
        case None:
            return [[]]
        case Or(parts):
            return [term for part in parts for term in _terms(part)]
        case And(parts):
            terms: list[list[Leaf]] = [[]]
            for part in parts:
                terms = [[*before, *more] for before in terms for more in _terms(part)]
            return terms
        case _:
            return [[rule]]


def _code(leaf: Leaf | None) -> Code:
    match leaf:
        case None:
            return NEXT_TERM
        case Causal():
            return CAUSAL
        case Window() | HeadWindow():
            return WINDOW
        case PrefixLM():
            return PREFIX
        case Document():
            return DOCUMENT
        case Custom(mask_fn):
            return mask_fn
    raise PlanError("MASK-COMPOSE", "mask_rule", repr(leaf), "must be a rule of the kernels")


def _numbers(leaf: Leaf | None, request: int, num_heads: int) -> list[int]:
    """What the kernels read of a leaf: per head the sizes of a window, the prefix, or the starts of documents."""
    match leaf:
        case Window(left, right):
            return [_reach(left), _reach(right)] * num_heads
        case HeadWindow(lefts, rights):
            if len(lefts) != num_heads:
                raise PlanError("SAFE-SHAPE", "len(left)", len(lefts), f"must be {num_heads}")
            return [_reach(size) for pair in zip(lefts, rights, strict=True) for size in pair]
        case PrefixLM(prefix_len):
            return [_of_request("prefix_len", prefix_len, request)]
        case Document(starts):
            return list(_of_request("starts", starts, request))
    return []


def _reach(size: int | None) -> int:
    return FAR if size is None else size


def _of_request(name: str, values: tuple[T, ...], request: int) -> T:
    if not 0 <= request < len(values):
        raise PlanError("SAFE-SHAPE", f"len({name})", len(values), f"there is a request {request}")
    return values[request]


@triton.jit
def rule_interval(
    q_idx,  # [ROWS] int64 logical positions
    head, data_ptr,
    CODES: tl.constexpr,
    IS_INNER: tl.constexpr,  # what is sure to be allowed, instead of what may be
):  # fmt: skip
    """First and last position that a rule allows each query, [ROWS] each; first > last where there is none."""
    lo = tl.full(q_idx.shape, FAR_AWAY, tl.int64)
    hi = -lo
    term_lo = -lo
    term_hi = lo
    for i in tl.static_range(len(CODES)):
        if CODES[i] == NEXT_TERM_CODE:
            lo = tl.minimum(lo, term_lo)
            hi = tl.maximum(hi, term_hi)
            term_lo = tl.full(q_idx.shape, -FAR_AWAY, tl.int64)
            term_hi = -term_lo
        else:
            leaf_lo, leaf_hi = leaf_interval(q_idx, head, data_ptr, data_ptr + i * 2, CODES[i], IS_INNER)
            term_lo = tl.maximum(term_lo, leaf_lo)
            term_hi = tl.minimum(term_hi, leaf_hi)
    return tl.minimum(lo, term_lo), tl.maximum(hi, term_hi)


@triton.jit
def leaf_interval(
    q_idx,  # [ROWS] int64
    head, data_ptr, header_ptr,
    CODE: tl.constexpr,
    IS_INNER: tl.constexpr,
):  # fmt: skip
    """First and last position that one leaf allows each query, [ROWS] each."""
    lo = tl.full(q_idx.shape, -FAR_AWAY, tl.int64)
    hi = -lo
    numbers_ptr = data_ptr + tl.load(header_ptr)
    if CODE == CAUSAL_CODE:
        hi = q_idx
    elif CODE == WINDOW_CODE:
        lo = q_idx - tl.load(numbers_ptr + 2 * head)
        hi = q_idx + tl.load(numbers_ptr + 2 * head + 1)
    elif CODE == PREFIX_CODE:
        hi = tl.maximum(q_idx, tl.load(numbers_ptr) - 1)
    elif CODE == DOCUMENT_CODE:
        lo, hi = document_interval(q_idx, numbers_ptr, tl.load(header_ptr + 1))
    elif IS_INNER:
        lo, hi = hi, lo
    return lo, hi


@triton.jit
def document_interval(q_idx, starts_ptr, num_starts, STEP: tl.constexpr = 64):
    """From a document's start up to the next one's, for queries [ROWS]; starts ascend."""
    lo = tl.full(q_idx.shape, -FAR_AWAY, tl.int64)
    past = -lo
    for first in range(0, num_starts, STEP):
        entry = first + tl.arange(0, STEP)
        start = tl.load(starts_ptr + entry, mask=entry < num_starts, other=FAR_AWAY)
        # [ROWS, STEP]
        is_before = start[None, :] <= q_idx[:, None]
        lo = tl.maximum(lo, tl.max(tl.where(is_before, start[None, :], -FAR_AWAY), axis=1))
        past = tl.minimum(past, tl.min(tl.where(is_before, FAR_AWAY, start[None, :]), axis=1))
    return lo, past - 1


@triton.jit
def rule_allows(
    q_idx,  # [ROWS] int64 logical positions
    kv_idx,  # [COLUMNS] int32
    q_row, head, request, data_ptr, custom_data,
    dense_ptr, dense_strides,
    CODES: tl.constexpr,
):  # fmt: skip
    """Whether a rule allows each edge, [ROWS, COLUMNS]; custom functions see int32. [MASK-COMPOSE]

    Positions take 31 bits, so that ends of intervals beyond them may be brought there, and elements compare in 32.
    """
    nothing = (q_row[:, None] < 0) & (kv_idx[None, :] < 0)
    allowed = nothing
    term = ~nothing
    for i in tl.static_range(len(CODES)):
        if CODES[i] == NEXT_TERM_CODE:
            allowed = allowed | term
            term = ~nothing
        elif CODES[i] == DENSE_CODE:
            place = q_row.to(tl.int64)[:, None] * dense_strides[1] + kv_idx[None, :] * dense_strides[2]
            is_place = (q_row[:, None] < dense_strides[3]) & (kv_idx[None, :] < dense_strides[4])
            term = term & (tl.load(dense_ptr + head * dense_strides[0] + place, mask=is_place, other=0) != 0)
        elif CODES[i] == CAUSAL_CODE or CODES[i] == WINDOW_CODE or CODES[i] == PREFIX_CODE or CODES[i] == DOCUMENT_CODE:
            lo, hi = leaf_interval(q_idx, head, data_ptr, data_ptr + i * 2, CODES[i], False)
            lo = tl.minimum(tl.maximum(lo, -1), 0x7FFFFFFF).to(tl.int32)
            hi = tl.minimum(tl.maximum(hi, -1), 0x7FFFFFFF).to(tl.int32)
            term = term & (kv_idx[None, :] >= lo[:, None]) & (kv_idx[None, :] <= hi[:, None])
        else:
            term = term & CODES[i](q_idx.to(tl.int32)[:, None], kv_idx[None, :], request, custom_data[i])
    return allowed | term


NEXT_TERM_CODE = tl.constexpr(NEXT_TERM)
CAUSAL_CODE = tl.constexpr(CAUSAL)
WINDOW_CODE = tl.constexpr(WINDOW)
PREFIX_CODE = tl.constexpr(PREFIX)
DOCUMENT_CODE = tl.constexpr(DOCUMENT)
DENSE_CODE = tl.constexpr(DENSE)
