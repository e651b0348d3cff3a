"""Logical blocks as runs of slots: where a kernel loads from, beside the positions that rules see."""

from dataclasses import dataclass
from math import gcd

import numpy as np

from attnconform.reference.block_mask import BlockLists, BlockMask
from attnconform.reference.coordinates import IntArray, Positions, to_page_offsets, to_slots
from attnconform.reference.errors import RefusedInput


@dataclass(frozen=True)
class PhysicalLists:
    """Runs of tokens that are contiguous both in their request and in the pool, per (head, block row), as CSR.

    Each run holds run_size tokens: position, position + 1, .. lie in slot, slot + 1, ..  Positions travel with the
    slots, so a row's runs may stand in any order. [BLOCK-PHYSICAL]
    """

    run_size: int
    indptr: IntArray  # (num_rows + 1,)
    position: IntArray  # (total,) logical, of the run's first token
    slot: IntArray  # (total,) physical, likewise


@dataclass(frozen=True)
class PhysicalBlockMask:
    """Full and partial blocks of one request as runs; the logical block mask stays what it was. [BLOCK-UNTOUCHED]"""

    full: PhysicalLists
    partial: PhysicalLists


def to_physical(
    block_mask: BlockMask,  # of one request
    page_table_row: IntArray,  # (max_pages,) physical page of each logical page of the request
    *,
    page_size: int,
    num_pages: int,
) -> PhysicalBlockMask:
    """Runs of slots of every listed block, through the request's page table. [BLOCK-PHYSICAL, COORD-SLOT]

    Blocks and pages may have any sizes: a run is as long as their greatest common divisor. Nothing is written into the
    block mask. [BLOCK-UNTOUCHED] Raises RefusedInput where a listed block needs a page that the table or the pool
    does not have.
    """
    full, partial = (
        _physical_lists(lists, block_mask, page_table_row, page_size, num_pages)
        for lists in (block_mask.full, block_mask.partial)
    )
    return PhysicalBlockMask(full, partial)


def decode_physical(lists: PhysicalLists, *, seqlen_kv: int) -> list[list[tuple[int, int]]]:
    """(position, slot) of every token that each row loads: this loop defines the format. [BLOCK-PHYSICAL]

    A last run may be longer than the request; tokens from seqlen_kv on are not there. [BLOCK-RAGGED]
    """
    rows: list[list[tuple[int, int]]] = []
    for row in range(len(lists.indptr) - 1):
        tokens = []
        for run in range(int(lists.indptr[row]), int(lists.indptr[row + 1])):
            for step in range(lists.run_size):
                position, slot = int(lists.position[run]) + step, int(lists.slot[run]) + step
                if position < seqlen_kv:
                    tokens.append((position, slot))
        rows.append(tokens)
    return rows


def sort_by_slot(lists: PhysicalLists) -> PhysicalLists:
    """The same runs, each row's by address; positions move with their slots. [BLOCK-PHYSICAL, COORD-LOGICAL]"""
    rows = np.repeat(np.arange(len(lists.indptr) - 1), np.diff(lists.indptr))
    order = np.lexsort((lists.slot, rows))
    return PhysicalLists(lists.run_size, lists.indptr, lists.position[order], lists.slot[order])


def _physical_lists(
    lists: BlockLists, block_mask: BlockMask, page_table_row: IntArray, page_size: int, num_pages: int
) -> PhysicalLists:
    run_size = gcd(block_mask.kv_block_size, page_size)
    starts = lists.indices[:, None] * block_mask.kv_block_size + np.arange(0, block_mask.kv_block_size, run_size)
    exists = starts < block_mask.seqlen_kv
    before = np.concatenate([[0], np.cumsum(exists.sum(axis=1))]).astype(np.int64)
    positions = Positions(starts[exists])
    where = to_page_offsets(positions, page_size=page_size)
    _check_pages(where.page, page_table_row, num_pages)
    slots = to_slots(where, page_table_row, page_size=page_size)
    return PhysicalLists(run_size, before[lists.indptr], positions.values, slots.values)


def _check_pages(pages: IntArray, page_table_row: IntArray, num_pages: int) -> None:
    missing = pages[pages >= len(page_table_row)]
    if missing.size:
        limit = f"the page table has {len(page_table_row)} entries"
        raise RefusedInput("COORD-PAGE-RANGE", "logical page", int(missing[0]), limit)
    outside = np.flatnonzero((page_table_row[pages] < 0) | (page_table_row[pages] >= num_pages))
    if outside.size:
        page = int(pages[outside[0]])
        limit = f"num_pages is {num_pages}"
        raise RefusedInput("COORD-PAGE-RANGE", "page_table_row", int(page_table_row[page]), limit, (page,))
