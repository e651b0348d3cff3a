"""Block masks on the GPU: which blocks of a mask hold an edge, and which hold every edge. [BLOCK-COMPLETE, BLOCK-FULL]

A rule of intervals needs one launch: a program takes a block row, whose listed and full columns are runs that follow
from the intervals of its first and last query, and writes them; work goes with the blocks listed, not with elements. A
rule with a function of its own, or a mask given element by element, needs two: blocks that the intervals leave in
doubt are looked at element by element, and a second launch collects each row's columns. Transposition collects each
column's rows instead. Nothing synchronizes.

Lists stand in tables with a count per row, as FlexAttention keeps them; entries past the count mean nothing.
[BLOCK-INTERVAL, BLOCK-CONSERVATIVE, BLOCK-EXCLUSIVE, BLOCK-TRANSPOSE, BLOCK-STATISTICS, BLOCK-EXTENT, FORMAT-TABLE]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from attnconform.kernels.sparse_attention.block_mask_kernels import (
    classify_kernel,
    collect_kernel,
    interval_kernel,
    scatter_kernel,
)
from attnconform.kernels.sparse_attention.block_rules import DENSE, BlockRule, lower_block_rule
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.rules import MaskRule
from attnconform.kernels.sparse_attention.tuning import (
    BLOCK_COLUMNS,
    BLOCK_ELEMENTS,
    BLOCK_WARPS,
    power_of_two_from,
)


@dataclass(frozen=True, kw_only=True)
class Extent:
    """Lengths of one request, its query offset, and the sizes of blocks."""

    seqlen_q: int
    seqlen_kv: int
    q_block_size: int
    kv_block_size: int
    q_offset: int | None = None  # logical position of the first query; seqlen_kv - seqlen_q by default

    def __post_init__(self) -> None:
        for name, least in (("q_block_size", 1), ("kv_block_size", 1), ("seqlen_q", 0), ("seqlen_kv", 0)):
            if getattr(self, name) < least:
                raise PlanError("BLOCK-EXTENT", name, getattr(self, name), f"must be at least {least}")

    @property
    def num_q_blocks(self) -> int:
        return -(-self.seqlen_q // self.q_block_size)

    @property
    def num_kv_blocks(self) -> int:
        return -(-self.seqlen_kv // self.kv_block_size)

    @property
    def first_position(self) -> int:
        return self.seqlen_kv - self.seqlen_q if self.q_offset is None else self.q_offset

    def transposed(self) -> Extent:
        """Keys as queries."""
        return Extent(
            seqlen_q=self.seqlen_kv,
            seqlen_kv=self.seqlen_q,
            q_block_size=self.kv_block_size,
            kv_block_size=self.q_block_size,
        )


@dataclass(frozen=True, eq=False)
class BlockTable:
    """Block columns of every (head, block row), ascending."""

    counts: Tensor  # (num_heads, num_q_blocks) int32
    indices: Tensor  # (num_heads, num_q_blocks, num_kv_blocks) int32, of which counts are meant


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Full and partial blocks of a mask (num_heads, seqlen_q, seqlen_kv)."""

    extent: Extent
    num_heads: int
    full: BlockTable
    partial: BlockTable


@dataclass(frozen=True)
class BlockStatistics:
    """Figures of one block mask over all its heads. [BLOCK-STATISTICS]"""

    row_mean: float  # listed blocks per block row
    row_p50: int  # the least length that half of the rows do not exceed
    row_p95: int
    row_max: int
    num_full: int
    num_partial: int
    num_empty: int
    amplification: float  # elements computed per edge


def build_block_mask(
    rule: MaskRule | None,
    extent: Extent,
    *,
    request: int = 0,
    num_heads: int = 1,
    device: torch.device | str,
) -> BlockMask:
    """The block mask of a rule for one request. [BLOCK-INTERVAL, BLOCK-COMPLETE]

    Raises PlanError for a rule that has no numbers for the request or for so many heads.
    """
    lowered = lower_block_rule(rule, request=request, num_heads=num_heads, device=torch.device(device))
    if lowered.is_interval:
        return _from_intervals(lowered, extent, num_heads)
    return _from_elements(lowered, extent, num_heads, request, None)


def block_mask_of(
    mask: Tensor,  # (num_heads, seqlen_q, seqlen_kv) bool
    *,
    q_block_size: int,
    kv_block_size: int,
) -> BlockMask:
    """The block mask of a mask given element by element. [BLOCK-COMPLETE, BLOCK-FULL]"""
    if mask.dim() != 3 or mask.dtype != torch.bool:
        limit = "must be bool of (num_heads, seqlen_q, seqlen_kv)"
        raise PlanError("BLOCK-EXTENT", "mask", f"{mask.dtype} of {tuple(mask.shape)}", limit)
    num_heads, seqlen_q, seqlen_kv = mask.shape
    extent = Extent(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, q_block_size=q_block_size, kv_block_size=kv_block_size)
    data = torch.zeros(2, dtype=torch.int64, device=mask.device)
    return _from_elements(BlockRule((DENSE,), data, (None,)), extent, num_heads, 0, mask)


