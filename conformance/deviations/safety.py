"""Mistakes about what is written, what is refused and what is reported. [SAFE]"""

from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Forward, Tensors
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.views import ProblemView
from attnconform.reference.candidates import HOLE, expand_entries
from attnconform.reference.coordinates import FloatArray, Positions
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rules import Alibi, Window
from attnconform.reference.steps import AttentionResult, Steps


@deviates("SAFE-WRITE", fault_class="U", report="BR-25 pytorch/pytorch#194167")
class WritesTheFirstRequestOnly(StepsBackend):
    """Rows of every request after the first are not written."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        end = int(problem.spec.qo_indptr[1])
        before = tensors.out[end:].clone()
        result = super().forward(problem, tensors)
        tensors.out[end:] = before
        return result


@deviates("SAFE-WRITE", fault_class="U", report="BR-35 flashinfer-ai/flashinfer#50: lse stored only where asked for")
class LeavesLseOfOddHeadsUnwritten(StepsBackend):
    """lse is written for every second head."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        before = tensors.lse[:, 1::2].clone()
        super().store(tensors, result)
        tensors.lse[:, 1::2] = before


@deviates(
    "SAFE-WRITE",
    fault_class="U",
    report="BR-05 Dao-AILab/flash-attention#2906: an empty tile that is scaled, not written",
)
class LeavesEmptyRowsUnwritten(StepsBackend):
    """A row that sees no key is skipped."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        before = tensors.out.clone()
        super().store(tensors, result)
        skipped = torch.from_numpy(np.isneginf(result.lse))
        tensors.out[skipped] = before[skipped]


@deviates("SAFE-WRITE", fault_class="E", report="BR-05 Dao-AILab/flash-attention#2906: leftovers scaled by 0")
class ScalesWhatTheOutputHeld(StepsBackend):
    """The output is accumulated onto 0 times what it held, which NaN survives."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        before = tensors.out.clone()
        super().store(tensors, result)
        tensors.out.add_(before * 0.0)


@deviates("SAFE-BOUNDS", fault_class="S", report="BR-76 Dao-AILab/flash-attention#2755: a write before the first row")
class WritesBeforeLse(StepsBackend):
    """An index of -1 writes the element before lse."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        super().store(tensors, result)
        write_beside(tensors.lse, -1)


@deviates("SAFE-BOUNDS", fault_class="C", report="BR-97 sgl-project/sglang#27338: rows up to the end of a tile")
class WritesPastOut(StepsBackend):
    """A tile of rows that is not full is stored whole."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        super().store(tensors, result)
        write_beside(tensors.out, tensors.out.numel())


def write_beside(output: torch.Tensor, offset: int) -> None:
    """Stores a 0 at an offset, in elements, from an output's first element, if the allocation reaches there."""
    at = output.storage_offset() + offset
    if 0 <= at < output.untyped_storage().nbytes() // output.element_size():
        torch.as_strided(output, (1,), (1,), at).zero_()


@deviates("SAFE-INPUTS", fault_class="A", report="no report: the scale folded into q, in place")
class ScalesQInPlace(StepsBackend):
    """q is multiplied by the scale where it lies."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        result = super().forward(problem, tensors)
        tensors.q.mul_(problem.spec.sm_scale)
        return result


@deviates("SAFE-INPUTS", fault_class="P", report="no report: a tail cleared in the caller's cache to be safe to read")
class ClearsUnownedSlots(StepsBackend):
    """Slots past the committed length are set to 0 in the caller's cache."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        for cache in (tensors.k_cache, tensors.v_cache):
            cache.nan_to_num_(nan=0.0)
        return super().forward(problem, tensors)


@deviates("SAFE-INPUTS", fault_class="K", report="SPEC: sorting a caller's list in place is a change")
class SortsTheCallersListsInPlace(StepsBackend):
    """Lists are sorted where the caller keeps them."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        lists = problem.spec.candidates
        if lists is not None:
            for i in range(lists.num_lists):
                lists.entries(i).sort()
        return super().forward(problem, tensors)


@deviates("SAFE-PATH", fault_class="A", report="article 1, 5.2: a fallback is announced, and declared beforehand")
class FallsBackUndeclared(StepsBackend):
    """Problems with a soft cap or interleaved caches run on another path, which is not declared."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        result = super().forward(problem, tensors)
        is_odd = bool(problem.spec.score_rules) or not tensors.k_cache.is_contiguous()
        return replace(result, path="fallback: dense") if is_odd else result


@deviates("COORD-SLOT", fault_class="C", report="article 1, 5.2: scratch is not the cache")
class ReadsAStaleCopyOfTheCache(StepsBackend):
    """Keys and values are gathered once, and later calls read the gathered copy."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.scratch: tuple[FloatArray, FloatArray] | None = None

    def inputs(self, problem: ProblemView, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        q, k, v = super().inputs(problem, tensors)
        if self.scratch is None or self.scratch[0].shape != k.shape:
            self.scratch = (k, v)
        return q, *self.scratch


@deviates("SET-IDENTITY", fault_class="C", report="BR-95 NVIDIA/TensorRT-LLM#18443; a captured graph over old storage")
class ReplaysTheFirstCall(StepsBackend):
    """Every call gives the first call's result."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.first: AttentionResult | None = None

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        if self.first is None or self.first.out.shape != result.out.shape:
            self.first = result
        super().store(tensors, self.first)


