"""The index structures of the bundled Triton kernels, in the reference's types, so that they are judged by item."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from attnconform.conformance.structures import Canonical, Structures
from attnconform.conformance.views import Hints, ProblemView
from attnconform.reference.block_expansion import BlockMembers
from attnconform.reference.block_mask import BlockLists, BlockMask
from attnconform.reference.blocks.build import Extent
from attnconform.reference.blocks.statistics import BlockStatistics, block_statistics
from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.plan_storage import StorageEvent
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import MaskRule

WAIT = -1
WORD_BITS = 64


class TritonStructures(Structures):
    """What the kernels build beside attention; mixed into a backend that has `device`, `plan_arguments` and `lower`."""

    device: str

    def plan_arguments(self, problem: ProblemView, dtype: torch.dtype) -> dict[str, Any]:
        """What the kernels' plan takes for a problem."""
        raise NotImplementedError

    def lower(self, rule: Any) -> Any:
        """A rule as the kernels' own descriptor."""
        raise NotImplementedError

    def canonicalize(self, problem: AttentionProblem) -> Canonical:
        from attnconform.kernels.sparse_attention import plan

        planned = plan(**self.plan_arguments(ProblemView(problem, Hints(), self.device), torch.float32))
        rows = [row_lists(planned, problem, where.request, where.row) for where in problem.rows()]
        entries = [entry for row in rows for entry in row]
        none = np.empty(0, dtype=np.int64)
        indptr = np.cumsum([0, *(len(positions) for positions, _ in entries)], dtype=np.int64)
        positions, slots = (np.concatenate([none, *(entry[i] for entry in entries)]) for i in (0, 1))
        return Canonical(indptr, positions, slots)

    def expand_to_blocks(
        self, indptr: IntArray, positions: IntArray, block_size: int, q_block_size: int
    ) -> BlockMembers:
        from attnconform.kernels.sparse_attention.block_members import expand_to_blocks

        longest = int(positions.max(initial=0)) + 1
        got = expand_to_blocks(
            self.int32(indptr), self.int32(positions), block_size=block_size, q_block_size=q_block_size,
            max_seqlen_kv=longest, capacity=-(-longest // block_size),
        )  # fmt: skip
        got.raise_if_refused()
        counts = got.counts.tolist()
        blocks, bitmaps = got.blocks.cpu().numpy(), got.bitmaps.cpu().numpy().view(np.uint64)
        none = np.empty((0, q_block_size, -(-block_size // WORD_BITS)), dtype=np.uint64)
        return BlockMembers(
            block_size=block_size,
            q_block_size=q_block_size,
            num_rows=len(indptr) - 1,
            indptr=np.cumsum([0, *counts], dtype=np.int64),
            blocks=np.concatenate([np.empty(0, np.int64), *(blocks[i, :n] for i, n in enumerate(counts))]).astype(
                np.int64
            ),
            bitmaps=np.concatenate([none, *(bitmaps[i, :n] for i, n in enumerate(counts))]),
        )

    def build_block_mask(self, problem: AttentionProblem, q_block_size: int, kv_block_size: int) -> Sequence[BlockMask]:
        from attnconform.kernels.sparse_attention.block_mask import block_mask_of

        masks = self.edges(problem)
        sizes = {"q_block_size": q_block_size, "kv_block_size": kv_block_size}
        return [to_reference(block_mask_of(mask, **sizes)) for mask in masks]

    def edges(self, problem: AttentionProblem) -> list[torch.Tensor]:
        """E of every request, (num_qo_heads, seqlen_q, seqlen_kv), as the dense path has it."""
        from attnconform.kernels.sparse_attention.dense import admitted, plan_dense

        planned = plan_dense(**self.plan_arguments(ProblemView(problem, Hints(), self.device), torch.float32))
        return [admitted(planned, n) for n in range(problem.batch_size)]

    def interval_block_mask(self, rule: MaskRule | None, request: int, extent: Extent) -> BlockMask:
        from attnconform.kernels.sparse_attention import block_mask

        own = block_mask.Extent(
            seqlen_q=extent.seqlen_q,
            seqlen_kv=extent.seqlen_kv,
            q_block_size=extent.q_block_size,
            kv_block_size=extent.kv_block_size,
            q_offset=extent.q_offset,
        )
        lowered = None if rule is None else self.lower(rule)
        return to_reference(block_mask.build_block_mask(lowered, own, request=request, device=self.device))

    def transpose(self, mask: BlockMask) -> BlockMask:
        from attnconform.kernels.sparse_attention.block_mask import transpose_block_mask

        return to_reference(transpose_block_mask(self.to_kernels(mask)))

    def statistics(self, mask: BlockMask, num_edges: int) -> BlockStatistics:
        """Figures of the kernels; bytes of metadata are those of the reference's lists."""
        from attnconform.kernels.sparse_attention import block_mask

        got = block_mask.block_statistics(self.to_kernels(mask), num_edges=num_edges)
        figures = {name: getattr(got, name) for name in got.__dataclass_fields__}
        return BlockStatistics(**figures, metadata_bytes=block_statistics(mask, num_edges=num_edges).metadata_bytes)

    def choose_tier(self, length: int, tiers: Sequence[int]) -> int:
        from attnconform.kernels.sparse_attention.tier_cache import smallest_tier

        return smallest_tier(length, tiers)

    def replay_storage(self, num_buffers: int, events: Sequence[StorageEvent]) -> Sequence[int]:
        from attnconform.kernels.sparse_attention.tier_ring import Buffers

        buffers, answers = Buffers(num_buffers), list[int]()
        for event in events:
            answer = buffers.update() if event.kind == "update" else getattr(buffers, event.kind)(event.run)
            answers.append(WAIT if answer is None else answer)
        return answers

    def to_kernels(self, mask: BlockMask) -> Any:
        """A block mask of the reference as the kernels keep it."""
        from attnconform.kernels.sparse_attention import block_mask

        extent = block_mask.Extent(
            seqlen_q=mask.seqlen_q,
            seqlen_kv=mask.seqlen_kv,
            q_block_size=mask.q_block_size,
            kv_block_size=mask.kv_block_size,
        )
        tables = [self.to_table(lists, mask) for lists in (mask.full, mask.partial)]
        return block_mask.BlockMask(extent, mask.num_heads, *tables)

    def to_table(self, lists: BlockLists, mask: BlockMask) -> Any:
        from attnconform.kernels.sparse_attention.block_mask import BlockTable

        rows = (mask.num_heads, mask.num_q_blocks)
        padded: IntArray = np.zeros((mask.num_rows, mask.num_kv_blocks), dtype=np.int64)
        for row in range(mask.num_rows):
            listed = lists.of(row)
            padded[row, : len(listed)] = listed
        counts = self.int32(np.diff(lists.indptr)).view(rows)
        return BlockTable(counts, self.int32(padded).view(*rows, mask.num_kv_blocks))

    def int32(self, array: IntArray | BoolArray) -> torch.Tensor:
        return torch.as_tensor(np.ascontiguousarray(array), device=self.device).to(torch.int32)


def row_lists(planned: Any, problem: AttentionProblem, request: int, row: int) -> list[tuple[IntArray, IntArray]]:
    """Positions and slots of one row's list for every query head, before any mask rule."""
    length = int(problem.seqlen_kv[request])
    if planned.list_indptr is None:
        positions = np.arange(length)
        page = problem.cache.page_table[request, positions // problem.cache.page_size]
        slots = page.astype(np.int64) * problem.cache.page_size + positions % problem.cache.page_size
        return [(positions, slots)] * problem.num_qo_heads
    counts = np.diff(problem.qo_indptr)
    blocks = -(-counts // planned.q_block_size)
    local = row - int(problem.qo_indptr[request])
    block = int(blocks[:request].sum()) + local // planned.q_block_size
    per_head = problem.num_qo_heads // planned.lists_per_block
    distance_from = int(problem.q_offset[request]) + local
    return [
        list_of_row(planned, block * planned.lists_per_block + head // per_head, distance_from)
        for head in range(problem.num_qo_heads)
    ]


def list_of_row(planned: Any, list_idx: int, q_idx: int) -> tuple[IntArray, IntArray]:
    """Entries that one row has of a list: members, and what lies in its own window."""
    start, end = planned.list_indptr[list_idx : list_idx + 2].tolist()
    positions = planned.list_positions[start:end].cpu().numpy().astype(np.int64)
    distance = q_idx - positions
    is_near = (distance >= 0) & (distance < (planned.window or 0))
    is_own = planned.list_members[start:end].cpu().numpy() | is_near
    return positions[is_own], planned.list_slots[start:end].cpu().numpy()[is_own]


def to_reference(mask: Any) -> BlockMask:
    """A block mask of the kernels in the reference's types."""
    extent = mask.extent
    return BlockMask(
        num_heads=mask.num_heads,
        seqlen_q=extent.seqlen_q,
        seqlen_kv=extent.seqlen_kv,
        q_block_size=extent.q_block_size,
        kv_block_size=extent.kv_block_size,
        full=to_lists(mask.full),
        partial=to_lists(mask.partial),
    )


def to_lists(table: Any) -> BlockLists:
    """Rows of a table as CSR lists."""
    counts = table.counts.flatten().cpu().numpy()
    indices = table.indices.flatten(0, 1).cpu().numpy()
    rows = [indices[row, :count] for row, count in enumerate(counts)]
    indptr = np.cumsum([0, *counts], dtype=np.int64)
    return BlockLists(indptr, np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64))
