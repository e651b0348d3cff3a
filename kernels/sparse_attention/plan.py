"""From the logical description of a sparse attention call to everything its kernels need. [PLAN, SAFE-REFUSE]

`plan` checks every input before anything is launched, forms the canonical candidate lists, lowers the rules, cuts the
work into tasks and allocates the workspace; `forward.run` then only launches. A plan copies every index it needs, so
the caller may rewrite its own tables; only sink logits and the data of a Custom rule are read live.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from attnconform.kernels.sparse_attention.candidates import (
    CandidateLists,
    CanonicalLists,
    RowBlocks,
    build_lists,
    check_indptr,
    cut_row_blocks,
    enumerate_runs,
    first_index,
    lists_per_block,
    order_by_slot,
    slot_dtype,
)
from attnconform.kernels.sparse_attention.dropout import Dropout
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.graphs import GraphCache
from attnconform.kernels.sparse_attention.hopper_choice import Call, choose_box
from attnconform.kernels.sparse_attention.hopper_union_choice import choose_union_box
from attnconform.kernels.sparse_attention.quantization import KVQuantization, scale_shape
from attnconform.kernels.sparse_attention.rules import (
    LoweredMask,
    LoweredScore,
    MaskRule,
    QueryRows,
    ScoreRule,
    lower_mask,
    lower_score,
)
from attnconform.kernels.sparse_attention.tasks import Launch, build_launches
from attnconform.kernels.sparse_attention.tuning import NO_CHOICE, UNION_ROWS, Choice, Geometry
from attnconform.kernels.sparse_attention.union import UnionLists, build_union

__all__ = ["CandidateLists", "Plan", "PlanError", "plan"]

MAX_HEAD_DIMS = {"head_dim_qk": 576, "head_dim_vo": 512}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Integers = Tensor | Sequence[int]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """What a run needs; arrays live on `device`. One run at a time may use a plan: it owns the workspace.

    Lists (None where every position is a candidate): entries of list l are list_indptr[l] up to list_indptr[l + 1],
    positions unique, and ascending unless the plan was asked for the order of slots. List numbers are row-major over
    (request, block of q_block_size query rows, head list), with num_qo_heads, num_kv_heads or 1 head lists
    (`lists_per_block`). An entry that is a member is a candidate of every row of its list; any other only of rows with
    0 <= q_idx - kv_idx < window.
    Mask: row r may see kv_idx where mask_starts[0, r] <= kv_idx < mask_ends[0, r], and mask_fn agrees; with a row of
    intervals per query head where has_head_mask. q and out have the plan's dtype; a quantized cache has its codes'.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    num_pages: int
    layout: Literal["NHD", "HND"]
    dtype: torch.dtype
    device: torch.device
    sm_scale: float

    qo_indptr: Tensor  # (batch_size + 1,) int64
    seqlen_kv: Tensor  # (batch_size,) int64
    q_offset: Tensor  # (batch_size,) int64
    page_table: Tensor  # (batch_size, max_pages) int32, a copy
    row_requests: Tensor  # (total_q,) int32
    row_positions: Tensor  # (total_q,) int32, logical position of every query row

    sharing: Literal["query_head", "kv_head", "shared"] | None
    q_block_size: int | None
    window: int | None
    list_indptr: Tensor | None  # (num_lists + 1,) int32
    list_positions: Tensor | None  # (num_entries,) int32; a tier may do without
    list_slots: Tensor | None  # (num_entries,) int32, or int64 where the pool has more slots than that counts
    list_members: Tensor | None  # (num_entries,) bool

    mask_starts: Tensor  # (1 or num_qo_heads, total_q) int32
    mask_ends: Tensor  # likewise
    mask_fn: triton.JITFunction | None
    mask_data: Tensor | None
    score_codes: tuple[int | triton.JITFunction, ...]
    score_params: Tensor  # (num_score_rules, num_qo_heads) float32
    score_tables: Tensor | None  # flat float32, as LoweredScore
    score_reaches: Tensor | None  # (num_score_rules, 2) int32, as LoweredScore
    score_table_sizes: tuple[int, ...]  # as LoweredScore
    sink_logits: Tensor | None  # (num_qo_heads,) float32

    launches: tuple[Launch, ...]

    k_quant: KVQuantization | None = None
    v_quant: KVQuantization | None = None
    dropout_words: Tensor | None = None  # (3,) int32, as Dropout.words; the seed may be edited between runs
    dropout_scale: float | None = None  # what a kept edge weighs
    score_rules: tuple[ScoreRule, ...] = ()  # as given: derivatives of a CustomScore are looked for here

    union: UnionLists | None = None  # what the forward walks instead of launches, for the same edges
    generations: Tensor | None = None  # (2, batch_size) int32: of every request's slot now, and when it was planned
    is_tier: bool = False  # lengths, pages and lists are renewed where they lie, and may be others at the next run
    graphs: GraphCache = field(default_factory=GraphCache)

    @property
    def batch_size(self) -> int:
        return int(self.seqlen_kv.numel())

    @property
    def total_q(self) -> int:
        return int(self.row_positions.numel())

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def has_head_mask(self) -> bool:
        """Whether a row's interval depends on the query head."""
        return self.mask_starts.shape[0] > 1

    @cached_property
    def tensor_shapes(self) -> tuple[tuple[str, tuple[int, ...], torch.dtype], ...]:
        """Name, shape and dtype of the tensors of a run: q, k_cache, v_cache, out, lse."""
        rows, tokens = (self.total_q, self.num_qo_heads), (self.page_size, self.num_kv_heads)
        cache = (self.num_pages, *(tokens if self.layout == "NHD" else tokens[::-1]))
        return (
            ("q", (*rows, self.head_dim_qk), self.dtype),
            ("k_cache", (*cache, self.head_dim_qk), self.k_quant.dtype if self.k_quant else self.dtype),
            ("v_cache", (*cache, self.head_dim_vo), self.v_quant.dtype if self.v_quant else self.dtype),
            ("out", (*rows, self.head_dim_vo), self.dtype),
            ("lse", rows, torch.float32),
        )

    @cached_property
    def scale_shapes(self) -> tuple[tuple[str, tuple[int, ...] | None], ...]:
        """Name and shape of the scales of a run, None where a cache is not quantized: k_scale, v_scale."""
        sizes = {"num_pages": self.num_pages, "page_size": self.page_size, "num_kv_heads": self.num_kv_heads}
        quants = (("k_scale", self.k_quant, self.head_dim_qk), ("v_scale", self.v_quant, self.head_dim_vo))
        return tuple(
            (name, None if quant is None else scale_shape(quant, head_dim=head_dim, **sizes))
            for name, quant, head_dim in quants
        )

    @property
    def lists_per_block(self) -> int:
        """How many lists a block of query rows has; only where there are lists."""
        assert self.sharing is not None
        return lists_per_block(self.sharing, self.num_qo_heads, self.num_kv_heads)

    @property
    def workspace_bytes(self) -> int:
        """Memory that partial states take."""
        partials = [t for run in self.launches for t in (run.partial_acc, run.partial_max, run.partial_sum)]
        return sum(t.numel() * t.element_size() for t in partials)


