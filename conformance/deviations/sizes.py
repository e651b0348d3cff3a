"""Mistakes that begin at a size: requests without keys, rows, heads, pages, windows and blocks past what a kernel has.

Below that size each of them is right, which is why small cases let them pass.
"""

from dataclasses import replace

import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Forward, Tensors
from attnconform.conformance.deviations.coordinates import LooksUpPages
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.masks import MovesQueries, MovesWindows, MultipliesTheTailByZero
from attnconform.conformance.deviations.quantization import ReadsCodes
from attnconform.conformance.deviations.sets import ReadsEntries
from attnconform.conformance.deviations.shapes import AllowsOtherwise, num_rows
from attnconform.conformance.views import ProblemView
from attnconform.reference.candidates import HOLE
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray, PageOffsets, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.quantization import Quantization
from attnconform.reference.rules import And, MaskRule, RelativeBias, Window
from attnconform.reference.steps import AttentionResult, Steps

ROW_TILE, KV_TILE, HEAD_TILE, ENTRY_TILE = 64, 16, 16, 32
GROUP_SIZES = (1, 2, 3, 4, 8)  # that a kernel is compiled for
LARGEST_PAGE, STAGED_PAGES = 128, 128  # tokens of a page, and entries of a table, that are addressed at once
LOADED_KEYS, PACKED_ROWS = 128, 192  # of a tile that is loaded by the page; rows of all heads of a group
USUAL_BLOCK, USUAL_DISTANCE, VECTOR = 16, 3, 16


def left_of(rule: MaskRule | None) -> int | None:
    """How far a rule's narrowest window reaches back; None where none does."""
    match rule:
        case And(parts):
            return min((left for left in map(left_of, parts) if left is not None), default=None)
        case Window(left, _):
            return left
    return None


# -- requests without keys ---------------------------------------------------------------------------------------------


class OfRequestsWithoutKeys(StepsBackend):
    """The reference with one hook: what becomes of the rows of a request without keys."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        out, lse = tensors.out.clone(), tensors.lse.clone()
        done = super().forward(problem, tensors)
        for n in np.flatnonzero(problem.spec.seqlen_kv == 0).tolist():
            self.change(tensors, problem.q_rows(n), out, lse)
        return done

    def change(self, tensors: Tensors, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Changes the outputs of those rows; `out` and `lse` hold what was there before the call."""
        raise NotImplementedError


