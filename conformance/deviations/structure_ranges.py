"""Mistakes in structures that show past a few words, pieces, heads or requests, and at odd rates. [FORMAT, PLAN]"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np

from attnconform.conformance.adapters.reference_structures import ReferenceStructures
from attnconform.conformance.deviations.block_structures import BuildsOtherwise, full_pairs, partial_pairs, with_pairs
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.pool_structures import KeepsAPool
from attnconform.conformance.structures import Canonical
from attnconform.reference.block_expansion import BlockMembers
from attnconform.reference.block_mask import BlockMask
from attnconform.reference.blocks.build import Extent
from attnconform.reference.blocks.physical import PhysicalBlockMask
from attnconform.reference.branches import Branch, BranchPolicy
from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.fallback import BatchFacts, FallbackReport, SparsePath
from attnconform.reference.group_merge import GroupLists, GroupPolicy
from attnconform.reference.page_pool import Handle, PagePool
from attnconform.reference.plan_cache import CallDescription
from attnconform.reference.plan_storage import Sizes
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import And, MaskRule, Or, Window
from attnconform.reference.scored_list import ScoredList
from attnconform.reference.task_table import TaskTable

WORD, TILE, FEW, ROW = 32, 64, 4, 16
BYTE = 256


@deviates("SET-DUPLICATE", fault_class="K", report="BR-80 sgl-project/sglang#30512: a list handled piece by piece")
class DropsDuplicatesWithinATile(ReferenceStructures):
    """A position that two tiles of 64 entries list stands twice."""

    def canonicalize(self, problem: AttentionProblem) -> Canonical:
        right, lists = super().canonicalize(problem), problem.candidates
        if lists is None or lists.block_size > 1:
            return right
        rows = [(where, h) for where in problem.rows() for h in range(problem.num_qo_heads)]
        times = [
            times_by_tile(lists.entries(problem.list_index(where, h)), right.positions[a:b])
            for (where, h), a, b in zip(rows, right.indptr[:-1], right.indptr[1:], strict=True)
        ]
        repeats = np.concatenate([np.empty(0, dtype=np.int64), *times])
        indptr = np.concatenate([[0], np.cumsum(repeats)])[right.indptr].astype(np.int64)
        return Canonical(indptr, np.repeat(right.positions, repeats), np.repeat(right.slots, repeats))


def times_by_tile(entries: IntArray, positions: IntArray) -> IntArray:
    """In how many tiles of entries each position stands; once where in none."""
    tiles = [np.isin(positions, entries[start : start + TILE]) for start in range(0, len(entries), TILE)]
    return np.maximum(np.sum(tiles, axis=0, dtype=np.int64), 1) if tiles else np.ones(len(positions), dtype=np.int64)


@deviates("FORMAT-MEMBERS", fault_class="O", report="no report: a bitmap of two words for blocks of 128 tokens at most")
class KeepsTwoWordsOfABitmap(ReferenceStructures):
    """Tokens from the 128th of a block on are lost."""

    def expand_to_blocks(
        self, indptr: IntArray, positions: IntArray, block_size: int, q_block_size: int
    ) -> BlockMembers:
        right = super().expand_to_blocks(indptr, positions, block_size, q_block_size)
        return replace(right, bitmaps=np.where(np.arange(right.bitmaps.shape[2]) < 2, right.bitmaps, np.uint64(0)))


@deviates("FORMAT-DENSE", fault_class="O", report="flashinfer-ai/flashinfer#2201: rows of bits that end within a word")
class SetsColumnsOfTheFirstWord(ReferenceStructures):
    """Columns from the 32nd on are never set."""

    def to_dense(self, indptr: IntArray, indices: IntArray, num_columns: int) -> BoolArray:
        return super().to_dense(indptr, indices, num_columns) & (np.arange(num_columns) < WORD)


@deviates("FORMAT-ROUND-TRIP", fault_class="K", report="article 1, 7.4: a row read as far as one vector reaches")
class ReadsSixteenEntriesOfARow(ReferenceStructures):
    """A row of fixed width is read to its 16th place."""

    def from_fixed_width(self, fixed: IntArray) -> tuple[IntArray, IntArray]:
        return super().from_fixed_width(fixed[:, :ROW])


@deviates(
    "FORMAT-TASK-TABLE", fault_class="S", report="BR-97 sgl-project/sglang#27338: room for fewer pieces than there are"
)
class KeepsFourPiecesOfARow(ReferenceStructures):
    """Pieces of a row from the fifth on have no task."""

    def task_table(self, indptr: IntArray, target: int, row_ids: IntArray, generations: IntArray) -> TaskTable:
        right = super().task_table(indptr, target, row_ids, generations)
        return right.take(np.flatnonzero(right.split < FEW))


@deviates("FORMAT-TASK-BALANCE", fault_class="S", report="no report: a maximum of splits before the target")
class CutsARowIntoEightPiecesAtMost(ReferenceStructures):
    """The pieces of long rows hold more than the target."""

    def task_table(self, indptr: IntArray, target: int, row_ids: IntArray, generations: IntArray) -> TaskTable:
        longest = int(np.diff(indptr).max(initial=0))
        return super().task_table(indptr, max(target, -(-longest // (2 * FEW))), row_ids, generations)


@deviates("BLOCK-COMPLETE", fault_class="B", report="no report: a row of blocks as bits of one word")
class BuildsRowsOf32Blocks(BuildsOtherwise):
    """Block columns from the 32nd on are left out."""

    def change(self, blocks: BlockMask) -> BlockMask:
        columns = max(blocks.num_kv_blocks, 1)
        return with_pairs(
            blocks, *(pairs[pairs % columns < WORD] for pairs in (full_pairs(blocks), partial_pairs(blocks)))
        )


@deviates("PLAN-KEY", fault_class="Q", report="BR-100 Dao-AILab/flash-attention#2645: a constant that the key lacks")
class KeysWithoutTheFormatOfValues(ReferenceStructures):
    """A plan made for plain values is found for codes of V."""

    def plan_key(self, call: CallDescription) -> Hashable:
        kept = frozenset(feature for feature in call.features if not feature.startswith("v "))
        return super().plan_key(replace(call, features=kept))


class KeysByAnotherRule(ReferenceStructures):
    """A plan's key in which mask rules are told apart by less."""

    def plan_key(self, call: CallDescription) -> Hashable:
        return super().plan_key(replace(call, mask_rule=None if call.mask_rule is None else self.said(call.mask_rule)))

    def said(self, rule: MaskRule) -> MaskRule:
        """A rule as the key has it."""
        if isinstance(rule, And | Or):
            return type(rule)(tuple(self.said(part) for part in rule.rules))
        return rule


