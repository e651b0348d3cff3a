"""Mistakes of the backward alone that show past a tile of rows or keys, with many heads, or with odd numbers. [GRAD]"""

from dataclasses import replace

import ml_dtypes
import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.gradient_edges import ChangesDkAndDv
from attnconform.conformance.deviations.gradients import BackwardCall, ChangesGradients
from attnconform.reference.coordinates import FloatArray, Positions, Slots
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.results import Gradients
from attnconform.reference.rules import Alibi
from attnconform.reference.steps import Steps

TILE_OF_ROWS, TILE_OF_KEYS = 64, 128  # what kernels have, where the matrix asks for 16 and 32
HEADS_AT_ONCE = 4


class CapsWeights(Steps):
    """The reference, with weights kept finite where a backward computes other scores than lse was made of."""

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        return np.exp(np.minimum(scores - lse, 30.0)) if np.isfinite(lse) else np.zeros_like(scores)


class FirstTileOfRows(Steps):
    """Edges of a request's first tile of query rows."""

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = self.effective(problem, where, qo_head)
        return kept if where.local < TILE_OF_ROWS else Positions(kept.values[:0])


@deviates(
    "GRAD-SUM", fault_class="R", report="Dao-AILab/flash-attention#2337: the backward's tile of rows taken for another"
)
class LosesDkOfRowsPastATile(ChangesDkAndDv):
    """dk and dv hold what a request's first 64 query rows give."""

    other = FirstTileOfRows


class FirstTileOfKeys(Steps):
    """Edges to the keys of a request's first tile."""

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = self.effective(problem, where, qo_head).values
        return Positions(kept[kept < TILE_OF_KEYS])


@deviates("GRAD-SUM", fault_class="R", report="tile-ai/tilelang#547: dq added to by tile of keys, some of it lost")
class LosesDqOfKeysPastATile(ChangesGradients):
    """dq holds what a request's first 128 keys give."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(right, dq=call.by(FirstTileOfKeys()).dq)


class FirstHeadsOfAGroup(Steps):
    """Edges of the first heads of each group."""

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = self.effective(problem, where, qo_head)
        return kept if qo_head % problem.group_size < HEADS_AT_ONCE else Positions(kept.values[:0])


@deviates(
    "GRAD-SUM", fault_class="G", report="fla-org/flash-linear-attention#384: dk addressed by query heads in a group"
)
class SumsTheFirstHeadsOfAGroup(ChangesDkAndDv):
    """dk and dv hold what the first four heads of a group give."""

    other = FirstHeadsOfAGroup


@deviates("GRAD-FORMULA", fault_class="D", report="triton-lang/triton#621: half of a head of 128, in the backward")
class LeavesTheRestOfALongHeadOutOfDq(ChangesGradients):
    """Components of dq from 64 on are 0 in heads of 128 and more."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        dq = right.dq.copy()
        if call.problem.head_dim_qk >= 2 * TILE_OF_ROWS:
            dq[..., TILE_OF_ROWS:] = 0
        return replace(right, dq=dq)


@deviates(
    "SCORE-SCALE", fault_class="D", report="XunhaoLai/native-sparse-attention-triton#27: extents of v, in forward"
)
class ReadsValuesToTheQueryDimension(Steps):
    """Components of v past head_dim_qk are taken to lie outside of it."""

    def values(self, problem: AttentionProblem, slots: np.ndarray, kv_head: int, v: FloatArray) -> FloatArray:
        kept = super().values(problem, slots, kv_head, v).copy()
        kept[:, problem.head_dim_qk :] = 0
        return kept


class ReadsDoutToTheQueryDimension(Steps):
    """Components of dout past head_dim_qk are taken to lie outside of it."""

    def through_epilogue(
        self, problem: AttentionProblem, qo_head: int, merged: FloatArray, dout: FloatArray
    ) -> FloatArray:
        kept = super().through_epilogue(problem, qo_head, merged, dout).copy()
        kept[problem.head_dim_qk :] = 0
        return kept


@deviates(
    "GRAD-FORMULA", fault_class="D", report="XunhaoLai/native-sparse-attention-triton#27: extents of v, in backward_dq"
)
class DotsDoutToTheQueryDimension(ChangesGradients):
    """dp sums over as many components as q has, where v has more; dv is right."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        other = call.by(ReadsDoutToTheQueryDimension())
        return replace(right, dq=other.dq, dk=other.dk)


class CountsRequestsWithRows(Steps):
    """Requests without query rows have no number."""

    def slots(self, problem: AttentionProblem, where: QueryRow, positions: Positions) -> Slots:
        has_rows = np.flatnonzero(np.diff(problem.qo_indptr))
        request = int(np.searchsorted(has_rows, where.request))
        room = int(problem.seqlen_kv[request])
        return problem.cache.slots(request, Positions(positions.values % max(room, 1)))


@deviates(
    "GRAD-SUM", fault_class="E", report="BR-11 Dao-AILab/flash-attention#2562: requests without rows, in backward"
)
class LeavesRequestsWithoutRowsUncounted(ChangesDkAndDv):
    """dk and dv of a request behind one without query rows land on that one's pages."""

    other = CountsRequestsWithRows


class OfAnotherProblem(ChangesGradients):
    """Gradients of a problem with some numbers changed, from the lse of the problem itself."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        return replace(call, problem=self.altered(call.problem)).by(CapsWeights())

    def altered(self, problem: AttentionProblem) -> AttentionProblem:
        """The problem as the backward sees it."""
        raise NotImplementedError


@deviates("SCORE-SCALE", fault_class="A", report="BR-67 Dao-AILab/flash-attention#2424: an argument not passed on")
class ScalesByTheHeadDimInBackward(OfAnotherProblem):
    """The backward's scale is 1 / sqrt(head_dim), whatever the forward had."""

    def altered(self, problem: AttentionProblem) -> AttentionProblem:
        return replace(problem, sm_scale=problem.head_dim_qk**-0.5)


def in_bf16(number: float) -> float:
    """The nearest number of bfloat16."""
    return float(ml_dtypes.bfloat16(number))


@deviates("GRAD-RULE", fault_class="Q", report="NVIDIA/TensorRT-Model-Connect#667: ALiBi in bf16 in one of two paths")
class RoundsSlopesInBackward(OfAnotherProblem):
    """The backward has ALiBi's slopes in bfloat16, the forward in float32."""

    def altered(self, problem: AttentionProblem) -> AttentionProblem:
        rules = tuple(
            Alibi(tuple(map(in_bf16, rule.slopes))) if isinstance(rule, Alibi) else rule for rule in problem.score_rules
        )
        return replace(problem, score_rules=rules)


@deviates("GRAD-SINK", fault_class="Q", report="NVIDIA/TransformerEngine#3551: dsink of a sink in the inputs' dtype")
class RoundsSinksInBackward(Steps):
    """dsink is computed from sink logits in bfloat16."""

    def sink_gradient(self, sink_logit: float, lse: float, delta: float) -> float:
        return super().sink_gradient(in_bf16(sink_logit), lse, delta)