def plan(
    *,
    qo_indptr: Integers,  # (batch_size + 1,)
    seqlen_kv: Integers,  # (batch_size,)
    page_table: Tensor,  # (batch_size, max_pages) int32, -1 where unused
    page_size: int,
    num_pages: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    sm_scale: float,
    dtype: torch.dtype,
    device: torch.device | str,
    q_offset: Integers | None = None,  # (batch_size,) logical position of a request's first query row
    candidates: CandidateLists | None = None,
    window: int | None = None,
    num_sink_tokens: int = 0,
    mask_rule: MaskRule | None = None,
    score_rules: Sequence[ScoreRule] = (),
    sink_logits: Tensor | None = None,  # (num_qo_heads,)
    num_kv_splits: int | None = None,
    tile_kv: int | None = None,
    rows_per_union: int | None = None,  # rows with lists of their own that share a tile of the union of their blocks
    order: Literal["position", "slot"] = "position",  # of the entries of a row's own lists
    choice: Choice = NO_CHOICE,
    layout: Literal["NHD", "HND"] = "NHD",
    k_quant: KVQuantization | None = None,  # k_cache holds codes, and each run is given k_scale
    v_quant: KVQuantization | None = None,  # likewise, apart
    dropout: Dropout | None = None,
    owned: Tensor | None = None,  # (batch_size, num_pages) bool, which request may read which page
) -> Plan:
    """Everything a run needs, checked. [PLAN, SET-RANGE, COORD-PAGE-RANGE, SAFE-SHAPE, SAFE-OWNER]

    Without candidates every position below seqlen_kv is one, and window and num_sink_tokens add nothing. With them
    S = D | {kv_idx: 0 <= q_idx - kv_idx < window} | first num_sink_tokens positions. q_offset is
    seqlen_kv - seqlen_q by default. num_kv_splits, tile_kv, rows_per_union, order, choice: hints that never change the
    answer. The work is done where the page table and the lists lie: on the host without waiting for the device, and on
    the device where a long list would have to be fetched first.
    Raises PlanError, naming the value that is refused.
    """
    check_options(sm_scale, dtype, layout, window, num_sink_tokens)
    _check_hints(rows_per_union, order)
    device = full_device(device)
    geometry = Geometry(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        element_size=dtype.itemsize,
        sharing=candidates.sharing if candidates else None,
        tile_kv=tile_kv,
        num_kv_splits=num_kv_splits,
        num_processors=count_processors(device),
        has_score_rules=bool(score_rules),
        is_quantized=k_quant is not None or v_quant is not None,
        choice=choice,
    )
    check_geometry(geometry, page_size, num_pages)
    where = _planning_device(page_table, candidates, device)
    cache = check_cache(qo_indptr, seqlen_kv, q_offset, page_table, page_size, num_pages, owned, where)
    rows = _query_rows(cache, num_qo_heads)
    mask = lower_mask(mask_rule, rows)
    call = Call(
        page_size=page_size,
        sm_scale=sm_scale,
        has_custom_mask=mask.mask_fn is not None,
        has_dropout=dropout is not None,
        score_rules=tuple(score_rules),
        candidates=candidates,
        has_local=bool(window) or num_sink_tokens > 0,
        order=order,
    )
    geometry = replace(geometry, box=choose_box(geometry, call, device))
    blocks, lists = _build_lists(candidates, cache, geometry, window, num_sink_tokens)
    listed_window = window if candidates else None
    launches = build_launches(blocks, lists, mask, geometry, listed_window, device)
    if order == "slot":
        lists = _by_slot(candidates, lists, mask, geometry)
    union = build_union(
        candidates,
        cache.qo_indptr,
        cache.q_offset,
        mask,
        geometry,
        has_local=bool(window) or num_sink_tokens > 0,
        rows_per_union=rows_per_union,
        box=choose_union_box(geometry, call, rows_per_union, device),
    )
    return Plan(
        **shape_fields(geometry, page_size, num_pages),
        layout=layout,
        dtype=dtype,
        device=device,
        sm_scale=float(sm_scale),
        **_row_fields(placed(cache, device), placed(rows, device), placed(mask, device)),
        **_list_fields(
            candidates, lists and placed(lists, device), listed_window, slot_dtype(num_pages, cache.page_size)
        ),
        **score_fields(lower_score(tuple(score_rules), num_qo_heads, device)),
        sink_logits=check_sink_logits(sink_logits, num_qo_heads, device),
        launches=launches,
        k_quant=k_quant,
        v_quant=v_quant,
        **_dropout_fields(dropout, device),
        score_rules=tuple(score_rules),
        union=union and placed(union, device),
    )


