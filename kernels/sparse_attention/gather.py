"""Keys copied together first, then attended: for candidates that are read again and again.

Attention reads scattered slots directly at one bandwidth; a copy costs a scattered read and a write once and is then
read contiguously at another. `break_even_reads` says from how many readings on the copy is faster; once it never is.
A copy may serve another reading only where candidates, their order, the storage dtype and what is done to positions
are the same, and the cache was not written since: that is its reuse key. Positions in rules stay the logical ones; only
the place of a key changes. [COST-GATHER, COORD-LOGICAL, FALLBACK-REASON]
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from math import floor, inf

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.arguments import cache_strides
from attnconform.kernels.sparse_attention.candidates import slot_dtype
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.forward import run
from attnconform.kernels.sparse_attention.graphs import GraphCache
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.tasks import Launch
from attnconform.kernels.sparse_attention.tuning import GATHER_ENTRIES, power_of_two_from


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """Sustained bandwidths in bytes per second, as measured on the device."""

    direct: float  # scattered reads inside attention
    gather: float  # scattered reads of the copy
    write: float  # writing the copy
    contiguous: float  # reading the copy

    def __post_init__(self) -> None:
        for name in ("direct", "gather", "write", "contiguous"):
            if not getattr(self, name) > 0:
                raise PlanError("COST-GATHER", name, getattr(self, name), "must be above 0")


def direct_time(num_bytes: float, bandwidths: Bandwidths, *, num_reads: int) -> float:
    """Seconds of num_reads scattered readings."""
    return num_reads * num_bytes / bandwidths.direct


def gather_time(num_bytes: float, bandwidths: Bandwidths, *, num_reads: int, launch: float = 0.0) -> float:
    """Seconds of a copy, its launch, and num_reads readings of it."""
    copy = num_bytes / bandwidths.gather + num_bytes / bandwidths.write
    return copy + num_reads * num_bytes / bandwidths.contiguous + launch


def break_even_reads(num_bytes: float, bandwidths: Bandwidths, *, launch: float = 0.0) -> float:
    """The least number of readings for which the copy is faster; infinite where it never is. [COST-GATHER]"""
    saved = direct_time(num_bytes, bandwidths, num_reads=1) - num_bytes / bandwidths.contiguous
    if saved <= 0:
        return inf
    return floor(gather_time(num_bytes, bandwidths, num_reads=0, launch=launch) / saved) + 1


def is_gather_faster(plan: Plan, bandwidths: Bandwidths, *, num_reads: int, launch: float = 0.0) -> bool:
    """Whether a copy of what the plan lists pays for so many readings."""
    return num_reads >= break_even_reads(max(gathered_bytes(plan), 1), bandwidths, launch=launch)


def gathered_bytes(plan: Plan) -> int:
    """Bytes of K and V that one reading of all lists takes."""
    heads = plan.num_kv_heads if plan.sharing == "shared" else 1
    sizes = [(plan.head_dim_qk, plan.k_quant), (plan.head_dim_vo, plan.v_quant)]
    per_entry = sum(dim * (1 if quant else plan.dtype.itemsize) for dim, quant in sizes)
    return _lists(plan).numel() * heads * per_entry


@dataclass(frozen=True, kw_only=True)
class ReuseKey:
    """What must be the same for a copy to serve again."""

    candidates: int  # version of the lists, raised at every change of what they hold
    order: str  # by which their entries stand, such as position
    dtype: torch.dtype
    position_transform: str  # what was done to keys by position, such as none
    cache_version: int  # raised at every write to the pages that are listed


@dataclass(eq=False)
class Gathered:
    """A plan over a scratch copy of what another plan lists, and what the copy stands for."""

    source: Plan
    plan: Plan
    k: Tensor  # (num_entries, 1, num_kv_heads, head_dim_qk), one KV head's where lists are not shared
    v: Tensor  # likewise, head_dim_vo
    key: Hashable = None
    num_copies: int = 0
    num_reuses: int = 0

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        key: ReuseKey,
        out: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention from the copy, made anew unless it was made under the same key."""
        if key != self.key:
            self.key = None  # a copy that fails stands for nothing
            self._copy(k_cache, v_cache)
            self.key, self.num_copies = key, self.num_copies + 1
        else:
            self.num_reuses += 1
        return run(self.plan, q, self.k, self.v, out=out, lse=lse)

    def _copy(self, k_cache: Tensor, v_cache: Tensor) -> None:
        tensors = (("k_cache", k_cache, self.k), ("v_cache", v_cache, self.v))
        shapes = {name: (shape, dtype) for name, shape, dtype in self.source.tensor_shapes}
        for name, cache, _ in tensors:
            shape, dtype = shapes[name]
            if cache.shape != shape or cache.dtype != dtype:
                limit = f"the plan is for {dtype} of {shape}"
                raise PlanError("SAFE-SHAPE", name, f"{cache.dtype} of {tuple(cache.shape)}", limit)
        for _, cache, copy in tensors:
            _launch_gather(self.source, cache, copy)


