"""A tier: a decode plan of fixed capacity whose candidates are canonicalized on the GPU, again and again.

`plan_tier` allocates everything once, for so many requests, so many candidates a list and so many tokens a request.
`Tier.update` takes new lengths, pages and candidates with one launch and no synchronization, and `run(tier.plan, ...)`
attends them; both may be captured in a CUDA graph, since every address stays. What does not fit is refused, never
overrun: `Tier.raise_if_refused` says what. [PLAN, SET-RANGE, COORD-PAGE-RANGE, SAFE-REFUSE]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from attnconform.kernels.sparse_attention.candidates import lists_per_block
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.index import (
    CAPACITY_ERROR,
    ENTRY_ERROR,
    NO_ERROR,
    PAGE_ERROR,
    index_kernel,
)
from attnconform.kernels.sparse_attention.numerics import IS_INTERPRETED
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.quantization import KVQuantization
from attnconform.kernels.sparse_attention.rules import ScoreRule, lower_score
from attnconform.kernels.sparse_attention.tasks import (
    MERGE_FIELDS,
    MIN_TILE_M,
    MIN_TILES_PER_SPLIT,
    PROGRAMS_PER_PROCESSOR,
    SMALL_TILE_M,
    TASK_FIELDS,
    Geometry,
    Launch,
    TileShape,
    choose_shape,
)

MAX_TIER_SPLITS = 64
STEP = 2048  # entries or tokens a program handles at once
MAX_TILE_WORDS = 128  # bitmap words read at once, 32 ids each


@dataclass(frozen=True, kw_only=True, eq=False)
class Tier:
    """A plan of fixed addresses, and what renews its contents."""

    plan: Plan
    granularity: Literal["token", "block"]
    block_size: int
    capacity: int  # tokens per list
    num_lists: int
    errors: Tensor  # (3,) int64, the smallest offender of each kind
    list_lengths: Tensor  # (num_lists,) int32, tokens of each list after canonicalization
    num_warps: int
    prepared: dict[object, Any]
    fixed: dict[str, object]

    def update(
        self,
        *,
        seqlen_kv: Tensor,  # (batch_size,) int32 or int64
        page_table: Tensor,  # (batch_size, max_pages) int32, contiguous
        indptr: Tensor,  # (num_lists + 1,) int32 or int64
        indices: Tensor,  # (total,) int32: token positions or block ids, in any order, holes and duplicates included
    ) -> None:
        """New candidates. The caller owns the four tensors and keeps them until the run has read them."""
        self._check_update(seqlen_kv, page_table, indptr, indices)
        inputs = (indptr, indices, seqlen_kv, page_table)
        # Triton looks through every argument of a call; between two updates only these can differ in kind
        key = tuple((t.data_ptr() % 16, t.dtype) for t in inputs)
        runner = self.prepared.get(key)
        if runner is not None:
            runner(*inputs, *self.fixed.values())
            return
        compiled = index_kernel[(self.num_lists,)](*inputs, **self.fixed, num_warps=self.num_warps)
        if not IS_INTERPRETED:
            self.prepared[key] = compiled[(self.num_lists, 1, 1)]

    def raise_if_refused(self) -> None:
        """Raises PlanError for the first input that an update since the last call refused; synchronizes."""
        errors = self.errors.tolist()
        self.errors.fill_(NO_ERROR)
        if errors[ENTRY_ERROR] != NO_ERROR:
            limit = "it is neither a hole nor an id of its request"
            raise PlanError("SET-RANGE", "indices", "refused", limit, (errors[ENTRY_ERROR],))
        if errors[PAGE_ERROR] != NO_ERROR:
            index = divmod(errors[PAGE_ERROR], self.plan.page_table.shape[1])
            raise PlanError("COORD-PAGE-RANGE", "page_table", "refused", f"num_pages is {self.plan.num_pages}", index)
        if errors[CAPACITY_ERROR] != NO_ERROR:
            limit = f"it has more tokens than the tier's {self.capacity}"
            raise PlanError("SAFE-SHAPE", "list", errors[CAPACITY_ERROR], limit)

    def _check_update(self, seqlen_kv: Tensor, page_table: Tensor, indptr: Tensor, indices: Tensor) -> None:
        """Refuses tensors that the launch could not read safely. [SAFE-SHAPE]"""
        for name, tensor, shape in (
            ("seqlen_kv", seqlen_kv, (self.plan.batch_size,)),
            ("page_table", page_table, tuple(self.plan.page_table.shape)),
            ("indptr", indptr, (self.num_lists + 1,)),
            ("indices", indices, tuple(indices.shape)),
        ):
            if tensor.shape != shape or tensor.dim() != len(shape):
                raise PlanError("SAFE-SHAPE", f"{name}.shape", tuple(tensor.shape), f"the tier is for {shape}")
            if tensor.dtype not in (torch.int32, torch.int64):
                raise PlanError("SAFE-SHAPE", f"{name}.dtype", tensor.dtype, "must be int32 or int64")
            if tensor.device != self.plan.device:
                raise PlanError("SAFE-SHAPE", f"{name}.device", tensor.device, f"the tier is on {self.plan.device}")
            if not tensor.is_contiguous():
                raise PlanError("COORD-STRIDE", f"{name}.stride()", tensor.stride(), "must be contiguous")


def plan_tier(
    *,
    batch_size: int,
    capacity: int,  # tokens per list, block ids expanded
    max_seqlen_kv: int,  # tokens per request
    page_size: int,
    num_pages: int,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim_qk: int,
    head_dim_vo: int,
    sm_scale: float,
    dtype: torch.dtype,
    device: torch.device | str,
    granularity: Literal["token", "block"],
    block_size: int = 1,
    sharing: Literal["query_head", "kv_head", "shared"] = "kv_head",
    score_rules: Sequence[ScoreRule] = (),
    sink_logits: Tensor | None = None,  # (num_qo_heads,) float32
    num_kv_splits: int | None = None,
    layout: Literal["NHD", "HND"] = "NHD",
    k_quant: KVQuantization | None = None,
    v_quant: KVQuantization | None = None,
) -> Tier:
    """A tier for one query row a request, at the last committed position; it sees what its list admits.

    Raises PlanError, naming the value that is refused.
    """
    _check_sizes(batch_size, capacity, max_seqlen_kv, page_size, num_pages, block_size, granularity)
    if num_qo_heads < 1 or num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        limit = f"must be a multiple of num_kv_heads, {num_kv_heads}"
        raise PlanError("GQA-MAP", "num_qo_heads", num_qo_heads, limit)
    if batch_size * num_qo_heads * capacity >= 2**31:
        limit = f"batch_size * num_qo_heads * capacity must be below 2^31 for {batch_size} and {num_qo_heads}"
        raise PlanError("COORD-WIDE", "capacity", capacity, limit)
    if not math.isfinite(sm_scale):
        raise PlanError("SAFE-FINITE", "sm_scale", sm_scale, "must be finite")
    device = torch.empty(0, device=device).device
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0
    geometry = Geometry(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        element_size=dtype.itemsize,
        sharing=sharing,
        tile_kv=None,
        num_kv_splits=num_kv_splits,
        num_processors=processors,
        is_quantized=k_quant is not None or v_quant is not None,
    )
    lists_per_row = lists_per_block(sharing, num_qo_heads, num_kv_heads)
    heads = 1 if sharing == "query_head" else min(num_qo_heads // num_kv_heads, MIN_TILE_M)
    shape = choose_shape(1, SMALL_TILE_M, heads, geometry, batch_size)
    tiles = _head_tiles(num_qo_heads, num_kv_heads, heads, lists_per_row)
    num_splits = _count_splits(batch_size * lists_per_row * len(tiles[0]), capacity, shape, geometry)
    tasks, merges = _static_tables(batch_size, tiles, num_splits, device)
    launch = _make_launch(tasks, merges, shape, num_splits, head_dim_vo)
    score = lower_score(tuple(score_rules), num_qo_heads, device)
    num_lists = batch_size * lists_per_row
    max_pages = -(-max_seqlen_kv // page_size)
    plan = Plan(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        page_size=page_size,
        num_pages=num_pages,
        layout=layout,
        dtype=dtype,
        device=device,
        sm_scale=float(sm_scale),
        qo_indptr=torch.arange(batch_size + 1, device=device),
        seqlen_kv=torch.zeros(batch_size, dtype=torch.int64, device=device),
        q_offset=torch.zeros(batch_size, dtype=torch.int64, device=device),
        page_table=torch.full((batch_size, max_pages), -1, dtype=torch.int32, device=device),
        row_requests=torch.arange(batch_size, dtype=torch.int32, device=device),
        row_positions=torch.zeros(batch_size, dtype=torch.int32, device=device),
        sharing=sharing,
        q_block_size=1,
        window=None,
        list_indptr=torch.arange(num_lists + 1, dtype=torch.int32, device=device) * capacity,
        list_positions=torch.zeros(num_lists * capacity, dtype=torch.int32, device=device),
        list_slots=torch.zeros(num_lists * capacity, dtype=torch.int64, device=device),
        list_members=torch.ones(1, dtype=torch.bool, device=device),
        mask_starts=torch.zeros((1, batch_size), dtype=torch.int32, device=device),
        mask_ends=torch.zeros((1, batch_size), dtype=torch.int32, device=device),
        mask_fn=None,
        mask_data=None,
        score_codes=score.codes,
        score_params=score.params,
        score_tables=score.tables,
        score_reaches=score.reaches,
        score_table_sizes=score.table_sizes,
        sink_logits=sink_logits,
        launches=(launch,),
        k_quant=k_quant,
        v_quant=v_quant,
    )
    return _make_tier(plan, capacity, max_seqlen_kv, granularity, block_size, len(tiles[0]), num_splits)


def _make_tier(
    plan: Plan,
    capacity: int,
    max_seqlen_kv: int,
    granularity: Literal["token", "block"],
    block_size: int,
    tiles_per_list: int,
    num_splits: int,
) -> Tier:
    """The plan with the index kernel's own storage and arguments."""
    assert plan.list_indptr is not None
    num_lists, launch = plan.list_indptr.numel() - 1, plan.launches[0]
    max_ids = -(-capacity // block_size) + 1
    num_words = triton.cdiv(triton.cdiv(max_seqlen_kv, block_size), 32)
    is_long = num_words > MAX_TILE_WORDS
    errors = torch.full((3,), NO_ERROR, dtype=torch.int64, device=plan.device)
    lengths, bitmap, ids = (
        torch.zeros(size, dtype=torch.int32, device=plan.device)
        for size in (num_lists, num_lists * num_words, num_lists * max_ids)
    )
    fixed: dict[str, object] = {
        "list_slots_ptr": plan.list_slots,
        "list_positions_ptr": plan.list_positions,
        "list_lengths_ptr": lengths,
        "row_positions_ptr": plan.row_positions,
        "mask_ends_ptr": plan.mask_ends,
        "tasks_ptr": launch.tasks,
        "merges_ptr": launch.merges,
        "errors_ptr": errors,
        "bitmap_ptr": bitmap,
        "ids_ptr": ids,
        "capacity": capacity,
        "max_pages": plan.page_table.shape[1],
        "num_pages": plan.num_pages,
        "num_words": num_words,
        "max_ids": max_ids,
        "LISTS_PER_ROW": num_lists // plan.batch_size,
        "BLOCK_SIZE": block_size,
        "PAGE_SIZE": plan.page_size,
        "TILES_PER_LIST": tiles_per_list,
        "NUM_SPLITS": num_splits,
        "PADDED_SPLITS": triton.next_power_of_2(num_splits),
        "TASK_WIDTH": len(TASK_FIELDS),
        "MERGE_WIDTH": len(MERGE_FIELDS),
        "TILE_KV": launch.shape.tile_kv,
        "STEP": min(STEP, triton.next_power_of_2(max(capacity, 32))),
        "TILE_WORDS": min(MAX_TILE_WORDS * (4 if is_long else 1), triton.next_power_of_2(num_words)),
        "ENTRY_ROW": ENTRY_ERROR,
        "PAGE_ROW": PAGE_ERROR,
        "CAPACITY_ROW": CAPACITY_ERROR,
    }
    return Tier(
        plan=plan,
        granularity=granularity,
        block_size=block_size,
        capacity=capacity,
        num_lists=num_lists,
        errors=errors,
        list_lengths=lengths,
        num_warps=16 if is_long else 8,
        prepared={},
        fixed=fixed,
    )


HeadTile = tuple[int, int, int]  # first query head, number of heads, KV head


def _head_tiles(num_qo_heads: int, num_kv_heads: int, heads: int, lists_per_row: int) -> list[list[HeadTile]]:
    """For every list of a row, the head tiles that read it."""
    group = num_qo_heads // num_kv_heads
    tiles = [
        (kv_head * group + start, min(heads, group - start), kv_head)
        for kv_head in range(num_kv_heads)
        for start in range(0, group, heads)
    ]
    per_list = len(tiles) // lists_per_row
    return [tiles[i * per_list : (i + 1) * per_list] for i in range(lists_per_row)]


def _count_splits(num_tiles: int, capacity: int, shape: TileShape, geometry: Geometry) -> int:
    """As asked, or so that all processors are busy and no chunk is a few steps only. [MERGE-SPLIT]"""
    if geometry.num_kv_splits is not None:
        return geometry.num_kv_splits
    wanted = -(-geometry.num_processors * PROGRAMS_PER_PROCESSOR // num_tiles)
    most = capacity // (shape.tile_kv * MIN_TILES_PER_SPLIT)
    return max(1, min(wanted, most, MAX_TIER_SPLITS))


def _static_tables(
    batch_size: int, tiles: list[list[HeadTile]], num_splits: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tasks and merges with everything but the keys filled in; rows in the order of list, tile and split."""
    tasks, merges = [], []
    for request in range(batch_size):
        for row_tiles in tiles:
            for head_start, head_count, kv_head in row_tiles:
                where = [request, request, 0, head_start, head_count, kv_head, 0, 0, 0, 0]
                first = len(tasks)
                tasks += [[*where, first + s if num_splits > 1 else -1] for s in range(num_splits)]
                if num_splits > 1:
                    merges.append([request, 0, head_start, head_count, first, num_splits])
    as_table = {"dtype": torch.int32, "device": device}
    return (
        torch.tensor(tasks, **as_table),
        torch.tensor(merges, **as_table).reshape(-1, len(MERGE_FIELDS)),
    )


def _make_launch(tasks: Tensor, merges: Tensor, shape: TileShape, num_splits: int, head_dim_vo: int) -> Launch:
    """The tasks with a workspace row for each chunk."""
    num_partials = tasks.shape[0] if num_splits > 1 else 0
    state = torch.empty((num_partials, shape.tile_m), dtype=torch.float32, device=tasks.device)
    acc = torch.empty((num_partials, shape.tile_m, head_dim_vo), dtype=torch.float32, device=tasks.device)
    return Launch(
        shape=shape, tasks=tasks, merges=merges, partial_acc=acc, partial_max=state, partial_sum=torch.empty_like(state)
    )


def _check_sizes(
    batch_size: int,
    capacity: int,
    max_seqlen_kv: int,
    page_size: int,
    num_pages: int,
    block_size: int,
    granularity: str,
) -> None:
    """Refuses sizes that no tier has. [SAFE-SHAPE]"""
    sizes = {
        "batch_size": batch_size,
        "capacity": capacity,
        "max_seqlen_kv": max_seqlen_kv,
        "page_size": page_size,
        "num_pages": num_pages,
        "block_size": block_size,
    }
    for name, size in sizes.items():
        if size < 1:
            raise PlanError("SAFE-SHAPE", name, size, "must be at least 1")
    if granularity not in ("token", "block"):
        raise PlanError("SAFE-SHAPE", "granularity", granularity, "must be token or block")
    if granularity == "token" and block_size != 1:
        raise PlanError("SAFE-SHAPE", "block_size", block_size, "must be 1 at token granularity")