def _planning_device(page_table: Tensor, candidates: CandidateLists | None, device: torch.device) -> torch.device:
    """Where the long tables lie: the host if all of them do, else the device of the kernels."""
    tables = (page_table, *((candidates.indptr, candidates.indices) if candidates else ()))
    return torch.device("cpu") if all(table.device.type == "cpu" for table in tables) else device


def placed(record: Any, device: torch.device) -> Any:
    """A dataclass with its tensors on a device; those that are there already stay as they are."""
    values = {f.name: getattr(record, f.name) for f in fields(record)}
    moved = {name: x.to(device, non_blocking=True) for name, x in values.items() if isinstance(x, Tensor)}
    return replace(record, **moved)


@dataclass(frozen=True, eq=False)
class CheckedCache:
    """Requests, their positions and their pages, on the plan's device."""

    qo_indptr: Tensor  # (batch_size + 1,) int64
    seqlen_kv: Tensor  # (batch_size,) int64
    q_offset: Tensor  # (batch_size,) int64
    page_table: Tensor  # (batch_size, max_pages) int32, a copy
    page_size: int


def check_cache(
    qo_indptr: Integers,
    seqlen_kv: Integers,
    q_offset: Integers | None,
    page_table: Tensor,
    page_size: int,
    num_pages: int,
    owned: Tensor | None,
    device: torch.device,
) -> CheckedCache:
    """Refuses requests and pages that do not fit together. [SAFE-SHAPE, COORD-PAGE-RANGE, SAFE-OWNER]"""
    lengths = _to_int64("seqlen_kv", seqlen_kv, device)
    indptr = _to_int64("qo_indptr", qo_indptr, device)
    _check_requests(indptr, lengths)
    table = _check_page_table(page_table, lengths, page_size, num_pages)
    if owned is not None:
        _check_owners(table, owned, num_pages)
    offsets = lengths - indptr.diff() if q_offset is None else _to_int64("q_offset", q_offset, device)
    return CheckedCache(indptr, lengths, offsets, table, page_size)


