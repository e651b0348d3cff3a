"""Mistakes about biases: ALiBi beside a soft cap, whose relative table is read, and where a table ends. [SCORE]"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.placement import LooksUpBias
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rules import Alibi, RelativeBias, ScoreRule, SoftCap
from attnconform.reference.steps import Steps

Scored = tuple[FloatArray, FloatArray]
Slopes = tuple[float, ...]  # (num_qo_heads,)


class ChangesRules(Steps):
    """The reference with one hook: the score rule that stands for one of the problem's."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> Scored:
        changed = tuple(self.change(problem, rule) for rule in problem.score_rules)
        return super().scores(replace(problem, score_rules=changed), where, qo_head, positions, dot)

    def change(self, problem: AttentionProblem, rule: ScoreRule) -> ScoreRule:
        """The rule that is applied."""
        raise NotImplementedError


class ChangesSlopesUnderACap(ChangesRules):
    """The reference with one hook: the slopes of ALiBi in a problem that has a soft cap too.

    A path of its own computes both, so that a mistake there leaves ALiBi alone and the cap alone right.
    """

    def change(self, problem: AttentionProblem, rule: ScoreRule) -> ScoreRule:
        caps = [other.cap for other in problem.score_rules if isinstance(other, SoftCap)]
        if not caps or not isinstance(rule, Alibi):
            return rule
        return Alibi(self.slopes(problem, rule.slopes, caps[0]))

    def slopes(self, problem: AttentionProblem, slopes: Slopes, cap: float) -> Slopes:
        """The slopes that are applied."""
        raise NotImplementedError


@deviates(
    "SCORE-ALIBI", fault_class="A", report="BR-110 sgl-project/sglang#33915: what one path takes, another ignores"
)
class ForgetsAlibiUnderACap(ChangesSlopesUnderACap):
    """A problem with a soft cap runs without its ALiBi."""

    def slopes(self, problem: AttentionProblem, slopes: Slopes, cap: float) -> Slopes:
        return (0.0,) * len(slopes)


@deviates("SCORE-ORDER", fault_class="A", report="article 2, 1.2: a bias that is scaled with the scores")
class ScalesTheBiasUnderACap(ChangesSlopesUnderACap):
    """Under a soft cap, ALiBi is added before the scale."""

    def slopes(self, problem: AttentionProblem, slopes: Slopes, cap: float) -> Slopes:
        return tuple(problem.sm_scale * slope for slope in slopes)


@deviates(
    "SCORE-ORDER", fault_class="A", report="no report: 1 / cap folded into the scale, and the bias added after it"
)
class AddsTheBiasToTheCapsQuotient(ChangesSlopesUnderACap):
    """ALiBi is added to score / cap, inside the tanh, where it should be added to the score."""

    def slopes(self, problem: AttentionProblem, slopes: Slopes, cap: float) -> Slopes:
        return tuple(cap * slope for slope in slopes)


@deviates("SCORE-HEAD", fault_class="G", report="article 2, 1.2: the KV head where the query head is meant")
class AlibiUsesTheKvHeadUnderACap(ChangesSlopesUnderACap):
    """Under a soft cap, the slope is that of the KV head."""

    def slopes(self, problem: AttentionProblem, slopes: Slopes, cap: float) -> Slopes:
        return tuple(slopes[h // problem.group_size] for h in range(len(slopes)))


class ChoosesTables(ChangesRules):
    """The reference with one hook: the head whose relative table a query head reads."""

    def change(self, problem: AttentionProblem, rule: ScoreRule) -> ScoreRule:
        if not isinstance(rule, RelativeBias):
            return rule
        return RelativeBias(tuple(rule.tables[self.table(problem, h)] for h in range(len(rule.tables))))

    def table(self, problem: AttentionProblem, qo_head: int) -> int:
        """Index of the table that is read."""
        raise NotImplementedError


@deviates("SCORE-HEAD", fault_class="G", report="article 2, 1.2: the KV head where the query head is meant")
class RelativeBiasUsesTheKvHead(ChoosesTables):
    """The relative table is that of the KV head."""

    def table(self, problem: AttentionProblem, qo_head: int) -> int:
        return qo_head // problem.group_size


@deviates("SCORE-HEAD", fault_class="G", report="no report: the head's place in its group where its number is meant")
class RelativeBiasUsesTheHeadInsideItsGroup(ChoosesTables):
    """The relative table is that of the head's place within its group."""

    def table(self, problem: AttentionProblem, qo_head: int) -> int:
        return qo_head % problem.group_size


@deviates("SCORE-HEAD", fault_class="G", report="BR-83 XunhaoLai/native-sparse-attention-triton#27: interleaved heads")
class RelativeBiasUsesTheHeadModuloTheKvHeads(ChoosesTables):
    """The relative table is that of the query head modulo the number of KV heads."""

    def table(self, problem: AttentionProblem, qo_head: int) -> int:
        return qo_head % problem.num_kv_heads


@deviates("SCORE-RELATIVE", fault_class="A", report="article 2, 1.2: clipping of a relative index")
class ReachesTheEndsOfATableOneEarly(LooksUpBias):
    """Distances are clipped one short of both ends, whose entries are never read."""

    def entry(self, table: FloatArray, distance: IntArray, farthest: int) -> FloatArray:
        return np.asarray(table[np.clip(distance, 1 - farthest, farthest - 1) + farthest])


@deviates("SCORE-RELATIVE", fault_class="A", report="no report: an exclusive end taken for the last index of a table")
class NeverReadsTheLastEntryOfATable(LooksUpBias):
    """The index is clipped to one before the last entry, so that keys far ahead take their neighbour's."""

    def entry(self, table: FloatArray, distance: IntArray, farthest: int) -> FloatArray:
        return np.asarray(table[np.clip(distance, -farthest, farthest - 1) + farthest])


@deviates("SCORE-RELATIVE", fault_class="A", report="no report: the middle of a table counted from 1")
class ReadsATableOneEntryOn(LooksUpBias):
    """Every distance takes the entry of the next one, and the farthest key ahead its own."""

    def entry(self, table: FloatArray, distance: IntArray, farthest: int) -> FloatArray:
        return np.asarray(table[np.clip(distance + 1, -farthest, farthest) + farthest])
