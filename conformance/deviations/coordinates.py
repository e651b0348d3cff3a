"""Mistakes about where a position lies: slots, pages, strides, address width, rows. [COORD]"""

from dataclasses import replace

import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend, to_float64
from attnconform.conformance.backend import Tensors
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import FloatArray, IntArray, PageOffsets, Positions, Slots, to_page_offsets
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.rules import Alibi
from attnconform.reference.steps import AttentionResult, Steps

PAGES_PER_TILE = 4


class LooksUpPages(Steps):
    """The reference with one hook: from logical pages and offsets to slots."""

    def slots(self, problem: AttentionProblem, where: QueryRow, positions: Positions) -> Slots:
        cache = problem.cache
        at = self.look_up(problem, where, to_page_offsets(positions, page_size=cache.page_size))
        return Slots(at % cache.num_slots)  # a wild address stays in the pool, as mapped memory does

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        """Slots of the tokens."""
        raise NotImplementedError


@deviates("COORD-SLOT", fault_class="T", report="article 1, 1.2: tile id = physical page // 4")
class ReadsATileIdAsAPage(LooksUpPages):
    """The page table is indexed by tiles of four pages."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        pages = problem.cache.page_table[where.request][at.page // PAGES_PER_TILE]
        return np.asarray(pages * problem.cache.page_size + at.offset)


@deviates("COORD-SLOT", fault_class="T", report="article 1, 1.2: logical and physical page")
class IgnoresThePageTable(LooksUpPages):
    """Logical pages are taken for physical ones."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        return at.page * problem.cache.page_size + at.offset


@deviates("COORD-SLOT", fault_class="T", report="BR-58 ROCm/rocm-libraries#6932: look-ahead over a page table")
class UsesThePrefetchedPage(LooksUpPages):
    """The last token of a page is read from the next page of the table, which was fetched ahead."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        cache, row = problem.cache, problem.cache.page_table[where.request]
        ahead = (at.offset == cache.page_size - 1) & (at.page + 1 < len(row))
        return np.asarray(row[at.page + ahead] * cache.page_size + at.offset)


@deviates("COORD-SLOT", fault_class="T", report="article 1, 1.2: page length and stride of the pool mixed up")
class SwapsPageAndOffset(LooksUpPages):
    """Tokens of one offset lie together, instead of tokens of one page."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        return np.asarray(at.offset * problem.cache.num_pages + problem.cache.page_table[where.request][at.page])


@deviates("COORD-ROW", fault_class="T", report="BR-62 meta-pytorch/attention-gym#189")
class ReadsTheFirstRequestsTable(LooksUpPages):
    """Every request uses the page table of request 0."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        return np.asarray(problem.cache.page_table[0][at.page] * problem.cache.page_size + at.offset)


@deviates(
    "COORD-RENUMBER",
    fault_class="T",
    report="vllm-project/vllm keeps page 0 as a null block; here it is an ordinary page",
)
class TreatsPageZeroAsNull(Steps):
    """Tokens on page 0 are skipped: that page is taken to be nobody's."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        return Positions(kept.values[self.slots(problem, where, kept).values >= problem.cache.page_size])


@deviates("COORD-RENUMBER", fault_class="T", report="BR-49 vllm-project/vllm#50427: an inverse table of the whole pool")
class GivesASharedPageToItsLastRequest(Steps):
    """A page in the tables of two requests is only seen by the later one."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        later = problem.cache.page_table[where.request + 1 :]
        pages = self.slots(problem, where, kept).values // problem.cache.page_size
        return Positions(kept.values[~np.isin(pages, later)])


@deviates("COORD-LOGICAL", fault_class="T", report="article 1, 1.2: causality by physical order")
class MasksByPhysicalOrder(Steps):
    """The mask rule is asked about slots instead of positions."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = self.candidates(problem, where, qo_head)
        own = Positions(np.array([where.q_idx]).clip(0, max(int(problem.seqlen_kv[where.request]) - 1, 0)))
        if not len(listed):
            return listed
        slots, q_slot = (self.slots(problem, where, p).values for p in (listed, own))
        return Positions(listed.values[mask_allows(problem.mask_rule, where.request, int(q_slot[0]), slots, qo_head)])


