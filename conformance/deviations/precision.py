"""Arithmetic of a lower precision than the one declared. [BOUND]"""

from dataclasses import replace

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Forward, Tensors
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.merge import InPieces, from_output
from attnconform.conformance.views import ProblemView
from attnconform.reference.attention import check_tensors
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rules import SoftCap
from attnconform.reference.states import PartialState, finish
from attnconform.reference.steps import AttentionResult, Steps

FAST_TANH_ERROR = 2.0**-11  # what the hardware's approximate tanh gives
NEGLIGIBLE = 7.0  # nats below the maximum at which a key is skipped


def rounded(values: FloatArray, dtype: npt.DTypeLike) -> FloatArray:
    """The nearest numbers that a format holds, as float64."""
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(values).astype(dtype).astype(np.float64)


def cut(values: FloatArray, bits: int) -> FloatArray:
    """Numbers with all but so many bits of their significand cut off."""
    significand, exponent = np.frexp(values)
    return np.asarray(np.ldexp(np.trunc(np.ldexp(significand, bits)), exponent - bits))


class RoundsWeights(Steps):
    """The reference with one hook: how weights and values are summed, for a row that is not empty."""

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        if not len(scores):
            return super().state(scores, v)
        m = float(scores.max())
        return self.sums(m, np.exp(scores - m), v)

    def sums(self, m: float, p: FloatArray, v: FloatArray) -> PartialState:
        """The state, from the maximum, the weights and the values."""
        raise NotImplementedError


@deviates("BOUND-OUT", fault_class="Q", report="no report: an fp8 path that is not declared")
class StoresWeightsInFp8(RoundsWeights):
    """Weights are rounded to fp8 e4m3 before they meet V."""

    def sums(self, m: float, p: FloatArray, v: FloatArray) -> PartialState:
        return PartialState(m, float(p.sum()), rounded(p, ml_dtypes.float8_e4m3fn) @ v)


@deviates("BOUND-OUT", fault_class="Q", report="no report: a kernel for half precision that also takes float32")
class StoresWeightsInBf16(RoundsWeights):
    """Weights are rounded to bf16 whatever the dtype of the problem."""

    def sums(self, m: float, p: FloatArray, v: FloatArray) -> PartialState:
        return PartialState(m, float(p.sum()), rounded(p, ml_dtypes.bfloat16) @ v)


