"""Mistakes about edges that drop out: which, from where, and in the backward. [DROPOUT]"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.coordinates import BoolArray, FloatArray, Positions
from attnconform.reference.dropout import Dropout, kept_edges
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.states import PartialState, softmax_state
from attnconform.reference.steps import Steps


class DrawsEdges(Steps):
    """The reference with one hook: which edges of a row are kept."""

    def dropout_weights(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions
    ) -> FloatArray:
        if problem.dropout is None:
            return super().dropout_weights(problem, where, qo_head, positions)
        kept = self.kept(problem, problem.dropout, where, qo_head, positions)
        return np.where(kept, problem.dropout.factor, 0.0)

    def kept(
        self, problem: AttentionProblem, dropout: Dropout, where: QueryRow, qo_head: int, positions: Positions
    ) -> BoolArray:
        """True where an edge is kept."""
        return kept_edges(dropout, where.request, qo_head, where.q_idx, positions.values)


@deviates("DROPOUT-COUNTER", fault_class="K", report="article 1, 7.2: independent of execution order")
class CountsByPlaceInTheList(DrawsEdges):
    """The counter holds a key's place among the row's keys instead of its position."""

    def kept(
        self, problem: AttentionProblem, dropout: Dropout, where: QueryRow, qo_head: int, positions: Positions
    ) -> BoolArray:
        return kept_edges(dropout, where.request, qo_head, where.q_idx, np.arange(len(positions)))


@deviates("DROPOUT-COUNTER", fault_class="T", report="article 1, 7.2: counter of logical coordinates")
class CountsBySlot(DrawsEdges):
    """The counter holds a key's slot."""

    def kept(
        self, problem: AttentionProblem, dropout: Dropout, where: QueryRow, qo_head: int, positions: Positions
    ) -> BoolArray:
        return kept_edges(dropout, where.request, qo_head, where.q_idx, self.slots(problem, where, positions).values)


@deviates("DROPOUT-COUNTER", fault_class="G", report="no report: one mask for a whole group")
class DropsTheSameEdgesInEveryHead(DrawsEdges):
    """The counter leaves out the query head."""

    def kept(
        self, problem: AttentionProblem, dropout: Dropout, where: QueryRow, qo_head: int, positions: Positions
    ) -> BoolArray:
        return kept_edges(dropout, where.request, 0, where.q_idx, positions.values)


@deviates("DROPOUT-COUNTER", fault_class="T", report="no report: one mask for every request of a batch")
class DropsTheSameEdgesInEveryRequest(DrawsEdges):
    """The counter leaves out the request."""

    def kept(
        self, problem: AttentionProblem, dropout: Dropout, where: QueryRow, qo_head: int, positions: Positions
    ) -> BoolArray:
        return kept_edges(dropout, 0, qo_head, where.q_idx, positions.values)


@deviates("DROPOUT-COUNTER", fault_class="M", report="article 2, 5.1: local query index for query position")
class CountsQueriesFromTheirFirstRow(DrawsEdges):
    """The counter holds a query's index in its request's rows."""

    def kept(
        self, problem: AttentionProblem, dropout: Dropout, where: QueryRow, qo_head: int, positions: Positions
    ) -> BoolArray:
        return kept_edges(dropout, where.request, qo_head, where.local, positions.values)


@deviates("DROPOUT-COUNTER", fault_class="A", report="no report: keep and drop exchanged")
class KeepsWhatShouldDrop(DrawsEdges):
    """Words below the threshold are kept."""

    def kept(
        self, problem: AttentionProblem, dropout: Dropout, where: QueryRow, qo_head: int, positions: Positions
    ) -> BoolArray:
        return ~super().kept(problem, dropout, where, qo_head, positions)


@deviates("DROPOUT-COUNTER", fault_class="A", report="no report: dropout off outside of training, whatever is asked")
class NeverDrops(Steps):
    """Dropout is accepted and ignored."""

    def dropout_weights(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions
    ) -> FloatArray:
        return np.ones(len(positions))


@deviates("DROPOUT-NUMERATOR", fault_class="A", report="article 1, 7.2: a_j / (1 - p) on the numerator only")
class ForgetsTheFactor(Steps):
    """Kept edges weigh what they weighed before."""

    def dropout_weights(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions
    ) -> FloatArray:
        return np.minimum(super().dropout_weights(problem, where, qo_head, positions), 1.0)


@deviates("DROPOUT-NUMERATOR", fault_class="L", report="article 1, 7.2: dropped before the sum of exponentials")
class DropsFromTheDenominatorAsWell(Steps):
    """A dropped edge is masked: it leaves the denominator, and lse."""

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        kept = v.any(axis=1)  # a value that dropped out is a row of zeros
        return softmax_state(scores[kept], v[kept]) if len(v) else super().state(scores, v)


@deviates("DROPOUT-BACKWARD", fault_class="R", report="article 1, 7.2: the same mask in the recomputation")
class DrawsOtherEdgesInTheBackward(Steps):
    """The backward draws with the next seed."""

    def dropout_weights_in_backward(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions
    ) -> FloatArray:
        if problem.dropout is None:
            return super().dropout_weights_in_backward(problem, where, qo_head, positions)
        again = replace(problem, dropout=replace(problem.dropout, seed=problem.dropout.seed + 1))
        return super().dropout_weights_in_backward(again, where, qo_head, positions)


@deviates("DROPOUT-BACKWARD", fault_class="R", report="article 2, 4: checkpointing recomputes without its random state")
class ForgetsDropoutInTheBackward(Steps):
    """The backward is that of a call without dropout."""

    def dropout_weights_in_backward(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions
    ) -> FloatArray:
        return np.ones(len(positions))


@deviates("DROPOUT-RATE", fault_class="A", report="no report: 1 / (1 - 1)")
class AcceptsARateOfOne(Steps):
    """The rate is not checked."""

    def refuse(self, problem: AttentionProblem) -> None:
        super().refuse(replace(problem, dropout=None))

    def dropout_weights(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions
    ) -> FloatArray:
        if problem.dropout is not None and problem.dropout.rate >= 1:
            return np.zeros(len(positions))
        return super().dropout_weights(problem, where, qo_head, positions)