@deviates("PLAN-KEY", fault_class="C", report="no report: a limit that is not there keyed like a limit of 0")
class KeysWithoutWhichLimitsThereAre(KeysByAnotherRule):
    """A plan made for a window without a right edge is found for one that has it."""

    def said(self, rule: MaskRule) -> MaskRule:
        return Window(left=rule.left or 0, right=rule.right or 0) if isinstance(rule, Window) else super().said(rule)


@deviates("PLAN-KEY", fault_class="C", report="no report: the parts of a rule keyed, and not how they combine")
class KeysWithoutHowRulesCombine(KeysByAnotherRule):
    """A plan made for an intersection is found for a union of the same rules."""

    def said(self, rule: MaskRule) -> MaskRule:
        return And(tuple(self.said(part) for part in rule.rules)) if isinstance(rule, And | Or) else rule


@deviates("PLAN-MASK-KEY", fault_class="C", report="BR-95 NVIDIA/TensorRT-LLM#18443: a schedule of other lengths")
class FindsMasksByTheSumOfLengths(ReferenceStructures):
    """A block mask is found for requests of other lengths that add up to the same."""

    def mask_key(self, call: CallDescription) -> Hashable:
        return super().mask_key(replace(call, seqlens_kv=(sum(call.seqlens_kv),)))


