"""Canonical candidate lists: sorted unique positions, their slots, and which of them every row may use.

S = unique(D u W u A) is formed once per list, with torch operations over all entries at once and no loop over any of
them. A list serves a block of query rows, and each row has its own window: an entry that only some rows' windows
brought in is marked as no member, and a kernel admits it to the rows whose window holds it.
[SET-IDENTITY, SET-DUPLICATE, SET-HOLE, SET-UNION, SET-RANGE]
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.errors import PlanError

HOLE = -1
POSITION_BITS = 32  # a key is (list << 32) | position
_MAX_ENTRIES = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class CandidateLists:
    """Dynamic candidates D, ragged, one list per (request, block of query rows, head), row-major in that order.

    Request n has ceil(seqlen_q / q_block_size) blocks; each has num_qo_heads, num_kv_heads or 1 lists.
    Duplicates count once and holes (-1) are ignored anywhere, so a fixed-width array may be passed flattened.
    """

    granularity: Literal["token", "block"]
    sharing: Literal["query_head", "kv_head", "shared"]
    indptr: Tensor  # (num_lists + 1,) integer
    indices: Tensor  # (total,) integer: token positions, or block ids
    block_size: int = 1  # tokens per listed block; 1 at token granularity
    q_block_size: int = 1  # query rows that share a list


@dataclass(frozen=True, eq=False)
class RowBlocks:
    """Runs of neighbouring query rows of one request; the rows of a batch are partitioned by them, in order."""

    request: Tensor  # (num_blocks,) int64
    q_start: Tensor  # (num_blocks,) int64, global row
    q_count: Tensor  # (num_blocks,) int64, at least 1
    first_position: Tensor  # (num_blocks,) int64, logical position of row q_start


@dataclass(frozen=True, eq=False)
class CanonicalLists:
    """Entries of list l: indptr[l] up to indptr[l + 1], positions ascending and unique; `keys` always ascend."""

    indptr: Tensor  # (num_lists + 1,) int32
    positions: Tensor  # (num_entries,) int32
    slots: Tensor  # (num_entries,) int64
    members: Tensor  # (num_entries,) bool; False: only windows brought it in
    keys: Tensor  # (num_entries,) int64, ascending


def cut_row_blocks(qo_indptr: Tensor, q_offset: Tensor, q_block_size: int) -> RowBlocks:
    """Every request's query rows in blocks; the last block of a request may be shorter."""
    seqlen_q = qo_indptr.diff()
    request, start, count = cut_ranges(seqlen_q, q_block_size)
    return RowBlocks(request, qo_indptr[request] + start, count, q_offset[request] + start)