class KnowsTheDtype(StepsBackend):
    """The reference with steps that depend on the dtype of the problem."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        q, k, v = self.inputs(problem, tensors)
        check_tensors(problem.spec, q, k, v)
        result = self.steps_for(tensors.q.dtype).forward(problem.spec, q, k, v)
        self.store(tensors, result)
        return Forward(tensors.out, tensors.lse, saved=result)

    def steps_for(self, dtype: torch.dtype) -> Steps:
        """The steps of one dtype."""
        raise NotImplementedError


class CutsWeights(RoundsWeights):
    """Weights are cut to some bits, which lowers all of them."""

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def sums(self, m: float, p: FloatArray, v: FloatArray) -> PartialState:
        return PartialState(m, float(p.sum()), cut(p, self.bits) @ v)


@deviates("BOUND-PROBABILISTIC", fault_class="Q", report="no report: a cut where a rounding to nearest is declared")
class CutsWeightsWhereTheyAreToBeRounded(KnowsTheDtype):
    """Weights are cut to the declared format, not rounded: inside the worst case, and on one side of it throughout."""

    def steps_for(self, dtype: torch.dtype) -> Steps:
        return {torch.bfloat16: CutsWeights(8), torch.float16: CutsWeights(11)}.get(dtype, Steps())


@deviates("BOUND-OUT", fault_class="Q", report="no report: accumulators in the storage dtype")
class AccumulatesInBf16(RoundsWeights):
    """The running output is rounded to bf16 after every key."""

    def sums(self, m: float, p: FloatArray, v: FloatArray) -> PartialState:
        o = np.zeros(v.shape[1])
        for weight, value in zip(p, v, strict=True):
            o = rounded(o + weight * value, ml_dtypes.bfloat16)
        return PartialState(m, float(p.sum()), o)


@deviates("BOUND-OUT", fault_class="Q", report="no report: a sum that runs out of bits")
class AccumulatesTheSumInFp16(RoundsWeights):
    """The running sum of weights is rounded to fp16 after every key."""

    def sums(self, m: float, p: FloatArray, v: FloatArray) -> PartialState:
        total = 0.0
        for weight in p:
            total = float(rounded(np.array(total + weight), np.float16))
        return PartialState(m, total, p @ v)


@deviates("BOUND-OUT", fault_class="Q", report="no report: skipping by a threshold, undeclared")
class SkipsKeysFarBelowTheMaximum(RoundsWeights):
    """A key whose weight is below e^-7 of the largest is skipped."""

    def sums(self, m: float, p: FloatArray, v: FloatArray) -> PartialState:
        kept = p > np.exp(-NEGLIGIBLE)
        return PartialState(m, float(p[kept].sum()), p[kept] @ v[kept])


@deviates("BOUND-OUT", fault_class="Q", report="no report: exp2 by a short polynomial")
class UsesAShortPolynomialForExp(RoundsWeights):
    """2^f is a cubic in f, good to 1e-4."""

    def sums(self, m: float, p: FloatArray, v: FloatArray) -> PartialState:
        whole, part = np.floor(np.log2(np.maximum(p, 1e-300))), np.log2(np.maximum(p, 1e-300)) % 1.0
        p = np.exp2(whole) * (1 + part * (0.695976 + part * (0.224494 + part * 0.07944)))
        return PartialState(m, float(p.sum()), p @ v)


@deviates("BOUND-OUT", fault_class="Q", report="no report: scores in the storage dtype")
class StoresScoresInFp16(Steps):
    """Scores are rounded to fp16."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        scores, slope = super().scores(problem, where, qo_head, positions, dot)
        return rounded(scores, np.float16), slope


@deviates("BOUND-OUT", fault_class="Q", report="no report: tanh.approx.f32, where tanh is declared to 8 roundoffs")
class UsesAFastTanh(Steps):
    """The soft cap's tanh is good to 2^-11."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        scores, slope = super().scores(problem, where, qo_head, positions, dot)
        for rule in problem.score_rules:
            if isinstance(rule, SoftCap):  # an error that swings with the argument, as an approximation's does
                scores = scores * (1 + FAST_TANH_ERROR * np.cos(64 * scores / rule.cap))
        return scores, slope


class RoundsInputs(StepsBackend):
    """The reference with one hook: what happens to q, k and v on the way in, where they are float32."""

    def inputs(self, problem: ProblemView, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        q, k, v = super().inputs(problem, tensors)
        if tensors.q.dtype != torch.float32:
            return q, k, v
        return self.round(q), self.round(k), self.round(v)

    def round(self, values: FloatArray) -> FloatArray:
        """Operands as the products see them."""
        raise NotImplementedError


@deviates("BOUND-OUT", fault_class="Q", report="intel-xpu-backend#3813, pytorch#138556: TF32 behind a switch")
class MultipliesInTf32(RoundsInputs):
    """float32 operands are cut to 11 bits, and TF32 is not declared."""

    def round(self, values: FloatArray) -> FloatArray:
        return cut(values, 11)


@deviates("BOUND-OUT", fault_class="Q", report="VSA Triton: bf16 hard-coded")
class ComputesFloat32InBf16(RoundsInputs):
    """float32 operands are rounded to bf16."""

    def round(self, values: FloatArray) -> FloatArray:
        return rounded(values, ml_dtypes.bfloat16)


@deviates("BOUND-OUT", fault_class="Q", report="flashinfer BSR: the output's dtype defaults to fp16")
class StoresTheOutputThroughFp16(StepsBackend):
    """out is rounded to fp16 before it is stored in any dtype."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        super().store(tensors, replace(result, out=rounded(result.out, np.float16)))


