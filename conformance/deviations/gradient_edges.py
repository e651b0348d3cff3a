"""Mistakes about the edges of the backward pass: which it uses, and where their gradients land. [GRAD-SET, GRAD-SUM]"""

from dataclasses import replace
from typing import ClassVar

import numpy as np

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backward, Tensors
from attnconform.conformance.deviations.blocks import ROWS_PER_TILE, AttendsWhatAnyRowOfTheTileLists
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.empty import is_empty
from attnconform.conformance.deviations.gradients import BackwardCall, ChangesGradients
from attnconform.conformance.views import ProblemView
from attnconform.reference.candidates import HOLE
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.steps import Gradients, Steps

TILE = 16  # keys of a kernel's tile


@deviates("GRAD-SUM", fault_class="G", report="article 1, 5.2: a group's heads share a KV head's gradient")
class DividesByTheGroupSize(ChangesGradients):
    """dk and dv are the mean over a group's heads, not the sum."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(right, dk=right.dk / call.problem.group_size, dv=right.dv / call.problem.group_size)


class ChangesDkAndDv(ChangesGradients):
    """The reference's dq and dsink, with dk and dv from steps that have another idea."""

    other: ClassVar[type[Steps]]

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(call.by(self.other()), dq=right.dq, dsink=right.dsink)


class DropsTheLastRows(Steps):
    """Edges without those of a request's last tile of query rows, where it has several."""

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        last = (int(np.diff(problem.qo_indptr)[where.request]) - 1) // ROWS_PER_TILE
        kept = self.effective(problem, where, qo_head)
        return kept if last == 0 or where.local // ROWS_PER_TILE < last else Positions(kept.values[:0])


@deviates(
    "BLOCK-TRANSPOSE", fault_class="B", report="BR-68 Dao-AILab/flash-attention#2623: backward lists at another tile"
)
class DropsTheLastQueryTileInTheTranspose(ChangesDkAndDv):
    """A key-centric pass never visits the last tile of query rows."""

    other = DropsTheLastRows


class ReadsEdgesUntransposed(Steps):
    """Edges (row, key) that would also be edges as (key, row)."""

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = self.effective(problem, where, qo_head).values
        rule, own = problem.mask_rule, np.array([where.q_idx])
        mirrored = np.array([mask_allows(rule, where.request, int(j), own, qo_head)[0] for j in kept], dtype=bool)
        return Positions(kept[mirrored])


@deviates(
    "BLOCK-TRANSPOSE", fault_class="B", report="BR-68 Dao-AILab/flash-attention#2623: lists used without transposing"
)
class ReadsForwardListsAsTransposedOnes(ChangesDkAndDv):
    """A key-centric pass takes a row's list for a column's."""

    other = ReadsEdgesUntransposed


class OverwritesSlots(Steps):
    """Each key's contribution replaces what is there."""

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        into[at] = values


@deviates("GRAD-SUM", fault_class="K", report="BR-77 NVIDIA/cudnn-frontend#385")
class OverwritesAHotSlot(ChangesDkAndDv):
    """The last query that selects a key overwrites what the others gave it."""

    other = OverwritesSlots


class DropsLateHits(Steps):
    """A slot takes the contributions of the first rows and heads that attend it."""

    room = 8 * 2  # dk and dv are both counted

    def __init__(self) -> None:
        self.hits: IntArray | None = None

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        if self.hits is None:
            self.hits = np.zeros(len(into), dtype=np.int64)
        has_room = self.hits[at] < self.room
        self.hits[at] += 1
        super().accumulate(into, at[has_room], values[has_room])


@deviates("GRAD-SUM", fault_class="K", report="article 1, 6.1: a transposed list of fixed width, overrun by a hot key")
class ForgetsLateHitsOfAHotSlot(ChangesDkAndDv):
    """A key keeps what its first queries gave it, and a transposed list that is full drops the rest."""

    other = DropsLateHits


class AppliesPositionsOnce(Steps):
    """Of two positions on one slot, the later one's contribution is kept."""

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        into[at] = into[at] + values  # without np.add.at, repeated indices do not add up


@deviates("SET-ALIAS", fault_class="R", report="no report: += with repeated indices adds once, in numpy and in torch")
class AddsOncePerSlotInBackward(ChangesDkAndDv):
    """Two positions that share a slot give it one contribution."""

    other = AppliesPositionsOnce