@deviates("COORD-LOGICAL", fault_class="T", report="article 1, 1.2: a bias by physical order")
class BiasesByPhysicalOrder(Steps):
    """Score rules see slots instead of positions."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        slots = Positions(self.slots(problem, where, positions).values)
        return super().scores(problem, where, qo_head, slots, dot)


@deviates("COORD-LOGICAL", fault_class="B", report="flashinfer BSR: causality by place in the gathered list")
class MasksByPlaceInTheList(Steps):
    """The mask rule is asked about places in the gathered list instead of positions."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = self.candidates(problem, where, qo_head)
        places = np.arange(len(listed))
        return Positions(listed.values[mask_allows(problem.mask_rule, where.request, where.q_idx, places, qo_head)])


@deviates("COORD-LOGICAL", fault_class="B", report="article 2, 5.2: score_mod given the index of the gathered key")
class BiasesByPlaceInTheList(Steps):
    """Score rules see places in the gathered list instead of positions."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        return super().scores(problem, where, qo_head, Positions(np.arange(len(positions))), dot)


@deviates("COORD-LOGICAL", fault_class="T", report="article 1, 1.2: page offset where a position belongs")
class BiasesByOffsetInThePage(Steps):
    """ALiBi sees a key's offset within its page."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        if not any(isinstance(rule, Alibi) for rule in problem.score_rules):
            return super().scores(problem, where, qo_head, positions, dot)
        offsets = Positions(positions.values % problem.cache.page_size)
        return super().scores(problem, where, qo_head, offsets, dot)


class PermutesRows(Steps):
    """The reference with one hook: which computed row is stored where."""

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        result = super().forward(problem, q, k, v)
        order = self.order(problem)
        return replace(result, out=result.out[order], lse=result.lse[order])

    def order(self, problem: AttentionProblem) -> IntArray:
        """For each row of the output, the row that was computed for it."""
        raise NotImplementedError


@deviates("COORD-ROW", fault_class="T", report="article 1, 7.4: sorted rank as output row")
class StoresRowsByRankOfLength(PermutesRows):
    """Rows are sorted by their number of keys to balance work, and stored in that order."""

    def order(self, problem: AttentionProblem) -> IntArray:
        keys = [len(self.effective(problem, where, 0)) for where in problem.rows()]
        return np.argsort(-np.asarray(keys, dtype=np.int64), kind="stable")


@deviates("COORD-ROW", fault_class="T", report="BR-62 meta-pytorch/attention-gym#189: batch slot for batch position")
class StoresTheBatchBackwards(PermutesRows):
    """The last request's rows are stored first."""

    def order(self, problem: AttentionProblem) -> IntArray:
        starts, ends = problem.qo_indptr[:-1], problem.qo_indptr[1:]
        parts = [np.arange(a, b) for a, b in zip(starts[::-1], ends[::-1], strict=True)]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])


@deviates("COORD-ROW", fault_class="S", report="BR-28 Dao-AILab/flash-attention#2842: two layouts of one lse")
class StoresLseHeadMajor(Steps):
    """lse is written in (head, row) order into a tensor of (row, head)."""

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        result = super().forward(problem, q, k, v)
        return replace(result, lse=np.ascontiguousarray(result.lse.T).reshape(result.lse.shape))


class AddressesMemory(StepsBackend):
    """The reference with one hook: the offset, in elements, of every element of a cache."""

    def inputs(self, problem: ProblemView, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        k, v = self.load(problem, tensors.k_cache), self.load(problem, tensors.v_cache)
        return to_float64(tensors.q), to_float64(problem.by_slot(k)), to_float64(problem.by_slot(v))

    def load(self, problem: ProblemView, cache: torch.Tensor) -> torch.Tensor:
        """The elements that the offsets name; a wild address stays in the allocation."""
        size = cache.untyped_storage().nbytes() // cache.element_size()
        memory = torch.as_strided(cache, (size,), (1,), 0)
        offsets = self.offsets(problem, cache) + cache.storage_offset()
        return memory[torch.from_numpy(offsets % size)]

    def offsets(self, problem: ProblemView, cache: torch.Tensor) -> IntArray:
        """Offset of every element from the tensor's first one, in the cache's shape."""
        raise NotImplementedError


def element_offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> IntArray:
    """Offset of every element of a strided tensor."""
    grids = np.indices(shape, sparse=True, dtype=np.int64)
    return np.asarray(sum((index * stride for index, stride in zip(grids, strides, strict=True)), np.int64(0)))


def dense_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))