def _build_lists(
    candidates: CandidateLists | None,
    cache: CheckedCache,
    geometry: Geometry,
    window: int | None,
    num_sink_tokens: int,
) -> tuple[RowBlocks, CanonicalLists | None]:
    """The blocks of rows that share lists, and S of each; one block a request where there are no lists."""
    if candidates is None:
        return cut_row_blocks(cache.qo_indptr, cache.q_offset, max(1, int(cache.qo_indptr[-1]))), None
    blocks = check_candidates(candidates, cache)
    lists = build_lists(
        candidates,
        blocks,
        lists_per_block(candidates.sharing, geometry.num_qo_heads, geometry.num_kv_heads),
        window=window,
        num_sink_tokens=num_sink_tokens,
        seqlen_kv=cache.seqlen_kv,
        page_table=cache.page_table,
        page_size=cache.page_size,
    )
    return blocks, lists


def _by_slot(
    candidates: CandidateLists | None, lists: CanonicalLists | None, mask: LoweredMask, geometry: Geometry
) -> CanonicalLists | None:
    """Lists of single rows by slot; those that rows or heads of several intervals share stay as they are."""
    if candidates is None or lists is None or candidates.q_block_size > 1 or len(mask.starts) > 1:
        return lists
    heads = lists_per_block(candidates.sharing, geometry.num_qo_heads, geometry.num_kv_heads)
    return order_by_slot(lists, mask.starts[0], mask.ends[0], heads)


