"""The reference's own structures behind the optional methods of a backend: what deviations of them vary."""

from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.structures import Canonical, MaskOfLength, Pool, SlicedRows, Structures
from attnconform.reference import (
    block_expansion,
    block_mask,
    branches,
    canonical,
    fallback,
    formats,
    group_merge,
    leak,
    plan_cache,
    plan_storage,
    task_table,
    tiers,
)
from attnconform.reference.block_expansion import BlockMembers
from attnconform.reference.block_mask import BlockLists, BlockMask
from attnconform.reference.blocks import algebra, classify, physical, reuse, statistics, table
from attnconform.reference.blocks.build import Extent, element_mask, rule_block_mask
from attnconform.reference.blocks.candidates import problem_block_mask
from attnconform.reference.blocks.physical import PhysicalBlockMask
from attnconform.reference.blocks.statistics import BlockStatistics
from attnconform.reference.blocks.table import BlockTable
from attnconform.reference.branches import Branch, BranchPolicy
from attnconform.reference.canonical import CanonicalRow, RequestPages
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray
from attnconform.reference.cost import end_to_end, flops, gather, scales, tiles, traffic, use_bounds, workspace
from attnconform.reference.fallback import BatchFacts, FallbackReport, SparsePath
from attnconform.reference.group_merge import GroupLists, GroupPolicy
from attnconform.reference.page_pool import PagePool
from attnconform.reference.plan_cache import CacheCounts, CallDescription, PlanCache
from attnconform.reference.plan_storage import Planned, Sizes, StorageEvent
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import MaskRule
from attnconform.reference.scored_list import ScoredList
from attnconform.reference.task_table import TaskTable

COSTS: dict[str, Callable[..., float]] = {
    function.__name__: function
    for function in (
        flops.attention_flops, flops.arithmetic_intensity, tiles.num_blocks, tiles.aligned_tiles, tiles.tile_efficiency,
        tiles.block_use, tiles.index_use, tiles.execution_amplification, traffic.kv_bytes, traffic.index_table_bytes,
        traffic.block_mask_bytes, traffic.transaction_utilization, traffic.memory_time, traffic.roofline_time,
        scales.num_scales, scales.scale_bytes, gather.direct_time, gather.gather_time, gather.break_even_reads,
        gather.gather_traffic, workspace.partial_state_bytes, workspace.hot_atomics, workspace.gradient_partial_bytes,
        end_to_end.total_time, end_to_end.end_to_end_speedup, use_bounds.least_block_use, use_bounds.largest_block_use,
        leak.leaked_mass,
    )
}  # fmt: skip


