"""Mistakes about ranks, bases per head, windows per head, relative tables and what is done to complete rows."""

from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.candidates import HOLE, rank_bias_of
from attnconform.reference.coordinates import FloatArray, IntArray, Positions, Slots
from attnconform.reference.epilogue import Cast, Gate, apply_epilogue
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rules import RelativeBias
from attnconform.reference.states import PartialState
from attnconform.reference.steps import Steps


class Ranks(Steps):
    """The reference with one hook: what a sequence's ranks add."""

    def rank_bias(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions
    ) -> FloatArray | float:
        lists = problem.candidates
        if lists is None or lists.rank_bias is None:
            return super().rank_bias(problem, where, qo_head, positions)
        entries = lists.entries(problem.list_index(where, qo_head))
        return self.bias(entries, positions.values, lists.rank_bias)

    def bias(self, entries: IntArray, positions: IntArray, rank_bias: FloatArray) -> FloatArray:
        """The bias of each position."""
        raise NotImplementedError


@deviates("SET-SEQUENCE", fault_class="K", report="article 2, 5: order that carries meaning")
class IgnoresRanks(Ranks):
    """A sequence is attended as a set."""

    def bias(self, entries: IntArray, positions: IntArray, rank_bias: FloatArray) -> FloatArray:
        return np.zeros(len(positions))


@deviates("SET-SEQUENCE", fault_class="K", report="article 2, 5: indices sorted before their ranks were read")
class RanksByPosition(Ranks):
    """The list is sorted first, and ranks are read off the sorted one."""

    def bias(self, entries: IntArray, positions: IntArray, rank_bias: FloatArray) -> FloatArray:
        return rank_bias_of(np.sort(entries[entries != HOLE]), positions, rank_bias)


@deviates("SET-SEQUENCE", fault_class="Z", report="no report: holes squeezed out before ranks are read")
class LetsHolesTakeNoRank(Ranks):
    """Entries after a hole move up."""

    def bias(self, entries: IntArray, positions: IntArray, rank_bias: FloatArray) -> FloatArray:
        return rank_bias_of(entries[entries != HOLE], positions, rank_bias)


@deviates("SET-SEQUENCE", fault_class="K", report="article 2, 5: what a repeated entry would mean")
class AcceptsARepeatedEntry(Steps):
    """A key with two ranks takes the last one."""

    def refuse(self, problem: AttentionProblem) -> None:
        try:
            super().refuse(problem)
        except RefusedInput as error:
            if error.clause != "SET-SEQUENCE":
                raise


@deviates("COORD-HEAD-PAGE", fault_class="T", report="article 1, 7.3, formula (17): base[table(t / P), h]")
class IgnoresTheBasesOfHeads(Steps):
    """Every KV head reads the page itself."""

    def head_slots(self, problem: AttentionProblem, slots: Slots, kv_head: int) -> IntArray:
        return slots.values


@deviates("COORD-HEAD-PAGE", fault_class="G", report="article 1, 7.3, formula (17): the first head's base for all")
class UsesTheBaseOfTheFirstHead(Steps):
    """Every KV head reads where the first one's part lies."""

    def head_slots(self, problem: AttentionProblem, slots: Slots, kv_head: int) -> IntArray:
        return super().head_slots(problem, slots, 0)


@deviates("COORD-HEAD-PAGE", fault_class="A", report="no report: a base outside the pool")
class AcceptsABaseOutsideThePool(Steps):
    """Bases are not checked."""

    def refuse(self, problem: AttentionProblem) -> None:
        super().refuse(replace(problem, cache=replace(problem.cache, head_pages=None)))

    def head_slots(self, problem: AttentionProblem, slots: Slots, kv_head: int) -> IntArray:
        return super().head_slots(problem, slots, kv_head) % problem.cache.num_slots


class MasksAsAnotherHead(Steps):
    """The reference with one hook: the head that a mask is asked for."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = self.candidates(problem, where, qo_head).values
        allowed = super().effective(replace(problem, candidates=None), where, self.head(problem, qo_head)).values
        return Positions(listed[np.isin(listed, allowed)])

    def head(self, problem: AttentionProblem, qo_head: int) -> int:
        """That head."""
        raise NotImplementedError


@deviates("MASK-HEAD-WINDOW", fault_class="M", report="article 2, 1.1: windows per head")
class UsesTheWindowOfTheFirstHead(MasksAsAnotherHead):
    """Every query head has the first one's window."""

    def head(self, problem: AttentionProblem, qo_head: int) -> int:
        return 0


@deviates("MASK-HEAD-WINDOW", fault_class="G", report="article 2, 1.2: a table per query head, indexed by KV head")
class UsesTheWindowOfTheKvHead(MasksAsAnotherHead):
    """A window is looked up by the KV head."""

    def head(self, problem: AttentionProblem, qo_head: int) -> int:
        return self.kv_head(problem, qo_head)