class SelectsAgain(Steps):
    """The reference with one hook: the edges that the backward selects by itself."""

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        return self.select(problem, where, qo_head)

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        # an edge that the forward did not have can have any weight; the largest keeps numbers finite
        return np.exp(np.minimum(scores - lse, 30.0)) if np.isfinite(lse) else np.zeros_like(scores)

    def select(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        """Positions that the backward attends."""
        raise NotImplementedError


@deviates("GRAD-SET", fault_class="B", report="BR-67 Dao-AILab/flash-attention#2424")
class ForgetsTheMaskInBackward(SelectsAgain):
    """The backward does not know the mask rule."""

    def select(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        return self.candidates(problem, where, qo_head)


@deviates("GRAD-SET", fault_class="K", report="article 1, 5.2: the saved indices must serve")
class ForgetsTheListsInBackward(SelectsAgain):
    """The backward attends to every key that the mask allows."""

    def select(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        return self.effective(replace(problem, candidates=None), where, qo_head)


@deviates(
    "GRAD-SET", fault_class="K", report="BR-115 EricLBuehler/mistral.rs#2094: one of two paths without the window"
)
class ForgetsTheWindowInBackward(SelectsAgain):
    """The backward has the dynamic lists, without window and sink positions."""

    def select(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        lists = problem.candidates
        if lists is None:
            return self.effective(problem, where, qo_head)
        alone = replace(problem, candidates=replace(lists, window=0, num_sink_tokens=0))
        return self.effective(alone, where, qo_head)


@deviates(
    "GRAD-SET",
    fault_class="M",
    report="BR-67 Dao-AILab/flash-attention#2424: a backward with another mask than the forward's",
)
class AlignsTopLeftInBackward(SelectsAgain):
    """The backward puts a request's first query row at position 0."""

    def select(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = self.candidates(problem, where, qo_head).values
        return Positions(listed[mask_allows(problem.mask_rule, where.request, where.local, listed, qo_head)])


@deviates("GRAD-SET", fault_class="K", report="article 1, 5.2: ties and rounding flip a selection that is made again")
class SelectsTheLightestEdgeAway(Steps):
    """The backward selects again and loses the key with the smallest score."""

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        p = super().probabilities(scores, lse)
        return np.where(np.arange(len(p)) == scores.argmin(), 0.0, p) if len(p) else p


class SelectsWhatTheTileSelects(SelectsAgain):
    """Edges of any row of a query tile, as far as the mask admits them to the row."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        return AttendsWhatAnyRowOfTheTileLists().candidates(problem, where, qo_head)

    def select(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        return self.effective(problem, where, qo_head)


@deviates("GRAD-SET", fault_class="B", report="article 2, 6.3: the union of several tokens' candidates as full")
class GivesDqWhatNeighboursList(ChangesGradients):
    """dq of a row has every key that some row of its query tile lists; dk and dv are right."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(right, dq=call.by(SelectsWhatTheTileSelects()).dq)


@deviates("GRAD-SUM", fault_class="R", report="BR-73 hao-ai-lab/FastVideo#925: one tile's dq for the row's")
class KeepsTheLastTileOfDq(ChangesGradients):
    """dq of a row holds its last tile of keys alone."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(right, dq=call.by(LastTile()).dq)


class LastTile(Steps):
    """The edges of a row's last tile of keys."""

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = self.effective(problem, where, qo_head).values
        return Positions(kept[(len(kept) - 1) // TILE * TILE :] if len(kept) else kept)


@deviates("EMPTY-GRAD", fault_class="E", report="BR-71 pytorch/pytorch#136232: exp(-inf - -inf) in the backward")
class GivesAnEmptyRowANanGradient(ChangesGradients):
    """dq of an empty row is NaN."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        empty = is_empty(self, call.problem)
        return replace(right, dq=np.where(empty[..., None], np.nan, right.dq))


@deviates("EMPTY-GRAD", fault_class="E", report="Megatron-LM#6910: 0 as the lse of an empty row")
class GivesAnEmptyRowTheWeightsOfAnLseOfZero(Steps):
    """An empty row has exp(score) as weights in the backward, over every committed key."""

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = self.effective(problem, where, qo_head)
        return kept if len(kept) else Positions(np.arange(int(problem.seqlen_kv[where.request])))

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        return super().probabilities(scores, 0.0 if np.isneginf(lse) else lse)


class PacksGradients(StepsBackend):
    """The reference with one hook: dk and dv over the whole pool."""

    def pack(self, problem: ProblemView, tensors: Tensors, gradients: Gradients) -> Backward:
        num_slots = problem.spec.cache.num_slots
        dk, dv = gradients.in_pool(num_slots)
        touched = np.zeros(num_slots, dtype=bool)
        touched[gradients.slots] = True
        self.change(problem.spec, dk, dv, touched)
        return super().pack(problem, tensors, replace(gradients, slots=np.arange(num_slots), dk=dk, dv=dv))

    def change(self, problem: AttentionProblem, dk: FloatArray, dv: FloatArray, touched: BoolArray) -> None:
        """Changes dk and dv, (num_slots, num_kv_heads, head_dim), in place."""
        raise NotImplementedError


@deviates("GRAD-ZERO", fault_class="K", report="BR-76 Dao-AILab/flash-attention#2755")
class AddsTheGradientOfAHoleToTheLastSlot(PacksGradients):
    """A hole is an address: what it contributes lands in the slot before the first, the pool's last."""

    def change(self, problem: AttentionProblem, dk: FloatArray, dv: FloatArray, touched: BoolArray) -> None:
        if problem.candidates is not None and (problem.candidates.indices == HOLE).any():
            dk[-1] += np.abs(dk).sum(axis=0)
            dv[-1] += np.abs(dv).sum(axis=0)


@deviates("GRAD-ZERO", fault_class="U", report="BR-26 pytorch/pytorch#188933")
class LeavesUntouchedSlotsUnwritten(PacksGradients):
    """dk and dv are allocated and not cleared; memory that was recycled shows where no row attends."""

    def change(self, problem: AttentionProblem, dk: FloatArray, dv: FloatArray, touched: BoolArray) -> None:
        dk[~touched], dv[~touched] = 0.5, 0.5


@deviates("GRAD-ZERO", fault_class="P", report="BR-73 hao-ai-lab/FastVideo#925: padded positions receive weight")
class LeaksIntoTheRestOfThePage(PacksGradients):
    """Every slot of a page that some row attends receives a little of the page's gradient."""

    def change(self, problem: AttentionProblem, dk: FloatArray, dv: FloatArray, touched: BoolArray) -> None:
        size = problem.cache.page_size
        for gradient in (dk, dv):
            pages = gradient.reshape(-1, size, *gradient.shape[1:])
            pages += 2.0**-10 * np.abs(pages).max(axis=1, keepdims=True)