@deviates("COORD-STRIDE", fault_class="T", report="BR-55 ROCm/aiter#3498")
class TakesTheCacheForDense(AddressesMemory):
    """A cache that is a view of an interleaved pool is read with the strides of a contiguous one."""

    def offsets(self, problem: ProblemView, cache: torch.Tensor) -> IntArray:
        return element_offsets(tuple(cache.shape), dense_strides(tuple(cache.shape)))


@deviates("COORD-STRIDE", fault_class="T", report="BR-55 ROCm/aiter#3498: page stride rebuilt from the slot's")
class RebuildsThePageStride(AddressesMemory):
    """The stride of a page is taken to be page_size times the stride of a token."""

    def offsets(self, problem: ProblemView, cache: torch.Tensor) -> IntArray:
        token_axis = 1 if problem.spec.cache.layout == "NHD" else 2
        page_stride = problem.spec.cache.page_size * cache.stride(token_axis)
        return element_offsets(tuple(cache.shape), (page_stride, *cache.stride()[1:]))


@deviates("COORD-STRIDE", fault_class="T", report="flashinfer-ai/flashinfer#2879: layout other than documented")
class ReadsHeadMajorAsTokenMajor(StepsBackend):
    """A cache with heads before tokens is read as one with tokens before heads."""

    def inputs(self, problem: ProblemView, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        shape = (problem.spec.cache.num_slots, problem.spec.num_kv_heads, -1)
        k, v = (to_float64(t.reshape(shape)) for t in (tensors.k_cache, tensors.v_cache))
        return to_float64(tensors.q), k, v


@deviates("COORD-STRIDE", fault_class="D", report="BR-83 XunhaoLai/native-sparse-attention-triton#27: D_v for D_qk")
class AddressesValuesWithTheStridesOfKeys(AddressesMemory):
    """V is addressed with K's strides, which are other ones where the head dimensions differ."""

    def inputs(self, problem: ProblemView, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        self.strides = tuple(tensors.k_cache.stride())
        return super().inputs(problem, tensors)

    def offsets(self, problem: ProblemView, cache: torch.Tensor) -> IntArray:
        return element_offsets(tuple(cache.shape), self.strides)


@deviates("COORD-WIDE", fault_class="O", report="BR-46 flashinfer-ai/flashinfer#3136; BR-47 vllm-project/vllm#47671")
class WrapsOffsetsInInt32(AddressesMemory):
    """Offsets into the cache are computed in 32 bits."""

    def offsets(self, problem: ProblemView, cache: torch.Tensor) -> IntArray:
        return element_offsets(tuple(cache.shape), cache.stride()).astype(np.int32).astype(np.int64)


@deviates("COORD-WIDE", fault_class="O", report="BR-53 pytorch/pytorch#190857, scaled to the pools of a CPU case")
class WrapsOffsetsInInt16(AddressesMemory):
    """Offsets into the cache are computed in 16 bits: the wrap of 32 bits, in a pool small enough to own."""

    def offsets(self, problem: ProblemView, cache: torch.Tensor) -> IntArray:
        return element_offsets(tuple(cache.shape), cache.stride()).astype(np.int16).astype(np.int64)


@deviates("COORD-WIDE", fault_class="O", report="BR-50 Dao-AILab/flash-attention#772: the stride of a request wraps")
class KeepsPageIdsInFiveBits(LooksUpPages):
    """Page ids from 32 on wrap: a table stored in too narrow a type."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        return np.asarray((problem.cache.page_table[where.request][at.page] % 32) * problem.cache.page_size + at.offset)
