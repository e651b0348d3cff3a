"""Mistakes in candidate lists, block tables, task tables and tiers, made where a backend writes them. [FORMAT]"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from attnconform.conformance.adapters.reference_structures import ReferenceStructures
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.structures import Canonical
from attnconform.reference.block_expansion import WORD_BITS, BlockMembers
from attnconform.reference.blocks.table import BlockTable
from attnconform.reference.candidates import HOLE
from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.task_table import TaskTable


@deviates("SET-ALIAS", fault_class="T", report="article 1, 7.3: duplicates dropped by physical page")
class DropsDuplicatesBySlot(ReferenceStructures):
    """Two positions that share a slot become one in the canonical lists."""

    def canonicalize(self, problem: AttentionProblem) -> Canonical:
        right = super().canonicalize(problem)
        rows = np.repeat(np.arange(len(right.indptr) - 1), np.diff(right.indptr))
        _, first = np.unique(np.stack([rows, right.slots]), axis=1, return_index=True)
        kept = np.sort(first)
        indptr = np.concatenate([[0], np.cumsum(np.bincount(rows[kept], minlength=len(right.indptr) - 1))])
        return Canonical(indptr.astype(np.int64), right.positions[kept], right.slots[kept])


@deviates("COORD-SLOT", fault_class="T", report="article 1, 7.3: sorted by address, positions left where they were")
class TranslatesAllRowsByTheFirstTable(ReferenceStructures):
    """Slots of every request are looked up in the page table of request 0."""

    def canonicalize(self, problem: AttentionProblem) -> Canonical:
        right, size = super().canonicalize(problem), problem.cache.page_size
        pages = problem.cache.page_table[0][right.positions // size % problem.cache.page_table.shape[1]]
        return replace(right, slots=pages * size + right.positions % size)


@deviates("FORMAT-CSR", fault_class="K", report="article 1, 1.2: the end of a list is exclusive")
class ReadsTheEndOfAListAsWell(ReferenceStructures):
    """A list ends after the entry that its successor begins with."""

    def decode_csr(self, indptr: IntArray, indices: IntArray) -> list[list[int]]:
        super().decode_csr(indptr, indices)  # refuses what it must
        rows = [indices[a : b + 1] for a, b in pairwise(indptr)]
        return [row[row != HOLE].tolist() for row in rows]


@deviates("FORMAT-CSR", fault_class="A", report="article 1, 7.3: arrays of a caller taken without a check")
class TrustsAnIndptrThatFalls(ReferenceStructures):
    """Row limits are never checked."""

    def decode_csr(self, indptr: IntArray, indices: IntArray) -> list[list[int]]:
        rows = [indices[a:b] for a, b in pairwise(indptr)]
        return [row[row != HOLE].tolist() for row in rows]


@deviates("FORMAT-FIXED-WIDTH", fault_class="K", report="article 1, 7.4: padding by a repeated entry is no padding")
class PadsByRepeatingTheLastEntry(ReferenceStructures):
    """A list that does not fill its row is padded with its last entry."""

    def to_fixed_width(self, indptr: IntArray, indices: IntArray, width: int) -> IntArray:
        fixed = super().to_fixed_width(indptr, indices, width)
        for row, length in zip(fixed, np.diff(indptr), strict=True):
            if length:
                row[length:] = row[length - 1]
        return fixed


@deviates("FORMAT-FIXED-WIDTH", fault_class="K", report="article 1, 7.3: page 0 is read to fill emptiness")
class PadsWithZero(ReferenceStructures):
    """A list that does not fill its row is padded with entry 0."""

    def to_fixed_width(self, indptr: IntArray, indices: IntArray, width: int) -> IntArray:
        fixed = super().to_fixed_width(indptr, indices, width)
        fixed[np.arange(width) >= np.diff(indptr)[:, None]] = 0
        return fixed


@deviates("FORMAT-WIDTH", fault_class="K", report="article 1, 7.4: 129 entries cut to a capacity of 128")
class CutsListsToTheWidth(ReferenceStructures):
    """A list that is longer than the width loses its end."""

    def to_fixed_width(self, indptr: IntArray, indices: IntArray, width: int) -> IntArray:
        rows = [indices[a : min(b, a + width)] for a, b in pairwise(indptr)]
        limits = np.cumsum([0, *map(len, rows)])
        return super().to_fixed_width(limits, np.concatenate(rows), width)


@deviates("FORMAT-ROUND-TRIP", fault_class="K", report="BR-79 NVIDIA/cudnn-frontend#676: what comes after a -1 is lost")
class ReadsFixedWidthToTheFirstHole(ReferenceStructures):
    """A row of fixed width ends at its first hole."""

    def from_fixed_width(self, fixed: IntArray) -> tuple[IntArray, IntArray]:
        return super().from_fixed_width(np.where(np.cumsum(fixed == HOLE, axis=1) > 0, HOLE, fixed))


@deviates("FORMAT-ROUND-TRIP", fault_class="K", report="article 1, 7.3: sets and sequences confused")
class SortsListsOnTheWayBack(ReferenceStructures):
    """Lists come back from fixed width sorted."""

    def from_fixed_width(self, fixed: IntArray) -> tuple[IntArray, IntArray]:
        return super().from_fixed_width(np.sort(fixed, axis=1))


@deviates("FORMAT-DENSE", fault_class="K", report="BR-76 Dao-AILab/flash-attention#2755: -1 as an index from the end")
class SetsTheLastColumnForAHole(ReferenceStructures):
    """A hole sets the last column of its row."""

    def to_dense(self, indptr: IntArray, indices: IntArray, num_columns: int) -> BoolArray:
        dense = super().to_dense(indptr, indices, num_columns)
        rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        dense[rows[indices == HOLE], -1] = True
        return dense


@deviates("FORMAT-DENSE", fault_class="K", report="article 1, 7.4: a row's start taken from the row before")
class SetsColumnsOneRowLate(ReferenceStructures):
    """The lists of all rows but the first stand one row further down."""

    def to_dense(self, indptr: IntArray, indices: IntArray, num_columns: int) -> BoolArray:
        dense = super().to_dense(indptr, indices, num_columns)
        return np.concatenate([dense[:1], np.roll(dense[1:], 1, axis=0)])


@deviates("FORMAT-TABLE", fault_class="B", report="article 2, 2.1; FlexAttention fills a table with a permutation")
class ReadsTheWholeRowOfATable(ReferenceStructures):
    """Entries past a row's count are read as blocks."""

    def decode_block_table(self, table: BlockTable, batch_size: int, num_heads: int, num_kv_blocks: int) -> BoolArray:
        widest = BlockTable(np.full_like(table.num_blocks, table.indices.shape[3]), table.indices)
        return super().decode_block_table(widest, batch_size, num_heads, num_kv_blocks)


