"""Mistakes of the backward pass. The forward is right in all of them. [GRAD]"""

from dataclasses import replace

import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backward, Forward, Tensors
from attnconform.conformance.deviations.blocks import ROWS_PER_TILE
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.views import ProblemView
from attnconform.reference.candidates import HOLE
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.rules import SoftCap
from attnconform.reference.steps import AttentionResult, Gradients, Steps

TILE = 16  # keys of a kernel's tile


class ChangesGradients(Steps):
    """The reference with one hook: what happens to right gradients."""

    def backward(
        self,
        problem: AttentionProblem,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        result: AttentionResult,
        dout: FloatArray,
        dlse: FloatArray | None = None,
    ) -> Gradients:
        return self.change(problem, super().backward(problem, q, k, v, result, dout, dlse))

    def change(self, problem: AttentionProblem, right: Gradients) -> Gradients:
        """The gradients that are returned."""
        raise NotImplementedError


@deviates("GRAD-FORMULA", fault_class="R", report="BR-68 Dao-AILab/flash-attention#2623: one gradient off by a factor")
class ForgetsTheScaleInDq(ChangesGradients):
    """dq lacks sm_scale."""

    def change(self, problem: AttentionProblem, right: Gradients) -> Gradients:
        return replace(right, dq=right.dq / problem.sm_scale)


@deviates("GRAD-FORMULA", fault_class="R", report="BR-68 Dao-AILab/flash-attention#2623: one gradient off by a factor")
class ForgetsTheScaleInDk(ChangesGradients):
    """dk lacks sm_scale."""

    def change(self, problem: AttentionProblem, right: Gradients) -> Gradients:
        return replace(right, dk=right.dk / problem.sm_scale)


@deviates("GRAD-FORMULA", fault_class="R", report="BR-91 huggingface/diffusers#14338")
class SwapsDkAndDv(ChangesGradients):
    """dk and dv are returned for each other where their shapes allow it."""

    def change(self, problem: AttentionProblem, right: Gradients) -> Gradients:
        return replace(right, dk=right.dv, dv=right.dk) if right.dk.shape == right.dv.shape else right


@deviates("GRAD-SUM", fault_class="G", report="article 1, 5.2: a group's heads share a KV head's gradient")
class DividesByTheGroupSize(ChangesGradients):
    """dk and dv are the mean over a group's heads, not the sum."""

    def change(self, problem: AttentionProblem, right: Gradients) -> Gradients:
        return replace(right, dk=right.dk / problem.group_size, dv=right.dv / problem.group_size)


@deviates("GRAD-SINK", fault_class="R", report="BR-82 NVIDIA/cudnn-frontend#421")
class LeavesDsinkAtZero(ChangesGradients):
    """dsink is never accumulated."""

    def change(self, problem: AttentionProblem, right: Gradients) -> Gradients:
        return replace(right, dsink=None if right.dsink is None else np.zeros_like(right.dsink))


class ChangesOneGradient(Steps):
    """The reference with its own dq, and dk and dv from steps with another idea."""

    other: type[Steps]

    def backward(
        self,
        problem: AttentionProblem,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        result: AttentionResult,
        dout: FloatArray,
        dlse: FloatArray | None = None,
    ) -> Gradients:
        right = super().backward(problem, q, k, v, result, dout, dlse)
        wrong = self.other().backward(problem, q, k, v, result, dout, dlse)
        return replace(wrong, dq=right.dq, dsink=right.dsink)


class DropsTheLastRows(Steps):
    """Edges without those of a request's last tile of query rows, where it has several."""

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        last = (int(np.diff(problem.qo_indptr)[where.request]) - 1) // ROWS_PER_TILE
        kept = self.effective(problem, where, qo_head)
        return kept if last == 0 or where.local // ROWS_PER_TILE < last else Positions(kept.values[:0])


