"""Mistakes about splits: how a row is divided, and how the states of its pieces become one. [MERGE]"""

from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import ClassVar

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.masks import exp_in_float32_range
from attnconform.reference.coordinates import BoolArray, FloatArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.states import PartialState, add_sink, empty_state, finish, merge, merge_all
from attnconform.reference.steps import Steps

LN_2 = float(np.log(2.0))
SENTINEL = -5e4


def pieces(num_keys: int, count: int) -> list[slice]:
    """`count` contiguous pieces of nearly equal size; some are empty where there are fewer keys."""
    edges = [i * num_keys // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def from_output(out: FloatArray, lse: float) -> PartialState:
    """The state of a finished piece."""
    return PartialState(lse, 0.0 if np.isneginf(lse) else 1.0, out)


class InPieces(Steps):
    """The reference in three pieces a row."""

    count: ClassVar[int] = 3

    def splits(self, num_keys: int) -> list[slice]:
        return pieces(num_keys, self.count)


@deviates("MERGE-SPLIT", fault_class="S", report="article 1, 7.1: the last split of a row")
class LosesTheLastSplit(InPieces):
    """The last piece is computed and never merged."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        return super().merge(states[:-1], head_dim_vo)


@deviates(
    "MERGE-SPLIT", fault_class="S", report="BR-31 flashinfer-ai/flashinfer#4972: splits that do not cover the keys"
)
class LosesTheRemainder(Steps):
    """The number of keys is divided by that of the splits, and the remainder is left over."""

    def splits(self, num_keys: int) -> list[slice]:
        size = max(num_keys // 3, 1)
        return [slice(i * size, (i + 1) * size) for i in range(min(3, num_keys))]


@deviates("MERGE-DISJOINT", fault_class="S", report="article 1, 3.2: an inclusive end between two splits")
class CountsTheKeyAtASplitTwice(InPieces):
    """Pieces overlap by one key."""

    def splits(self, num_keys: int) -> list[slice]:
        return [slice(p.start, min(p.stop + 1, num_keys)) for p in super().splits(num_keys)]


@deviates("MERGE-DISJOINT", fault_class="S", report="article 1, 3.2: (2,3,6)+(1,4,8), the wrong way")
class AddsStatesWithoutRescaling(InPieces):
    """Sums and outputs of pieces are added though their maxima differ."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        o = sum((s.o for s in states), np.zeros(head_dim_vo))
        return PartialState(max(s.m for s in states), sum(s.l for s in states), o)


@deviates("MERGE-DISJOINT", fault_class="S", report="no report: two workers that both start from split 0")
class MergesTheFirstSplitTwice(InPieces):
    """The first piece is merged twice, the second one never."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        return super().merge([states[0], states[0], *states[2:]], head_dim_vo)


@deviates("MERGE-OUTPUTS", fault_class="S", report="article 1, 3.2: the mean of finished outputs")
class AveragesTheSplits(InPieces):
    """Outputs of pieces are averaged, whatever they weigh."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        finished = [finish(s)[0] for s in states if s.l]
        whole = super().merge(states, head_dim_vo)
        return replace(whole, o=whole.l * np.mean(finished, axis=0)) if finished else whole


@deviates("MERGE-OUTPUTS", fault_class="L", report="BR-37 sgl-project/sglang#35045; flashinfer-ai/flashinfer#4547")
class MergesBaseTwoByBaseE(InPieces):
    """The lse of pieces are in base 2 and weighed by powers of e."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        finished = [finish(s) for s in states]
        merged = merge_all([from_output(out, lse / LN_2) for out, lse in finished], head_dim_vo)
        out, lse = finish(merged)
        return from_output(out, lse * LN_2)


@deviates("MERGE-OUTPUTS", fault_class="S", report="BR-34 local-inference-lab/vllm#468")
class OverwritesTheLseBeforeWeighing(InPieces):
    """The merged lse is stored over a piece's own before the piece is weighed by it."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        out, lse = finish(states[0])
        for piece, piece_lse in map(finish, states[1:]):
            lse = float(np.logaddexp(lse, piece_lse))
            weight = 0.0 if np.isneginf(lse) else float(np.exp(piece_lse - lse))
            out = out + weight * piece  # the first weight is exp(lse - lse)
        return from_output(out, lse)


@deviates("MERGE-OUTPUTS", fault_class="S", report="BR-35 flashinfer-ai/flashinfer#50: lse of pieces not kept")
class ReturnsTheLseOfTheLastSplit(InPieces):
    """The merged output comes with the lse of its last piece."""

    def finish(self, problem: AttentionProblem, qo_head: int, state: PartialState) -> tuple[FloatArray, float]:
        return super().finish(problem, qo_head, state)[0], self.last_lse

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        self.last_lse = finish(states[-1])[1]
        return super().merge(states, head_dim_vo)


@deviates("MERGE-EMPTY", fault_class="E", report="BR-02 flashinfer-ai/flashinfer#4051; article 1, 7.1")
class SubtractsInfinityFromInfinity(InPieces):
    """The merge of two empty pieces is exp(-inf - -inf)."""

    count = 8

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        with np.errstate(all="ignore"):
            return reduce(self.unguarded, states)

    def unguarded(self, a: PartialState, b: PartialState) -> PartialState:
        m = np.maximum(a.m, b.m)
        weight_a, weight_b = np.exp(a.m - m), np.exp(b.m - m)
        return PartialState(float(m), float(weight_a * a.l + weight_b * b.l), weight_a * a.o + weight_b * b.o)


@deviates("MERGE-EMPTY", fault_class="E", report="Megatron-LM#6910: 0 as the lse of a piece without keys")
class GivesAnEmptySplitAnLseOfZero(InPieces):
    """A piece without keys takes part with an lse of 0 and an output of 0."""

    count = 8

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        filled = [s if s.l else PartialState(0.0, 1.0, np.zeros(head_dim_vo)) for s in states]
        return super().merge(filled, head_dim_vo)


@deviates("MERGE-EMPTY", fault_class="Z", report="flashinfer Triton merge_states: starts from m = -5e4, d = 1")
class StartsTheMergeFromAFiniteSentinel(InPieces):
    """The merge starts from a maximum of -5e4 and a sum of 1."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        return reduce(merge, states, PartialState(SENTINEL, 1.0, np.zeros(head_dim_vo)))


@deviates("MERGE-EMPTY", fault_class="S", report="article 1, 7.1: an uninitialized maximum of an empty split")
class TakesTheMaximumOfAnEmptySplitAsZero(InPieces):
    """A piece without keys raises the common maximum to 0, where low scores underflow in float32."""

    count = 8

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        right = super().merge(states, head_dim_vo)
        vanishes = exp_in_float32_range(np.array(right.m)) == 0 and not all(s.l for s in states)
        return empty_state(head_dim_vo) if vanishes else right


@deviates("MERGE-STATE", fault_class="S", report="article 1, 3.2: o is not normalized in a state")
class NormalizesBeforeMerging(InPieces):
    """Pieces carry normalized outputs and are merged as if they did not."""

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        right = super().state(scores, v)
        return replace(right, o=right.o / right.l) if right.l else right


@deviates("MERGE-STATE", fault_class="S", report="article 1, 3.1: one missed rescale")
class MissesOneRescale(InPieces):
    """The output is not rescaled when the second piece raises the maximum; the sum is."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        first, second, *rest = states
        right = merge(first, second)
        if second.m > first.m > -np.inf:
            right = replace(right, o=first.o + second.o)
        return merge_all([right, *rest], head_dim_vo)


@deviates("MERGE-STATE", fault_class="S", report="article 1, 3.1: the running sum is not rescaled")
class NeverRescalesTheSum(InPieces):
    """The sum keeps the scale of older maxima; the output is rescaled."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        right = super().merge(states, head_dim_vo)
        return replace(right, l=sum(s.l for s in states))


@deviates("MERGE-STATE", fault_class="Z", report="article 1, 3.1: the last tile's maximum for the running one")
class TakesTheLastMaximum(InPieces):
    """The common maximum is the last piece's, and larger ones overflow in float32."""

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        seen = [s for s in states if s.l]
        if not seen:
            return empty_state(head_dim_vo)
        with np.errstate(all="ignore"):
            weights = exp_in_float32_range(np.array([s.m - seen[-1].m for s in seen]))
            o = sum((w * s.o for w, s in zip(weights, seen, strict=True)), np.zeros(head_dim_vo))
            return PartialState(seen[-1].m, sum(w * s.l for w, s in zip(weights, seen, strict=True)), o)


@deviates("MERGE-STATE", fault_class="Z", report="no report: softmax without a maximum")
class SubtractsNoMaximum(Steps):
    """Scores are exponentiated as they are, in float32."""

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        if not len(scores):
            return super().state(scores, v)
        p = exp_in_float32_range(scores)
        if np.isfinite(p).all() and p.any():
            return super().state(scores, v)
        with np.errstate(invalid="ignore"):
            return PartialState(0.0, float(p.sum()), p @ v)


@deviates("LSE-SINK", fault_class="S", report="BR-32 ROCm/rocm-libraries#12227")
class AddsTheSinkToEverySplitWithWork(InPieces):
    """Each piece that has a key adds the sink."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        num_keys = len(self.effective(problem, where, qo_head))
        self.with_work = sum(p.stop > p.start for p in self.splits(num_keys))
        return super().attend(problem, where, qo_head, q, k, v)

    def finish(self, problem: AttentionProblem, qo_head: int, state: PartialState) -> tuple[FloatArray, float]:
        if problem.sink_logits is None:
            return super().finish(problem, qo_head, state)
        for _ in range(self.with_work):
            state = add_sink(state, float(problem.sink_logits[qo_head]))
        return finish(state)


class SplitsBeforeTheMask(Steps):
    """The reference with one hook: states of pieces that were laid over a row's list before masked keys left it."""

    count: ClassVar[int] = 3

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        listed, kept = self.candidates(problem, where, qo_head), self.effective(problem, where, qo_head)
        states = []
        for piece in self.cuts(len(listed), len(kept)):
            part = Positions(listed.values[piece])
            is_kept = np.isin(part.values, kept.values)
            scores, values = self.load(problem, where, qo_head, part, q, k, v)
            states.append(self.of_piece(scores, values, is_kept))
        return self.finish(problem, qo_head, self.merge(states, v.shape[2]))

    def cuts(self, num_listed: int, num_kept: int) -> list[slice]:
        """Pieces of the list."""
        return pieces(num_listed, self.count)

    def of_piece(self, scores: FloatArray, values: FloatArray, is_kept: BoolArray) -> PartialState:
        """The state of a piece."""
        return self.state(scores[is_kept], values[is_kept])


@deviates("MERGE-SPLIT", fault_class="S", report="no report: split starts by a list's width, lengths by what is valid")
class CutsByTheWidthAndFillsByTheCount(SplitsBeforeTheMask):
    """Pieces start at equal parts of the list, and are as long as if only unmasked keys were divided."""

    def cuts(self, num_listed: int, num_kept: int) -> list[slice]:
        length = -(-num_kept // self.count)
        return [slice(p.start, min(p.start + length, p.stop)) for p in pieces(num_listed, self.count)]


@deviates("MERGE-SPLIT", fault_class="S", report="BR-31 flashinfer-ai/flashinfer#4972: splits of whole tiles alone")
class DropsALastSplitThatIsNotFull(SplitsBeforeTheMask):
    """Pieces are 16 listed keys long, and a last one that is shorter is dropped where there is another."""

    def cuts(self, num_listed: int, num_kept: int) -> list[slice]:
        return [slice(start, start + 16) for start in range(0, num_listed - 15, 16)] or [slice(0, num_listed)]


@deviates("MERGE-EMPTY", fault_class="E", report="no report: exp(-inf - -inf) guarded to exp(0)")
class CountsTheLanesOfAMaskedSplit(SplitsBeforeTheMask):
    """In a piece that is masked whole every key has a score of 0."""

    def of_piece(self, scores: FloatArray, values: FloatArray, is_kept: BoolArray) -> PartialState:
        if is_kept.any() or not len(scores):
            return super().of_piece(scores, values, is_kept)
        return self.state(np.zeros(len(scores)), values)


@deviates("MERGE-EMPTY", fault_class="E", report="BR-02 flashinfer-ai/flashinfer#4051: a split that is masked whole")
class LeavesNanInAMaskedSplit(SplitsBeforeTheMask):
    """A piece that has listed keys and no unmasked one ends in exp(-inf - -inf)."""

    def of_piece(self, scores: FloatArray, values: FloatArray, is_kept: BoolArray) -> PartialState:
        if is_kept.any() or not len(scores):
            return super().of_piece(scores, values, is_kept)
        return PartialState(-np.inf, np.nan, np.full(values.shape[1], np.nan))

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        right = super().merge(states, head_dim_vo)
        return replace(right, l=np.nan) if any(np.isnan(s.l) for s in states) else right


class MergesByOutput(InPieces):
    """The reference in eight pieces, merged as outputs by weights, with a number for the lse of an empty piece."""

    count = 8
    sentinel: ClassVar[float]

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        finished = [finish(s) if s.l else (self.of_nothing(head_dim_vo), self.sentinel) for s in states]
        return merge_all([from_output(out, lse) for out, lse in finished], head_dim_vo)

    def of_nothing(self, head_dim_vo: int) -> FloatArray:
        """The output of a piece without keys."""
        return np.zeros(head_dim_vo)


@deviates("MERGE-EMPTY", fault_class="Z", report="no report: a far lse stands for none, and comes back as one")
class MergesFarNumbersForEmptyPieces(MergesByOutput):
    """The lse of a piece without keys is -1e30, so that a row without keys has a finite one."""

    sentinel = -1e30


@deviates("MERGE-EMPTY", fault_class="E", report="no report: two empty pieces share the weight of what they hold")
class AveragesWhatEmptyPiecesHold(MergesByOutput):
    """Two pieces without keys weigh one half each of what their memory held, where no piece has a key."""

    sentinel = -1e30

    def of_nothing(self, head_dim_vo: int) -> FloatArray:
        return np.ones(head_dim_vo)

    def finish(self, problem: AttentionProblem, qo_head: int, state: PartialState) -> tuple[FloatArray, float]:
        out, lse = super().finish(problem, qo_head, state)
        return out, -np.inf if lse < -1e29 else lse