@deviates("FORMAT-TABLE", fault_class="B", report="article 2, 2.2: a broadcast axis read as its first entry alone")
class ReadsABroadcastAxisOnce(ReferenceStructures):
    """A table with one head stands for head 0, and other heads list nothing."""

    def decode_block_table(self, table: BlockTable, batch_size: int, num_heads: int, num_kv_blocks: int) -> BoolArray:
        listed = super().decode_block_table(table, batch_size, num_heads, num_kv_blocks)
        listed[:, table.num_blocks.shape[1] :] = False
        return listed


@deviates("FORMAT-TABLE", fault_class="B", report="BR-64 invergent-ai/surogate#110: rows of another batch entry")
class TablesTheFirstEntryForAll(ReferenceStructures):
    """Every batch entry of a table gets the lists of the first."""

    def to_block_table(self, lists: Sequence[object], num_heads: int, width: int) -> BlockTable:
        super().to_block_table(lists, num_heads, width)  # type: ignore[arg-type]  # refuses what it must
        return super().to_block_table([lists[0]] * len(lists), num_heads, width)  # type: ignore[list-item]


@deviates("FORMAT-COVER", fault_class="K", report="article 1, 1.2: no second dedupe after tokens became blocks")
class ListsABlockPerToken(ReferenceStructures):
    """A block stands in the list once for each of its tokens."""

    def expand_to_blocks(
        self, indptr: IntArray, positions: IntArray, block_size: int, q_block_size: int
    ) -> BlockMembers:
        right = super().expand_to_blocks(indptr, positions, block_size, q_block_size)
        words = np.bitwise_or.reduce(right.bitmaps, axis=1)
        times = np.array([max(sum(int(w).bit_count() for w in block), 1) for block in words], dtype=np.int64)
        before = np.concatenate([[0], np.cumsum(times)]).astype(np.int64)
        return replace(
            right,
            indptr=before[right.indptr],
            blocks=np.repeat(right.blocks, times),
            bitmaps=np.repeat(right.bitmaps, times, axis=0),
        )


@deviates("FORMAT-COVER", fault_class="K", report="article 1, 1.2: the blocks of one row of a query tile")
class LoadsTheFirstRowsBlocks(ReferenceStructures):
    """A query block loads the blocks of its first row alone."""

    def expand_to_blocks(
        self, indptr: IntArray, positions: IntArray, block_size: int, q_block_size: int
    ) -> BlockMembers:
        right = super().expand_to_blocks(indptr, positions, block_size, q_block_size)
        kept = right.bitmaps[:, 0].any(axis=1)
        before = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
        return replace(right, indptr=before[right.indptr], blocks=right.blocks[kept], bitmaps=right.bitmaps[kept])


