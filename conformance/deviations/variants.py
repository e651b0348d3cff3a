"""Faithful variants: other orders, splits, precisions and declarations, and the right answer.

They measure false alarms: a suite that rejects one of these rejects a sound kernel.
"""

from dataclasses import replace
from functools import reduce
from typing import ClassVar

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backward, Capabilities, Forward, OneOf, Tensors
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics
from attnconform.conformance.deviations.determinism import Races
from attnconform.conformance.deviations.deviation import faithful
from attnconform.conformance.deviations.empty import is_empty
from attnconform.conformance.deviations.masks import ReadsTheWholeRequest
from attnconform.conformance.deviations.merge import InPieces, from_output
from attnconform.conformance.deviations.precision import KnowsTheDtype, PartsLseInBf16, PartsOutInBf16, rounded
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.states import PartialState, empty_state, finish, merge, merge_outputs, softmax_state
from attnconform.reference.steps import AttentionResult, Gradients, Steps

LN_2 = float(np.log(2.0))
DECLARED = StepsBackend.capabilities
HALF_DTYPES = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}


class InTiles(Steps):
    """The reference with an online softmax over tiles of keys."""

    tile: ClassVar[int]

    def splits(self, num_keys: int) -> list[slice]:
        return [slice(start, start + self.tile) for start in range(0, num_keys, self.tile)]


@faithful
class TilesOfSixteen(InTiles):
    """Keys are visited in tiles of 16."""

    tile = 16


@faithful
class TilesOfThirtyTwo(InTiles):
    """Keys are visited in tiles of 32."""

    tile = 32


@faithful
class TilesOfSixtyFour(InTiles):
    """Keys are visited in tiles of 64."""

    tile = 64


@faithful
class TilesBackwards(InTiles):
    """Tiles of 16 keys are visited from the last to the first."""

    tile = 16

    def splits(self, num_keys: int) -> list[slice]:
        return super().splits(num_keys)[::-1]


@faithful
class TwoSplitsByState(InPieces):
    """A row is two pieces, merged by (m, l, o)."""

    count = 2


@faithful
class EightSplitsByState(InPieces):
    """A row is eight pieces, some of them empty, merged by (m, l, o)."""

    count = 8


class SplitsByOutput(InPieces):
    """The reference in finished pieces, merged by (out, lse)."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        finished = [finish(s) for s in states]
        out, lse = finish(empty_state(head_dim_vo))
        for piece, piece_lse in finished:
            out, merged = merge_outputs(out, np.asarray(lse), piece, np.asarray(piece_lse))
            lse = float(merged)
        return from_output(out, lse)


@faithful
class TwoSplitsByOutput(SplitsByOutput):
    """A row is two pieces, merged by (out, lse)."""

    count = 2


@faithful
class EightSplitsByOutput(SplitsByOutput):
    """A row is eight pieces, some of them empty, merged by (out, lse)."""

    count = 8


@faithful
class MergesByATree(InPieces):
    """Eight pieces are merged pairwise, neighbours first."""

    count = 8

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        while len(states) > 1:
            states = [merge(a, b) for a, b in zip(states[::2], states[1::2], strict=True)]
        return states[0]


@faithful
class SortsBySlot(Steps):
    """Keys are visited in the order in which they lie in memory."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        return Positions(kept.values[np.argsort(self.slots(problem, where, kept).values, kind="stable")])