@deviates("BLOCK-TRANSPOSE", fault_class="B", report="BR-68 Dao-AILab/flash-attention#2623: backward lists at another tile")
class DropsTheLastQueryTileInTheTranspose(ChangesOneGradient):
    """A key-centric pass never visits the last tile of query rows."""

    other = DropsTheLastRows


class ReadsEdgesUntransposed(Steps):
    """Edges (row, key) that would also be edges as (key, row)."""

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = self.effective(problem, where, qo_head).values
        rule, own = problem.mask_rule, np.array([where.q_idx])
        mirrored = np.array([mask_allows(rule, where.request, int(j), own)[0] for j in kept], dtype=bool)
        return Positions(kept[mirrored])


@deviates("BLOCK-TRANSPOSE", fault_class="B", report="BR-68 Dao-AILab/flash-attention#2623: lists used without transposing")
class ReadsForwardListsAsTransposedOnes(ChangesOneGradient):
    """A key-centric pass takes a row's list for a column's."""

    other = ReadsEdgesUntransposed


class OverwritesSlots(Steps):
    """Each key's contribution replaces what is there."""

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        into[at] = values


@deviates("GRAD-SUM", fault_class="K", report="BR-77 NVIDIA/cudnn-frontend#385")
class OverwritesAHotSlot(ChangesOneGradient):
    """The last query that selects a key overwrites what the others gave it."""

    other = OverwritesSlots


class DropsLateHits(Steps):
    """A slot takes the contributions of the first eight rows and heads."""

    def backward(
        self,
        problem: AttentionProblem,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        result: AttentionResult,
        dout: FloatArray,
        dlse: FloatArray | None = None,
    ) -> Gradients:
        self.hits = np.zeros(len(self.touched_slots(problem)), dtype=np.int64)
        return super().backward(problem, q, k, v, result, dout, dlse)

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        has_room = self.hits[at] < 8 * 2  # dk and dv are both counted
        self.hits[at] += 1
        super().accumulate(into, at[has_room], values[has_room])


@deviates("GRAD-SUM", fault_class="K", report="article 1, 6.1: a transposed list of fixed width, overrun by a hot key")
class ForgetsLateHitsOfAHotSlot(ChangesOneGradient):
    """A key keeps what its first queries gave it, and a transposed list that is full drops the rest."""

    other = DropsLateHits


class AppliesPositionsOnce(Steps):
    """Of two positions on one slot, the later one's contribution is kept."""

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        into[at] = into[at] + values  # without np.add.at, repeated indices do not add up


@deviates("SET-ALIAS", fault_class="R", report="torch and numpy: += with repeated indices adds once")
class AddsOncePerSlotInBackward(ChangesOneGradient):
    """Two positions that share a slot give it one contribution."""

    other = AppliesPositionsOnce


class UsesUnnormalizedWeights(Steps):
    """Weights without the division by the sum."""

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        return np.exp(scores - scores.max()) if len(scores) else scores


@deviates("GRAD-FORMULA", fault_class="R", report="BR-92 HKUSTDial/flash-sparse-attention#121: dv alone is wrong")
class ForgetsToNormalizeInDv(Steps):
    """dv is made of weights that are not normalized; dq and dk are right."""

    def backward(
        self,
        problem: AttentionProblem,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        result: AttentionResult,
        dout: FloatArray,
        dlse: FloatArray | None = None,
    ) -> Gradients:
        right = super().backward(problem, q, k, v, result, dout, dlse)
        return replace(right, dv=UsesUnnormalizedWeights().backward(problem, q, k, v, result, dout, dlse).dv)


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