def _row_fields(cache: CheckedCache, rows: QueryRows, mask: LoweredMask) -> dict[str, Any]:
    """Fields of a plan that say where its rows stand and what they may see."""
    return {
        "qo_indptr": cache.qo_indptr,
        "seqlen_kv": cache.seqlen_kv,
        "q_offset": cache.q_offset,
        "page_table": cache.page_table,
        "row_requests": rows.request.int(),
        "row_positions": rows.position.int(),
        "mask_starts": mask.starts,
        "mask_ends": mask.ends,
        "mask_fn": mask.mask_fn,
        "mask_data": mask.mask_data,
    }


def _list_fields(
    candidates: CandidateLists | None, lists: CanonicalLists | None, window: int | None, slots: torch.dtype
) -> dict[str, Any]:
    """Fields of a plan that hold its lists."""
    return {
        "sharing": candidates.sharing if candidates else None,
        "q_block_size": candidates.q_block_size if candidates else None,
        "window": window,
        "list_indptr": lists.indptr if lists else None,
        "list_positions": lists.positions if lists else None,
        "list_slots": lists.slots.to(slots) if lists else None,
        "list_members": lists.members if lists else None,
    }


def shape_fields(geometry: Geometry, page_size: int, num_pages: int) -> dict[str, int]:
    """Fields of a plan that say which heads and pages there are."""
    names = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")
    heads = {name: getattr(geometry, name) for name in names}
    return {**heads, "page_size": page_size, "num_pages": num_pages}


def _dropout_fields(dropout: Dropout | None, device: torch.device) -> dict[str, Any]:
    """Fields of a plan that say which edges are dropped."""
    if dropout is None:
        return {}
    return {"dropout_words": dropout.words(device), "dropout_scale": dropout.keep_scale}


def score_fields(score: LoweredScore) -> dict[str, Any]:
    """Fields of a plan that hold its score rules."""
    return {
        "score_codes": score.codes,
        "score_params": score.params,
        "score_tables": score.tables,
        "score_reaches": score.reaches,
        "score_table_sizes": score.table_sizes,
    }


def full_device(device: torch.device | str) -> torch.device:
    """The device with its index, as tensors report it."""
    return torch.empty(0, device=device).device