class ReferenceStructures(StepsBackend, Structures):
    """Attention by the reference's steps, and every optional structure by the reference's functions."""

    name = "reference-structures"

    def canonicalize(self, problem: AttentionProblem) -> Canonical:
        positions, slots = [], []
        for where in problem.rows():
            for h in range(problem.num_qo_heads):
                listed = self.steps.candidates(problem, where, h)
                positions.append(listed.values)
                slots.append(self.steps.slots(problem, where, listed).values)
        none = np.empty(0, dtype=np.int64)
        indptr = np.cumsum([0, *map(len, positions)], dtype=np.int64)
        return Canonical(indptr, np.concatenate([none, *positions]), np.concatenate([none, *slots]))

    def canonical_row(
        self,
        dynamic: IntArray,
        window: IntArray,
        sinks: IntArray,
        request: RequestPages,
        last_visible: int | None,
    ) -> CanonicalRow:
        return canonical.canonical_row(dynamic, window, sinks, request, last_visible=last_visible)

    def merge_branches(self, parts: Sequence[Branch], policy: BranchPolicy) -> Branch:
        return branches.merge_branches(parts, policy)

    def gate_branches(
        self, lists: Sequence[IntArray], gates: FloatArray, scores: FloatArray, v: FloatArray
    ) -> FloatArray:
        return branches.gate_branches(lists, gates, scores, v)

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        return group_merge.GROUP_POLICIES[policy](heads, budget=budget)

    def page_pool(self, num_pages: int, page_size: int, num_rows: int) -> Pool:
        return PagePool(num_pages=num_pages, page_size=page_size, num_rows=num_rows)

    def expand_to_blocks(
        self, indptr: IntArray, positions: IntArray, block_size: int, q_block_size: int
    ) -> BlockMembers:
        return block_expansion.expand_to_blocks(indptr, positions, block_size=block_size, q_block_size=q_block_size)

    def build_block_mask(self, problem: AttentionProblem, q_block_size: int, kv_block_size: int) -> Sequence[BlockMask]:
        sizes = {"q_block_size": q_block_size, "kv_block_size": kv_block_size}
        return [problem_block_mask(problem, request, **sizes) for request in range(problem.batch_size)]

    def interval_block_mask(self, rule: MaskRule | None, request: int, extent: Extent) -> BlockMask:
        return rule_block_mask(rule, extent, request=request)

    def classify_blocks(self, outer: BoolArray, inner: BoolArray, q_block_size: int, kv_block_size: int) -> BlockMask:
        return classify.classify_blocks(outer, inner, q_block_size=q_block_size, kv_block_size=kv_block_size)

    def decode_block_mask(self, mask: BlockMask, element_mask: BoolArray) -> BoolArray:
        return block_mask.decode_block_mask(mask, element_mask)

    def transpose(self, mask: BlockMask) -> BlockMask:
        return block_mask.transpose_block_mask(mask)

    def intersect(self, a: BlockMask, b: BlockMask) -> BlockMask:
        return algebra.intersect_block_masks(a, b)

    def unite(self, a: BlockMask, b: BlockMask) -> BlockMask:
        return algebra.unite_block_masks(a, b)

    def slice_rows(self, rule: MaskRule | None, extent: Extent, start: int, stop: int) -> SlicedRows:
        whole = rule_block_mask(rule, extent)
        return SlicedRows(reuse.slice_rows(whole, start, stop), element_mask(rule, extent)[:, start:stop])

    def crop(self, mask_of: MaskOfLength, mask: BlockMask, seqlen: int) -> BlockMask | None:
        if not self.admit(mask_of, mask.seqlen_kv, mask.q_block_size, mask.kv_block_size):
            return None
        return reuse.crop_lengths(mask, seqlen, seqlen)

    def admit(self, mask_of: MaskOfLength, max_seqlen: int, q_block_size: int, kv_block_size: int) -> bool:
        sizes = {"max_seqlen": max_seqlen, "q_block_size": q_block_size, "kv_block_size": kv_block_size}
        return not reuse.CropList().admit("rule", mask_of, **sizes)

    def to_physical(
        self, mask: BlockMask, page_table_row: IntArray, page_size: int, num_pages: int
    ) -> PhysicalBlockMask:
        return physical.to_physical(mask, page_table_row, page_size=page_size, num_pages=num_pages)

    def statistics(self, mask: BlockMask, num_edges: int) -> BlockStatistics:
        return statistics.block_statistics(mask, num_edges=num_edges)

    def decode_csr(self, indptr: IntArray, indices: IntArray) -> list[list[int]]:
        return formats.decode_csr(indptr, indices)

    def to_fixed_width(self, indptr: IntArray, indices: IntArray, width: int) -> IntArray:
        return formats.csr_to_fixed_width(indptr, indices, width)

    def from_fixed_width(self, fixed: IntArray) -> tuple[IntArray, IntArray]:
        return formats.fixed_width_to_csr(fixed)

    def to_dense(self, indptr: IntArray, indices: IntArray, num_columns: int) -> BoolArray:
        return formats.csr_to_dense(indptr, indices, num_columns)

    def to_block_table(self, lists: Sequence[BlockLists], num_heads: int, width: int) -> BlockTable:
        return table.to_block_table(lists, num_heads=num_heads, width=width)

    def decode_block_table(self, tabled: BlockTable, batch_size: int, num_heads: int, num_kv_blocks: int) -> BoolArray:
        return table.decode_block_table(tabled, batch_size=batch_size, num_heads=num_heads, num_kv_blocks=num_kv_blocks)

    def task_table(self, indptr: IntArray, target: int, row_ids: IntArray, generations: IntArray) -> TaskTable:
        return task_table.build_task_table(indptr, target=target, row_ids=row_ids, generations=generations)

    def live_tasks(self, tasks: TaskTable, generations: IntArray) -> BoolArray:
        return task_table.live_tasks(tasks, generations)

    def choose_tier(self, length: int, capacities: Sequence[int]) -> int:
        return tiers.smallest_tier(length, capacities)

    def optimal_tiers(self, lengths: Sequence[int], cost: Callable[[int], float], price: float) -> Sequence[int]:
        return tiers.optimal_tiers(lengths, cost=cost, price=price)

    def plan_key(self, call: CallDescription) -> Hashable:
        return plan_cache.plan_key(call)

    def mask_key(self, call: CallDescription) -> Hashable:
        return plan_cache.mask_key(call)

    def count_lookups(self, calls: Sequence[CallDescription]) -> CacheCounts:
        cache = PlanCache()
        for call in calls:
            cache.look_up(call)
        return cache.counts

    def check_capacity(self, need: Sizes, capacity: Sizes) -> None:
        plan_storage.check_capacity(need, capacity)

    def plan_each(self, indptrs: Sequence[IntArray], target: int, capacity: int) -> Sequence[Planned]:
        return plan_storage.plan_each(indptrs, target=target, capacity=capacity)

    def replay_storage(self, num_buffers: int, events: Sequence[StorageEvent]) -> Sequence[int]:
        return plan_storage.replay_storage(num_buffers, events)

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        return fallback.choose_paths(batches, path)

    def cost(self, name: str, arguments: Mapping[str, object]) -> float:
        if name not in COSTS:
            raise NotImplementedError(name)
        return float(COSTS[name](**arguments))