@deviates("GRAD-SET", fault_class="K", report="BR-115 EricLBuehler/mistral.rs#2094: one of two paths without the window")
class ForgetsTheWindowInBackward(SelectsAgain):
    """The backward has the dynamic lists, without window and sink positions."""

    def select(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        lists = problem.candidates
        if lists is None:
            return self.effective(problem, where, qo_head)
        alone = replace(problem, candidates=replace(lists, window=0, num_sink_tokens=0))
        return self.effective(alone, where, qo_head)


@deviates("GRAD-SET", fault_class="M", report="BR-88 family: a backward with the other alignment of its mask")
class AlignsTopLeftInBackward(SelectsAgain):
    """The backward puts a request's first query row at position 0."""

    def select(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = self.candidates(problem, where, qo_head).values
        return Positions(listed[mask_allows(problem.mask_rule, where.request, where.local, listed)])


@deviates("GRAD-SET", fault_class="K", report="article 1, 5.2: ties and rounding flip a selection that is made again")
class SelectsTheLightestEdgeAway(Steps):
    """The backward selects again and loses the key with the smallest score."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        scores, slope = super().scores(problem, where, qo_head, positions, dot)
        if self.in_backward and len(scores):
            scores[int(scores.argmin())] = -np.inf
        return scores, slope

    in_backward = False

    def backward(
        self,
        problem: AttentionProblem,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        result: AttentionResult,
        dout: FloatArray,
        dlse: FloatArray | None = None,
    ) -> Gradients:
        self.in_backward = True
        try:
            return super().backward(problem, q, k, v, result, dout, dlse)
        finally:
            self.in_backward = False


@deviates("GRAD-SET", fault_class="G", report="BR-83 XunhaoLai/native-sparse-attention-triton#27: interleaved in backward alone")
class MapsHeadsInterleavedInBackward(Steps):
    """The forward's head map is right, the backward's is interleaved."""

    def backward(
        self,
        problem: AttentionProblem,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        result: AttentionResult,
        dout: FloatArray,
        dlse: FloatArray | None = None,
    ) -> Gradients:
        return Interleaved().backward(problem, q, k, v, result, dout, dlse)


class Interleaved(Steps):
    """The other head map."""

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        return qo_head % problem.num_kv_heads

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        return np.exp(np.minimum(scores - lse, 30.0)) if len(scores) else scores


@deviates("GRAD-FORMULA", fault_class="R", report="BR-67 Dao-AILab/flash-attention#2424: score_mod not passed on")
class ForgetsScoreRulesInBackward(Steps):
    """The backward recomputes weights without ALiBi and soft cap, from an lse that has them."""

    def backward(
        self,
        problem: AttentionProblem,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        result: AttentionResult,
        dout: FloatArray,
        dlse: FloatArray | None = None,
    ) -> Gradients:
        return super().backward(replace(problem, score_rules=()), q, k, v, result, dout, dlse)


@deviates("GRAD-FORMULA", fault_class="R", report="article 1, 5.2: D = rowsum(dO * O)")
class ForgetsDelta(Steps):
    """The softmax's own correction is left out."""

    def delta(self, dout: FloatArray, out: FloatArray, dlse: float) -> float:
        return -dlse


@deviates("GRAD-FORMULA", fault_class="R", report="BR-68 Dao-AILab/flash-attention#2623: the sign of a correction")
class AddsDelta(Steps):
    """The softmax's own correction has the wrong sign."""

    def delta(self, dout: FloatArray, out: FloatArray, dlse: float) -> float:
        return -float(dout @ out) - dlse


@deviates("GRAD-FORMULA", fault_class="L", report="BR-37 sgl-project/sglang#35045, in the backward")
class ReadsASavedLseInBaseTwo(Steps):
    """The backward takes the saved lse for a logarithm to base 2."""

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        return super().probabilities(scores, lse * float(np.log(2.0)))


@deviates("GRAD-LSE", fault_class="R", report="flash-attention#404: lse has no gradient by design, undeclared here")
class IgnoresDlse(Steps):
    """The gradient that enters by lse is dropped."""

    def delta(self, dout: FloatArray, out: FloatArray, dlse: float) -> float:
        return float(dout @ out)


@deviates("GRAD-LSE", fault_class="R", report="article 1, 5.2: delta less dlse")
class AddsDlseWithTheWrongSign(Steps):
    """The gradient that enters by lse has the wrong sign."""

    def delta(self, dout: FloatArray, out: FloatArray, dlse: float) -> float:
        return float(dout @ out) + dlse


@deviates("GRAD-SOFTCAP", fault_class="R", report="BR-89 Dao-AILab/flash-attention#2402")
class ForgetsTheSlopeOfTheCap(Steps):
    """The derivative of the soft cap is taken for 1."""

    def score_gradient(self, p: FloatArray, dp: FloatArray, delta: float, slope: FloatArray) -> FloatArray:
        return p * (dp - delta)


@deviates("GRAD-SOFTCAP", fault_class="R", report="BR-89 Dao-AILab/flash-attention#2402: derivative at another point")
class TakesTheSlopeAtTheCappedScore(Steps):
    """The derivative of the soft cap is evaluated at the score after the cap."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        scores, slope = super().scores(problem, where, qo_head, positions, dot)
        for rule in problem.score_rules:
            if isinstance(rule, SoftCap):
                slope = 1 - np.tanh(scores / rule.cap) ** 2
        return scores, slope


@deviates("GRAD-SOFTCAP", fault_class="R", report="1 - tanh for 1 - tanh^2")
class ForgetsToSquareTheTanh(Steps):
    """The derivative of the soft cap is 1 - |tanh|."""

    def score_gradient(self, p: FloatArray, dp: FloatArray, delta: float, slope: FloatArray) -> FloatArray:
        return p * (dp - delta) * (1 - np.sqrt(1 - slope))


@deviates("GRAD-SINK", fault_class="R", report="BR-79 NVIDIA/cudnn-frontend#676: wrong dSink")
class GivesDsinkTheWrongSign(Steps):
    """dsink is that of a sink that would raise the output."""

    def sink_gradient(self, sink_logit: float, lse: float, delta: float) -> float:
        return -super().sink_gradient(sink_logit, lse, delta)


@deviates("GRAD-SINK", fault_class="R", report="article 1, 5.2: p of the sink left out of its gradient")
class ForgetsTheWeightOfTheSink(Steps):
    """dsink is the sum of deltas, without the sink's weight."""

    def sink_gradient(self, sink_logit: float, lse: float, delta: float) -> float:
        return -delta


@deviates("GRAD-SINK", fault_class="R", report="BR-82 NVIDIA/cudnn-frontend#421: not in the backward's denominator")
class LeavesTheSinkOutOfTheBackwardsDenominator(Steps):
    """Weights in the backward sum to 1 without the sink."""

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        p = super().probabilities(scores, lse)
        return p / p.sum() if len(p) and p.sum() > 0 else p


@deviates("GRAD-SUM", fault_class="R", report="BR-73 hao-ai-lab/FastVideo#925: one tile's dq for the row's")
class KeepsTheLastTileOfDq(Steps):
    """dq of a row holds its last tile of keys alone."""

    def backward(
        self,
        problem: AttentionProblem,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        result: AttentionResult,
        dout: FloatArray,
        dlse: FloatArray | None = None,
    ) -> Gradients:
        right = super().backward(problem, q, k, v, result, dout, dlse)
        return replace(right, dq=LastTile().backward(problem, q, k, v, result, dout, dlse).dq)


class LastTile(Steps):
    """The edges of a row's last tile of keys."""

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = self.effective(problem, where, qo_head).values
        return Positions(kept[(len(kept) - 1) // TILE * TILE :] if len(kept) else kept)


@deviates("EMPTY-GRAD", fault_class="E", report="BR-71 pytorch/pytorch#136232: exp(-inf - -inf) in the backward")
class GivesAnEmptyRowANanGradient(ChangesGradients):
    """dq of an empty row is NaN."""

    def change(self, problem: AttentionProblem, right: Gradients) -> Gradients:
        dq = right.dq.copy()
        for where in problem.rows():
            for h in range(problem.num_qo_heads):
                if not len(self.effective(problem, where, h)):
                    dq[where.row, h] = np.nan
        return replace(right, dq=dq)


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

    def change(self, problem: AttentionProblem, dk: FloatArray, dv: FloatArray, touched: np.ndarray) -> None:  # type: ignore[type-arg]
        """Changes dk and dv, (num_slots, num_kv_heads, head_dim), in place."""
        raise NotImplementedError


@deviates("GRAD-ZERO", fault_class="K", report="BR-76 Dao-AILab/flash-attention#2755")
class AddsTheGradientOfAHoleToTheLastSlot(PacksGradients):
    """A hole is an address: what it contributes lands in the slot before the first, the pool's last."""

    def change(self, problem: AttentionProblem, dk: FloatArray, dv: FloatArray, touched: np.ndarray) -> None:  # type: ignore[type-arg]
        if problem.candidates is not None and (problem.candidates.indices == HOLE).any():
            dk[-1] += np.abs(dk).sum(axis=0)
            dv[-1] += np.abs(dv).sum(axis=0)


@deviates("GRAD-ZERO", fault_class="U", report="BR-26 pytorch/pytorch#188933")
class LeavesUntouchedSlotsUnwritten(PacksGradients):
    """dk and dv are allocated and not cleared; memory that was recycled shows where no row attends."""

    def change(self, problem: AttentionProblem, dk: FloatArray, dv: FloatArray, touched: np.ndarray) -> None:  # type: ignore[type-arg]
        dk[~touched], dv[~touched] = 0.5, 0.5


@deviates("GRAD-ZERO", fault_class="P", report="BR-73 hao-ai-lab/FastVideo#925: padded positions receive weight")
class LeaksIntoTheRestOfThePage(PacksGradients):
    """Every slot of a page that some row attends receives a little of the page's gradient."""

    def change(self, problem: AttentionProblem, dk: FloatArray, dv: FloatArray, touched: np.ndarray) -> None:  # type: ignore[type-arg]
        size = problem.cache.page_size
        for gradient in (dk, dv):
            pages = gradient.reshape(-1, size, *gradient.shape[1:])
            pages += 2.0**-10 * np.abs(pages).max(axis=1, keepdims=True)


class ReadsDout(StepsBackend):
    """The reference with one hook: how dout is read."""

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Backward:
        return super().backward(problem, tensors, forward, self.read(dout), dlse)

    def read(self, dout: torch.Tensor) -> torch.Tensor:
        """dout as the mistake sees it."""
        raise NotImplementedError


@deviates("GRAD-FORMULA", fault_class="R", report="BR-88 Dao-AILab/flash-attention#355: dout read in another layout")
class ReadsDoutHeadMajor(ReadsDout):
    """dout is read as (head, row) where it is (row, head)."""

    def read(self, dout: torch.Tensor) -> torch.Tensor:
        rows, heads, dim = dout.shape
        return dout.reshape(heads, rows, dim).transpose(0, 1)


@deviates("COORD-STRIDE", fault_class="R", report="BR-88 Dao-AILab/flash-attention#355")
class IgnoresTheStridesOfDout(ReadsDout):
    """dout is read as if it were contiguous."""

    def read(self, dout: torch.Tensor) -> torch.Tensor:
        rows, heads, dim = dout.shape
        return torch.as_strided(dout, (rows, heads, dim), (heads * dim, dim, 1))


@deviates("SAFE-INPUTS", fault_class="R", report="scratch taken from dout, which autograd may still need")
class ScalesDoutInPlace(ReadsDout):
    """dout is multiplied in place."""

    def read(self, dout: torch.Tensor) -> torch.Tensor:
        before = dout.clone()
        dout.mul_(0.5)
        return before