@deviates("FORMAT-MEMBERS", fault_class="K", report="article 2, 6.3: a token reads another token's candidates")
class SharesABitmapAmongRows(ReferenceStructures):
    """The rows of a query block have one bitmap, that of all of them together."""

    def expand_to_blocks(
        self, indptr: IntArray, positions: IntArray, block_size: int, q_block_size: int
    ) -> BlockMembers:
        right = super().expand_to_blocks(indptr, positions, block_size, q_block_size)
        joined = np.bitwise_or.reduce(right.bitmaps, axis=1, keepdims=True)
        return replace(right, bitmaps=np.repeat(joined, q_block_size, axis=1))


@deviates("FORMAT-MEMBERS", fault_class="O", report="article 1, 7.2: a bitmap of 32 bits for a block of 64 tokens")
class KeepsTheLow32BitsOfABitmap(ReferenceStructures):
    """Tokens from the 32nd of each word on are lost."""

    def expand_to_blocks(
        self, indptr: IntArray, positions: IntArray, block_size: int, q_block_size: int
    ) -> BlockMembers:
        right = super().expand_to_blocks(indptr, positions, block_size, q_block_size)
        return replace(right, bitmaps=right.bitmaps & np.uint64(2 ** (WORD_BITS // 2) - 1))


@deviates("FORMAT-MEMBERS", fault_class="B", report="BR-23 pytorch/pytorch#159247: the whole block is attended")
class SetsEveryBitOfALoadedBlock(ReferenceStructures):
    """A row's bitmap of a block that it loads is all ones."""

    def expand_to_blocks(
        self, indptr: IntArray, positions: IntArray, block_size: int, q_block_size: int
    ) -> BlockMembers:
        right = super().expand_to_blocks(indptr, positions, block_size, q_block_size)
        return replace(right, bitmaps=np.where(right.bitmaps.any(axis=2, keepdims=True), ~np.uint64(0), right.bitmaps))


@deviates("FORMAT-TIER", fault_class="C", report="article 1, 7.4: tiers chosen with room to spare")
class SkipsATierThatFitsExactly(ReferenceStructures):
    """A row that fills a tier exactly runs in the next one."""

    def choose_tier(self, length: int, capacities: Sequence[int]) -> int:
        return super().choose_tier(length + 1 if length < capacities[-1] else length, capacities)


@deviates(
    "FORMAT-TIER-LIMIT", fault_class="C", report="BR-97 sgl-project/sglang#27338: a buffer bound that is exceeded"
)
class RunsLongRowsInTheLargestTier(ReferenceStructures):
    """A row above the largest tier runs in it."""

    def choose_tier(self, length: int, capacities: Sequence[int]) -> int:
        return super().choose_tier(min(length, capacities[-1]), capacities)


@deviates("FORMAT-TIER-OPTIMAL", fault_class="C", report="article 1, 7.4 (21): halves of the largest length")
class HalvesTheLargestLength(ReferenceStructures):
    """The tiers are the longest length and powers of two of it, whatever the lengths are."""

    def optimal_tiers(self, lengths: Sequence[int], cost: Callable[[int], float], price: float) -> Sequence[int]:
        longest = max(*lengths, 1, 1)
        return sorted({max(longest >> shift, 1) for shift in range(3)})


@deviates("FORMAT-TIER-OPTIMAL", fault_class="C", report="article 1, 7.4 (21): the price of a tier left out")
class TakesATierPerLength(ReferenceStructures):
    """Every length is a tier, as if tiers cost nothing."""

    def optimal_tiers(self, lengths: Sequence[int], cost: Callable[[int], float], price: float) -> Sequence[int]:
        return sorted({max(length, 1) for length in lengths})


class PlansOtherwise(ReferenceStructures):
    """The reference's structures with one hook: the table of tasks."""

    def task_table(self, indptr: IntArray, target: int, row_ids: IntArray, generations: IntArray) -> TaskTable:
        return self.change(super().task_table(indptr, target, row_ids, generations), target)

    def change(self, right: TaskTable, target: int) -> TaskTable:
        """The tasks as the mistake has them."""
        return right


@deviates("FORMAT-TASK-TABLE", fault_class="S", report="article 1, 7.4: pieces of floor(k / n) lose the rest")
class DropsTheRestOfARow(PlansOtherwise):
    """The pieces of a row are equally long, and what then is left over has no task."""

    def change(self, right: TaskTable, target: int) -> TaskTable:
        begins, length = row_limits(right)
        piece = length // np.bincount(right.row)[right.row]
        start = begins + right.split * piece
        return replace(right, start=start, end=start + piece)


def row_limits(tasks: TaskTable) -> tuple[IntArray, IntArray]:
    """Where the row of each task begins, and how many entries it has."""
    begins, length = (np.zeros(int(tasks.row.max(initial=0)) + 1, dtype=np.int64) for _ in range(2))
    is_first = tasks.split == 0
    begins[tasks.row[is_first]] = tasks.start[is_first]
    np.add.at(length, tasks.row, tasks.end - tasks.start)
    return begins[tasks.row], length[tasks.row]


@deviates("FORMAT-TASK-TABLE", fault_class="S", report="article 1, 7.4: neighbouring tasks share their limit")
class OverlapsNeighbouringTasks(PlansOtherwise):
    """A piece begins with the last entry of the piece before."""

    def change(self, right: TaskTable, target: int) -> TaskTable:
        return replace(right, start=right.start - (right.split > 0))


@deviates("FORMAT-TASK-TABLE", fault_class="S", report="BR-31 flashinfer-ai/flashinfer#4972: pieces of a row mixed up")
class NumbersEveryPieceZero(PlansOtherwise):
    """Every piece of a row says that it is piece 0, and the table is in no order."""

    def change(self, right: TaskTable, target: int) -> TaskTable:
        return replace(right, split=np.zeros_like(right.split)).take(np.arange(len(right))[::-1])


@deviates("FORMAT-TASK-BALANCE", fault_class="S", report="article 1, 5.1: the longest piece decides the time")
class LeavesARestPiece(PlansOtherwise):
    """A row is cut into pieces of the target and one short rest."""

    def change(self, right: TaskTable, target: int) -> TaskTable:
        begins, length = row_limits(right)
        start = begins + right.split * target
        return replace(right, start=start, end=np.minimum(start + target, begins + length))


@deviates("FORMAT-TASK-SHORT", fault_class="S", report="article 1, 5.1: short rows are not split")
class SplitsEveryRowInTwo(ReferenceStructures):
    """Rows that fit one task are split as well."""

    def task_table(self, indptr: IntArray, target: int, row_ids: IntArray, generations: IntArray) -> TaskTable:
        right = super().task_table(indptr, target, row_ids, generations)
        whole = (right.end - right.start > 1) & (np.bincount(right.row)[right.row] == 1)
        middle = (right.start + right.end) // 2
        kept = replace(right, end=np.where(whole, middle, right.end))
        more = replace(right, start=middle, split=right.split + 1).take(np.flatnonzero(whole))
        fields = ("row", "start", "end", "split", "generation")
        return TaskTable(**{f: np.concatenate([getattr(kept, f), getattr(more, f)]) for f in fields})


@deviates("FORMAT-TASK-EMPTY", fault_class="U", report="BR-25 pytorch/pytorch#194167: nobody writes the row")
class PlansNothingForEmptyRows(PlansOtherwise):
    """A row without entries has no task."""

    def change(self, right: TaskTable, target: int) -> TaskTable:
        return right.take(np.flatnonzero(right.end > right.start))


@deviates("FORMAT-ROW-IDENTITY", fault_class="T", report="article 1, 7.4: the rank of a sorted row as its output row")
class WritesUnderTheSortedRank(ReferenceStructures):
    """Rows are sorted by length, and a task names the rank of its row."""

    def task_table(self, indptr: IntArray, target: int, row_ids: IntArray, generations: IntArray) -> TaskTable:
        order = np.argsort(-np.diff(indptr), kind="stable")
        ranked = np.empty_like(row_ids)
        ranked[order] = np.sort(row_ids)
        return super().task_table(indptr, target, ranked, generations)


@deviates(
    "FORMAT-ROW-IDENTITY", fault_class="T", report="BR-62 meta-pytorch/attention-gym#189: place and slot mixed up"
)
class WritesUnderThePlaceInTheBatch(ReferenceStructures):
    """A task names the place of its list instead of the row that the list belongs to."""

    def task_table(self, indptr: IntArray, target: int, row_ids: IntArray, generations: IntArray) -> TaskTable:
        return super().task_table(indptr, target, np.arange(len(row_ids)), generations)


@deviates("FORMAT-GENERATION", fault_class="C", report="article 1, 7.4: a late task writes into a slot that was reused")
class WritesWhateverTheGeneration(ReferenceStructures):
    """Every task may write."""

    def live_tasks(self, tasks: TaskTable, generations: IntArray) -> BoolArray:
        super().live_tasks(tasks, generations)  # refuses what it must
        return np.ones(len(tasks), dtype=bool)


@deviates("FORMAT-GENERATION", fault_class="O", report="article 1, 7.4: a generation counter that wraps around")
class WritesUnlessTheGenerationIsLater(ReferenceStructures):
    """A task may write unless its place has a later generation, also after the counter has wrapped around."""

    def live_tasks(self, tasks: TaskTable, generations: IntArray) -> BoolArray:
        return np.asarray(tasks.generation >= generations[tasks.row])
