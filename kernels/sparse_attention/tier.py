"""A tier: a decode plan of fixed capacity whose candidates are canonicalized on the GPU, again and again.

`plan_tier` allocates everything once, for so many requests, so many candidates a list and so many tokens a request.
`Tier.update` takes new lengths, pages and candidates with one launch and no synchronization, and `run(tier.plan, ...)`
attends them; `Tier.step` does both, as one CUDA graph from the second call on the same tensors on. Both may also be
captured in a graph of the caller's, since every address stays. What does not fit is refused, never overrun:
`Tier.raise_if_refused` says what. [PLAN, SET-UNION, SET-RANGE, COORD-PAGE-RANGE, SAFE-OWNER, SAFE-REFUSE]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from attnconform.kernels.sparse_attention.candidates import lists_per_block, slot_dtype
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.forward import launch_run
from attnconform.kernels.sparse_attention.graphs import GraphCache, call_or_replay, launching_on
from attnconform.kernels.sparse_attention.index import (
    CAPACITY_ERROR,
    ENTRY_ERROR,
    NO_ERROR,
    NUM_ERRORS,
    OWNER_ERROR,
    PAGE_ERROR,
    index_kernel,
)
from attnconform.kernels.sparse_attention.numerics import IS_INTERPRETED
from attnconform.kernels.sparse_attention.plan import (
    Plan,
    check_geometry,
    check_options,
    check_sink_logits,
    count_processors,
    full_device,
    score_fields,
    shape_fields,
)
from attnconform.kernels.sparse_attention.prepared import addresses_of
from attnconform.kernels.sparse_attention.quantization import KVQuantization
from attnconform.kernels.sparse_attention.rules import ScoreRule, lower_score
from attnconform.kernels.sparse_attention.run_checks import check_run
from attnconform.kernels.sparse_attention.tasks import MERGE_FIELDS, TASK_FIELDS, Launch, make_launch
from attnconform.kernels.sparse_attention.tuning import (
    MIN_TILE_M,
    NO_CHOICE,
    SMALL_TILE_M,
    Choice,
    Geometry,
    IndexShape,
    choose_index_shape,
    choose_shape,
    count_tier_splits,
    power_of_two_from,
)

INT32_LIMIT = 2**31
NUM_INPUTS = 5  # arguments of index_kernel that an update brings


@dataclass(frozen=True, kw_only=True, eq=False)
class Tier:
    """A plan of fixed addresses, and what renews its contents."""

    plan: Plan
    granularity: Literal["token", "block"]
    block_size: int
    capacity: int  # tokens per list
    num_lists: int
    errors: Tensor  # (NUM_ERRORS,) int64, the smallest offender of each kind
    list_lengths: Tensor  # (num_lists,) int32, tokens of each list after canonicalization
    num_programs: int  # of the index
    num_warps: int
    fixed: dict[str, object]
    fixed_values: tuple[object, ...]  # of `fixed`, as a launch takes them
    prepared: dict[object, Any] = field(default_factory=dict)
    graphs: GraphCache = field(default_factory=GraphCache)

    def update(
        self,
        *,
        seqlen_kv: Tensor,  # (batch_size,) int32 or int64
        page_table: Tensor,  # (batch_size, max_pages) int32, contiguous
        indptr: Tensor,  # (num_lists + 1,) int32 or int64
        indices: Tensor,  # (total,) int32: token positions or block ids, in any order, holes and duplicates included
        owned: Tensor | None = None,  # (batch_size, num_pages) bool, which request may read which page
    ) -> None:
        """New candidates. The caller owns the tensors and keeps them until the launch has read them."""
        self._check_update(seqlen_kv, page_table, indptr, indices, owned)
        with launching_on(self.plan.device):
            self._launch((indptr, indices, seqlen_kv, page_table, owned))

    def step(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        out: Tensor,
        lse: Tensor,
        seqlen_kv: Tensor,
        page_table: Tensor,
        indptr: Tensor,
        indices: Tensor,
        owned: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """`update`, then `run`; one graph launch where these very tensors came before. [PLAN-REPLAY]"""
        # told apart before anything else is done: with short kernels a step takes as long as this function
        if self.graphs.replay((
            id(indptr), id(indices), id(seqlen_kv), id(page_table), id(owned),
            id(q), id(k_cache), id(v_cache), id(k_scale), id(v_scale), id(out), id(lse),
        )):  # fmt: skip
            return
        inputs = (indptr, indices, seqlen_kv, page_table, owned)
        tensors = (q, k_cache, v_cache, k_scale, v_scale, out, lse)

        def launch() -> None:
            self._check_update(seqlen_kv, page_table, indptr, indices, owned)
            check_run(self.plan, *tensors)
            self._launch(inputs)
            launch_run(self.plan, *tensors)

        call_or_replay(self.graphs, self.plan.device, (*inputs, *tensors), launch)

    def retire(self, request: int) -> None:
        """The request's slot goes to another one: what was planned for it before writes nothing. [FORMAT-GENERATION]

        Takes effect in stream order, without a synchronization.
        """
        if self.plan.generations is None:
            raise PlanError("FORMAT-GENERATION", "has_generations", False, "the tier was planned without generations")
        self.plan.generations[0, request] += 1

    def _launch(self, inputs: tuple[Tensor | None, ...]) -> None:
        # Triton looks through every argument of a call; between two updates only these can differ in kind
        addresses = addresses_of(inputs)
        key = tuple([None if t is None else (a % 16, t.dtype) for a, t in zip(addresses, inputs, strict=True)])
        runner = self.prepared.get(key)
        if runner is not None:
            runner(*addresses, *self.fixed_values)
            return
        compiled = index_kernel[(self.num_programs,)](*inputs, **self.fixed, num_warps=self.num_warps)
        if not IS_INTERPRETED:
            self.prepared[key] = compiled[(self.num_programs, 1, 1)]

    def raise_if_refused(self) -> None:
        """Raises PlanError for the first input that an update since the last call refused; synchronizes."""
        errors = self.errors.tolist()
        self.errors.fill_(NO_ERROR)
        table = self.plan.page_table.shape[1]
        if errors[ENTRY_ERROR] != NO_ERROR:
            limit = "it is neither a hole nor an id of its request"
            raise PlanError("SET-RANGE", "indices", "refused", limit, (errors[ENTRY_ERROR],))
        if errors[PAGE_ERROR] != NO_ERROR:
            index = divmod(errors[PAGE_ERROR], table)
            raise PlanError("COORD-PAGE-RANGE", "page_table", "refused", f"num_pages is {self.plan.num_pages}", index)
        if errors[OWNER_ERROR] != NO_ERROR:
            index = divmod(errors[OWNER_ERROR], table)
            limit = f"request {index[0]} does not own that page"
            raise PlanError("SAFE-OWNER", "page_table", "refused", limit, index)
        if errors[CAPACITY_ERROR] != NO_ERROR:
            limit = f"it has more tokens than the tier's {self.capacity}"
            raise PlanError("PLAN-CAPACITY", "list", errors[CAPACITY_ERROR], limit)

    def _check_update(
        self, seqlen_kv: Tensor, page_table: Tensor, indptr: Tensor, indices: Tensor, owned: Tensor | None
    ) -> None:
        """Refuses tensors that the launch could not read safely. [SAFE-SHAPE]"""
        batch_size, integers = self.plan.batch_size, (torch.int32, torch.int64)
        self._check_input("seqlen_kv", seqlen_kv, (batch_size,), integers)
        self._check_input("page_table", page_table, tuple(self.plan.page_table.shape), integers)
        self._check_input("indptr", indptr, (self.num_lists + 1,), integers)
        self._check_input("indices", indices, (indices.numel(),), integers)
        if owned is not None:
            self._check_input("owned", owned, (batch_size, self.plan.num_pages), (torch.bool,))

    def _check_input(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
        if tensor.shape != shape:
            raise PlanError("SAFE-SHAPE", f"{name}.shape", tuple(tensor.shape), f"the tier is for {shape}")
        if tensor.dtype not in dtypes:
            raise PlanError("SAFE-SHAPE", f"{name}.dtype", tensor.dtype, f"must be {_one_of(dtypes)}")
        if tensor.device != self.plan.device:
            raise PlanError("SAFE-SHAPE", f"{name}.device", tensor.device, f"the tier is on {self.plan.device}")
        if not tensor.is_contiguous():
            raise PlanError("COORD-STRIDE", f"{name}.stride()", tensor.stride(), "must be contiguous")


def _one_of(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def plan_tier(
    *,
    batch_size: int,
    capacity: int,  # tokens per list, block ids expanded, window and sinks included
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
    window: int | None = None,  # positions up to the query's own that join every list
    num_sink_tokens: int = 0,  # first positions that join every list
    score_rules: Sequence[ScoreRule] = (),
    sink_logits: Tensor | None = None,  # (num_qo_heads,) float32
    num_kv_splits: int | None = None,
    layout: Literal["NHD", "HND"] = "NHD",
    k_quant: KVQuantization | None = None,
    v_quant: KVQuantization | None = None,
    has_generations: bool = False,  # rows may be retired
    with_positions: bool = False,  # lists hold positions beside slots even where no rule asks for them
    index_parts: int | None = None,  # programs that share a list's index: a hint
    choice: Choice = NO_CHOICE,
) -> Tier:
    """A tier for one query row a request, at the last committed position; it sees what its list admits.

    Raises PlanError, naming the value that is refused.
    """
    device = full_device(device)
    geometry = Geometry(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim_qk,
        head_dim_vo=head_dim_vo,
        element_size=dtype.itemsize,
        sharing=sharing,
        tile_kv=None,
        num_kv_splits=num_kv_splits,
        num_processors=count_processors(device),
        is_quantized=k_quant is not None or v_quant is not None,
        choice=choice,
    )
    _check_sizes(batch_size, capacity, max_seqlen_kv, page_size, num_pages, block_size, granularity)
    check_options(sm_scale, dtype, layout, window, num_sink_tokens)
    check_geometry(geometry, page_size, num_pages)
    _check_offsets(batch_size, num_qo_heads, capacity)
    plan = Plan(
        **shape_fields(geometry, page_size, num_pages),
        layout=layout,
        dtype=dtype,
        device=device,
        sm_scale=float(sm_scale),
        **_row_fields(batch_size, -(-max_seqlen_kv // page_size), device, has_generations),
        sharing=sharing,
        **_list_fields(
            batch_size * lists_per_block(sharing, num_qo_heads, num_kv_heads),
            capacity,
            slot_dtype(num_pages, page_size),
            device,
            has_positions=with_positions or bool(score_rules),
        ),
        **score_fields(lower_score(tuple(score_rules), num_qo_heads, device)),
        sink_logits=check_sink_logits(sink_logits, num_qo_heads, device),
        launches=(_static_launch(batch_size, capacity, geometry, device),),
        is_tier=True,
        k_quant=k_quant,
        v_quant=v_quant,
    )
    local = {"window": window or 0, "num_sink_tokens": num_sink_tokens}
    return _make_tier(plan, capacity, max_seqlen_kv, granularity, block_size, local, index_parts)


def _row_fields(batch_size: int, max_pages: int, device: torch.device, has_generations: bool) -> dict[str, Any]:
    """Fields of a plan that say where its rows stand; an update fills them."""
    generations = torch.zeros((2, batch_size), dtype=torch.int32, device=device) if has_generations else None
    return {
        "qo_indptr": torch.arange(batch_size + 1, device=device),
        "seqlen_kv": torch.zeros(batch_size, dtype=torch.int64, device=device),
        "q_offset": torch.zeros(batch_size, dtype=torch.int64, device=device),
        "page_table": torch.full((batch_size, max_pages), -1, dtype=torch.int32, device=device),
        "row_requests": torch.arange(batch_size, dtype=torch.int32, device=device),
        "row_positions": torch.zeros(batch_size, dtype=torch.int32, device=device),
        "mask_starts": torch.zeros((1, batch_size), dtype=torch.int32, device=device),
        "mask_ends": torch.zeros((1, batch_size), dtype=torch.int32, device=device),
        "mask_fn": None,
        "mask_data": None,
        "generations": generations,
    }


def _list_fields(
    num_lists: int, capacity: int, slots: torch.dtype, device: torch.device, *, has_positions: bool
) -> dict[str, Any]:
    """Fields of a plan for lists of a fixed place each; window and sinks are entries like others."""
    num_entries = num_lists * capacity
    return {
        "q_block_size": 1,
        "window": None,
        "list_indptr": torch.arange(num_lists + 1, dtype=torch.int32, device=device) * capacity,
        "list_positions": torch.zeros(num_entries, dtype=torch.int32, device=device) if has_positions else None,
        "list_slots": torch.zeros(num_entries, dtype=slots, device=device),
        "list_members": torch.ones(1, dtype=torch.bool, device=device),
    }


def _static_launch(batch_size: int, capacity: int, geometry: Geometry, device: torch.device) -> Launch:
    """Tasks of every list's tiles, so many chunks each, with everything but the keys filled in."""
    group_size = geometry.num_qo_heads // geometry.num_kv_heads
    heads = 1 if geometry.sharing == "query_head" else min(group_size, MIN_TILE_M)
    shape = choose_shape(1, SMALL_TILE_M, heads, geometry, batch_size)
    lists_per_row = lists_per_block(geometry.sharing or "shared", geometry.num_qo_heads, geometry.num_kv_heads)
    tiles = _head_tiles(geometry.num_qo_heads, geometry.num_kv_heads, heads, lists_per_row)
    num_splits = count_tier_splits(batch_size * lists_per_row * len(tiles[0]), capacity, shape, geometry)
    tasks, merges = _static_tables(batch_size, tiles, num_splits, device)
    launch = make_launch(tasks, merges, shape, len(tasks) if num_splits > 1 else 0, geometry.head_dim_vo)
    # where tasks are never cut, a kernel that merges nothing takes fewer registers
    tickets = launch.tickets if num_splits > 1 else None
    return replace(launch, tickets=tickets)


