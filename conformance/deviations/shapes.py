"""Mistakes that only some shapes show: one request of several, one row of a tile, one part of a head, long keys."""

from dataclasses import replace
from typing import ClassVar

import ml_dtypes
import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backward, Forward, Tensors
from attnconform.conformance.deviations.coordinates import AddressesMemory, LooksUpPages, element_offsets
from attnconform.conformance.deviations.deviation import build_backend, deviates
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray, PageOffsets, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow, default_q_offset
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.rules import And, Causal, MaskRule, Or, RelativeBias, SoftCap, Window
from attnconform.reference.steps import AttentionResult, Gradients, Steps, Upstream

Q_TILE = 4  # query rows of a tile
KV_TILE = 16
LANES = 64  # components of a head that one pass takes


def num_rows(problem: AttentionProblem, request: int) -> int:
    """Query rows of a request."""
    return int(problem.qo_indptr[request + 1] - problem.qo_indptr[request])


def with_wider_windows(rule: MaskRule) -> MaskRule:
    """A rule whose windows reach one position further to the right."""
    match rule:
        case And(parts) | Or(parts):
            return type(rule)(tuple(map(with_wider_windows, parts)))
        case Window(left, right) if right is not None:
            return Window(left=left, right=right + 1)
        case _:
            return rule


# -- rows of a batch ---------------------------------------------------------------------------------------------------


