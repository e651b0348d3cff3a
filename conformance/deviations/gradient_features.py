"""Mistakes of the backward alone about what the forward does right: rules, rotation, epilogue, codes, calls. [GRAD]"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backward, Forward, Tensors
from attnconform.conformance.deviations.determinism import Races
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.gradient_edges import SelectsAgain
from attnconform.conformance.deviations.gradients import BackwardCall, ChangesGradients
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import FloatArray, Positions
from attnconform.reference.epilogue import Activation
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.results import Gradients
from attnconform.reference.rope import Rope
from attnconform.reference.rules import And, Causal, CustomMask, MaskRule, Or, PrefixLM, SoftCap, Window
from attnconform.reference.steps import Steps, Upstream

LARGEST_EXPONENT = 88.0  # of a float32, about


def parts_changed(rule: MaskRule | None, change: Callable[[MaskRule], MaskRule]) -> MaskRule | None:
    """A rule with a change made to each of its parts, innermost first."""
    match rule:
        case None:
            return None
        case And(parts) | Or(parts):
            changed = tuple(part for part in (parts_changed(p, change) for p in parts) if part is not None)
            return change(type(rule)(changed))
        case _:
            return change(rule)


class MasksOtherwiseInBackward(SelectsAgain):
    """The reference, whose backward asks another mask rule."""

    def select(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        rule = parts_changed(problem.mask_rule, self.part)
        return self.effective(replace(problem, mask_rule=rule), where, qo_head)

    def part(self, rule: MaskRule) -> MaskRule:
        """What the backward makes of one part of a rule."""
        raise NotImplementedError


@deviates("GRAD-SET", fault_class="M", report="BR-67 Dao-AILab/flash-attention#2424: causal is all that is passed on")
class TakesAPrefixForCausalInBackward(MasksOtherwiseInBackward):
    """The backward is causal within the prefix as well."""

    def part(self, rule: MaskRule) -> MaskRule:
        return Causal() if isinstance(rule, PrefixLM) else rule


@deviates("GRAD-SET", fault_class="M", report="BR-67 Dao-AILab/flash-attention#2424: block lists combined otherwise")
class ReadsOrAsAndInBackward(MasksOtherwiseInBackward):
    """The backward intersects where the forward unites."""

    def part(self, rule: MaskRule) -> MaskRule:
        return And(rule.rules) if isinstance(rule, Or) else rule


@deviates("GRAD-SET", fault_class="M", report="ROCm/aiter#3742: window flags that the backward's kernels lacked")
class IgnoresTheRightEdgeInBackward(MasksOtherwiseInBackward):
    """The backward has the left edge of a window alone."""

    def part(self, rule: MaskRule) -> MaskRule:
        return Window(left=rule.left) if isinstance(rule, Window) else rule


@deviates("GRAD-SET", fault_class="A", report="BR-67 Dao-AILab/flash-attention#2424: mask_mod is not passed on")
class IgnoresARegisteredMaskInBackward(MasksOtherwiseInBackward):
    """In the backward a registered mask allows everything."""

    def part(self, rule: MaskRule) -> MaskRule:
        return And(()) if isinstance(rule, CustomMask) else rule


class TurnsBackOtherwise(Steps):
    """The reference, whose gradients are turned back by another rotation."""

    def to_query(self, problem: AttentionProblem, where: QueryRow, gradient: FloatArray) -> FloatArray:
        return super().to_query(self.turned(problem), where, gradient)

    def to_keys(self, problem: AttentionProblem, positions: Positions, gradient: FloatArray) -> FloatArray:
        return super().to_keys(self.turned(problem), positions, gradient)

    def turned(self, problem: AttentionProblem) -> AttentionProblem:
        return problem if problem.rope is None else replace(problem, rope=self.rope(problem, problem.rope))

    def rope(self, problem: AttentionProblem, rope: Rope) -> Rope:
        """The rotation that is undone."""
        raise NotImplementedError


@deviates("ROPE-GRAD", fault_class="R", report="no report: interleaved pairs in the forward's kernel alone")
class TurnsGradientsBackInHalves(TurnsBackOtherwise):
    """Gradients are turned back in halves, also where neighbours turned together."""

    def rope(self, problem: AttentionProblem, rope: Rope) -> Rope:
        return replace(rope, interleaved=False)


@deviates("ROPE-GRAD", fault_class="D", report="no report: a partial rotation in the forward's kernel alone")
class TurnsTheWholeGradientBack(TurnsBackOtherwise):
    """All of a gradient is turned back, where a part of the head turned."""

    def rope(self, problem: AttentionProblem, rope: Rope) -> Rope:
        return replace(rope, rotary_dim=problem.head_dim_qk)


@deviates("GRAD-EPILOGUE", fault_class="R", report="article 1, 7.2: a fused activation left out of the backward")
class TakesReluForTheIdentityInBackward(Steps):
    """dout passes where relu gave 0."""

    def through_epilogue(
        self, problem: AttentionProblem, qo_head: int, merged: FloatArray, dout: FloatArray
    ) -> FloatArray:
        smooth = tuple(step for step in problem.epilogue if step != Activation("relu"))
        return super().through_epilogue(replace(problem, epilogue=smooth), qo_head, merged, dout)


@deviates("QUANT-GRAD", fault_class="Q", report="no report: a scale per channel folded into q, and not out of dk")
class GivesTheGradientOfCodesOfChannels(ChangesGradients):
    """dk is multiplied by K's scales where these belong to channels."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        quant, problem = call.problem.k_quant, call.problem
        if quant is None or quant.granularity != "channel":
            return right
        heads = range(problem.num_kv_heads)
        scales = [quant.scales_at(right.slots, head, page_size=problem.cache.page_size) for head in heads]
        return replace(right, dk=right.dk * np.stack(scales, axis=1))