def count_processors(device: torch.device) -> int:
    """Multiprocessors to keep busy; 0 where programs run one after another anyway."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def _to_int64(name: str, values: Integers, device: torch.device) -> Tensor:
    tensor = torch.as_tensor(values, device=device)
    _check_integers(name, tensor, 1)
    return tensor.to(torch.int64, copy=True)


def _check_integers(name: str, tensor: Tensor, num_dims: int) -> None:
    if tensor.dtype not in (torch.int32, torch.int64) and tensor.numel():
        raise PlanError("SAFE-SHAPE", f"{name}.dtype", tensor.dtype, "must be int32 or int64")
    if tensor.dim() != num_dims:
        raise PlanError("SAFE-SHAPE", f"{name}.shape", tuple(tensor.shape), f"must have {num_dims} axes")


def check_geometry(geometry: Geometry, page_size: int, num_pages: int) -> None:
    """Refuses sizes no kernel is made for. [SAFE-SHAPE, GQA-MAP]"""
    sizes = [(name, getattr(geometry, name)) for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")]
    for name, size in [*sizes, ("page_size", page_size)]:
        if size < 1:
            raise PlanError("SAFE-SHAPE", name, size, "must be at least 1")
    for name, size in sizes[2:]:
        if size > MAX_HEAD_DIMS[name]:
            raise PlanError("SAFE-SHAPE", name, size, f"must be at most {MAX_HEAD_DIMS[name]}")
    if num_pages < 0:
        raise PlanError("SAFE-SHAPE", "num_pages", num_pages, "must be at least 0")
    if geometry.num_qo_heads % geometry.num_kv_heads:
        limit = f"must be a multiple of num_kv_heads, {geometry.num_kv_heads}"
        raise PlanError("GQA-MAP", "num_qo_heads", geometry.num_qo_heads, limit)
    if geometry.num_kv_splits is not None and geometry.num_kv_splits < 1:
        raise PlanError("SAFE-SHAPE", "num_kv_splits", geometry.num_kv_splits, "must be None or at least 1")
    if geometry.tile_kv not in (None, 16, 32, 64, 128, 256):
        raise PlanError("SAFE-SHAPE", "tile_kv", geometry.tile_kv, "must be None, 16, 32, 64, 128 or 256")


def check_options(sm_scale: float, dtype: torch.dtype, layout: str, window: int | None, num_sink_tokens: int) -> None:
    """Refuses numbers and names outside their domains. [SAFE-SHAPE, SAFE-FINITE]"""
    if not math.isfinite(sm_scale):
        raise PlanError("SAFE-FINITE", "sm_scale", sm_scale, "must be finite")
    if dtype not in DTYPES:
        raise PlanError("SAFE-SHAPE", "dtype", dtype, "must be bfloat16, float16 or float32")
    if layout not in ("NHD", "HND"):
        raise PlanError("SAFE-SHAPE", "layout", layout, "must be NHD or HND")
    for name, size in (("window", window or 0), ("num_sink_tokens", num_sink_tokens)):
        if size < 0:
            raise PlanError("SAFE-SHAPE", name, size, "must be at least 0")


def _check_hints(rows_per_union: int | None, order: str) -> None:
    """Refuses more rows than an entry has bits for, counts that make no tile, and orders of no name. [SAFE-SHAPE]"""
    if order not in ("position", "slot"):
        raise PlanError("SAFE-SHAPE", "order", order, "must be position or slot")
    if rows_per_union is not None and rows_per_union not in UNION_ROWS:
        limit = f"must be None or one of {', '.join(map(str, UNION_ROWS))}"
        raise PlanError("SAFE-SHAPE", "rows_per_union", rows_per_union, limit)


def _check_requests(qo_indptr: Tensor, seqlen_kv: Tensor) -> None:
    """Refuses row starts and lengths that do not describe a batch. [SAFE-SHAPE]"""
    if qo_indptr.numel() != seqlen_kv.numel() + 1:
        limit = f"must be batch_size + 1, {seqlen_kv.numel() + 1}"
        raise PlanError("SAFE-SHAPE", "len(qo_indptr)", qo_indptr.numel(), limit)
    check_indptr("qo_indptr", qo_indptr, int(qo_indptr[-1]))
    is_bad = (seqlen_kv < 0) | (seqlen_kv >= 2**31)
    if bool(is_bad.any()):
        index = first_index(is_bad)
        raise PlanError("SAFE-SHAPE", "seqlen_kv", int(seqlen_kv[index]), "must lie in [0, 2^31)", index)


def _check_page_table(page_table: Tensor, seqlen_kv: Tensor, page_size: int, num_pages: int) -> Tensor:
    """A copy on the plan's device; refuses pages outside the pool within the length. [COORD-PAGE-RANGE]"""
    _check_integers("page_table", page_table, 2)
    if page_table.shape[0] != seqlen_kv.numel():
        limit = f"batch_size is {seqlen_kv.numel()}"
        raise PlanError("SAFE-SHAPE", "page_table.shape", tuple(page_table.shape), limit)
    used = (seqlen_kv + page_size - 1) // page_size
    if bool((used > page_table.shape[1]).any()):
        n = first_index(used > page_table.shape[1])[0]
        limit = f"request {n} has seqlen_kv {int(seqlen_kv[n])} and needs {int(used[n])} pages"
        raise PlanError("SAFE-SHAPE", "page_table.shape", tuple(page_table.shape), limit)
    table = page_table.to(seqlen_kv.device)
    is_used = torch.arange(table.shape[1], device=table.device) < used[:, None]
    is_bad = is_used & ((table < 0) | (table >= num_pages))
    if bool(is_bad.any()):
        index = first_index(is_bad)
        page = int(table[index])
        limit = f"num_pages is {num_pages}" if page != -1 else f"seqlen_kv[{index[0]}] is {int(seqlen_kv[index[0]])}"
        raise PlanError("COORD-PAGE-RANGE", "page_table", page, limit, index)
    return torch.where(is_used, table, -1).int().contiguous()