def plan_gather(plan: Plan) -> Gathered:
    """Scratch for a plan's lists, and a plan of the same work over it. Allocates; a run does not.

    Raises PlanError where nothing is listed, or a cache is quantized by page or token: scales would have to move too.
    """
    slots = _lists(plan)
    for name, quant in (("k_quant", plan.k_quant), ("v_quant", plan.v_quant)):
        if quant is not None:
            limit = "a quantized cache is attended where it lies"
            raise PlanError("QUANT-GRANULARITY", name, f"{quant.format} per {quant.granularity}", limit)
    num_entries, heads = slots.numel(), plan.num_kv_heads if plan.sharing == "shared" else 1
    as_plan = {"dtype": plan.dtype, "device": plan.device}
    k, v = (
        torch.empty((num_entries, 1, heads, dim), **as_plan).expand(-1, -1, plan.num_kv_heads, -1)
        for dim in (plan.head_dim_qk, plan.head_dim_vo)
    )
    place = torch.arange(num_entries, dtype=slot_dtype(num_entries, 1), device=plan.device)
    local = replace(
        plan, page_size=1, num_pages=num_entries, layout="NHD", list_slots=place, union=None, graphs=GraphCache(),
        launches=tuple(_own_workspace(launch) for launch in plan.launches),
    )  # fmt: skip
    return Gathered(plan, local, k, v)


def _own_workspace(launch: Launch) -> Launch:
    """The same tasks; launches that are prepared for one plan are not for another."""
    return replace(
        launch,
        partial_acc=torch.empty_like(launch.partial_acc),
        partial_max=torch.empty_like(launch.partial_max),
        partial_sum=torch.empty_like(launch.partial_sum),
        tickets=None if launch.tickets is None else torch.zeros_like(launch.tickets),
        prepared={},
    )


def _lists(plan: Plan) -> Tensor:
    if plan.list_slots is None:
        raise PlanError("COST-GATHER", "candidates", None, "there is nothing to gather")
    return plan.list_slots


def _launch_gather(plan: Plan, cache: Tensor, copy: Tensor) -> None:
    """One program a few entries and KV head."""
    slots, indptr = _lists(plan), plan.list_indptr
    assert indptr is not None
    num_lists = max(indptr.numel() - 1, 1)
    heads = plan.num_kv_heads if plan.sharing == "shared" else 1
    if not slots.numel():
        return
    gather_kernel[(triton.cdiv(slots.numel(), GATHER_ENTRIES), heads)](
        cache, copy, slots, indptr, cache_strides(plan, cache), copy.stride(), slots.numel(),
        plan.lists_per_block, num_lists, num_lists.bit_length(), plan.group_size if plan.sharing == "query_head" else 1,
        PAGE_SIZE=plan.page_size,
        HEAD_DIM=cache.shape[-1],
        PADDED_DIM=power_of_two_from(cache.shape[-1]),
        IS_SHARED=plan.sharing == "shared",
        ENTRIES=GATHER_ENTRIES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_entries", "lists_per_block", "num_lists", "num_halvings", "heads_per_kv_head"])
def gather_kernel(
    cache_ptr, copy_ptr, slots_ptr, indptr_ptr, cache_strides, copy_strides,
    num_entries, lists_per_block, num_lists, num_halvings, heads_per_kv_head,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    IS_SHARED: tl.constexpr,
    ENTRIES: tl.constexpr,
):  # fmt: skip
    """Copies the keys or values of some entries of the lists, each from its slot and its list's KV head."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    is_entry = entry < num_entries
    slot = tl.load(slots_ptr + entry, mask=is_entry, other=0).to(tl.int64)
    if IS_SHARED:
        kv_head = tl.program_id(1) + tl.zeros([ENTRIES], tl.int64)
        copy_ptr += tl.program_id(1) * copy_strides[2]
    else:
        kv_head = find_list(indptr_ptr, entry, num_lists, num_halvings) % lists_per_block // heads_per_kv_head
    if cache_strides[0] is None:
        start = slot * cache_strides[1]
    else:
        start = slot // PAGE_SIZE * cache_strides[0] + slot % PAGE_SIZE * cache_strides[1]
    dim = tl.arange(0, PADDED_DIM)
    mask = is_entry[:, None] & (dim < HEAD_DIM)[None, :]
    start += kv_head * cache_strides[2]
    x = tl.load(cache_ptr + start[:, None] + (dim.to(tl.int64) * cache_strides[3])[None, :], mask=mask)
    tl.store(copy_ptr + (entry * copy_strides[0])[:, None] + dim[None, :], x, mask=mask)


@triton.jit
def find_list(indptr_ptr, entry, num_lists, num_halvings):  # [ENTRIES]
    """The list of each entry: the last one that starts at or before it."""
    low = tl.zeros(entry.shape, tl.int64)
    high = low + num_lists
    # halves [low, high) until one list is left
    for _ in range(0, num_halvings):
        middle = (low + high) // 2
        is_past = tl.load(indptr_ptr + middle) <= entry
        low = tl.where(is_past, middle, low)
        high = tl.where(is_past, high, middle)
    return low