@deviates("COORD-ROW", fault_class="E", report="no report: tables of the requests that have keys, packed together")
class TakesTablesOfRequestsWithKeysAlone(LooksUpPages):
    """A request without keys has no row in the page table, so that later ones read the row before their own."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        before = int((problem.seqlen_kv[: where.request] == 0).sum())
        pages = problem.cache.page_table[where.request - before]
        return np.asarray(pages[at.page] * problem.cache.page_size + at.offset)


@deviates("COORD-ROW", fault_class="T", report="no report: rows divided by the longest request's number of them")
class FindsTheRequestOfARowByDivision(LooksUpPages):
    """A row belongs to the request that it would belong to if all had as many rows as the longest."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        longest = max(num_rows(problem, n) for n in range(problem.batch_size))
        pages = problem.cache.page_table[min(where.row // longest, problem.batch_size - 1)]
        return np.asarray(pages[at.page] * problem.cache.page_size + at.offset)


@deviates("COORD-SLOT", fault_class="T", report="no report: a table's width taken from the first request")
class TakesTheTableForAsWideAsItsFirstRow(LooksUpPages):
    """Rows of the page table are as far apart as the first request has pages."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        width = -(-int(problem.seqlen_kv[0]) // problem.cache.page_size)
        flat = problem.cache.page_table.ravel()
        return np.asarray(flat[(where.request * width + at.page) % len(flat)] * problem.cache.page_size + at.offset)


@deviates("SAFE-WRITE", fault_class="U", report="no report: the last tile of rows, where it has one row")
class LeavesALoneLastRowUnwritten(StepsBackend):
    """A last tile of query rows that has a single row is not stored."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        before = tensors.out.clone()
        super().store(tensors, result)
        if len(before) % Q_TILE == 1:
            tensors.out[-1] = before[-1]


@deviates("SAFE-WRITE", fault_class="D", report="no report: a store of whole vectors of 64 components")
class LeavesTheRestOfAHeadUnwritten(StepsBackend):
    """Components past the last multiple of 64 are not stored."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        before = tensors.out.clone()
        super().store(tensors, result)
        whole = before.shape[2] // LANES * LANES
        tensors.out[..., whole:] = before[..., whole:]


@deviates("EMPTY-NEIGHBOUR", fault_class="E", report="no report: an early exit decided by the first head of a group")
class SkipsAGroupWhoseFirstHeadIsEmpty(Steps):
    """A whole group is skipped where its first head sees no key."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        own = super().effective(problem, where, qo_head)
        first = super().effective(problem, where, qo_head - qo_head % problem.group_size)
        return own if len(first) else Positions(own.values[:0])


# -- masks of some rows ------------------------------------------------------------------------------------------------


class AllowsOtherwise(Steps):
    """The reference with one hook: which listed keys a mask allows."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = self.candidates(problem, where, qo_head)
        return Positions(listed.values[self.allowed(problem, where, qo_head, listed.values)])

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        """True where a key counts."""
        return mask_allows(problem.mask_rule, where.request, where.q_idx, kv_idx, qo_head)


@deviates("MASK-OFFSET", fault_class="M", report="no report: a query offset that is given and not read")
class AlignsBottomRightWhateverIsGiven(Steps):
    """Queries stand at the end of what is committed, whatever offset the problem has."""

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        offsets = default_q_offset(problem.qo_indptr, problem.seqlen_kv)
        return super().forward(replace(problem, q_offset=offsets), q, k, v)


@deviates("MASK-OFFSET", fault_class="M", report="no report: one position for all rows of a request, as in decode")
class PutsEveryRowWhereTheLastOneStands(AllowsOtherwise):
    """Every row of a request is masked as its last one."""

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        last = where.q_idx - where.local + num_rows(problem, where.request) - 1
        return mask_allows(problem.mask_rule, where.request, last, kv_idx, qo_head)


@deviates("MASK-OFFSET", fault_class="M", report="no report: rows counted back from the longest request's number")
class CountsRowsFromTheLongestRequests(AllowsOtherwise):
    """A row's distance to the end is that of a request with as many rows as the longest."""

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        longest = max(num_rows(problem, n) for n in range(problem.batch_size))
        q_idx = where.q_idx - (longest - num_rows(problem, where.request))
        return mask_allows(problem.mask_rule, where.request, q_idx, kv_idx, qo_head)


@deviates("MASK-WINDOW", fault_class="M", report="no report: a tile's first row decides where its keys begin")
class StartsTheWindowAtTheTilesFirstRow(AllowsOtherwise):
    """Rows of a tile see from where the window of its first row begins."""

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        right = super().allowed(problem, where, qo_head, kv_idx)
        first = mask_allows(problem.mask_rule, where.request, where.q_idx - where.local % Q_TILE, kv_idx, qo_head)
        return np.asarray(right | (first & (kv_idx <= where.q_idx)))


@deviates("MASK-WINDOW", fault_class="M", report="no report: j < i + right + 2 for j <= i + right")
class KeepsOneKeyMoreOnTheRight(AllowsOtherwise):
    """The right edge of a window is one position too far."""

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        rule = None if problem.mask_rule is None else with_wider_windows(problem.mask_rule)
        return mask_allows(rule, where.request, where.q_idx, kv_idx, qo_head)


@deviates("MASK-CAUSAL", fault_class="M", report="no report: causality applied to the tiles on the diagonal of the end")
class MasksCausallyInTheLastTileAlone(AllowsOtherwise):
    """Causality is applied to the last tile of keys, where the diagonal is if queries stand at the end."""

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        right = super().allowed(problem, where, qo_head, kv_idx)
        if not isinstance(problem.mask_rule, Causal):
            return right
        last_tile = (int(problem.seqlen_kv[where.request]) - 1) // KV_TILE * KV_TILE
        return np.asarray(right | (kv_idx < last_tile))


@deviates("MASK-CAUSAL", fault_class="M", report="no report: a single row is taken for the newest")
class ForgetsCausalityInDecode(AllowsOtherwise):
    """A request with one row sees all of its keys."""

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        right = super().allowed(problem, where, qo_head, kv_idx)
        is_decode = isinstance(problem.mask_rule, Causal) and num_rows(problem, where.request) == 1
        return np.ones_like(right) if is_decode else right


@deviates("MASK-DOCUMENT", fault_class="M", report="no report: document starts of one request for a whole batch")
class TakesTheDocumentsOfTheFirstRequest(AllowsOtherwise):
    """Every request has the documents, and the prefix, of request 0."""

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        return mask_allows(problem.mask_rule, 0, where.q_idx, kv_idx, qo_head)


@deviates("MASK-HEAD-WINDOW", fault_class="G", report="no report: the head's place in its group for its number")
class UsesTheWindowOfTheHeadInsideItsGroup(AllowsOtherwise):
    """A window is looked up by the head's place within its group."""

    def allowed(self, problem: AttentionProblem, where: QueryRow, qo_head: int, kv_idx: IntArray) -> BoolArray:
        return mask_allows(problem.mask_rule, where.request, where.q_idx, kv_idx, qo_head % problem.group_size)


@deviates("MASK-TAIL", fault_class="P", report="no report: length // page_size as the index of the last page")
class DropsALastPageThatIsFull(Steps):
    """A last page that is exactly full is taken for the one after the last."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        length, size = int(problem.seqlen_kv[where.request]), problem.cache.page_size
        is_full = size > 1 and length > size and length % size == 0
        return Positions(kept.values[kept.values < length - size]) if is_full else kept


# -- what nobody owns --------------------------------------------------------------------------------------------------


class AddsZeroTimes(Steps):
    """The reference with one hook: slots whose values take part with a weight of 0."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        out, lse = super().attend(problem, where, qo_head, q, k, v)
        slots = np.asarray(self.beside(problem, where, qo_head), dtype=np.int64)
        return out + (0.0 * v[slots % len(v), self.kv_head(problem, qo_head)]).sum(axis=0), lse

    def beside(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> IntArray:
        """Those slots."""
        raise NotImplementedError


@deviates("MASK-INTERFERE", fault_class="P", report="BR-58 ROCm/rocm-libraries#6932: an entry past the end of a row")
class LoadsThePageOfAnUnusedEntry(AddsZeroTimes):
    """Pages that a table names past a request's end are loaded, and have a weight of 0."""

    def beside(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> IntArray:
        used = -(-int(problem.seqlen_kv[where.request]) // problem.cache.page_size)
        return np.asarray(problem.cache.page_table[where.request, used:] * problem.cache.page_size)


@deviates("MASK-INTERFERE", fault_class="K", report="BR-76 Dao-AILab/flash-attention#2755: a hole as an address")
class LoadsTheFirstSlotForAHole(AddsZeroTimes):
    """Where a list has a hole, the pool's first slot is loaded, and has a weight of 0."""

    def beside(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> IntArray:
        lists = problem.candidates
        has_hole = lists is not None and bool((lists.entries(problem.list_index(where, qo_head)) < 0).any())
        return np.zeros(int(has_hole), dtype=np.int64)


# -- splits of some shapes ---------------------------------------------------------------------------------------------


class UnderHints(StepsBackend):
    """The reference, but for calls that ask for several splits."""

    least: ClassVar[int] = 2  # splits from which the mistake is made
    mistake: ClassVar[type[Steps]]

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        if (problem.hints.num_kv_splits or 1) < self.least:
            return super().forward(problem, tensors)
        return build_backend(self.mistake).forward(problem, tensors)


class ForgetsSinks(Steps):
    """Sinks enter nowhere."""

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        return super().forward(replace(problem, sink_logits=None), q, k, v)


class TakesFourPieces(Steps):
    """Of eight pieces the first four are merged."""

    def splits(self, num_keys: int) -> list[slice]:
        return [slice(0, num_keys // 2)]


@deviates("LSE-SINK", fault_class="S", report="no report: sinks handled by the kernel without splits alone")
class ForgetsTheSinkWhereThereAreSplits(UnderHints):
    """Sinks enter where a row is one piece, and nowhere else."""

    mistake = ForgetsSinks


@deviates("MERGE-SPLIT", fault_class="S", report="no report: a merge with room for four partial states")
class MergesFourPiecesOfEight(UnderHints):
    """Where a row is eight pieces, four are merged."""

    least = 8
    mistake = TakesFourPieces


@deviates("SAFE-WRITE", fault_class="U", report="BR-35 flashinfer-ai/flashinfer#50: lse stored by one of two paths")
class LeavesLseUnwrittenWhereThereAreSplits(StepsBackend):
    """lse is stored where a row is one piece, and not after a merge."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        before = tensors.lse.clone()
        result = super().forward(problem, tensors)
        if (problem.hints.num_kv_splits or 1) > 1:
            tensors.lse.copy_(before)
        return result


@deviates("MERGE-SPLIT", fault_class="S", report="no report: split sizes of the batch's first request")
class DividesByTheFirstRequestsLength(Steps):
    """Two pieces are as long as halves of the first request, and what is beyond them is lost."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        self.size = max(-(-int(problem.seqlen_kv[0]) // 2), 1)
        return super().attend(problem, where, qo_head, q, k, v)

    def splits(self, num_keys: int) -> list[slice]:
        return [slice(0, self.size), slice(self.size, 2 * self.size)]


# -- long keys and far addresses ---------------------------------------------------------------------------------------


@deviates("COORD-WIDE", fault_class="O", report="no report: positions of a list stored in 8 bits")
class KeepsPositionsInEightBits(Steps):
    """Positions from 256 on wrap."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = super().candidates(problem, where, qo_head)
        return Positions(np.unique(listed.values % 256))


@deviates("COORD-WIDE", fault_class="O", report="no report: byte offsets in 32 bits, where element offsets would fit")
class WrapsByteOffsetsInInt32(AddressesMemory):
    """Offsets into the cache are computed in bytes, in 32 bits."""

    def offsets(self, problem: ProblemView, cache: torch.Tensor) -> IntArray:
        size = cache.element_size()
        in_bytes = element_offsets(tuple(cache.shape), cache.stride()) * size
        return np.asarray(in_bytes.astype(np.int32).astype(np.int64) // size)


@deviates("COORD-WIDE", fault_class="O", report="BR-46 flashinfer-ai/flashinfer#3136: a wrap at 2^32")
class WrapsOffsetsInUnsigned32(AddressesMemory):
    """Offsets into the cache are computed in 32 bits without a sign."""

    def offsets(self, problem: ProblemView, cache: torch.Tensor) -> IntArray:
        return element_offsets(tuple(cache.shape), cache.stride()).astype(np.uint32).astype(np.int64)


# -- heads of some sizes -----------------------------------------------------------------------------------------------


class ReadsAPartOfTheHead(Steps):
    """The reference with one hook: components of a query that take part."""

    def query(self, problem: AttentionProblem, where: QueryRow, q: FloatArray) -> FloatArray:
        turned = super().query(problem, where, q)
        return np.where(np.arange(len(turned)) < self.count(problem), turned, 0.0)

    def count(self, problem: AttentionProblem) -> int:
        """How many take part."""
        raise NotImplementedError


@deviates("SCORE-SCALE", fault_class="D", report="no report: a dot product in steps of 32 components")
class DotsWholeStepsAlone(ReadsAPartOfTheHead):
    """Components past the last multiple of 32 take no part in a dot product."""

    def count(self, problem: AttentionProblem) -> int:
        return problem.head_dim_qk // 32 * 32


@deviates(
    "SCORE-SCALE", fault_class="D", report="BR-109 gittensor-ai-lab/sparkinfer#425: a head dimension of 128 at most"
)
class DotsTheFirstHalfOfALongHead(ReadsAPartOfTheHead):
    """Components from 128 on take no part in a dot product."""

    def count(self, problem: AttentionProblem) -> int:
        return 128


@deviates("SCORE-SCALE", fault_class="A", report="no report: a scale that is given and not read")
class ScalesByTheHeadDimWhateverIsGiven(Steps):
    """The scale is 1 / sqrt(head_dim), whatever the problem has."""

    def scale(self, problem: AttentionProblem, dot: FloatArray) -> FloatArray:
        return np.asarray(dot / np.sqrt(problem.head_dim_qk))


@deviates("LSE-NATURAL", fault_class="L", report="no report: the sum taken before a cap, the weights after it")
class TakesLseOfUncappedScores(Steps):
    """lse is that of the scores before the soft cap; out is right."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        others = tuple(rule for rule in problem.score_rules if not isinstance(rule, SoftCap))
        out, _ = super().attend(problem, where, qo_head, q, k, v)
        return out, super().attend(replace(problem, score_rules=others), where, qo_head, q, k, v)[1]


# -- parameters that a half would round --------------------------------------------------------------------------------


def to_bf16(numbers: FloatArray) -> FloatArray:
    """The nearest numbers that bfloat16 holds."""
    return np.asarray(numbers).astype(ml_dtypes.bfloat16).astype(np.float64)


@deviates("LSE-SINK", fault_class="Q", report="no report: sink logits in the dtype of a model's weights")
class RoundsSinksToBf16(Steps):
    """Sink logits are rounded to bfloat16."""

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        sinks = problem.sink_logits
        rounded = problem if sinks is None else replace(problem, sink_logits=to_bf16(sinks))
        return super().forward(rounded, q, k, v)


@deviates("SCORE-RELATIVE", fault_class="Q", report="no report: a table of biases in the dtype of a model's weights")
class RoundsRelativeTablesToBf16(Steps):
    """Entries of a relative table are rounded to bfloat16."""

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        rules = tuple(
            RelativeBias(tuple(tuple(to_bf16(np.array(table)).tolist()) for table in rule.tables))
            if isinstance(rule, RelativeBias)
            else rule
            for rule in problem.score_rules
        )
        return super().forward(replace(problem, score_rules=rules), q, k, v)


@deviates("SET-SEQUENCE", fault_class="Q", report="no report: biases of ranks in the dtype of a model's weights")
class RoundsRankBiasesToBf16(Steps):
    """Biases of ranks are rounded to bfloat16."""

    def rank_bias(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions
    ) -> FloatArray | float:
        return to_bf16(np.asarray(super().rank_bias(problem, where, qo_head, positions)))


# -- gradients of some rows --------------------------------------------------------------------------------------------


class LeavesRowsOutOfDsink(Steps):
    """The reference with one hook: rows that add nothing to dsink."""

    def add_row(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, k: FloatArray, v: FloatArray,
        arrives: Upstream, into: Gradients,
    ) -> None:  # fmt: skip
        before = None if into.dsink is None else into.dsink.copy()
        super().add_row(problem, where, qo_head, k, v, arrives, into)
        if before is not None and into.dsink is not None and self.is_left_out(problem, where, qo_head):
            into.dsink[...] = before

    def is_left_out(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> bool:
        """Whether a row and head is one of them."""
        raise NotImplementedError


@deviates("GRAD-SINK", fault_class="R", report="no report: a sink's gradient stored by the first request, not added")
class GivesDsinkOfTheFirstRequest(LeavesRowsOutOfDsink):
    """dsink is that of the rows of request 0."""

    def is_left_out(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> bool:
        return where.request > 0


@deviates("GRAD-SINK", fault_class="E", report="no report: an early exit of empty rows, which a sink still reaches")
class GivesEmptyRowsNoDsink(LeavesRowsOutOfDsink):
    """A row that sees no key adds nothing to dsink, though its lse moves with the sink."""

    def is_left_out(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> bool:
        return not len(self.effective(problem, where, qo_head))


@deviates("GRAD-FORMULA", fault_class="D", report="no report: rowsum(dO * O) over one vector of 64 components")
class TakesDeltaOverAPartOfTheHead(Steps):
    """Delta sums over the first 64 components of a head."""

    def delta(self, dout: FloatArray, out: FloatArray, dlse: float) -> float:
        return super().delta(dout[:LANES], out[:LANES], dlse)


@deviates("GRAD-SET", fault_class="C", report="no report: what a backward needs, kept by the kernel and not the call")
class TakesWhatTheLastForwardSaved(StepsBackend):
    """A backward takes the out and lse of whichever forward ran last."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.last: AttentionResult | None = None

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        done = super().forward(problem, tensors)
        self.last = done.saved
        return done

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Backward:
        return super().backward(problem, tensors, replace(forward, saved=self.last), dout, dlse)