@deviates("SET-IDENTITY", fault_class="U", report="KernelBench#165: a kernel that gives zeros")
class GivesZeros(StepsBackend):
    """Nothing is computed; out and lse are 0."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        tensors.out.zero_()
        tensors.lse.zero_()


@deviates("SAFE-REFUSE", fault_class="A", report="article 1, 7.3: a refusal comes before the launch")
class RefusesAfterWriting(StepsBackend):
    """The outputs are cleared before the problem is checked."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        tensors.out.zero_()
        tensors.lse.zero_()
        return super().forward(problem, tensors)


@deviates("SAFE-REFUSE", fault_class="A", report="BR-113 huggingface/diffusers#12605: a warning in place of a refusal")
class GivesZerosInsteadOfRefusing(StepsBackend):
    """A problem that breaks the contract gives zeros."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        try:
            return super().forward(problem, tensors)
        except RefusedInput:
            tensors.out.zero_()
            tensors.lse.fill_(-torch.inf)
            return Forward(tensors.out, tensors.lse)


@deviates("SAFE-REFUSE", fault_class="A", report="BR-85 flashinfer-ai/flashinfer#4299: a fault where an error belongs")
class RaisesWhateverComesUp(StepsBackend):
    """A problem that breaks the contract ends in an exception that no one declared."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        try:
            return super().forward(problem, tensors)
        except RefusedInput as refusal:
            raise IndexError("index out of range") from refusal


class Forgives(Steps):
    """The reference with some refusals left out, and one hook that makes the problem computable."""

    forgiven: ClassVar[str]

    def refuse(self, problem: AttentionProblem) -> None:
        try:
            super().refuse(problem)
        except RefusedInput as refusal:
            if refusal.clause != self.forgiven:
                raise

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        self.refuse(problem)
        return super().forward(self.repair(problem), q, k, v)

    def repair(self, problem: AttentionProblem) -> AttentionProblem:
        """The problem that is computed instead."""
        return problem


@deviates(
    "SET-RANGE", fault_class="K", report="FlashMLA's own tests: ids past the end; BR-79 NVIDIA/cudnn-frontend#676"
)
class ClampsPositionsIntoTheRequest(Forgives):
    """A position past the committed length becomes the last one."""

    forgiven = "SET-RANGE"

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        lists = problem.candidates
        if lists is None:
            return super().candidates(problem, where, qo_head)
        last = max(int(problem.seqlen_kv[where.request]) - 1, 0) // lists.block_size
        clamped = replace(lists, indices=np.minimum(lists.indices, last))
        return super().candidates(replace(problem, candidates=clamped), where, qo_head)


@deviates("SET-RANGE", fault_class="K", report="FlashMLA's own tests: INT_MIN among the indices")
class TakesEveryNegativeForAHole(Forgives):
    """Any negative entry is ignored like a hole; a position past the end is still refused."""

    forgiven = ""

    def refuse(self, problem: AttentionProblem) -> None:
        super().refuse(self.repair(problem))

    def repair(self, problem: AttentionProblem) -> AttentionProblem:
        lists = problem.candidates
        if lists is None:
            return problem
        return replace(problem, candidates=replace(lists, indices=np.maximum(lists.indices, HOLE)))