class SeesOtherRates(ReferenceStructures):
    """Paths chosen by another candidate rate."""

    def choose_paths(self, batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
        return super().choose_paths([self.seen(batch) for batch in batches], path)

    def seen(self, batch: BatchFacts) -> BatchFacts:
        """A batch as the mistake sees it."""
        raise NotImplementedError


@deviates("FALLBACK-HYSTERESIS", fault_class="O", report="no report: a rate in whole percents")
class RoundsTheRateToPercents(SeesOtherRates):
    """A rate between two percents passes for the lower one."""

    def seen(self, batch: BatchFacts) -> BatchFacts:
        percent = 100 * batch.num_candidate_blocks // max(batch.num_blocks, 1)
        return replace(batch, num_candidate_blocks=percent, num_blocks=100)


@deviates("FALLBACK-HYSTERESIS", fault_class="E", report="BR-08 NVIDIA/cudnn-frontend#439: 0 of 0, in a rate")
class TakesABatchWithoutBlocksForDense(SeesOtherRates):
    """The rate of a batch that has no blocks is 1."""

    def seen(self, batch: BatchFacts) -> BatchFacts:
        return batch if batch.num_blocks else replace(batch, num_candidate_blocks=1, num_blocks=1)


@deviates("BLOCK-INTERVAL", fault_class="B", report="BR-64 invergent-ai/surogate#110: a mask of another batch entry")
class BuildsIntervalsOfTheFirstRequest(ReferenceStructures):
    """Prefixes and documents are those of request 0."""

    def interval_block_mask(self, rule: MaskRule | None, request: int, extent: Extent) -> BlockMask:
        return super().interval_block_mask(rule, 0, extent)


@deviates("BLOCK-INTERVAL", fault_class="M", report="BR-01 flashinfer-ai/flashinfer#4452: rows before position 0")
class BuildsIntervalsFromPositionZero(ReferenceStructures):
    """Rows before the first token pass for rows from the first token on."""

    def interval_block_mask(self, rule: MaskRule | None, request: int, extent: Extent) -> BlockMask:
        return super().interval_block_mask(rule, request, replace(extent, q_offset=max(extent.q_offset, 0)))


@deviates("FORMAT-GENERATION", fault_class="C", report="no report: a generation in a byte of the task's word")
class KeepsGenerationsInAByte(ReferenceStructures):
    """A task may write where generations differ by a multiple of 256."""

    def live_tasks(self, table: TaskTable, generations: IntArray) -> BoolArray:
        return super().live_tasks(replace(table, generation=table.generation % BYTE), generations % BYTE)


class WrappingPool(PagePool):
    """Generations of a place are a byte."""

    def allocate(self) -> Handle:
        handle = super().allocate()
        return Handle(handle.row, handle.generation % BYTE)

    def check(self, handle: Handle) -> None:
        if handle.row not in self.tables or int(self.generations[handle.row]) % BYTE != handle.generation:
            raise RefusedInput("COORD-GENERATION", "handle", handle, "its place has another request")


@deviates("COORD-GENERATION", fault_class="C", report="no report: a handle of one byte for the generation")
class WrapsTheGenerationOfAPlace(KeepsAPool):
    """The 257th request of a place has the handle of the first."""

    pool = WrappingPool


@deviates("PLAN-CAPACITY", fault_class="O", report="BR-46 flashinfer-ai/flashinfer#3136: bytes in 32 bits")
class ComparesBytesIn32Bits(ReferenceStructures):
    """What is needed of workspace wraps before it is compared."""

    def check_capacity(self, need: Sizes, capacity: Sizes) -> None:
        wrapped = int(np.array(need.workspace_bytes).astype(np.int32))
        super().check_capacity(replace(need, workspace_bytes=wrapped), capacity)


@deviates("GQA-MERGE-MAX", fault_class="G", report="no report: a group of four heads written into the merge")
class AsksFourHeadsOfAGroup(ReferenceStructures):
    """Heads of a group from the fifth on have no say, and attend what the fourth does."""

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        merged = super().merge_group(heads[:FEW], policy, budget)
        rest = merged.of_head[-1:] * max(len(heads) - FEW, 0)
        return replace(merged, of_head=(*merged.of_head, *rest))


@deviates("GQA-MERGE-MAX", fault_class="Q", report="NVIDIA/Megatron-LM#7169: selections that differ by a rounding")
class MergesByScoresInBf16(ReferenceStructures):
    """Scores that are nearly equal pass for equal, and the lower position is listed."""

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        super().merge_group(heads, policy, budget)  # refuses what it must
        low = [ScoredList(h.positions, h.scores.astype(ml_dtypes.bfloat16).astype(np.float64)) for h in heads]
        return super().merge_group(low, policy, budget)


@deviates("GQA-MERGE-MAX", fault_class="O", report="no report: score and position packed into one word of 32 bits")
class PacksPositionsInto16Bits(ReferenceStructures):
    """Positions that a group merges are taken modulo 2^16."""

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        right = super().merge_group(heads, policy, budget)
        return replace(right, loaded=right.loaded % 2**16, of_head=tuple(listed % 2**16 for listed in right.of_head))


@deviates("GQA-MERGE-MAX", fault_class="E", report="BR-79 NVIDIA/cudnn-frontend#676: a list without entries ends all")
class LetsAHeadWithoutWishesEmptyItsGroup(ReferenceStructures):
    """A group loads nothing where one of its heads wants nothing."""

    def merge_group(self, heads: Sequence[ScoredList], policy: GroupPolicy, budget: int) -> GroupLists:
        merged = super().merge_group(heads, policy, budget)
        if all(len(head.positions) for head in heads):
            return merged
        return replace(merged, loaded=merged.loaded[:0], of_head=tuple(listed[:0] for listed in merged.of_head))


@deviates("SET-BRANCH-COVER", fault_class="E", report="fla-org/flash-linear-attention#840: branches without entries")
class StopsAtAnEmptyBranch(ReferenceStructures):
    """Branches after one without positions are not merged."""

    def merge_branches(self, parts: Sequence[Branch], policy: BranchPolicy) -> Branch:
        super().merge_branches(parts, policy)  # refuses what it must
        first = next((i for i, part in enumerate(parts) if not len(part.positions)), len(parts))
        return super().merge_branches(parts[: max(first, 1)], policy)


@deviates("BLOCK-PHYSICAL", fault_class="T", report="no report: a run of pages told by its least and its number")
class LoadsARunOfPagesInOrder(ReferenceStructures):
    """Pages that lie side by side are loaded as one run, in whatever order the table has them."""

    def to_physical(
        self, mask: BlockMask, page_table_row: IntArray, page_size: int, num_pages: int
    ) -> PhysicalBlockMask:
        in_order = np.sort(page_table_row)
        is_run = bool((np.diff(in_order) == 1).all())
        return super().to_physical(mask, in_order if is_run else page_table_row, page_size, num_pages)


@deviates("COORD-SLOT", fault_class="T", report="article 1, 7.3: slots put in order, and positions left as they were")
class SortsSlotsOfCanonicalLists(ReferenceStructures):
    """Each list's slots are ascending, and no longer those of the positions beside them."""

    def canonicalize(self, problem: AttentionProblem) -> Canonical:
        right = super().canonicalize(problem)
        rows = np.repeat(np.arange(len(right.indptr) - 1), np.diff(right.indptr))
        return replace(right, slots=right.slots[np.lexsort((right.slots, rows))])