def transpose_block_mask(mask: BlockMask) -> BlockMask:
    """The block mask of the transposed mask, row for row exact. [BLOCK-TRANSPOSE]"""
    extent, num_heads = mask.extent, mask.num_heads
    states = torch.zeros(
        (num_heads, extent.num_q_blocks, extent.num_kv_blocks), dtype=torch.int8, device=mask.full.counts.device
    )
    if states.numel():
        scatter_kernel[(num_heads * extent.num_q_blocks,)](
            mask.full.counts, mask.full.indices, mask.partial.counts, mask.partial.indices, states,
            extent.num_kv_blocks, STEP=BLOCK_COLUMNS,
        )  # fmt: skip
    return _collect(states.transpose(1, 2), extent.transposed())


def block_statistics(mask: BlockMask, *, num_edges: int) -> BlockStatistics:
    """Figures of a block mask; num_edges is the number of allowed elements it stands for. Synchronizes once.

    A block counts with all its elements, also where it is ragged: that is what a tile computes. [BLOCK-STATISTICS]
    """
    lengths = (mask.full.counts + mask.partial.counts).flatten().sort().values
    num_rows, extent = lengths.numel(), mask.extent
    ranks = [max(-(-percent * num_rows // 100), 1) - 1 for percent in (50, 95, 100)]
    picked = lengths[ranks] if num_rows else lengths.new_zeros(3)
    figures = torch.cat([picked.long(), mask.full.counts.sum()[None], mask.partial.counts.sum()[None]])
    p50, p95, most, num_full, num_partial = figures.tolist()
    executed = (num_full + num_partial) * extent.q_block_size * extent.kv_block_size
    if num_edges > executed:
        raise PlanError("BLOCK-STATISTICS", "num_edges", num_edges, f"the listed blocks have {executed} elements")
    return BlockStatistics(
        row_mean=(num_full + num_partial) / num_rows if num_rows else 0.0,
        row_p50=p50,
        row_p95=p95,
        row_max=most,
        num_full=num_full,
        num_partial=num_partial,
        num_empty=num_rows * extent.num_kv_blocks - num_full - num_partial,
        amplification=executed / num_edges if num_edges else float("inf") if executed else 1.0,
    )


def _from_intervals(rule: BlockRule, extent: Extent, num_heads: int) -> BlockMask:
    """One launch: runs of listed and of full columns, row by row."""
    mask = _empty_mask(extent, num_heads, rule.data.device)
    if mask.full.indices.numel():
        interval_kernel[(num_heads * extent.num_q_blocks,)](
            *_tables(mask), rule.data, *_sizes(extent), CODES=rule.codes, STEP=BLOCK_COLUMNS
        )
    return mask


def _from_elements(rule: BlockRule, extent: Extent, num_heads: int, request: int, dense: Tensor | None) -> BlockMask:
    """Two launches: the state of every block, and the columns of every row. Small blocks share a program."""
    states = torch.empty(
        (num_heads, extent.num_q_blocks, extent.num_kv_blocks), dtype=torch.int8, device=rule.data.device
    )
    strides = None if dense is None else (*dense.stride(), extent.seqlen_q, extent.seqlen_kv)
    padded_q, padded_kv = power_of_two_from(extent.q_block_size), power_of_two_from(extent.kv_block_size)
    tile_kv = min(padded_kv, max(1, BLOCK_ELEMENTS // padded_q))
    columns = min(max(1, BLOCK_ELEMENTS // (padded_q * padded_kv)), power_of_two_from(extent.num_kv_blocks))
    if states.numel():
        classify_kernel[(num_heads * extent.num_q_blocks, triton.cdiv(extent.num_kv_blocks, columns))](
            states, rule.data, rule.custom_data, dense, strides, request, *_sizes(extent),
            CODES=rule.codes,
            PADDED_Q=padded_q,
            TILE_KV=tile_kv,
            COLUMNS=columns,
            num_warps=BLOCK_WARPS,
        )  # fmt: skip
    return _collect(states, extent)


def _collect(states: Tensor, extent: Extent) -> BlockMask:
    """The block mask of (num_heads, num_q_blocks, num_kv_blocks) states.

    Transposed ones are copied: their strides would be compiled in, by what they are multiples of. [PLAN-VALUES]
    """
    mask = _empty_mask(extent, states.shape[0], states.device)
    if states.numel():
        collect_kernel[(states.shape[0] * states.shape[1],)](
            *_tables(mask), states.contiguous(), extent.num_kv_blocks, STEP=BLOCK_COLUMNS
        )
    return mask


def _empty_mask(extent: Extent, num_heads: int, device: torch.device) -> BlockMask:
    """Tables to be written, counts included; a row without columns has no program and counts 0."""
    rows = (num_heads, extent.num_q_blocks)
    make: Callable[..., Tensor] = torch.empty if extent.num_kv_blocks else torch.zeros
    as_int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    tables = [
        BlockTable(make(rows, **as_int32), torch.empty((*rows, extent.num_kv_blocks), **as_int32)) for _ in range(2)
    ]
    return BlockMask(extent, num_heads, *tables)


def _tables(mask: BlockMask) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return mask.full.counts, mask.full.indices, mask.partial.counts, mask.partial.indices


def _sizes(extent: Extent) -> tuple[int, int, int, int, int]:
    """Lengths and block sizes, in the kernels' order."""
    return (
        extent.first_position, extent.seqlen_q, extent.seqlen_kv, extent.q_block_size, extent.kv_block_size,
    )  # fmt: skip