class StoresParts(InPieces):
    """The reference in three pieces a row, with one hook: what becomes of out and lse of each before the merge."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        stored = [from_output(*self.stored(*finish(state))) for state in states]
        return super().merge(stored, head_dim_vo)

    def stored(self, out: FloatArray, lse: float) -> tuple[FloatArray, float]:
        """Both as the merge reads them back."""
        raise NotImplementedError


class PartsOutInBf16(StoresParts):
    """Each piece's out is rounded to bf16 before the merge."""

    def stored(self, out: FloatArray, lse: float) -> tuple[FloatArray, float]:
        return rounded(out, ml_dtypes.bfloat16), lse


class PartsLseInBf16(StoresParts):
    """Each piece's lse is rounded to bf16 before the merge."""

    def stored(self, out: FloatArray, lse: float) -> tuple[FloatArray, float]:
        return out, float(rounded(np.array(lse), ml_dtypes.bfloat16))


@deviates("BOUND-OUT", fault_class="Q", report="no report: the out of each split in the dtype of inputs, undeclared")
class StoresOutOfPartsInBf16(PartsOutInBf16):
    """The out of each split is rounded to bf16 before the merge, and float32 is declared."""


@deviates("BOUND-LSE", fault_class="Q", report="no report: the lse of each split in the dtype of inputs, undeclared")
class StoresLseOfPartsInBf16(PartsLseInBf16):
    """The lse of each split is rounded to bf16 before the merge, and float32 is declared."""


@deviates("BOUND-LSE", fault_class="Q", report="no report: lse in the dtype of out")
class StoresLseInBf16(StepsBackend):
    """lse is rounded to bf16."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        super().store(tensors, replace(result, lse=rounded(result.lse, ml_dtypes.bfloat16)))


class LosesDq(Steps):
    """dq is 0."""

    def score_gradient(self, p: FloatArray, dp: FloatArray, delta: float, slope: FloatArray) -> FloatArray:
        return 0 * p


@deviates("BOUND-VOID", fault_class="Q", report="no report: a declaration so loose that nothing is judged")
class DeclaresWhatNothingCanExceed(StepsBackend):
    """The declared exponential is so poor that no gradient has a bound, and dq and dk are 0."""

    steps = LosesDq()
    capabilities = msgspec.structs.replace(
        StepsBackend.capabilities,
        numerics={
            dtype: msgspec.structs.replace(NUMERICS_CLASSES[name], eps=2.0**40)
            for dtype, name in (("float32", "fp32"), ("bfloat16", "bf16"), ("float16", "fp16"))
        },
    )


@deviates("BOUND-GRAD", fault_class="Q", report="no report: gradients accumulated in the storage dtype by atomics")
class AccumulatesGradientsInBf16(Steps):
    """dk and dv are rounded to bf16 after every row."""

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        super().accumulate(into, at, values)
        into[at] = rounded(into[at], ml_dtypes.bfloat16)


@deviates("BOUND-GRAD", fault_class="Q", report="no report: rowsum(dO * O) in half precision")
class RoundsDeltaToBf16(Steps):
    """delta is rounded to bf16."""

    def delta(self, dout: FloatArray, out: FloatArray, dlse: float) -> float:
        return float(rounded(np.array(super().delta(dout, out, dlse)), ml_dtypes.bfloat16))


@deviates("BOUND-GRAD", fault_class="Q", report="BR-79 NVIDIA/cudnn-frontend#676: poor accuracy of the backward")
class RoundsWeightsInBackwardToFp8(Steps):
    """The backward's weights are rounded to fp8 e4m3."""

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        return rounded(super().probabilities(scores, lse), ml_dtypes.float8_e4m3fn)