class LooksUpBias(Steps):
    """The reference with one hook: the entry of a relative table that a distance takes."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        scores, slope = super().scores(problem, where, qo_head, positions, dot)
        if not problem.score_rules or not isinstance(problem.score_rules[-1], RelativeBias):
            return scores, slope
        table = np.asarray(problem.score_rules[-1].tables[qo_head])
        distance, farthest = positions.values - where.q_idx, len(table) // 2
        right = table[np.clip(distance, -farthest, farthest) + farthest]
        return scores - right + self.entry(table, distance, farthest), slope

    def entry(self, table: FloatArray, distance: IntArray, farthest: int) -> FloatArray:
        """What is added."""
        raise NotImplementedError


@deviates("SCORE-RELATIVE", fault_class="A", report="article 2, 1.2: the sign of a distance")
class LooksUpTheReversedDistance(LooksUpBias):
    """The table is indexed by i - j."""

    def entry(self, table: FloatArray, distance: IntArray, farthest: int) -> FloatArray:
        return np.asarray(table[np.clip(-distance, -farthest, farthest) + farthest])


@deviates("SCORE-RELATIVE", fault_class="A", report="article 2, 1.2: clipping of a relative index")
class GivesFarKeysNoBias(LooksUpBias):
    """Beyond the table nothing is added."""

    def entry(self, table: FloatArray, distance: IntArray, farthest: int) -> FloatArray:
        near = np.abs(distance) <= farthest
        return np.where(near, table[np.clip(distance, -farthest, farthest) + farthest], 0.0)


@deviates("SCORE-RELATIVE", fault_class="Z", report="no report: a negative index that wraps around")
class WrapsTheRelativeIndex(LooksUpBias):
    """Beyond the table the index wraps around."""

    def entry(self, table: FloatArray, distance: IntArray, farthest: int) -> FloatArray:
        return np.asarray(table[(distance + farthest) % len(table)])


@deviates("SCORE-RELATIVE", fault_class="A", report="no report: a table of the distances behind alone")
class TakesTheAbsoluteDistanceOfATable(LooksUpBias):
    """Keys ahead take the entries of keys behind."""

    def entry(self, table: FloatArray, distance: IntArray, farthest: int) -> FloatArray:
        return np.asarray(table[np.maximum(-np.abs(distance), -farthest) + farthest])


@deviates("MERGE-EPILOGUE", fault_class="A", report="article 1, 7.2: epilogue fusion")
class ForgetsTheEpilogue(Steps):
    """Complete rows are left as they are."""

    def epilogue(self, problem: AttentionProblem, qo_head: int, out: FloatArray) -> FloatArray:
        return out


@deviates("MERGE-EPILOGUE", fault_class="S", report="article 1, 7.2: a non-linear epilogue comes after the merge")
class ActivatesEachPiece(Steps):
    """Each half of a row goes through the epilogue before the halves are merged."""

    def splits(self, num_keys: int) -> list[slice]:
        return [slice(0, num_keys // 2), slice(num_keys // 2, num_keys)]

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        self.steps, self.head = problem.epilogue, qo_head
        return super().attend(problem, where, qo_head, q, k, v)

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        state = super().state(scores, v)
        if not state.l:
            return state
        return replace(state, o=apply_epilogue(self.steps, state.o / state.l, self.head) * state.l)

    def epilogue(self, problem: AttentionProblem, qo_head: int, out: FloatArray) -> FloatArray:
        return out


@deviates("MERGE-EPILOGUE", fault_class="G", report="no report: a gate of the KV head")
class GatesByTheKvHead(Steps):
    """A gate is looked up by the KV head."""

    def epilogue(self, problem: AttentionProblem, qo_head: int, out: FloatArray) -> FloatArray:
        return super().epilogue(problem, self.kv_head(problem, qo_head), out)


@deviates("MERGE-EPILOGUE", fault_class="A", report="no report: a gate and an activation, exchanged")
class AppliesTheEpilogueBackwards(Steps):
    """The last step comes first."""

    def epilogue(self, problem: AttentionProblem, qo_head: int, out: FloatArray) -> FloatArray:
        return apply_epilogue(problem.epilogue[::-1], out, qo_head)


@deviates("MERGE-EPILOGUE", fault_class="A", report="no report: a cast that the storage was to do")
class LeavesOutCasts(Steps):
    """A cast is left to whatever stores the result."""

    def epilogue(self, problem: AttentionProblem, qo_head: int, out: FloatArray) -> FloatArray:
        return apply_epilogue(tuple(s for s in problem.epilogue if not isinstance(s, Cast)), out, qo_head)


@deviates("MERGE-EPILOGUE", fault_class="A", report="no report: a gate's logit taken for the gate")
class MultipliesByTheGatesLogit(Steps):
    """A gate multiplies by its logit."""

    def epilogue(self, problem: AttentionProblem, qo_head: int, out: FloatArray) -> FloatArray:
        for step in problem.epilogue:
            out = out * step.logits[qo_head] if isinstance(step, Gate) else apply_epilogue((step,), out, qo_head)
        return out
