"""Who selected a slot: the exact transpose of a plan's lists, tiled over slots. [GRAD-SUM, BLOCK-TRANSPOSE]

The forward walks lists and reads slots; dK and dV run the other way. A *slot tile* is `tile_kv` neighbouring slots of
one KV head. A *reader* is a few query rows and the heads that share a list; a *pair* is a slot tile and a reader that
touches it. The codes of a pair say which logical position, if any, its list gives each slot of the tile: the position
where all rows of the list have it, `-2 - position` where only windows brought it in, -1 where the list does not have
the slot. A list that reaches one slot by two positions touches the tile twice: both count. [SET-ALIAS]

Pairs that the lowered mask forbids altogether are left out. Tiles that many rows touch are cut into items of bounded
work, whose parts one tree of fixed order adds: where they are cut and how they are added depends on neither schedule
nor device. In hybrid mode only entries of hot pages are listed. Everything here is torch over all entries at once;
nothing is cached, since the caller knows best how long a plan lives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.backward_hints import (
    MIN_ROWS_PER_ITEM,
    NUM_ITEMS_WANTED,
    BackwardHints,
    KeyShape,
    choose_key_shape,
    pack_pairs,
)
from attnconform.kernels.sparse_attention.candidates import cut_ranges, cut_row_blocks, enumerate_runs, to_slots
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.tasks import reduce_groups

ABSENT = -1
# Columns of the kernel's table of pairs, in order.
PAIR_FIELDS = ("q_start", "q_count", "head_tile", "cell")


@dataclass(frozen=True, eq=False)
class ListEntries:
    """A plan's lists as flat triples; without lists, each request is a list of all its positions."""

    entry_list: Tensor  # (num_entries,) int64
    entry_slot: Tensor  # (num_entries,) int64
    entry_code: Tensor  # (num_entries,) int32
    list_kv_head: Tensor  # (num_lists,) int64, 0 where all KV heads read alike
    list_head_start: Tensor  # (num_lists,) int64, first query head; relative to the KV head's where they read alike
    list_q_start: Tensor  # (num_lists,) int64, global row
    list_q_count: Tensor  # (num_lists,) int64
    num_slots: int


@dataclass(frozen=True, eq=False)
class SlotTiles:
    """Pairs by slot tile; only touched tiles."""

    tile_slot: Tensor  # (num_tiles,) int64, first slot
    tile_kv_head: Tensor  # (num_tiles,) int64
    tile_indptr: Tensor  # (num_tiles + 1,) int64, into pairs
    pair_list: Tensor  # (num_pairs,) int64; a reader after `expand_readers`
    pair_cells: Tensor  # (num_pairs,) int64, row of codes
    codes: Tensor  # (num_cells, tile_kv) int32
    is_touched: Tensor  # (num_tiles, tile_kv) bool, slots that at least one list has


@dataclass(frozen=True, eq=False)
class Readers:
    """Rows and first head of every reader, and what the masks of its rows allow: a hull, and a run common to all."""

    owner: Tensor  # (num_readers,) int64, list
    q_start: Tensor  # (num_readers,) int64
    q_count: Tensor  # (num_readers,) int64
    head_start: Tensor  # (num_readers,) int64
    first_position: Tensor  # (num_readers,) int64
    past_position: Tensor  # (num_readers,) int64
    common_start: Tensor  # (num_readers,) int64
    common_end: Tensor  # (num_readers,) int64


@dataclass(frozen=True, eq=False)
class Items:
    """Runs of pairs, each small enough for one program; a tile of one item needs no workspace."""

    item_tile: Tensor  # (num_items,) int64
    item_begin: Tensor  # (num_items,) int64, into pairs
    item_full_begin: Tensor  # (num_items,) int64, full pairs from here
    item_end: Tensor  # (num_items,) int64
    item_partial: Tensor  # (num_items,) int64, row of the workspace; -1: the item writes the gradient itself
    summed_tile: Tensor  # (num_summed,) int64, tiles of several items
    partial_indptr: Tensor  # (num_summed + 1,) int64, into workspace rows
    num_partials: int


@dataclass(frozen=True)
class PairShape:
    """What a pair is, compiled in."""

    heads: int  # of a reader
    rows_per_pair: int  # rows times heads
    is_packed: bool  # several pairs per step; else several steps per pair


@dataclass(frozen=True, eq=False)
class TransposedPlan:
    """All that the KV-centric kernel needs beside the plan; valid as long as the plan is."""

    shape: KeyShape
    pair_shape: PairShape
    tiles: SlotTiles
    pairs: Tensor  # (num_pairs, len(PAIR_FIELDS)) int32: all a kernel asks of a pair, in one place
    items: Items
    num_head_programs: int  # KV heads that read alike

    @property
    def partial_rows(self) -> tuple[int, int, int]:
        """Parts, heads and slots of the sums that wait to be added."""
        return self.items.num_partials, self.num_head_programs, self.shape.tile_kv


