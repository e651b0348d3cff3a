"""Mistakes in the formulas of the backward pass; the forward is right in all of them. [GRAD]"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backward, Forward, Tensors
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import FloatArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rules import SoftCap
from attnconform.reference.steps import AttentionResult, Gradients, Steps


@dataclass(frozen=True)
class BackwardCall:
    """What a backward pass is given."""

    problem: AttentionProblem
    q: FloatArray
    k: FloatArray
    v: FloatArray
    result: AttentionResult
    dout: FloatArray
    dlse: FloatArray | None

    def by(self, steps: Steps) -> Gradients:
        """The gradients as some steps compute them."""
        return steps.backward(self.problem, self.q, self.k, self.v, self.result, self.dout, self.dlse)


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
        call = BackwardCall(problem, q, k, v, result, dout, dlse)
        return self.change(call, call.by(Steps()))

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        """The gradients that are returned."""
        raise NotImplementedError


@deviates("GRAD-FORMULA", fault_class="R", report="BR-68 Dao-AILab/flash-attention#2623: one gradient off by a factor")
class ForgetsTheScaleInDq(ChangesGradients):
    """dq lacks sm_scale."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(right, dq=right.dq / call.problem.sm_scale)


@deviates("GRAD-FORMULA", fault_class="R", report="BR-68 Dao-AILab/flash-attention#2623: one gradient off by a factor")
class ForgetsTheScaleInDk(ChangesGradients):
    """dk lacks sm_scale."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(right, dk=right.dk / call.problem.sm_scale)


@deviates("GRAD-FORMULA", fault_class="R", report="BR-91 huggingface/diffusers#14338")
class SwapsDkAndDv(ChangesGradients):
    """dk and dv are returned for each other where their shapes allow it."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(right, dk=right.dv, dv=right.dk) if right.dk.shape == right.dv.shape else right


@deviates("GRAD-SINK", fault_class="R", report="BR-82 NVIDIA/cudnn-frontend#421")
class LeavesDsinkAtZero(ChangesGradients):
    """dsink is never accumulated."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(right, dsink=None if right.dsink is None else np.zeros_like(right.dsink))


class UsesUnnormalizedWeights(Steps):
    """Weights without the division by the sum."""

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        return np.exp(scores - scores.max()) if len(scores) else scores


@deviates("GRAD-FORMULA", fault_class="R", report="BR-92 HKUSTDial/flash-sparse-attention#121: dv alone is wrong")
class ForgetsToNormalizeInDv(ChangesGradients):
    """dv is made of weights that are not normalized; dq and dk are right."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(right, dv=call.by(UsesUnnormalizedWeights()).dv)


@deviates("GQA-MAP", fault_class="G", report="BR-83 XunhaoLai/native-sparse-attention-triton#27: in backward alone")
class MapsHeadsInterleavedInBackward(ChangesGradients):
    """The forward's head map is right, the backward's is interleaved."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return call.by(Interleaved())


class Interleaved(Steps):
    """The other head map."""

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        return qo_head % problem.num_kv_heads

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        return np.exp(np.minimum(scores - lse, 30.0)) if len(scores) else scores


@deviates("GRAD-FORMULA", fault_class="R", report="BR-67 Dao-AILab/flash-attention#2424: score_mod not passed on")
class ForgetsScoreRulesInBackward(ChangesGradients):
    """The backward recomputes weights without ALiBi and soft cap, from an lse that has them."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(call, problem=replace(call.problem, score_rules=())).by(Steps())


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


@deviates(
    "GRAD-SOFTCAP", fault_class="R", report="BR-89 Dao-AILab/flash-attention#2402: a derivative with the wrong power"
)
class ForgetsToSquareTheTanh(Steps):
    """The derivative of the soft cap is 1 - |tanh|."""

    def score_gradient(self, p: FloatArray, dp: FloatArray, delta: float, slope: FloatArray) -> FloatArray:
        return np.asarray(p * (dp - delta) * (1 - np.sqrt(1 - slope)))


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


@deviates("SAFE-INPUTS", fault_class="R", report="no report: dout used as scratch while autograd may still need it")
class ScalesDoutInPlace(ReadsDout):
    """dout is multiplied in place."""

    def read(self, dout: torch.Tensor) -> torch.Tensor:
        before = dout.clone()
        dout.mul_(0.5)
        return before