class InFloat32(InTiles):
    """The reference with scores, weights and sums in float32, in tiles of 16."""

    tile = 16

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        q, k, v = (x.astype(np.float32) for x in (q, k, v))  # type: ignore[assignment]
        with np.errstate(under="ignore"):
            return super().forward(problem, q, k, v)

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        scores, slope = super().scores(problem, where, qo_head, positions, dot)
        return rounded(scores, np.float32), slope

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        if not len(scores):
            return super().state(scores, v)
        m = np.float32(scores.max())
        p = self.stored(np.exp(scores.astype(np.float32) - m))
        total = np.exp(scores.astype(np.float32) - m).sum(dtype=np.float32)
        return PartialState(float(m), float(total), (p @ v.astype(np.float32)).astype(np.float64))

    def stored(self, p: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Weights as the product with V sees them."""
        return p

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        return reduce(merge_float32, states, empty_state(head_dim_vo))


def merge_float32(a: PartialState, b: PartialState) -> PartialState:
    """The merge of two states with every result rounded to float32."""
    right = merge(a, b)
    return PartialState(right.m, float(np.float32(right.l)), rounded(right.o, np.float32))


@faithful
class ComputesInFloat32(InFloat32):
    """Scores, weights and sums are float32, in tiles of 16."""


@faithful
class ComputesInFloat32ByBaseTwo(InFloat32):
    """Weights are powers of two of scores times log2 e, in float32."""

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        if not len(scores):
            return super().state(scores, v)
        log2 = scores.astype(np.float32) * np.float32(1 / LN_2)
        m = log2.max()
        p = np.exp2(log2 - m)
        return PartialState(
            float(m) * LN_2, float(p.sum(dtype=np.float32)), rounded(p @ v.astype(np.float32), np.float64)
        )


class InHalf(InFloat32):
    """Float32 sums, with weights in a half-precision format."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = dtype

    def stored(self, p: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return p.astype(self.dtype).astype(np.float32)


@faithful
class StoresWeightsInTheProblemsDtype(KnowsTheDtype):
    """Weights are rounded to the dtype of the problem before they meet V, as declared."""

    def steps_for(self, dtype: torch.dtype) -> Steps:
        return InHalf(HALF_DTYPES[dtype]) if dtype in HALF_DTYPES else InFloat32()


class FromRoundedWeights(InHalf):
    """The denominator sums the stored weights."""

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        right = super().state(scores, v)
        if not len(scores):
            return right
        return replace(right, l=float(self.stored(np.exp(scores - right.m).astype(np.float32)).sum(dtype=np.float32)))


def numerics_with(**changes: object) -> dict[str, Numerics]:
    """The half-precision classes with some fields replaced."""
    return {
        dtype: msgspec.structs.replace(NUMERICS_CLASSES[name], **changes)
        for dtype, name in (("bfloat16", "bf16"), ("float16", "fp16"))
    }


@faithful
class SumsTheStoredWeights(KnowsTheDtype):
    """The denominator sums the weights as they were stored, as declared."""

    capabilities = msgspec.structs.replace(DECLARED, numerics=numerics_with(l_from_p=True))

    def steps_for(self, dtype: torch.dtype) -> Steps:
        return FromRoundedWeights(HALF_DTYPES[dtype]) if dtype in HALF_DTYPES else InFloat32()


def three_parts(**stored: str) -> Capabilities:
    """A declaration of three splits, stored so whatever the dtype of the problem."""
    classes = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    numerics = {
        dtype: msgspec.structs.replace(NUMERICS_CLASSES[name], num_splits=3, **stored)
        for dtype, name in classes.items()
    }
    return msgspec.structs.replace(DECLARED, numerics=numerics)


@faithful
class StoresOutOfPartsAsDeclared(StepsBackend):
    """A row is three pieces, the out of each stored in bf16 before the merge, and declared so."""

    steps = PartsOutInBf16()
    capabilities = three_parts(partial_storage="bfloat16")


@faithful
class StoresLseOfPartsAsDeclared(StepsBackend):
    """A row is three pieces, the lse of each stored in bf16 before the merge, and declared so."""

    steps = PartsLseInBf16()
    capabilities = three_parts(partial_lse_storage="bfloat16")


class Unfused(Steps):
    """Every matrix of the textbook formula is stored in one format."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = dtype

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        scores, slope = super().scores(problem, where, qo_head, positions, dot)
        return rounded(scores, self.dtype), slope

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        # a score past the format's largest number is infinite, as it is in a kernel of this kind
        with np.errstate(invalid="ignore"):
            right = softmax_state(scores, v)
            if not len(scores):
                return right
            normalized = rounded(np.exp(scores - right.m) / right.l, self.dtype)
            return replace(right, o=right.l * (normalized @ v))


@faithful
class RunsUnfused(KnowsTheDtype):
    """Scores and normalized weights are stored in the dtype of the problem, float16 excepted, as declared."""

    capabilities = msgspec.structs.replace(
        DECLARED,
        supported={"dtype": OneOf(("float32", "bfloat16"))},  # float16 has no room for the scores of extreme cases
        has_backward=False,
        numerics={"bfloat16": NUMERICS_CLASSES["bf16-unfused"]},
    )

    def steps_for(self, dtype: torch.dtype) -> Steps:
        return Unfused(HALF_DTYPES.get(dtype, np.float32))


@faithful
class ReturnsLseInBaseTwoAsDeclared(StepsBackend):
    """lse is a logarithm to base 2, and declared so."""

    capabilities = msgspec.structs.replace(DECLARED, lse_base="2")

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        super().store(tensors, replace(result, lse=result.lse / LN_2))


@faithful
class ReturnsNoLse(StepsBackend):
    """lse is not returned, as declared."""

    capabilities = msgspec.structs.replace(DECLARED, returns_lse=False)

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        return replace(super().forward(problem, tensors), lse=None)


class WeighsUnselectedByZero(ReadsTheWholeRequest):
    """Keys that are not selected have a weight of 0."""

    def selected_state(self, scores: FloatArray, selected: BoolArray, v: FloatArray) -> PartialState:
        right = softmax_state(scores[selected], v[selected])
        return replace(right, o=right.o + np.zeros(len(v)) @ v)


@faithful
class LoadsWholeRequests(StepsBackend):
    """Every owned key is loaded and weighed by 0, and NaN in owned slots is declared harmful."""

    steps = WeighsUnselectedByZero()
    capabilities = msgspec.structs.replace(DECLARED, tolerates_nonfinite=False)


@faithful
class SignsTheZerosOfAnEmptyRow(Steps):
    """An empty row is 0 times the sum of all values, so that its zeros have the sums' signs."""

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        result = super().forward(problem, q, k, v)
        for row, h in np.argwhere(is_empty(self, problem)):
            zeros = np.copysign(0.0, np.nansum(v[:, h // problem.group_size], axis=0))
            result.out[row, h] = np.where(result.out[row, h] == 0, zeros, result.out[row, h])
        return result


@faithful
class FallsBackAsDeclared(StepsBackend):
    """Problems with a soft cap run on another path, as declared."""

    capabilities = msgspec.structs.replace(
        DECLARED,
        supported={"score": OneOf(("none", "alibi"))},
        fallback={"score": OneOf(("softcap", "alibi_softcap"))},
    )

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        caps = any(type(rule).__name__ == "SoftCap" for rule in problem.spec.score_rules)
        return replace(super().forward(problem, tensors), path="fallback: soft cap" if caps else "native")


@faithful
class ReturnsItsOwnTensors(StepsBackend):
    """Results are returned in tensors of the backend's own, and those of the caller are left alone."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        own = replace(tensors, out=torch.empty_like(tensors.out), lse=torch.empty_like(tensors.lse))
        return super().forward(problem, own)


@faithful
class ReturnsStridedTensors(StepsBackend):
    """Results are views of head-major memory."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        result = super().forward(problem, tensors)
        assert result.lse is not None
        out = result.out.transpose(0, 1).contiguous().transpose(0, 1)
        return replace(result, out=out, lse=result.lse.T.contiguous().T)


class AddsInAnyOrder(Races):
    """Contributions are added in an order that changes from call to call, and rounded on the way."""

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        order = self.order(len(values))
        np.add.at(into, at[order], values[order])
        into[at] = rounded(into[at], np.float32)


@faithful
class AddsGradientsInAnyOrderAsDeclared(StepsBackend):
    """dk and dv are added in float32 in an order that changes, and no determinism is declared."""

    steps = AddsInAnyOrder()
    capabilities = msgspec.structs.replace(DECLARED, determinism="none")


class AnyOrderOfKeys(Races):
    """Keys are visited in an order that changes from call to call."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head).values
        return Positions(kept[self.order(len(kept))])

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        return Steps().effective(problem, where, qo_head)

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        if not len(scores):
            return super().state(scores, v)
        m = np.float32(scores.max())
        p = np.exp(scores.astype(np.float32) - m)
        o = np.cumsum(p[:, None] * v.astype(np.float32), axis=0)[-1]
        return PartialState(float(m), float(np.cumsum(p)[-1]), o.astype(np.float64))


@faithful
class AddsKeysInAnyOrderAsDeclared(StepsBackend):
    """Keys are added in float32 in an order that changes, and no determinism is declared."""

    steps = AnyOrderOfKeys()
    capabilities = msgspec.structs.replace(DECLARED, determinism="none")


@faithful
class TakesNoGradientOfLse(StepsBackend):
    """dlse is not taken, as declared."""

    capabilities = msgspec.structs.replace(DECLARED, gradient_of_lse=False)


@faithful
class AccumulatesGradientsInFloat32(Steps):
    """dk and dv are rounded to float32 after every row."""

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        super().accumulate(into, at, values)
        into[at] = rounded(into[at], np.float32)


@faithful
class RoundsTheBackwardsWeights(StepsBackend):
    """P and dS of the backward are rounded to the dtype of the problem, as declared."""

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Backward:
        if tensors.q.dtype not in HALF_DTYPES:
            return super().backward(problem, tensors, forward, dout, dlse)
        q, k, v = self.inputs(problem, tensors)
        steps = HalfBackward(HALF_DTYPES[tensors.q.dtype])
        arrays = (np.asarray(x.to(torch.float64).numpy()) if x is not None else None for x in (dout, dlse))
        to_out, to_lse = arrays
        assert to_out is not None
        gradients: Gradients = steps.backward(problem.spec, q, k, v, forward.saved, to_out, to_lse)
        return self.pack(problem, tensors, gradients)


class HalfBackward(Steps):
    """P is rounded where it meets dO, dS where it meets Q and K."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype = dtype

    def score_gradient(self, p: FloatArray, dp: FloatArray, delta: float, slope: FloatArray) -> FloatArray:
        return rounded(super().score_gradient(p, dp, delta, slope), self.dtype)


@faithful
class DeclaresNoOwners(StepsBackend):
    """Ownership of pages is not checked, as declared."""

    capabilities: Capabilities = msgspec.structs.replace(DECLARED, checks_owner=False)