@deviates("SET-RANGE", fault_class="T", report="article 1, 7.3: ids checked against the batch's longest request")
class ChecksPositionsAgainstTheLongestRequest(Forgives):
    """A position is refused only where no request is that long; others read on in the page table."""

    forgiven = "SET-RANGE"

    def refuse(self, problem: AttentionProblem) -> None:
        lists, longest = problem.candidates, int(problem.seqlen_kv.max(initial=0))
        wild = lists is not None and ((lists.indices < HOLE) | (lists.indices * lists.block_size >= longest)).any()
        if wild:
            Steps().refuse(problem)
        super().refuse(problem)

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        longest = np.full_like(problem.seqlen_kv, problem.seqlen_kv.max(initial=0))
        listed = super().candidates(replace(problem, seqlen_kv=longest), where, qo_head) if problem.candidates else None
        if listed is None or not (listed.values >= problem.seqlen_kv[where.request]).any():
            return super().candidates(problem, where, qo_head)
        return Positions(listed.values[listed.values // problem.cache.page_size < problem.cache.page_table.shape[1]])


@deviates("SET-FORM", fault_class="K", report="article 1, 1.1 and 7.3: repeating a key as a weight")
class AcceptsAMultiset(Forgives):
    """A problem that asks for repeated keys gets them."""

    forgiven = "SET-FORM"

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        lists = problem.candidates
        if lists is None or lists.form == "set":
            return super().candidates(problem, where, qo_head)
        entries = lists.entries(problem.list_index(where, qo_head))
        seqlen_kv = int(problem.seqlen_kv[where.request])
        return Positions(expand_entries(entries[entries != HOLE], block_size=lists.block_size, seqlen_kv=seqlen_kv))


@deviates("COORD-PAGE-RANGE", fault_class="T", report="BR-61 microsoft/onnxruntime#32391")
class ReadsPageZeroForABadPage(Forgives):
    """A page outside the pool becomes page 0."""

    forgiven = "COORD-PAGE-RANGE"

    def repair(self, problem: AttentionProblem) -> AttentionProblem:
        cache = problem.cache
        needed = int(-(-problem.seqlen_kv // cache.page_size).max(initial=0))
        table = np.zeros((problem.batch_size, max(needed, cache.page_table.shape[1])), dtype=np.int64)
        table[:, : cache.page_table.shape[1]] = cache.page_table
        inside = (table >= 0) & (table < cache.num_pages)
        return replace(problem, cache=replace(cache, page_table=np.where(inside, table, 0)))


@deviates("SAFE-OWNER", fault_class="T", report="article 1, 1.1 and 7.3: another request's page")
class ReadsForeignPages(Forgives):
    """A page that belongs to another request is read."""

    forgiven = "SAFE-OWNER"


@deviates("SAFE-FINITE", fault_class="A", report="BR-79 NVIDIA/cudnn-frontend#676: sinks at infinity")
class TakesNumbersAsTheyCome(Forgives):
    """Scale, slopes, caps and sinks are not looked at."""

    forgiven = "SAFE-FINITE"

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        with np.errstate(all="ignore"):
            return super().forward(problem, q, k, v)


@deviates(
    "SAFE-SHAPE", fault_class="A", report="BR-112 flashinfer-ai/flashinfer#2201: offsets into a table of another shape"
)
class PadsMissingSlopes(Forgives):
    """Slopes that are missing are taken for 0."""

    forgiven = "SAFE-SHAPE"

    def repair(self, problem: AttentionProblem) -> AttentionProblem:
        spare = (0.0,) * problem.num_qo_heads
        rules = tuple(Alibi(r.slopes + spare) if isinstance(r, Alibi) else r for r in problem.score_rules)
        return replace(problem, score_rules=rules)


@deviates("SAFE-SHAPE", fault_class="A", report="SPEC: broadcasting where the problem has no broadcast")
class BroadcastsACacheOfOneHead(StepsBackend):
    """A cache with one KV head serves a problem that has several."""

    def inputs(self, problem: ProblemView, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        q, k, v = super().inputs(problem, tensors)
        heads = problem.spec.num_kv_heads
        k, v = (np.repeat(x, heads, axis=1) if x.shape[1] == 1 else x for x in (k, v))
        return q, k, v


@deviates(
    "SAFE-SHAPE", fault_class="D", report="article 1, 7.2: head_dim is never padded silently; BR-85 flashinfer#4299"
)
class PadsTheHeadDimOfQ(StepsBackend):
    """A q of a smaller head dimension is filled up with zeros."""

    def inputs(self, problem: ProblemView, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        q, k, v = super().inputs(problem, tensors)
        return np.pad(q, ((0, 0), (0, 0), (0, k.shape[2] - q.shape[2]))), k, v


@deviates("SAFE-SHAPE", fault_class="K", report="BR-44 vllm-project/vllm#51848: fewer lists than rows")
class ReusesTheLastList(Forgives):
    """Rows for which no list was given use the last one."""

    forgiven = "SAFE-SHAPE"

    def repair(self, problem: AttentionProblem) -> AttentionProblem:
        lists = problem.candidates
        want = problem.total_q * problem.num_qo_heads
        if lists is None or lists.num_lists >= want:
            return problem
        spare = want - lists.num_lists
        indptr = np.append(lists.indptr, np.full(spare, lists.indptr[-1]))
        return replace(problem, candidates=replace(lists, indptr=indptr))


@deviates("GQA-MAP", fault_class="G", report="article 2, 1.2: 5 query heads on 2 KV heads")
class RoundsTheGroupSizeDown(Forgives):
    """Query heads that do not divide among the KV heads are accepted, and the last ones share."""

    forgiven = "GQA-MAP"

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        return min(super().kv_head(problem, qo_head), problem.num_kv_heads - 1)


@deviates("MASK-WINDOW", fault_class="A", report="flash-attention: -1 stands for no window")
class ReadsANegativeWindowAsUnlimited(Forgives):
    """A negative window is no window."""

    forgiven = "MASK-WINDOW"

    def repair(self, problem: AttentionProblem) -> AttentionProblem:
        rule = problem.mask_rule
        if not isinstance(rule, Window):
            return problem
        sides = [None if side is None or side < 0 else side for side in (rule.left, rule.right)]
        return replace(problem, mask_rule=Window(*sides))


@deviates("SAFE-MEMORY", fault_class="C", report="no report: a workspace kept for each call")
class KeepsEveryOutput(StepsBackend):
    """Each call's output is kept for good."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.kept: list[torch.Tensor] = []

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        given = super().forward(problem, tensors)
        self.kept.append(given.out.repeat(4, 1, 1))
        return given