def _check_owners(page_table: Tensor, owned: Tensor, num_pages: int) -> None:
    """Refuses pages of a checked table that belong to other requests only. [SAFE-OWNER]"""
    if owned.shape != (page_table.shape[0], num_pages):
        limit = f"must be ({page_table.shape[0]}, {num_pages})"
        raise PlanError("SAFE-SHAPE", "owned.shape", tuple(owned.shape), limit)
    is_used = page_table >= 0
    is_owned = owned.to(page_table.device).gather(1, page_table.clamp(min=0).long())
    if bool((is_used & ~is_owned).any()):
        index = first_index(is_used & ~is_owned)
        limit = f"request {index[0]} does not own that page"
        raise PlanError("SAFE-OWNER", "page_table", int(page_table[index]), limit, index)


def _query_rows(cache: CheckedCache, num_qo_heads: int) -> QueryRows:
    """Request, logical position and length of every query row. [COORD-ROW, MASK-OFFSET]"""
    qo_indptr, seqlen_kv, q_offset = cache.qo_indptr, cache.seqlen_kv, cache.q_offset
    if q_offset.numel() != seqlen_kv.numel():
        raise PlanError("SAFE-SHAPE", "len(q_offset)", q_offset.numel(), f"must be {seqlen_kv.numel()}")
    is_bad = (q_offset.abs() + qo_indptr.diff()) >= 2**31
    if bool(is_bad.any()):
        index = first_index(is_bad)
        raise PlanError("SAFE-SHAPE", "q_offset", int(q_offset[index]), "positions must lie within 31 bits", index)
    request, local = enumerate_runs(qo_indptr.diff())
    return QueryRows(request, q_offset[request] + local, seqlen_kv[request], seqlen_kv.numel(), num_qo_heads)


def check_candidates(candidates: CandidateLists, cache: CheckedCache) -> RowBlocks:
    """The blocks of rows that share lists; refuses options and shapes. Entries are checked where lists are built.

    [SAFE-SHAPE]
    """
    if candidates.granularity not in ("token", "block"):
        raise PlanError("SAFE-SHAPE", "candidates.granularity", candidates.granularity, "must be token or block")
    if candidates.sharing not in ("query_head", "kv_head", "shared"):
        limit = "must be query_head, kv_head or shared"
        raise PlanError("SAFE-SHAPE", "candidates.sharing", candidates.sharing, limit)
    for name in ("block_size", "q_block_size"):
        if getattr(candidates, name) < 1:
            raise PlanError("SAFE-SHAPE", f"candidates.{name}", getattr(candidates, name), "must be at least 1")
    if candidates.granularity == "token" and candidates.block_size != 1:
        raise PlanError("SAFE-SHAPE", "candidates.block_size", candidates.block_size, "must be 1 at token granularity")
    _check_integers("candidates.indptr", candidates.indptr, 1)
    _check_integers("candidates.indices", candidates.indices, 1)
    return cut_row_blocks(cache.qo_indptr, cache.q_offset, candidates.q_block_size)


def check_sink_logits(sink_logits: Tensor | None, num_qo_heads: int, device: torch.device) -> Tensor | None:
    if sink_logits is None:
        return None
    if sink_logits.shape != (num_qo_heads,):
        limit = f"must be ({num_qo_heads},)"
        raise PlanError("SAFE-SHAPE", "sink_logits.shape", tuple(sink_logits.shape), limit)
    is_bad = ~torch.isfinite(sink_logits)
    if bool(is_bad.any()):
        index = first_index(is_bad)
        raise PlanError("SAFE-FINITE", "sink_logits", float(sink_logits[index]), "must be finite", index)
    return sink_logits.detach().to(device=device, dtype=torch.float32).contiguous()
