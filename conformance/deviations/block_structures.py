"""Mistakes in building, cutting, carrying and counting block masks, made where a backend builds them. [BLOCK]"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from attnconform.conformance.adapters.reference_structures import ReferenceStructures
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.structures import MaskOfLength, SlicedRows
from attnconform.reference.block_mask import BlockLists, BlockMask, build_block_mask, decode_block_mask
from attnconform.reference.blocks.algebra import listed_pairs, lists_from_pairs, pairs_of
from attnconform.reference.blocks.build import Extent, element_mask, rule_block_mask
from attnconform.reference.blocks.physical import PhysicalBlockMask, PhysicalLists
from attnconform.reference.blocks.reuse import crop_failures, crop_lengths
from attnconform.reference.blocks.statistics import BlockStatistics
from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.cost.tiles import execution_amplification
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import MaskRule


def with_pairs(blocks: BlockMask, full: IntArray, partial: IntArray) -> BlockMask:
    """The block mask with other (row, column) pairs in its lists, ascending."""
    in_full, in_partial = (lists_from_pairs(np.sort(pairs), blocks) for pairs in (full, partial))
    return replace(blocks, full=in_full, partial=in_partial)


def full_pairs(blocks: BlockMask) -> IntArray:
    return pairs_of(blocks.full, blocks.num_kv_blocks)


def partial_pairs(blocks: BlockMask) -> IntArray:
    return pairs_of(blocks.partial, blocks.num_kv_blocks)


class BuildsOtherwise(ReferenceStructures):
    """The reference's structures with one hook: what becomes of each block mask that is built."""

    def build_block_mask(self, problem: AttentionProblem, q_block_size: int, kv_block_size: int) -> Sequence[BlockMask]:
        built = super().build_block_mask(problem, q_block_size, kv_block_size)
        return [self.change(blocks) for blocks in built]

    def change(self, blocks: BlockMask) -> BlockMask:
        """The block mask as the mistake has it."""
        return blocks