@deviates("SAFE-WRITE", fault_class="U", report="vllm-project/vllm#37442: a padded place of a captured batch")
class LeavesRequestsWithoutKeysUnwritten(OfRequestsWithoutKeys):
    """A request of no keys is skipped, and its rows hold what they held."""

    def change(self, tensors: Tensors, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        tensors.out[rows], tensors.lse[rows] = out[rows], lse[rows]


@deviates("EMPTY-OUT", fault_class="E", report="vllm-project/vllm#57094: 0 / 0 in the second stage of splits")
class DividesARequestWithoutKeysByZero(OfRequestsWithoutKeys):
    """The output of a request of no keys is 0 / 0; an empty row of any other request is 0."""

    def change(self, tensors: Tensors, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        tensors.out[rows] = float("nan")


@deviates("EMPTY-LSE", fault_class="E", report="BR-28 Dao-AILab/flash-attention#2842: an early exit of its own")
class GivesARequestWithoutKeysAnLseOfZero(OfRequestsWithoutKeys):
    """An early exit for a request of no keys leaves an lse of 0."""

    def change(self, tensors: Tensors, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        tensors.lse[rows] = 0.0


@deviates("LSE-SINK", fault_class="S", report="BR-32 ROCm/rocm-libraries#12227: no sink where no split has work")
class ForgetsTheSinkOfARequestWithoutKeys(OfRequestsWithoutKeys):
    """An early exit for a request of no keys takes no sink."""

    def change(self, tensors: Tensors, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        tensors.lse[rows] = -torch.inf


# -- rows and heads past a tile ----------------------------------------------------------------------------------------


@deviates("SAFE-WRITE", fault_class="U", report="flashinfer-ai/flashinfer#5095: wrong from the 65th query row on")
class WritesOneTileOfRowsPerRequest(StepsBackend):
    """Of each request the first 64 rows are written."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        out, lse = tensors.out.clone(), tensors.lse.clone()
        done = super().forward(problem, tensors)
        for n in range(problem.spec.batch_size):
            rows = problem.q_rows(n)
            rest = slice(min(rows.start + ROW_TILE, rows.stop), rows.stop)
            tensors.out[rest], tensors.lse[rest] = out[rest], lse[rest]
        return done


@deviates("MASK-OFFSET", fault_class="M", report="tenstorrent/tt-metal#54435: a chunk's start by the size of its tiles")
class AddsTheOffsetOfATileOfRowsTwice(MovesQueries):
    """Rows of a request's second tile are masked as if they stood a tile further."""

    def q_idx(self, problem: AttentionProblem, where: QueryRow) -> int:
        return where.q_idx + where.local // ROW_TILE * ROW_TILE


@deviates("GQA-MAP", fault_class="G", report="flashinfer-ai/flashinfer#4316: group sizes that are compiled for")
class RoundsTheGroupSizeUp(Steps):
    """A group of 5, 6 or 7 heads is run as one of 8."""

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        size = problem.group_size
        return qo_head // next((compiled for compiled in GROUP_SIZES if compiled >= size), size)


@deviates("GQA-MAP", fault_class="G", report="vllm-project/vllm#40792; FlashML-org/FreeToken#177: 48 heads over 2")
class CutsHeadsIntoTilesAcrossGroups(Steps):
    """Heads of large groups are cut into tiles of 16, and a tile reads the KV head of its first one."""

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        first = qo_head // HEAD_TILE * HEAD_TILE if problem.group_size > HEAD_TILE else qo_head
        return first // problem.group_size


@deviates("QUANT-GRANULARITY", fault_class="Q", report="BR-107 vllm-project/vllm#51363: scales of some heads alone")
class KnowsScalesOfTwoHeads(ReadsCodes):
    """The third KV head has the scales of the first one."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        return super().scales(problem, quant, slots, kv_head % 2)


@deviates("SCORE-SCALE", fault_class="D", report="BR-85 flashinfer-ai/flashinfer#4299: 72 is no multiple of 16")
class DotsMultiplesOfSixteenAlone(Steps):
    """Components of a query past its last multiple of 16 are left out."""

    def query(self, problem: AttentionProblem, where: QueryRow, q: FloatArray) -> FloatArray:
        turned = super().query(problem, where, q)
        return np.asarray(np.where(np.arange(len(turned)) < len(turned) // VECTOR * VECTOR, turned, 0.0))


# -- pages -------------------------------------------------------------------------------------------------------------


@deviates("COORD-SLOT", fault_class="T", report="vllm-project/vllm#24486: pages of 528 or 784 tokens")
class TakesThePageSizeForAPowerOfTwo(LooksUpPages):
    """Page and offset are found by a shift and a mask of the next power of two."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        size = problem.cache.page_size
        positions, bits = at.page * size + at.offset, (size - 1).bit_length()
        pages = problem.cache.page_table[where.request][positions >> bits]
        return np.asarray(pages * size + (positions & ((1 << bits) - 1)))


@deviates("COORD-SLOT", fault_class="T", report="flashinfer-ai/flashinfer#4347: wrong for pages of more than 128")
class WrapsOffsetsInLargePages(LooksUpPages):
    """In a page of more than 128 tokens offsets are counted modulo 128."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        pages = problem.cache.page_table[where.request][at.page]
        return np.asarray(pages * problem.cache.page_size + at.offset % LARGEST_PAGE)


@deviates("COORD-SLOT", fault_class="T", report="BR-59 vllm-project/flash-attention#42: entries staged by the tile")
class WrapsATableOfManyPages(LooksUpPages):
    """A request's 129th page is its first one again."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        pages = problem.cache.page_table[where.request][at.page % STAGED_PAGES]
        return np.asarray(pages * problem.cache.page_size + at.offset)


@deviates("COORD-WIDE", fault_class="O", report="no report: page ids packed into bytes")
class KeepsPageIdsInEightBits(LooksUpPages):
    """Page 256 is page 0."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        pages = problem.cache.page_table[where.request][at.page] & 0xFF
        return np.asarray(pages * problem.cache.page_size + at.offset)


@deviates("MASK-TAIL", fault_class="P", report="Dao-AILab/flash-attention#2374: 0 * NaN where pages are loaded whole")
class MultipliesTheTailOfLargePagesByZero(MultipliesTheTailByZero):
    """Where pages are whole tiles of keys and rows more than a tile, slots past the length have a weight of 0."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        packed = num_rows(problem, where.request) * problem.group_size
        if problem.cache.page_size % LOADED_KEYS or packed <= PACKED_ROWS:
            return Steps.attend(self, problem, where, qo_head, q, k, v)
        return super().attend(problem, where, qo_head, q, k, v)


# -- windows and places of queries -------------------------------------------------------------------------------------


@deviates("MASK-WINDOW", fault_class="M", report="vllm-project/vllm#34378: a window of 0 as a word for none")
class ReadsALeftEdgeOfZeroAsUnlimited(MovesWindows):
    """A left edge of 0 is taken for none; the right edge is honoured."""

    def move(self, rule: Window) -> Window:
        return Window(rule.left or None, rule.right)


@deviates("MASK-WINDOW", fault_class="M", report="vllm-project/vllm-gaudi#1395: window // page_size pages")
class DropsThePageWhereAWindowBegins(AllowsOtherwise):
    """A window of more than a page reads as many pages as fit into it, and loses the one that it begins in."""

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        right = super().allowed(problem, where, qo_head, kv_idx)
        left, size = left_of(problem.mask_rule), problem.cache.page_size
        if left is None or not 1 < size <= left + 1:
            return right
        return np.asarray(right & (kv_idx // size > where.q_idx // size - (left + 1) // size))


@deviates("MASK-WINDOW", fault_class="M", report="openvinotoolkit/openvino#38034: partitions of the longest request")
class VisitsAsManyPagesOfAWindowAsTheLongestRequest(AllowsOtherwise):
    """A request whose window meets more pages than the longest one's loses its last page."""

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        right = super().allowed(problem, where, qo_head, kv_idx)
        left, size = left_of(problem.mask_rule), problem.cache.page_size
        if left is None:
            return right
        first = np.maximum(problem.seqlen_kv - 1 - left, 0) // size
        count = -(-problem.seqlen_kv // size) - first
        most = int(count[np.argmax(problem.seqlen_kv)])
        return np.asarray(right & (kv_idx // size < int(first[where.request]) + most))


@deviates("MASK-WINDOW", fault_class="M", report="BR-31 flashinfer-ai/flashinfer#4972: leading rows of a tile wrong")
class StartsTheWindowAtTheTilesLastRow(AllowsOtherwise):
    """Keys are read from the tile in which the window of a request's last row begins."""

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        right = super().allowed(problem, where, qo_head, kv_idx)
        left = left_of(problem.mask_rule)
        if left is None:
            return right
        last = where.q_idx - where.local + num_rows(problem, where.request) - 1
        return np.asarray(right & (kv_idx >= max(last - left, 0) // KV_TILE * KV_TILE))


@deviates("MASK-OFFSET", fault_class="M", report="no report: positions clamped into the request")
class ClampsQueriesToTheLastToken(MovesQueries):
    """A query past the end is masked as if it stood at the last committed token."""

    def q_idx(self, problem: AttentionProblem, where: QueryRow) -> int:
        return min(where.q_idx, int(problem.seqlen_kv[where.request]) - 1)


# -- lists and rules ---------------------------------------------------------------------------------------------------


@deviates("BLOCK-EXPAND", fault_class="B", report="no report: a block size compiled in")
class ExpandsBlocksBySixteen(Steps):
    """A listed block stands for 16 tokens, whatever its size."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        lists = problem.candidates
        if lists is not None and lists.granularity == "block":
            problem = replace(problem, candidates=replace(lists, block_size=USUAL_BLOCK))
        return super().candidates(problem, where, qo_head)


@deviates("SET-HOLE", fault_class="K", report="no report: a loop that ends at a tile without a valid entry")
class StopsAtATileOfHoles(ReadsEntries):
    """A list that has named keys ends with a tile of 32 holes."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        for start in range(ENTRY_TILE, len(entries), ENTRY_TILE):
            is_hole = entries == HOLE
            if is_hole[start : start + ENTRY_TILE].all() and not is_hole[:start].all():
                return entries[:start]
        return entries


@deviates("SET-IDENTITY", fault_class="K", report="flashinfer-ai/flashinfer#5095: lanes past a list's length")
class ReadsALanePastTheListInLaterTilesOfRows(Steps):
    """From the 65th row on, the first key stands for the lane behind a list's end."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = super().candidates(problem, where, qo_head)
        if problem.candidates is None or where.local < ROW_TILE:
            return listed
        return Positions(np.union1d(listed.values, [0]))


@deviates("ROPE-PAIRS", fault_class="D", report="no report: halves of the head where a part of it turns")
class PairsAcrossTheWholeHead(Steps):
    """Components lie apart by half of the head, where a part of it turns in halves."""

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        rope = problem.rope
        if rope is not None and rope.turns and not rope.interleaved:
            problem = replace(problem, rope=replace(rope, rotary_dim=problem.head_dim_qk))
        return super().forward(problem, q, k, v)


@deviates("SCORE-RELATIVE", fault_class="A", report="no report: a table's length compiled in")
class KnowsDistancesUpToThree(Steps):
    """Keys farther away than 3 share the entries of 3, however long the table is."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        rules = tuple(
            RelativeBias(tuple(map(middle_of, rule.tables))) if isinstance(rule, RelativeBias) else rule
            for rule in problem.score_rules
        )
        return super().scores(replace(problem, score_rules=rules), where, qo_head, positions, dot)


def middle_of(table: tuple[float, ...]) -> tuple[float, ...]:
    """A table's entries for distances of 3 and less."""
    middle = len(table) // 2
    return table[max(middle - USUAL_DISTANCE, 0) : middle + USUAL_DISTANCE + 1]