def transpose_plan(
    plan: Plan,
    hints: BackwardHints | None = None,
    *,
    entries: ListEntries | None = None,  # list_entries(plan), or those of hot pages
) -> TransposedPlan:
    """The KV-centric work of a plan; hints never change which edges count. [GRAD-SET]

    May be built once and used by every layer and step that uses the plan. Reads sizes back from the device.
    """
    hints = hints or BackwardHints()
    entries = entries or list_entries(plan)
    shape, pair_shape = _choose_shapes(plan, entries, hints)
    tiles = tile_slots(entries, shape.tile_kv)
    max_rows = max(1, pair_shape.rows_per_pair // pair_shape.heads)
    readers = cut_readers(plan, entries, max_rows)
    tiles = expand_readers(tiles, readers, entries.list_q_start.numel())
    tiles, num_full = classify_pairs(tiles, readers, max_rows)
    num_head_programs = 1 if plan.sharing in ("query_head", "kv_head") else plan.num_kv_heads
    slot_bytes = 4 * num_head_programs * shape.tile_kv * (plan.head_dim_qk + plan.head_dim_vo)
    max_pairs = _pairs_per_item(tiles, pair_shape.rows_per_pair, num_head_programs, slot_bytes, hints)
    items = cut_items(tiles.tile_indptr, num_full, max_pairs)
    # In units of a reader's heads: a kernel that multiplies by them knows how its addresses are aligned.
    columns = (readers.q_start, readers.q_count, readers.head_start // pair_shape.heads)
    pairs = torch.stack([*(column[tiles.pair_list] for column in columns), tiles.pair_cells], dim=1).int()
    return TransposedPlan(shape, pair_shape, tiles, pairs, items, num_head_programs)


def _pairs_per_item(
    tiles: SlotTiles, rows_per_pair: int, num_head_programs: int, partial_bytes: int, hints: BackwardHints
) -> int:
    """As many pairs as asked for, or as make enough items; more where the parts would take more than part_bytes."""
    total_rows = tiles.pair_list.numel() * rows_per_pair * num_head_programs
    rows_per_item = hints.rows_per_item or max(MIN_ROWS_PER_ITEM, -(-total_rows // NUM_ITEMS_WANTED))
    max_pairs = max(1, rows_per_item // rows_per_pair)
    num_pairs = tiles.tile_indptr.diff()
    while True:
        num_items = (num_pairs + max_pairs - 1) // max_pairs
        if int(num_items[num_items > 1].sum()) * partial_bytes <= hints.part_bytes:
            return max_pairs
        max_pairs *= 2


def list_entries(plan: Plan) -> ListEntries:
    """Every entry of every list with its slot and code."""
    num_slots = plan.num_pages * plan.page_size
    if plan.list_indptr is None:
        request, position = enumerate_runs(plan.seqlen_kv)
        nothing = torch.zeros_like(plan.seqlen_kv)
        slot = to_slots(request, position, plan.page_table, plan.page_size)
        q_start, q_count = plan.qo_indptr[:-1], plan.qo_indptr.diff()
        return ListEntries(request, slot, position.int(), nothing, nothing, q_start, q_count, num_slots)
    assert plan.q_block_size is not None
    assert plan.list_positions is not None
    assert plan.list_slots is not None
    assert plan.list_members is not None
    blocks = cut_row_blocks(plan.qo_indptr, plan.q_offset, plan.q_block_size)
    block = torch.arange(blocks.q_start.numel(), device=plan.device).repeat_interleave(plan.lists_per_block)
    head_list = torch.arange(plan.lists_per_block, device=plan.device).repeat(blocks.q_start.numel())
    if plan.sharing == "query_head":
        kv_head, head_start = head_list // plan.group_size, head_list
    else:
        kv_head, head_start = head_list, head_list * plan.group_size
    entry_list, _ = enumerate_runs(plan.list_indptr.long().diff())
    code = torch.where(plan.list_members, plan.list_positions, -2 - plan.list_positions)
    q_start, q_count = blocks.q_start[block], blocks.q_count[block]
    return ListEntries(entry_list, plan.list_slots.long(), code, kv_head, head_start, q_start, q_count, num_slots)


def entries_of_pages(plan: Plan, entries: ListEntries, is_hot: Tensor) -> ListEntries:
    """The entries on pages (num_kv_heads, num_pages) that are hot for their KV head."""
    kept = is_hot[entries.list_kv_head[entries.entry_list], entries.entry_slot // plan.page_size]
    return replace(
        entries,
        entry_list=entries.entry_list[kept],
        entry_slot=entries.entry_slot[kept],
        entry_code=entries.entry_code[kept],
    )


def _choose_shapes(plan: Plan, entries: ListEntries, hints: BackwardHints) -> tuple[KeyShape, PairShape]:
    """Tiles and pairs for the plan."""
    # Without lists every request is one long run.
    run = entries.num_slots if plan.list_indptr is None else _mean_run(entries)
    shape = hints.key_shape or choose_key_shape(plan, max(1, run))
    pair_shape = _shape_pairs(plan, entries, shape)
    if pair_shape.is_packed and hints.key_shape is None:
        shape = pack_pairs(shape)
        pair_shape = _shape_pairs(plan, entries, shape)
    return shape, pair_shape


def _shape_pairs(plan: Plan, entries: ListEntries, shape: KeyShape) -> PairShape:
    """As many of a list's rows in a pair as a step takes."""
    heads = 1 if plan.sharing == "query_head" else plan.group_size
    longest = int(entries.list_q_count.max()) if entries.list_q_count.numel() else 1
    rows_per_pair = heads * min(max(1, longest), max(1, shape.tile_m // heads))
    # A jit mask function is promised one request and one row of positions per call.
    return PairShape(heads, rows_per_pair, 2 * rows_per_pair <= shape.tile_m and plan.mask_fn is None)


def _mean_run(entries: ListEntries) -> int:
    """Mean length of runs of neighbouring slots in a list."""
    if entries.entry_slot.numel() == 0:
        return 1
    breaks = (entries.entry_slot.diff() != 1) | (entries.entry_list.diff() != 0)
    return entries.entry_slot.numel() // (1 + int(breaks.sum()))


def tile_slots(entries: ListEntries, tile_kv: int) -> SlotTiles:
    """The lists that touch every slot tile; each entry lands in exactly one cell."""
    num_lists = max(1, entries.list_kv_head.numel())
    num_slot_tiles = max(1, -(-entries.num_slots // tile_kv))
    tile = entries.list_kv_head[entries.entry_list] * num_slot_tiles + entries.entry_slot // tile_kv
    lane = entries.entry_slot % tile_kv
    touch = tile * num_lists + entries.entry_list
    num_repeats = 1
    key, pair = _group(touch)
    codes = _fill_cells(key.numel(), tile_kv, pair, lane, entries.entry_code)
    if int((codes != ABSENT).sum()) < lane.numel():
        repeat = _count_earlier_equals(pair * tile_kv + lane)
        num_repeats = int(repeat.max()) + 1
        key, pair = _group(touch * num_repeats + repeat)
        codes = _fill_cells(key.numel(), tile_kv, pair, lane, entries.entry_code)
    tiles, counts = torch.unique_consecutive(key // (num_lists * num_repeats), return_counts=True)
    hits = torch.zeros(tiles.numel(), tile_kv, dtype=torch.int32, device=key.device)
    hits.index_add_(0, torch.repeat_interleave(counts), (codes != ABSENT).int())
    return SlotTiles(
        tile_slot=tiles % num_slot_tiles * tile_kv,
        tile_kv_head=tiles // num_slot_tiles,
        tile_indptr=_row_starts(counts),
        pair_list=key // num_repeats % num_lists,
        pair_cells=torch.arange(key.numel(), device=key.device),
        codes=codes,
        is_touched=hits > 0,
    )


def _group(key: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct keys ascending, and for each input the index of its key.

    Neighbouring entries mostly share a key (positions of a page are neighbouring slots): runs are sorted, not entries.
    """
    run_key, run = torch.unique_consecutive(key, return_inverse=True)
    distinct, group_of_run = torch.unique(run_key, sorted=True, return_inverse=True)
    return distinct, group_of_run[run]


def _fill_cells(num_pairs: int, tile_kv: int, pair: Tensor, lane: Tensor, code: Tensor) -> Tensor:
    codes = torch.full((num_pairs, tile_kv), ABSENT, dtype=torch.int32, device=code.device)
    codes[pair, lane] = code
    return codes


def _count_earlier_equals(cell: Tensor) -> Tensor:
    """For each entry, how many entries before it have the same cell."""
    ordered, order = torch.sort(cell, stable=True)
    index = torch.arange(ordered.numel(), device=cell.device)
    is_start = torch.ones_like(ordered, dtype=torch.bool)
    is_start[1:] = ordered[1:] != ordered[:-1]
    start = torch.cummax(torch.where(is_start, index, 0), 0).values
    earlier = torch.empty_like(cell)
    earlier[order] = index - start
    return earlier


def _row_starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def cut_readers(plan: Plan, entries: ListEntries, max_rows: int) -> Readers:
    """Every list's rows in readers of at most `max_rows`, in list order."""
    owner, start, q_count = cut_ranges(entries.list_q_count, max_rows)
    q_start = entries.list_q_start[owner] + start
    reader, rank = enumerate_runs(q_count)
    rows = q_start[reader] + rank
    # Heads that a reader stands for in some program: all of them where all KV heads read alike.
    heads = {"query_head": 1, "kv_head": plan.group_size}.get(plan.sharing or "", plan.num_qo_heads)
    heads = heads if plan.has_head_mask else 1
    group = (entries.list_head_start[owner] // heads)[reader] if plan.has_head_mask else torch.zeros_like(reader)
    # (groups of heads, heads, total_q)
    by_heads = (plan.mask_starts.shape[0] // heads, heads, plan.total_q)
    starts, ends = plan.mask_starts.long().reshape(by_heads), plan.mask_ends.long().reshape(by_heads)
    is_empty = starts >= ends

    def reduce_rows(values: Tensor, how: str) -> Tensor:
        """Over the rows of every reader, from values (groups of heads, total_q)."""
        return reduce_groups(values[group, rows][:, None], reader, q_count.numel(), how)[:, 0]

    # A jit function may refuse any key, so that no run is known to be allowed.
    is_known = plan.mask_fn is None
    return Readers(
        owner=owner,
        q_start=q_start,
        q_count=q_count,
        head_start=entries.list_head_start[owner],
        first_position=reduce_rows(torch.where(is_empty, 2**31 - 1, starts).amin(1), "amin"),
        past_position=reduce_rows(torch.where(is_empty, 0, ends).amax(1), "amax"),
        common_start=reduce_rows(starts.amax(1), "amax"),
        common_end=reduce_rows(ends.amin(1), "amin") if is_known else torch.zeros_like(q_start),
    )


def expand_readers(tiles: SlotTiles, readers: Readers, num_lists: int) -> SlotTiles:
    """The same tiles with every list replaced by its readers, which share the list's codes."""
    num_readers = torch.bincount(readers.owner, minlength=num_lists)
    first_reader = num_readers.cumsum(0) - num_readers
    counts = num_readers[tiles.pair_list]
    pair, rank = enumerate_runs(counts)
    return replace(
        tiles,
        tile_indptr=_row_starts(counts)[tiles.tile_indptr],
        pair_list=first_reader[tiles.pair_list[pair]] + rank,
        pair_cells=tiles.pair_cells[pair],
    )


def classify_pairs(tiles: SlotTiles, readers: Readers, max_rows: int) -> tuple[SlotTiles, Tensor]:
    """The pairs that can hold an edge, the full ones last in their tile, and how many of a tile's pairs are full.

    Full: the reader has max_rows rows, and all of them admit all slots of the tile. [BLOCK-FULL]
    """
    position = torch.where(tiles.codes >= 0, tiles.codes, -2 - tiles.codes)
    first = torch.where(tiles.codes == ABSENT, 2**31 - 1, position).amin(1)[tiles.pair_cells]
    last = torch.where(tiles.codes == ABSENT, -1, position).amax(1)[tiles.pair_cells]
    reader = tiles.pair_list
    is_kept = (last >= readers.first_position[reader]) & (first < readers.past_position[reader])
    is_full = (tiles.codes >= 0).all(1)[tiles.pair_cells] & is_kept
    is_full &= readers.q_count[reader] == max_rows
    is_full &= (first >= readers.common_start[reader]) & (last < readers.common_end[reader])
    tile = torch.repeat_interleave(tiles.tile_indptr.diff())
    order = torch.argsort(2 * tile + is_full, stable=True)
    order = order[is_kept[order]]
    num_kept = torch.bincount(tile[is_kept], minlength=tiles.tile_slot.numel())
    return replace(
        tiles,
        tile_indptr=_row_starts(num_kept),
        pair_list=reader[order],
        pair_cells=tiles.pair_cells[order],
    ), torch.bincount(tile[is_full], minlength=tiles.tile_slot.numel())


def cut_items(tile_indptr: Tensor, num_full: Tensor, max_pairs: int) -> Items:
    """Every tile's pairs in items of at most `max_pairs`, largest first."""
    tile, start, count = cut_ranges(tile_indptr.diff(), max_pairs)
    begin = tile_indptr[:-1][tile] + start
    end = begin + count
    num_items = torch.bincount(tile, minlength=tile_indptr.numel() - 1)
    is_cut = num_items[tile] > 1
    partial = torch.where(is_cut, is_cut.cumsum(0) - 1, -1)
    order = torch.argsort(count, descending=True, stable=True)
    return Items(
        item_tile=tile[order],
        item_begin=begin[order],
        item_full_begin=torch.clamp((tile_indptr[1:] - num_full)[tile], begin, end)[order],
        item_end=end[order],
        item_partial=partial[order],
        summed_tile=torch.nonzero(num_items > 1).flatten(),
        partial_indptr=_row_starts(num_items[num_items > 1]),
        num_partials=int(is_cut.sum()),
    )