def cut_ranges(lengths: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Owner, start and length of the pieces of every range, each `size` long but the last."""
    num_pieces = (lengths + size - 1) // size
    owner, rank = enumerate_runs(num_pieces)
    start = rank * size
    return owner, start, torch.clamp(lengths[owner] - start, max=size)


def enumerate_runs(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For counts (2, 0, 3): the owners 0 0 2 2 2 and the ranks 0 1 0 1 2."""
    owner = torch.repeat_interleave(torch.arange(counts.numel(), device=counts.device), counts)
    first = counts.cumsum(0) - counts
    return owner, torch.arange(owner.numel(), device=counts.device) - first[owner]


def lists_per_block(sharing: str, num_qo_heads: int, num_kv_heads: int) -> int:
    """How many lists a block of query rows has."""
    return {"query_head": num_qo_heads, "kv_head": num_kv_heads, "shared": 1}[sharing]


def build_lists(
    candidates: CandidateLists,
    blocks: RowBlocks,
    num_heads: int,  # lists per block
    *,
    window: int | None,
    num_sink_tokens: int,
    seqlen_kv: Tensor,  # (batch_size,) int64
    page_table: Tensor,  # (batch_size, max_pages)
    page_size: int,
) -> CanonicalLists:
    """S of every list, with the physical slot of each entry. [SET-UNION, COORD-SLOT]"""
    block = torch.arange(blocks.request.numel(), device=seqlen_kv.device).repeat_interleave(num_heads)
    request = blocks.request[block]
    length = seqlen_kv[request]
    check_lists(candidates, request, seqlen_kv)
    dynamic, run = _dynamic_keys(candidates, length)
    parts = [
        (dynamic, 0),
        (_range_keys(torch.zeros_like(length), torch.clamp(length, max=num_sink_tokens)), 0),
    ]
    if window:
        first = blocks.first_position[block]
        past = torch.minimum(first + blocks.q_count[block], length)
        parts.append((_range_keys(torch.clamp(first - window + 1, min=0), past), 1))
    keys, members = _unique_keys(parts)
    if keys.numel() > _MAX_ENTRIES:
        raise PlanError("SAFE-SHAPE", "len(list_positions)", keys.numel(), "int32 offsets reach 2147483647")
    bounds = torch.arange(request.numel() + 1, device=keys.device) << POSITION_BITS
    slots = _slots_of_runs(keys, gcd(run, page_size) if keys is dynamic else 1, request, page_table, page_size)
    positions = (keys & ((1 << POSITION_BITS) - 1)).int()
    return CanonicalLists(torch.searchsorted(keys, bounds).int(), positions, slots, members, keys)


def _slots_of_runs(
    keys: Tensor,
    run: int,  # so many keys at a time are neighbours within one page, which is looked up once
    request: Tensor,  # (num_lists,)
    page_table: Tensor,
    page_size: int,
) -> Tensor:
    """Physical place of every key's position. [COORD-SLOT]"""
    first = keys[::run]
    slots = to_slots(request[first >> POSITION_BITS], first & ((1 << POSITION_BITS) - 1), page_table, page_size)
    return slots if run == 1 else (slots[:, None] + torch.arange(run, device=keys.device)).flatten()


def slot_dtype(num_pages: int, page_size: int) -> torch.dtype:
    """What a list holds slots as; half as many bytes are read beside K and V where the pool is small. [COORD-WIDE]"""
    return torch.int32 if num_pages * page_size <= torch.iinfo(torch.int32).max else torch.int64


def order_by_slot(lists: CanonicalLists, starts: Tensor, ends: Tensor, lists_per_row: int) -> CanonicalLists:
    """The same lists by slot, for rows with lists of their own: neighbouring reads, and no other answer. [SET-ORDER]

    What lies before a row's interval, in it and after it keeps its place, since work is cut along those.
    """
    list_idx = lists.keys >> POSITION_BITS
    row = list_idx // lists_per_row
    segment = (lists.positions >= starts[row]).long() + (lists.positions >= ends[row])
    by_slot = torch.argsort(lists.slots, stable=True)
    order = by_slot[torch.argsort((list_idx * 3 + segment)[by_slot], stable=True)]
    columns = {name: getattr(lists, name)[order] for name in ("positions", "slots", "members")}
    return replace(lists, **columns)


def to_slots(request: Tensor, positions: Tensor, page_table: Tensor, page_size: int) -> Tensor:
    """Physical place of every position, in 64-bit arithmetic. [COORD-SLOT, COORD-WIDE]"""
    return page_table[request, positions // page_size].long() * page_size + positions % page_size


def check_lists(candidates: CandidateLists, request: Tensor, seqlen_kv: Tensor) -> None:
    """Refuses lists of another count, and ids that are neither holes nor inside the request. [SET-RANGE, SAFE-SHAPE]"""
    indptr, indices = candidates.indptr.to(request.device), candidates.indices.to(request.device)
    if indptr.numel() != request.numel() + 1:
        raise PlanError("SAFE-SHAPE", "len(candidates.indptr)", indptr.numel(), f"must be {request.numel() + 1}")
    check_indptr("candidates.indptr", indptr, indices.numel())
    owner = torch.repeat_interleave(request, indptr.diff())
    is_outside = (indices != HOLE) & ((indices < 0) | (indices.long() * candidates.block_size >= seqlen_kv[owner]))
    if bool(is_outside.any()):
        at = first_index(is_outside)[0]
        n = int(owner[at])
        limit = f"request {n} has seqlen_kv {int(seqlen_kv[n])} and block_size is {candidates.block_size}"
        raise PlanError("SET-RANGE", "candidates.indices", int(indices[at]), limit, (at,))


def check_indptr(name: str, indptr: Tensor, total: int) -> None:
    """Refuses row starts that do not run from 0 to `total` without falling. [SAFE-SHAPE]"""
    for at, want in ((0, 0), (indptr.numel() - 1, total)):
        if int(indptr[at]) != want:
            raise PlanError("SAFE-SHAPE", name, int(indptr[at]), f"must be {want}", (at,))
    falls = indptr.diff() < 0
    if bool(falls.any()):
        at = first_index(falls)[0] + 1
        raise PlanError("SAFE-SHAPE", name, int(indptr[at]), f"the entry before is {int(indptr[at - 1])}", (at,))


def first_index(is_bad: Tensor) -> tuple[int, ...]:
    """Where the first True element lies."""
    return tuple(int(i) for i in torch.nonzero(is_bad)[0])


def listed_keys(candidates: CandidateLists, num_lists: int, device: torch.device) -> Tensor:
    """(list << 32) | id of every listed token or block, ascending, each once. [SET-DUPLICATE, SET-HOLE]"""
    indptr, indices = candidates.indptr.to(device), candidates.indices.to(device).long()
    owner = torch.repeat_interleave(torch.arange(num_lists, device=device), indptr.diff())
    is_listed = indices != HOLE
    return torch.unique((owner[is_listed] << POSITION_BITS) | indices[is_listed])


def _dynamic_keys(candidates: CandidateLists, length: Tensor) -> tuple[Tensor, int]:
    """Keys of every token that D admits, and how many of them at a time are one whole block's, 1 where some is cut.

    A listed block admits its tokens below seqlen_kv. [BLOCK-EXPAND]
    """
    block_keys = listed_keys(candidates, length.numel(), length.device)
    offset = torch.arange(candidates.block_size, device=length.device)
    owner, indices = block_keys >> POSITION_BITS, block_keys & ((1 << POSITION_BITS) - 1)
    first = indices * candidates.block_size
    keys = ((owner << POSITION_BITS) | first)[:, None] + offset
    room = length[owner] - first
    if bool((room >= candidates.block_size).all()):  # no block hangs over the end: nothing is left out
        return keys.flatten(), candidates.block_size
    return keys[offset < room[:, None]], 1


def _range_keys(start: Tensor, past: Tensor) -> Tensor:
    """Keys of the positions from start[l] up to past[l] of every list l."""
    owner, rank = enumerate_runs(torch.clamp(past - start, min=0))
    return (owner << POSITION_BITS) | (start[owner] + rank)


def _unique_keys(parts: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Distinct keys ascending, and whether any part of rank 0 holds the key. Every part has its own so already."""
    filled = [(keys, rank) for keys, rank in parts if keys.numel()]
    if len(filled) == 1:  # nothing to merge: a sort of all tokens would take most of the time of a long plan
        [(keys, rank)] = filled
        return keys, torch.full_like(keys, rank == 0, dtype=torch.bool)
    ranked = torch.cat([(keys << 1) | rank for keys, rank in parts]).sort().values
    keys = ranked >> 1
    is_first = torch.ones_like(keys, dtype=torch.bool)
    is_first[1:] = keys[1:] != keys[:-1]
    return keys[is_first], (ranked[is_first] & 1) == 0
