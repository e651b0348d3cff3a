"""What a backend may offer beside attention: the functions that build its index structures.

An attention output can hide an index error, for instance where two values are alike; a structure is compared item by
item. Every method is optional, and one that a backend does not write is not judged. All take and return the
reference's own types, which hold numpy arrays; an adapter converts. What must be refused is refused by raising one of
the backend's `refusals`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from attnconform.reference.block_expansion import BlockMembers
from attnconform.reference.block_mask import BlockLists, BlockMask
from attnconform.reference.blocks.build import Extent
from attnconform.reference.blocks.physical import PhysicalBlockMask
from attnconform.reference.blocks.statistics import BlockStatistics
from attnconform.reference.blocks.table import BlockTable
from attnconform.reference.branches import Branch, BranchPolicy
from attnconform.reference.canonical import CanonicalRow, RequestPages
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray
from attnconform.reference.fallback import BatchFacts, FallbackReport, SparsePath
from attnconform.reference.group_merge import GroupLists, GroupPolicy
from attnconform.reference.page_pool import PageCopy
from attnconform.reference.plan_cache import CacheCounts, CallDescription
from attnconform.reference.plan_storage import Planned, Sizes, StorageEvent
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import MaskRule
from attnconform.reference.scored_list import ScoredList
from attnconform.reference.task_table import TaskTable

MaskOfLength = Callable[[int], BoolArray]  # length -> (num_heads, length, length)


@dataclass(frozen=True)
class Canonical:
    """Candidate sets S of every (row, query head), row-major, before any mask rule."""

    indptr: IntArray  # (total_q * num_qo_heads + 1,)
    positions: IntArray  # (total,) logical, each once
    slots: IntArray  # (total,) physical, of the same entries


@dataclass(frozen=True)
class SlicedRows:
    """Rows cut out of a larger block mask, with the mask that its partial blocks ask."""

    blocks: BlockMask
    element_mask: BoolArray  # (num_heads, rows, seqlen_kv)


class Pool(Protocol):
    """Pages handed to requests, as `attnconform.reference.page_pool.PagePool` hands them; handles are the backend's.

    What does not fit, and a handle of a request that has ended, is refused.
    """

    def allocate(self) -> Any: ...

    def append(self, handle: Any, num_tokens: int, /) -> Sequence[PageCopy]: ...

    def fork(self, handle: Any, num_tokens: int, /) -> Any: ...

    def truncate(self, handle: Any, num_tokens: int, /) -> None: ...

    def free(self, handle: Any, /) -> None: ...

    def page_table(self, handle: Any, /) -> IntArray: ...

    def seqlen_kv(self, handle: Any, /) -> int: ...


class Structures:
    """Functions that build index structures; a backend writes those it has."""

    # -- candidates ------------------------------------------------------------------------------------------------

    def canonicalize(self, problem: AttentionProblem) -> Canonical:
        """Every row's candidates as a set of positions, with their slots. [SET-IDENTITY, COORD-SLOT]"""
        raise NotImplementedError

    def canonical_row(
        self,
        dynamic: IntArray,
        window: IntArray,
        sinks: IntArray,
        request: RequestPages,
        last_visible: int | None,
    ) -> CanonicalRow:
        """One list's candidates in all three coordinates; refuses what must be. [SET-CANONICAL, SET-VALIDATE]"""
        raise NotImplementedError

    def merge_branches(self, branches: Sequence[Branch], policy: BranchPolicy) -> Branch:
        """Every position of any branch once, by a policy. [SET-BRANCH-COVER, SET-BRANCH-LARGER, SET-BRANCH-GATES]"""
        raise NotImplementedError

    def gate_branches(
        self, lists: Sequence[IntArray], gates: FloatArray, scores: FloatArray, v: FloatArray
    ) -> FloatArray:
        """(head_dim_vo,) a softmax for each list, combined by gates. [SET-BRANCH-SOFTMAX]"""
        raise NotImplementedError

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        """What a KV head loads and each of its query heads attends, ascending. [GQA-MERGE-MAX, GQA-MERGE-TIE]"""
        raise NotImplementedError

    def page_pool(self, num_pages: int, page_size: int, num_rows: int) -> Pool:
        """An empty pool. [COORD-FORK, COORD-COPY-ON-WRITE, COORD-FREE, COORD-GENERATION]"""
        raise NotImplementedError

    def expand_to_blocks(
        self, indptr: IntArray, positions: IntArray, block_size: int, q_block_size: int
    ) -> BlockMembers:
        """Blocks around the tokens of some rows, with bitmaps. [FORMAT-COVER, FORMAT-MEMBERS]"""
        raise NotImplementedError

    # -- block masks -----------------------------------------------------------------------------------------------

    def build_block_mask(self, problem: AttentionProblem, q_block_size: int, kv_block_size: int) -> Sequence[BlockMask]:
        """One block mask a request, or one for all; of every query head, or of one for all. [BLOCK-COMPLETE]"""
        raise NotImplementedError

    def interval_block_mask(self, rule: MaskRule | None, request: int, extent: Extent) -> BlockMask:
        """The block mask of one head from the ends of a rule's intervals. [BLOCK-INTERVAL]"""
        raise NotImplementedError

    def classify_blocks(self, outer: BoolArray, inner: BoolArray, q_block_size: int, kv_block_size: int) -> BlockMask:
        """A block mask right for every mask between two bounds. [BLOCK-CONSERVATIVE]"""
        raise NotImplementedError

    def decode_block_mask(self, block_mask: BlockMask, element_mask: BoolArray) -> BoolArray:
        """The dense mask; refuses an element mask of other lengths. [BLOCK-DECODE, BLOCK-EXTENT]"""
        raise NotImplementedError

    def transpose(self, block_mask: BlockMask) -> BlockMask:
        """The block mask of the transposed mask. [BLOCK-TRANSPOSE]"""
        raise NotImplementedError

    def intersect(self, a: BlockMask, b: BlockMask) -> BlockMask:
        """The block mask of the masks' intersection. [BLOCK-INTERSECT]"""
        raise NotImplementedError

    def unite(self, a: BlockMask, b: BlockMask) -> BlockMask:
        """The block mask of the masks' union. [BLOCK-UNITE]"""
        raise NotImplementedError

    def slice_rows(self, rule: MaskRule | None, extent: Extent, start: int, stop: int) -> SlicedRows:
        """Rows start to stop of the extent's block mask, for a decode step. [BLOCK-SLICE, BLOCK-OFFSET]"""
        raise NotImplementedError

    def crop(self, mask_of: MaskOfLength, block_mask: BlockMask, seqlen: int) -> BlockMask | None:
        """The block mask of shorter data, out of mask_of's own for longer; None: it has to be rebuilt. [BLOCK-CROP]"""
        raise NotImplementedError

    def admit(self, mask_of: MaskOfLength, max_seqlen: int, q_block_size: int, kv_block_size: int) -> bool:
        """Whether block masks of a rule may be cropped. [BLOCK-ADMIT]"""
        raise NotImplementedError

    def to_physical(
        self, block_mask: BlockMask, page_table_row: IntArray, page_size: int, num_pages: int
    ) -> PhysicalBlockMask:
        """Listed blocks as runs of slots. [BLOCK-PHYSICAL, BLOCK-UNTOUCHED]"""
        raise NotImplementedError

    def statistics(self, block_mask: BlockMask, num_edges: int) -> BlockStatistics:
        """Figures of a block mask, metadata in indices of 4 bytes. [BLOCK-STATISTICS]"""
        raise NotImplementedError

    # -- lists -----------------------------------------------------------------------------------------------------

    def decode_csr(self, indptr: IntArray, indices: IntArray) -> list[list[int]]:
        """The lists that CSR arrays stand for. [FORMAT-CSR]"""
        raise NotImplementedError

    def to_fixed_width(self, indptr: IntArray, indices: IntArray, width: int) -> IntArray:
        """(num_lists, width), holes after each list's end. [FORMAT-FIXED-WIDTH, FORMAT-WIDTH]"""
        raise NotImplementedError

    def from_fixed_width(self, fixed: IntArray) -> tuple[IntArray, IntArray]:
        """indptr and indices of fixed-width lists, holes anywhere. [FORMAT-ROUND-TRIP]"""
        raise NotImplementedError

    def to_dense(self, indptr: IntArray, indices: IntArray, num_columns: int) -> BoolArray:
        """(num_lists, num_columns), True where a list has the column. [FORMAT-DENSE]"""
        raise NotImplementedError

    def to_block_table(self, lists: Sequence[BlockLists], num_heads: int, width: int) -> BlockTable:
        """A table with counts, one batch entry for each of the lists. [FORMAT-TABLE]"""
        raise NotImplementedError

    def decode_block_table(self, table: BlockTable, batch_size: int, num_heads: int, num_kv_blocks: int) -> BoolArray:
        """(batch_size, num_heads, num_q_blocks, num_kv_blocks), True where listed. [FORMAT-TABLE]"""
        raise NotImplementedError

    # -- plans -----------------------------------------------------------------------------------------------------

    def task_table(self, indptr: IntArray, target: int, row_ids: IntArray, generations: IntArray) -> TaskTable:
        """Lists divided into tasks of at most `target` entries. [FORMAT-TASK-TABLE, FORMAT-ROW-IDENTITY]"""
        raise NotImplementedError

    def live_tasks(self, table: TaskTable, generations: IntArray) -> BoolArray:
        """(num_tasks,) True where a task may write. [FORMAT-GENERATION]"""
        raise NotImplementedError

    def choose_tier(self, length: int, tiers: Sequence[int]) -> int:
        """The tier that a row runs in; refuses a row above the largest. [FORMAT-TIER, FORMAT-TIER-LIMIT]"""
        raise NotImplementedError

    def optimal_tiers(self, lengths: Sequence[int], cost: Callable[[int], float], price: float) -> Sequence[int]:
        """Tiers of least expected cost plus price each. [FORMAT-TIER-OPTIMAL]"""
        raise NotImplementedError

    def plan_key(self, call: CallDescription) -> Hashable:
        """What a compiled plan is found under. [PLAN-KEY, PLAN-VALUES]"""
        raise NotImplementedError

    def mask_key(self, call: CallDescription) -> Hashable:
        """What a block mask is found under. [PLAN-MASK-KEY]"""
        raise NotImplementedError

    def count_lookups(self, calls: Sequence[CallDescription]) -> CacheCounts:
        """Hits and misses of empty caches that are asked for one call after the other. [PLAN-COUNT]"""
        raise NotImplementedError

    def check_capacity(self, need: Sizes, capacity: Sizes) -> None:
        """Refuses what a plan was not made for. [PLAN-CAPACITY]"""
        raise NotImplementedError

    def plan_each(self, indptrs: Sequence[IntArray], target: int, capacity: int) -> Sequence[Planned]:
        """One plan of so many tasks, made for list after list. [PLAN-REPLAN, PLAN-LAYER, PLAN-CAPACITY]"""
        raise NotImplementedError

    def replay_storage(self, num_buffers: int, events: Sequence[StorageEvent]) -> Sequence[int]:
        """The buffer of every event, or -1 for an update that waits. [PLAN-STORAGE]"""
        raise NotImplementedError

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        """Paths, reasons, records and counts of batch after batch. [FALLBACK-REASON, FALLBACK-COUNT]"""
        raise NotImplementedError

    # -- figures ---------------------------------------------------------------------------------------------------

    def cost(self, name: str, arguments: Mapping[str, object]) -> float:
        """A figure of the chapter COST, by the name and the arguments of its reference function. [COST-FLOPS]

        Raises NotImplementedError for a figure that the backend does not give.
        """
        raise NotImplementedError


METHODS: tuple[str, ...] = tuple(name for name in vars(Structures) if not name.startswith("_"))


def offers(backend: object, method: str) -> bool:
    """Whether a backend writes an optional method."""
    written = getattr(type(backend), method, None)
    return written is not None and written is not getattr(Structures, method)


def offers_any(backend: object) -> bool:
    """Whether a backend offers any structure to be judged."""
    return any(offers(backend, method) for method in METHODS)