def _make_tier(
    plan: Plan,
    capacity: int,
    max_seqlen_kv: int,
    granularity: Literal["token", "block"],
    block_size: int,
    local: dict[str, int],
    index_parts: int | None,
) -> Tier:
    """The plan with the index kernel's own storage and arguments."""
    assert plan.list_indptr is not None
    num_lists = plan.list_indptr.numel() - 1
    num_words = triton.cdiv(triton.cdiv(max_seqlen_kv, block_size), 32)
    unit = gcd(block_size, plan.page_size)  # tokens that are in one page whatever the id
    shape = choose_index_shape(num_lists, capacity, num_words, count_processors(plan.device), unit)
    shape = replace(shape, parts=index_parts or shape.parts)
    sizes = {"capacity": capacity, "num_words": num_words, "max_ids": -(-capacity // block_size) + 2, **local}
    units = block_size // unit if unit > 1 else 0
    storage = _index_storage(num_lists, shape.parts, num_words, sizes["max_ids"], units, plan)
    fixed = _index_arguments(plan, storage, sizes, block_size, shape)
    return Tier(
        plan=plan,
        granularity=granularity,
        block_size=block_size,
        capacity=capacity,
        num_lists=num_lists,
        errors=storage["errors_ptr"],
        list_lengths=storage["list_lengths_ptr"],
        num_programs=num_lists * shape.parts,
        num_warps=shape.num_warps,
        fixed=fixed,
        fixed_values=addresses_of(fixed.values()),
    )


def _index_storage(
    num_lists: int, parts: int, num_words: int, max_ids: int, units: int, plan: Plan
) -> dict[str, Tensor]:
    """What the index kernel writes beside the plan's lists; all of it is scratch but errors and lengths.

    Between two launches the bitmap is 0, as are the tickets.
    """
    programs = num_lists * parts
    counts = {
        "list_lengths_ptr": num_lists,
        "bitmap_ptr": programs * num_words,
        "ids_ptr": programs * max_ids,
        "tickets_ptr": num_lists * 2,
    }
    storage = {name: torch.zeros(count, dtype=torch.int32, device=plan.device) for name, count in counts.items()}
    assert plan.list_slots is not None
    storage["bases_ptr"] = plan.list_slots.new_zeros(max(1, programs * max_ids * units))
    storage["errors_ptr"] = torch.full((NUM_ERRORS,), NO_ERROR, dtype=torch.int64, device=plan.device)
    return storage


def _index_arguments(
    plan: Plan, storage: dict[str, Tensor], sizes: dict[str, int], block_size: int, shape: IndexShape
) -> dict[str, object]:
    """Arguments of index_kernel that a tier fixes, in order."""
    launch = plan.launches[0]
    given: dict[str, object] = {
        "list_slots_ptr": plan.list_slots,
        "list_positions_ptr": plan.list_positions,
        "row_positions_ptr": plan.row_positions,
        "mask_ends_ptr": plan.mask_ends,
        "tasks_ptr": launch.tasks,
        "merges_ptr": launch.merges,
        "generations_ptr": plan.generations,
        "max_pages": plan.page_table.shape[1],
        "num_pages": plan.num_pages,
        "batch_size": plan.batch_size,
        "BLOCK_SIZE": block_size,
        "PAGE_SIZE": plan.page_size,
        "UNIT": gcd(block_size, plan.page_size),
        "PARTS": shape.parts,
        "STEP": shape.step,
        "EXPAND_STEP": shape.expand_step,
        "TILE_WORDS": shape.tile_words,
        "ENTRY_ROW": ENTRY_ERROR,
        "PAGE_ROW": PAGE_ERROR,
        "CAPACITY_ROW": CAPACITY_ERROR,
        "OWNER_ROW": OWNER_ERROR,
        **storage,
        **sizes,
        **_task_constants(plan),
    }
    return {name: given[name] for name in index_kernel.arg_names[NUM_INPUTS:]}


def _task_constants(plan: Plan) -> dict[str, int]:
    """How the static tasks stand in their table."""
    launch = plan.launches[0]
    assert plan.list_indptr is not None
    num_lists, num_merges = plan.list_indptr.numel() - 1, launch.merges.shape[0]
    num_splits = launch.tasks.shape[0] // num_merges if num_merges else 1
    return {
        "LISTS_PER_ROW": num_lists // plan.batch_size,
        "TILES_PER_LIST": launch.tasks.shape[0] // (num_lists * num_splits),
        "NUM_SPLITS": num_splits,
        "PADDED_SPLITS": power_of_two_from(num_splits),
        "TASK_WIDTH": len(TASK_FIELDS),
        "MERGE_WIDTH": len(MERGE_FIELDS),
        "TILE_KV": launch.shape.tile_kv,
    }


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


def _static_tables(
    batch_size: int, tiles: list[list[HeadTile]], num_splits: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Tasks and merges with everything but the keys filled in; rows in the order of list, tile and split."""
    per_row = torch.tensor([tile for row_tiles in tiles for tile in row_tiles], dtype=torch.int32)
    request = torch.arange(batch_size, dtype=torch.int32).repeat_interleave(len(per_row))[:, None]
    heads = per_row.repeat(batch_size, 1)
    nothing = torch.zeros_like(request)
    whole = torch.cat([request, request, nothing, heads, nothing.expand(-1, 4)], dim=1)
    if num_splits == 1:
        tasks = torch.cat([whole, (nothing - 1).expand(-1, 2)], dim=1)
        return tasks.to(device), tasks.new_empty((0, len(MERGE_FIELDS)), device=device)
    merge = torch.arange(len(whole), dtype=torch.int32)[:, None]
    partial = torch.arange(len(whole) * num_splits, dtype=torch.int32)[:, None]
    tasks = torch.cat([whole.repeat_interleave(num_splits, 0), partial, merge.repeat_interleave(num_splits, 0)], dim=1)
    counts = [merge * num_splits, torch.full_like(merge, num_splits), request]
    merges = torch.cat([request, nothing, heads[:, :2], *counts], dim=1)
    return tasks.to(device), merges.to(device)


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


def _check_offsets(batch_size: int, num_qo_heads: int, capacity: int) -> None:
    """Refuses tiers whose entries an int32 does not count. [COORD-WIDE]"""
    if batch_size * num_qo_heads * capacity >= INT32_LIMIT:
        limit = f"batch_size * num_qo_heads * capacity must be below 2^31 for {batch_size} and {num_qo_heads}"
        raise PlanError("COORD-WIDE", "capacity", capacity, limit)