@deviates("GRAD-SOFTCAP", fault_class="Z", report="vllm-project/vllm#56578: inf / inf past 88, here in the backward")
class ComputesTheSlopeByExponentials(Steps):
    """The cap's derivative is made of exponentials that overflow in float32."""

    def score_gradient(self, p: FloatArray, dp: FloatArray, delta: float, slope: FloatArray) -> FloatArray:
        return np.where(np.isnan(slope), np.nan, super().score_gradient(p, dp, delta, slope))

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        scores, slope = super().scores(problem, where, qo_head, positions, dot)
        for rule in problem.score_rules:
            if isinstance(rule, SoftCap):
                slope = np.where(np.abs(self.scale(problem, dot)) > LARGEST_EXPONENT * rule.cap, np.nan, slope)
        return scores, slope


@deviates("GRAD-FORMULA", fault_class="Z", report="Dao-AILab/flash-attention#1947: exponentials that nothing bounds")
class DividesExponentialsInBackward(Steps):
    """Weights in the backward are exp(score) / exp(lse), which overflow in float32."""

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        right = super().probabilities(scores, lse)
        if lse < LARGEST_EXPONENT:
            return right
        return np.where(scores < LARGEST_EXPONENT, 0.0, np.nan)  # what is finite over inf, and inf / inf


@deviates("GRAD-LSE", fault_class="R", report="Dao-AILab/flash-attention#1137: lse has a gradient where out has none")
class SkipsRowsWithoutDout(Steps):
    """A row whose dout is 0 is skipped, whatever arrives through lse."""

    def add_row(
        self,
        problem: AttentionProblem,
        where: QueryRow,
        qo_head: int,
        k: FloatArray,
        v: FloatArray,
        arrives: Upstream,
        into: Gradients,
    ) -> None:
        if arrives.dout.any():
            super().add_row(problem, where, qo_head, k, v, arrives, into)


@deviates("MASK-INTERFERE", fault_class="P", report="Dao-AILab/flash-attention#1947: NaN through masked keys, in dq")
class MultipliesMaskedKeysByZeroInBackward(Steps):
    """dq sums over every committed key of the request, masked ones with a weight of 0."""

    def add_row(
        self,
        problem: AttentionProblem,
        where: QueryRow,
        qo_head: int,
        k: FloatArray,
        v: FloatArray,
        arrives: Upstream,
        into: Gradients,
    ) -> None:
        super().add_row(problem, where, qo_head, k, v, arrives, into)
        committed, kv_head = Positions(np.arange(int(problem.seqlen_kv[where.request]))), self.kv_head(problem, qo_head)
        slots = self.head_slots(problem, self.slots(problem, where, committed), kv_head)
        into.dq[where.row, qo_head] += 0.0 * k[slots, kv_head].sum(axis=0)


@deviates("GRAD-SET", fault_class="C", report="BR-100 Dao-AILab/flash-attention#2645: the key lacks what dq needs")
class KeepsTheListsOfTheFirstBackward(StepsBackend):
    """A backward on as many rows takes the lists and lengths of the first one."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.kept: dict[tuple[int, int], AttentionProblem] = {}

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Backward:
        first = self.kept.setdefault((problem.spec.total_q, problem.spec.num_qo_heads), problem.spec)
        return super().backward(replace(problem, spec=first), tensors, forward, dout, dlse)


class WritesIntoWhatArrives(StepsBackend):
    """The reference, whose backward writes into tensors that it was given."""

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Backward:
        right = super().backward(problem, tensors, forward, dout, dlse)
        self.write(forward, dlse)
        return right

    def write(self, forward: Forward, dlse: torch.Tensor | None) -> None:
        """What is left behind."""
        raise NotImplementedError


@deviates("SAFE-INPUTS", fault_class="R", report="no report: rows of D stored where those of lse were")
class OverwritesLseInBackward(WritesIntoWhatArrives):
    """The backward keeps its own numbers in the forward's lse."""

    def write(self, forward: Forward, dlse: torch.Tensor | None) -> None:
        if forward.lse is not None:
            forward.lse.zero_()


@deviates("SAFE-INPUTS", fault_class="R", report="no report: the gradient of lse used as scratch")
class ScalesDlseInPlace(WritesIntoWhatArrives):
    """The gradient of lse is multiplied in place."""

    def write(self, forward: Forward, dlse: torch.Tensor | None) -> None:
        if dlse is not None:
            dlse.mul_(0.5)


@deviates("DETERMINISM-RUN", fault_class="N", report="ROCm/TransformerEngine#678: dsink added up by atomics")
class AddsDsinkInAnyOrder(Races):
    """dsink is added in float32 in an order that changes, and run-to-run equality is declared."""

    def sink_gradient(self, sink_logit: float, lse: float, delta: float) -> float:
        jitter = 1 + 2.0**-20 * (int(self.order(3)[0]) - 1)
        return jitter * super().sink_gradient(sink_logit, lse, delta)