@deviates("BLOCK-COMPLETE", fault_class="B", report="article 2, 2.1: an off-by-one at the end of a row of blocks")
class BuildsRowsWithoutTheirLastBlock(BuildsOtherwise):
    """The last block of each block row is left out."""

    def change(self, blocks: BlockMask) -> BlockMask:
        pairs = listed_pairs(blocks)
        is_last = np.append(np.diff(pairs // max(blocks.num_kv_blocks, 1)) != 0, True)[: len(pairs)]
        gone = pairs[is_last]
        return with_pairs(blocks, np.setdiff1d(full_pairs(blocks), gone), np.setdiff1d(partial_pairs(blocks), gone))


@deviates("BLOCK-EXCLUSIVE", fault_class="B", report="article 2, 6.3: one block in both lists")
class BuildsFullBlocksIntoBothLists(BuildsOtherwise):
    """Every full block stands among the partial ones as well."""

    def change(self, blocks: BlockMask) -> BlockMask:
        return with_pairs(blocks, full_pairs(blocks), listed_pairs(blocks))


@deviates("BLOCK-FULL", fault_class="B", report="article 2, 6.3: a partial block called full")
class BuildsEveryListedBlockAsFull(BuildsOtherwise):
    """Every block that holds an edge is called full."""

    def change(self, blocks: BlockMask) -> BlockMask:
        return with_pairs(blocks, listed_pairs(blocks), np.empty(0, dtype=np.int64))


@deviates("BLOCK-RAGGED", fault_class="B", report="BR-74 microsoft/SeerAttention#33: the length rounded down to blocks")
class BuildsNoRaggedColumn(BuildsOtherwise):
    """A last block column that is not full of keys is left out."""

    def change(self, blocks: BlockMask) -> BlockMask:
        whole = blocks.seqlen_kv // blocks.kv_block_size
        columns = max(blocks.num_kv_blocks, 1)
        full, partial = (p[p % columns < whole] for p in (full_pairs(blocks), partial_pairs(blocks)))
        return with_pairs(blocks, full, partial)


@deviates("BLOCK-EXTENT", fault_class="B", report="BR-70 pytorch/pytorch#143260: the mask's shape is another length")
class BuildsForAPaddedLength(BuildsOtherwise):
    """The block mask says that it is made for lengths rounded up to whole blocks."""

    def change(self, blocks: BlockMask) -> BlockMask:
        return replace(
            blocks,
            seqlen_q=blocks.num_q_blocks * blocks.q_block_size,
            seqlen_kv=blocks.num_kv_blocks * blocks.kv_block_size,
        )


@deviates("BLOCK-EXTENT", fault_class="A", report="BR-71 pytorch/pytorch#136232: a mask larger than the data is taken")
class CropsAMaskThatIsTooLarge(ReferenceStructures):
    """A block mask for longer data is read as far as the data goes."""

    def decode_block_mask(self, blocks: BlockMask, element: BoolArray) -> BoolArray:
        fits = blocks.seqlen_q >= element.shape[1] and blocks.seqlen_kv >= element.shape[2]
        return decode_block_mask(crop_lengths(blocks, *element.shape[1:]) if fits else blocks, element)


@deviates(
    "BLOCK-DECODE", fault_class="B", report="BR-23 pytorch/pytorch#159247: the whole block where the rest is masked"
)
class DecodesPartialBlocksAsFull(ReferenceStructures):
    """A partial block is all true."""

    def decode_block_mask(self, blocks: BlockMask, element: BoolArray) -> BoolArray:
        super().decode_block_mask(blocks, element)  # refuses what it must
        return decode_block_mask(blocks, np.ones_like(element))


@deviates("BLOCK-INTERVAL", fault_class="B", report="article 2, 6.3: union and intersection of a block's rows confused")
class BuildsFullBlocksFromTheFirstRow(ReferenceStructures):
    """A block that the first of its rows sees whole is called full."""

    def interval_block_mask(self, rule: MaskRule | None, request: int, extent: Extent) -> BlockMask:
        right = super().interval_block_mask(rule, request, extent)
        first = np.unique(np.arange(extent.seqlen_q) // extent.q_block_size * extent.q_block_size)
        seen = element_mask(rule, extent, request=request)[:, first]
        rows = build_block_mask(seen, q_block_size=1, kv_block_size=extent.kv_block_size)
        full = np.intersect1d(full_pairs(rows), listed_pairs(right))
        return with_pairs(right, full, np.setdiff1d(listed_pairs(right), full))


@deviates("BLOCK-INTERVAL", fault_class="B", report="article 2, 6.3: a window of W keys cut one short")
class StartsItsIntervalsABlockLate(ReferenceStructures):
    """The first listed block of a row that has several is taken for empty."""

    def interval_block_mask(self, rule: MaskRule | None, request: int, extent: Extent) -> BlockMask:
        right = super().interval_block_mask(rule, request, extent)
        pairs = listed_pairs(right)
        rows = pairs // right.num_kv_blocks
        starts = np.append(True, rows[1:] != rows[:-1])[: len(pairs)] & (np.bincount(rows)[rows] > 1)
        gone = pairs[starts]
        return with_pairs(right, np.setdiff1d(full_pairs(right), gone), np.setdiff1d(partial_pairs(right), gone))


@deviates(
    "BLOCK-INTERVAL", fault_class="B", report="article 2, 2.2: a structured builder that still visits every block"
)
class ListsBlocksThatNoIntervalMeets(ReferenceStructures):
    """Blocks without an edge are listed as partial."""

    def interval_block_mask(self, rule: MaskRule | None, request: int, extent: Extent) -> BlockMask:
        right = super().interval_block_mask(rule, request, extent)
        every = np.arange(right.num_rows * right.num_kv_blocks)
        return with_pairs(right, full_pairs(right), np.setdiff1d(every, full_pairs(right)))


@deviates("BLOCK-CONSERVATIVE", fault_class="B", report="article 2, 6.3: what cannot be proven full must be partial")
class CallsFullWhatMayBeFull(ReferenceStructures):
    """A block is full where the outer bound has all of its elements."""

    def classify_blocks(self, outer: BoolArray, inner: BoolArray, q_block_size: int, kv_block_size: int) -> BlockMask:
        return build_block_mask(outer, q_block_size=q_block_size, kv_block_size=kv_block_size)


@deviates("BLOCK-CONSERVATIVE", fault_class="B", report="article 2, 6.3: what cannot be proven empty must be listed")
class DropsWhatMayBeEmpty(ReferenceStructures):
    """A block is listed where the inner bound has an element."""

    def classify_blocks(self, outer: BoolArray, inner: BoolArray, q_block_size: int, kv_block_size: int) -> BlockMask:
        return build_block_mask(inner, q_block_size=q_block_size, kv_block_size=kv_block_size)


@deviates("BLOCK-CANDIDATES", fault_class="K", report="article 2, 6.3: the union of several tokens' candidates as full")
class BuildsTheUnionOfTheRowsAsFull(ReferenceStructures):
    """A block that the rows of a query block cover together is called full."""

    def build_block_mask(self, problem: AttentionProblem, q_block_size: int, kv_block_size: int) -> Sequence[BlockMask]:
        right = super().build_block_mask(problem, q_block_size, kv_block_size)
        if problem.candidates is None:
            return right
        single = super().build_block_mask(problem, 1, kv_block_size)
        return [self.united(*pair, q_block_size) for pair in zip(right, single, strict=True)]

    def united(self, blocks: BlockMask, rows: BlockMask, q_block_size: int) -> BlockMask:
        """Blocks that some row sees whole, called full for all of them."""
        row, column = np.divmod(full_pairs(rows), max(rows.num_kv_blocks, 1))
        head, local = np.divmod(row, max(rows.num_q_blocks, 1))
        seen = (head * blocks.num_q_blocks + local // q_block_size) * blocks.num_kv_blocks + column
        full = np.union1d(full_pairs(blocks), seen)
        return with_pairs(blocks, full, np.setdiff1d(listed_pairs(blocks), full))


@deviates("BLOCK-BROADCAST-HEADS", fault_class="G", report="article 2, 1.2: a pattern of one head shared by all")
class BuildsOneHeadForAll(ReferenceStructures):
    """The lists of query head 0 stand for every head."""

    def build_block_mask(self, problem: AttentionProblem, q_block_size: int, kv_block_size: int) -> Sequence[BlockMask]:
        return [first_head(blocks) for blocks in super().build_block_mask(problem, q_block_size, kv_block_size)]


def first_head(blocks: BlockMask) -> BlockMask:
    """The lists of head 0 alone."""
    rows = blocks.num_q_blocks
    full, partial = (
        BlockLists(lists.indptr[: rows + 1], lists.indices[: lists.indptr[rows]])
        for lists in (blocks.full, blocks.partial)
    )
    return replace(blocks, num_heads=1, full=full, partial=partial)


@deviates("BLOCK-BROADCAST-BATCH", fault_class="B", report="article 2, 2.2: batch axis None with documents that differ")
class BuildsOneRequestForAll(ReferenceStructures):
    """Requests of equal lengths share the block mask of the first of them."""

    def build_block_mask(self, problem: AttentionProblem, q_block_size: int, kv_block_size: int) -> Sequence[BlockMask]:
        built = super().build_block_mask(problem, q_block_size, kv_block_size)
        return [next(other for other in built if other.shape == blocks.shape) for blocks in built]


@deviates(
    "BLOCK-BROADCAST-BATCH", fault_class="B", report="BR-64 invergent-ai/surogate#110: mask row of another sequence"
)
class BuildsOneMaskForTheBatch(ReferenceStructures):
    """A batch of several requests gets the block mask of the first one, and no other."""

    def build_block_mask(self, problem: AttentionProblem, q_block_size: int, kv_block_size: int) -> Sequence[BlockMask]:
        return super().build_block_mask(problem, q_block_size, kv_block_size)[:1]


@deviates(
    "BLOCK-TRANSPOSE", fault_class="R", report="BR-68 Dao-AILab/flash-attention#2623: backward lists are no transpose"
)
class TransposesTheFullListsAlone(ReferenceStructures):
    """Partial blocks are missing from the transposed block mask."""

    def transpose(self, blocks: BlockMask) -> BlockMask:
        turned = super().transpose(blocks)
        return with_pairs(turned, full_pairs(turned), np.empty(0, dtype=np.int64))


@deviates("BLOCK-TRANSPOSE", fault_class="R", report="article 2, 2.1: a transposed list that keeps one row a column")
class KeepsTheLastRowOfEachColumn(ReferenceStructures):
    """A column that several rows list keeps only the last of them, as an unguarded write does."""

    def transpose(self, blocks: BlockMask) -> BlockMask:
        turned = super().transpose(blocks)
        return with_pairs(turned, last_of_row(full_pairs(turned), turned), last_of_row(partial_pairs(turned), turned))


def last_of_row(pairs: IntArray, blocks: BlockMask) -> IntArray:
    """The last pair of each row."""
    rows = pairs // max(blocks.num_kv_blocks, 1)
    return pairs[np.append(rows[1:] != rows[:-1], True)[: len(pairs)]]


@deviates("BLOCK-INTERSECT", fault_class="B", report="article 2, 5.2: a stable mask and the candidates of a request")
class IntersectsToFullWhereEitherIsFull(ReferenceStructures):
    """A block that is full in one of the masks and listed in the other is called full."""

    def intersect(self, a: BlockMask, b: BlockMask) -> BlockMask:
        listed = np.intersect1d(listed_pairs(a), listed_pairs(b))
        full = np.intersect1d(listed, np.union1d(full_pairs(a), full_pairs(b)))
        return with_pairs(a, full, np.setdiff1d(listed, full))


@deviates("BLOCK-INTERSECT", fault_class="B", report="article 2, 5.2: full and partial lists intersected by kind")
class IntersectsKindByKind(ReferenceStructures):
    """Full lists are intersected with full lists and partial with partial, so that mixed blocks are lost."""

    def intersect(self, a: BlockMask, b: BlockMask) -> BlockMask:
        pairs = [np.intersect1d(of(a), of(b)) for of in (full_pairs, partial_pairs)]
        return with_pairs(a, *pairs)


@deviates("BLOCK-UNITE", fault_class="B", report="article 2, 6.3: two partial blocks taken for a full one")
class UnitesTwoPartialBlocksToAFullOne(ReferenceStructures):
    """A block that is partial in both masks is called full in their union."""

    def unite(self, a: BlockMask, b: BlockMask) -> BlockMask:
        right = super().unite(a, b)
        both = np.intersect1d(partial_pairs(a), partial_pairs(b))
        return with_pairs(right, np.union1d(full_pairs(right), both), np.setdiff1d(partial_pairs(right), both))


@deviates("BLOCK-UNITE", fault_class="B", report="article 2, 1.2: a union taken for an intersection")
class UnitesOnlyWhatBothList(ReferenceStructures):
    """Blocks that one of the masks alone lists are left out of the union."""

    def unite(self, a: BlockMask, b: BlockMask) -> BlockMask:
        return self.intersect(a, b)


@deviates("BLOCK-OFFSET", fault_class="M", report="article 2, 5.1: the local query index 0 of a decode step")
class AsksTheMaskOfRowsCountedFromZero(ReferenceStructures):
    """Sliced rows ask the element mask as if the first of them were the first of the mask."""

    def slice_rows(self, rule: MaskRule | None, extent: Extent, start: int, stop: int) -> SlicedRows:
        right = super().slice_rows(rule, extent, start, stop)
        return SlicedRows(right.blocks, element_mask(rule, extent)[:, : stop - start])


@deviates("BLOCK-SLICE", fault_class="B", report="article 2, 5.2: the granularity of a slice")
class SlicesFromTheNextBlock(ReferenceStructures):
    """A slice takes the lists of the block row after its first row's."""

    def slice_rows(self, rule: MaskRule | None, extent: Extent, start: int, stop: int) -> SlicedRows:
        right = super().slice_rows(rule, extent, start, stop)
        size = extent.q_block_size
        later = min(start + size, (extent.seqlen_q - 1) // size * size)
        own = rule_block_mask(rule, extent)
        lists = [own.full.of(later // size), own.partial.of(later // size)]
        first = len(right.blocks.full.of(0)), len(right.blocks.partial.of(0))
        full, partial = (
            BlockLists(
                np.concatenate([[0], kept.indptr[1:] - cut + len(new)]), np.concatenate([new, kept.indices[cut:]])
            )
            for kept, new, cut in zip((right.blocks.full, right.blocks.partial), lists, first, strict=True)
        )
        return SlicedRows(replace(right.blocks, full=full, partial=partial), right.element_mask)


@deviates("BLOCK-SLICE", fault_class="B", report="BR-70 pytorch/pytorch#143260: a slice keeps the old query length")
class SlicesAndKeepsTheOldLength(ReferenceStructures):
    """The sliced block mask says that it has as many query rows as before."""

    def slice_rows(self, rule: MaskRule | None, extent: Extent, start: int, stop: int) -> SlicedRows:
        right = super().slice_rows(rule, extent, start, stop)
        return SlicedRows(replace(right.blocks, seqlen_q=extent.seqlen_q), right.element_mask)


@deviates(
    "BLOCK-SLICE", fault_class="A", report="article 2, 5.2: a position past the prebuilt length, cut off in silence"
)
class SlicesWhatIsThere(ReferenceStructures):
    """Rows past the end of the block mask are left out without a word."""

    def slice_rows(self, rule: MaskRule | None, extent: Extent, start: int, stop: int) -> SlicedRows:
        return super().slice_rows(rule, extent, start, min(stop, extent.seqlen_q))


@deviates("BLOCK-CROP", fault_class="B", report="article 2, 1.2: a mask that is too large, cropped whatever its rule")
class CropsEveryRule(ReferenceStructures):
    """A block mask is cropped to shorter data without asking what its rule is."""

    def crop(self, mask_of: MaskOfLength, blocks: BlockMask, seqlen: int) -> BlockMask | None:
        return crop_lengths(blocks, seqlen, seqlen)


@deviates("BLOCK-CROP", fault_class="B", report="article 2, 2.2: cropped at whole blocks")
class CropsToWholeBlocks(ReferenceStructures):
    """A crop to a length that cuts a block leaves that block out."""

    def crop(self, mask_of: MaskOfLength, blocks: BlockMask, seqlen: int) -> BlockMask | None:
        cropped = super().crop(mask_of, blocks, seqlen)
        return None if cropped is None else BuildsNoRaggedColumn.change(BuildsNoRaggedColumn(), cropped)


@deviates("BLOCK-ADMIT", fault_class="B", report="article 2, 2.2: a white list made by comparing one length")
class AdmitsByTheLongestLength(ReferenceStructures):
    """A rule may be cropped once the mask of the largest length was compared with itself."""

    def admit(self, mask_of: MaskOfLength, max_seqlen: int, q_block_size: int, kv_block_size: int) -> bool:
        sizes = {"q_block_size": q_block_size, "kv_block_size": kv_block_size}
        return not crop_failures(mask_of, max_seqlen=max_seqlen, lengths=[max_seqlen], **sizes)


@deviates("BLOCK-ADMIT", fault_class="B", report="article 2, 2.2: block indices compared, elements not")
class AdmitsByWholeBlocks(ReferenceStructures):
    """A rule may be cropped where crop and rebuild agree at lengths of a few blocks."""

    def admit(self, mask_of: MaskOfLength, max_seqlen: int, q_block_size: int, kv_block_size: int) -> bool:
        sizes = {"q_block_size": q_block_size, "kv_block_size": kv_block_size}
        return not crop_failures(mask_of, max_seqlen=max_seqlen, lengths=[1, 3, max_seqlen], **sizes)


class CarriesToPages(ReferenceStructures):
    """The reference's structures with one hook: the runs of a list on pages."""

    def to_physical(
        self, blocks: BlockMask, page_table_row: IntArray, page_size: int, num_pages: int
    ) -> PhysicalBlockMask:
        right = super().to_physical(blocks, page_table_row, page_size, num_pages)
        return PhysicalBlockMask(*(self.change(runs, page_table_row) for runs in (right.full, right.partial)))

    def change(self, runs: PhysicalLists, page_table_row: IntArray) -> PhysicalLists:
        """The runs as the mistake has them."""
        return runs


@deviates("BLOCK-PHYSICAL", fault_class="T", report="article 2, 5.2: logical block ids used as physical ones")
class TakesPositionsForSlots(CarriesToPages):
    """A run lies in the pool where it lies in the request."""

    def change(self, runs: PhysicalLists, page_table_row: IntArray) -> PhysicalLists:
        return replace(runs, slot=runs.position)


@deviates("BLOCK-PHYSICAL", fault_class="T", report="article 2, 5.2: entries sorted by address without their positions")
class SortsSlotsAndLeavesPositions(CarriesToPages):
    """A row's slots are sorted by address while its positions stay as they were."""

    def change(self, runs: PhysicalLists, page_table_row: IntArray) -> PhysicalLists:
        rows = np.repeat(np.arange(len(runs.indptr) - 1), np.diff(runs.indptr))
        return replace(runs, slot=runs.slot[np.lexsort((runs.slot, rows))])


@deviates("BLOCK-UNTOUCHED", fault_class="T", report="BR-62 meta-pytorch/attention-gym#189; article 2, 5.2: in place")
class WritesPagesIntoTheLogicalMask(ReferenceStructures):
    """Block ids are replaced by page ids in the block mask that was handed over."""

    def to_physical(
        self, blocks: BlockMask, page_table_row: IntArray, page_size: int, num_pages: int
    ) -> PhysicalBlockMask:
        right = super().to_physical(blocks, page_table_row, page_size, num_pages)
        for lists in (blocks.full, blocks.partial):
            lists.indices[:] = page_table_row[lists.indices * blocks.kv_block_size // page_size]
        return right


class CountsOtherwise(ReferenceStructures):
    """The reference's structures with one hook: the figures of a block mask."""

    def statistics(self, blocks: BlockMask, num_edges: int) -> BlockStatistics:
        return self.change(super().statistics(blocks, num_edges), blocks, num_edges)

    def change(self, right: BlockStatistics, blocks: BlockMask, num_edges: int) -> BlockStatistics:
        """The figures as the mistake has them."""
        return right


@deviates("BLOCK-STATISTICS", fault_class="B", report="article 2, 6.3: row lengths without the full blocks")
class CountsPartialBlocksAlone(CountsOtherwise):
    """Row lengths count the partial list and forget the full one."""

    def change(self, right: BlockStatistics, blocks: BlockMask, num_edges: int) -> BlockStatistics:
        lengths = np.diff(blocks.partial.indptr)
        return replace(right, row_mean=float(lengths.mean()), row_max=int(lengths.max(initial=0)))


@deviates("BLOCK-STATISTICS", fault_class="B", report="article 2, 6.3: an average where a percentile is asked for")
class ReportsTheMeanAsP95(CountsOtherwise):
    """The long rows of a mask are hidden behind their mean."""

    def change(self, right: BlockStatistics, blocks: BlockMask, num_edges: int) -> BlockStatistics:
        return replace(right, row_p95=round(right.row_mean))


@deviates(
    "COST-AMPLIFICATION", fault_class="B", report="article 2, 6.3: the block mask's elements, not the executed ones"
)
class ForgetsThePaddingOfRaggedBlocks(CountsOtherwise):
    """A ragged block counts with the elements that exist, though its tile computes all."""

    def change(self, right: BlockStatistics, blocks: BlockMask, num_edges: int) -> BlockStatistics:
        row, column = np.divmod(listed_pairs(blocks), max(blocks.num_kv_blocks, 1))
        heights = np.minimum(blocks.q_block_size, blocks.seqlen_q - row % blocks.num_q_blocks * blocks.q_block_size)
        widths = np.minimum(blocks.kv_block_size, blocks.seqlen_kv - column * blocks.kv_block_size)
        return replace(right, amplification=execution_amplification(int((heights * widths).sum()), num_edges))
