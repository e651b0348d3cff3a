"""Mistakes about what softmax sees: scale, ALiBi, soft cap, their order and their head. [SCORE]"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.coordinates import FloatArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.rules import Alibi, SoftCap
from attnconform.reference.steps import Steps

Scored = tuple[FloatArray, FloatArray]


@deviates("SCORE-SCALE", fault_class="A", report="article 1, 3.1: the factor 1/sqrt(d)")
class ForgetsTheScale(Steps):
    """Dot products are not scaled."""

    def scale(self, problem: AttentionProblem, dot: FloatArray) -> FloatArray:
        return dot


@deviates("SCORE-SCALE", fault_class="A", report="no report: a scale folded into q, and applied to the scores again")
class ScalesTwice(Steps):
    """Dot products are scaled twice."""

    def scale(self, problem: AttentionProblem, dot: FloatArray) -> FloatArray:
        return problem.sm_scale**2 * dot


@deviates("SCORE-SCALE", fault_class="D", report="article 1, 7.2: silent padding of head_dim, and its scale kept")
class ScalesByThePaddedHeadDim(Steps):
    """The scale is that of the head dimension padded to a power of two."""

    def scale(self, problem: AttentionProblem, dot: FloatArray) -> FloatArray:
        padded = 1 << (problem.head_dim_qk - 1).bit_length()
        return np.asarray(problem.sm_scale * np.sqrt(problem.head_dim_qk / padded) * dot)


@deviates("SCORE-SCALE", fault_class="D", report="BR-83 XunhaoLai/native-sparse-attention-triton#27: D_v for D_qk")
class ScalesByTheValueHeadDim(Steps):
    """The scale is computed from the head dimension of V."""

    def scale(self, problem: AttentionProblem, dot: FloatArray) -> FloatArray:
        return np.asarray(problem.sm_scale * np.sqrt(problem.head_dim_qk / problem.head_dim_vo) * dot)


@deviates("SCORE-SCALE", fault_class="L", report="no report: exp2 without the factor log2 e")
class ExponentiatesInBaseTwo(Steps):
    """Weights are powers of two instead of e, lse converted back."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> Scored:
        scores, slope = super().scores(problem, where, qo_head, positions, dot)
        return scores * np.log(2.0), slope


class AppliesAlibi(Steps):
    """The reference with one hook: the bias of ALiBi."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> Scored:
        rules = [rule for rule in problem.score_rules if isinstance(rule, Alibi)]
        right, slope = super().scores(problem, where, qo_head, positions, dot)
        if not rules or any(isinstance(rule, SoftCap) for rule in problem.score_rules):
            return right, slope  # under a cap the bias cannot be exchanged afterwards
        for rule in rules:
            right = right - rule.slopes[qo_head] * (positions.values - where.q_idx)
            right = right + self.bias(problem, where, qo_head, rule, positions.values.astype(np.float64))
        return right, slope

    def bias(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, rule: Alibi, kv_idx: FloatArray
    ) -> FloatArray:
        """What is added to the scores."""
        raise NotImplementedError


@deviates("SCORE-ALIBI", fault_class="A", report="article 2, 1.2: i - j for j - i")
class AlibiFavoursTheFarKeys(AppliesAlibi):
    """ALiBi adds slope * (i - j)."""

    def bias(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, rule: Alibi, kv_idx: FloatArray
    ) -> FloatArray:
        return rule.slopes[qo_head] * (where.q_idx - kv_idx)


@deviates("SCORE-ALIBI", fault_class="L", report="flash-attention: a bias up to a constant per row, seen in lse alone")
class AlibiCountsFromTheRequestsEnd(AppliesAlibi):
    """ALiBi measures from the last committed position: out is right, lse is not."""

    def bias(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, rule: Alibi, kv_idx: FloatArray
    ) -> FloatArray:
        return rule.slopes[qo_head] * (kv_idx - (int(problem.seqlen_kv[where.request]) - 1))


@deviates("SCORE-ALIBI", fault_class="M", report="flash-attention: -slope * |i - j|")
class AlibiTakesTheAbsoluteDistance(AppliesAlibi):
    """Keys of the future are lowered as well, where they should be raised."""

    def bias(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, rule: Alibi, kv_idx: FloatArray
    ) -> FloatArray:
        return -rule.slopes[qo_head] * np.abs(kv_idx - where.q_idx)


@deviates("SCORE-ALIBI", fault_class="A", report="BR-110 sgl-project/sglang#33915: an argument that is ignored")
class IgnoresAlibi(AppliesAlibi):
    """The bias is never added."""

    def bias(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, rule: Alibi, kv_idx: FloatArray
    ) -> FloatArray:
        return np.zeros_like(kv_idx)


@deviates("SCORE-HEAD", fault_class="G", report="article 2, 1.2: the KV head where the query head is meant")
class AlibiUsesTheKvHead(AppliesAlibi):
    """The slope is that of the KV head."""

    def bias(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, rule: Alibi, kv_idx: FloatArray
    ) -> FloatArray:
        return rule.slopes[qo_head // problem.group_size] * (kv_idx - where.q_idx)


@deviates("SCORE-HEAD", fault_class="G", report="no report: the head's place in its group where its number is meant")
class AlibiUsesTheHeadInsideItsGroup(AppliesAlibi):
    """The slope is that of the head's place within its group."""

    def bias(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, rule: Alibi, kv_idx: FloatArray
    ) -> FloatArray:
        return rule.slopes[qo_head % problem.group_size] * (kv_idx - where.q_idx)


@deviates("SCORE-ORDER", fault_class="A", report="article 2, 1.2: a bias that is scaled with the scores")
class ScalesTheBiasToo(AppliesAlibi):
    """ALiBi is added before the scale."""

    def bias(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, rule: Alibi, kv_idx: FloatArray
    ) -> FloatArray:
        return problem.sm_scale * rule.slopes[qo_head] * (kv_idx - where.q_idx)


@deviates("SCORE-ORDER", fault_class="A", report="article 2, 1.2: cap and bias do not commute")
class CapsBeforeTheBias(Steps):
    """Rules are applied in reverse order."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> Scored:
        reverse = replace(problem, score_rules=problem.score_rules[::-1])
        return super().scores(reverse, where, qo_head, positions, dot)


@deviates("SCORE-ORDER", fault_class="A", report="article 2, 1.2: cap before scale")
class CapsBeforeTheScale(Steps):
    """The soft cap is applied to the dot product, and the scale after it."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> Scored:
        if not any(isinstance(rule, SoftCap) for rule in problem.score_rules):
            return super().scores(problem, where, qo_head, positions, dot)
        scores, slope = super().scores(replace(problem, sm_scale=1.0), where, qo_head, positions, dot)
        return problem.sm_scale * scores, slope


@deviates("SCORE-ORDER", fault_class="Z", report="article 2, 6.3: -inf through a non-linear rule")
class MasksBeforeTheCap(Steps):
    """A masked score goes through the soft cap and comes out as -cap."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        if any(isinstance(rule, SoftCap) for rule in problem.score_rules):
            return self.candidates(problem, where, qo_head)
        return super().effective(problem, where, qo_head)

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> Scored:
        allowed = mask_allows(problem.mask_rule, where.request, where.q_idx, positions.values, qo_head)
        return super().scores(problem, where, qo_head, positions, np.where(allowed, dot, -np.inf))


class AppliesTheCap(Steps):
    """The reference with one hook: what a soft cap does to a score."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> Scored:
        caps = [rule for rule in problem.score_rules if isinstance(rule, SoftCap)]
        others = tuple(rule for rule in problem.score_rules if not isinstance(rule, SoftCap))
        _, slope = super().scores(problem, where, qo_head, positions, dot)
        scores, _ = super().scores(replace(problem, score_rules=others), where, qo_head, positions, dot)
        for rule in caps:  # the matrix has the cap last
            scores = self.cap(scores, rule.cap)
        return scores, slope

    def cap(self, scores: FloatArray, cap: float) -> FloatArray:
        """Capped scores."""
        raise NotImplementedError


@deviates("SCORE-SOFTCAP", fault_class="A", report="BR-110 sgl-project/sglang#33915")
class IgnoresTheCap(AppliesTheCap):
    """Scores are not capped."""

    def cap(self, scores: FloatArray, cap: float) -> FloatArray:
        return scores


@deviates("SCORE-SOFTCAP", fault_class="R", report="BR-89 Dao-AILab/flash-attention#2402")
class MultipliesTheTanhByTheScore(AppliesTheCap):
    """tanh is multiplied by the score instead of the cap."""

    def cap(self, scores: FloatArray, cap: float) -> FloatArray:
        return np.asarray(scores * np.tanh(scores / cap))


@deviates("SCORE-SOFTCAP", fault_class="A", report="no report: a hard clamp for a soft cap")
class ClampsInsteadOfCapping(AppliesTheCap):
    """Scores are cut off at the cap."""

    def cap(self, scores: FloatArray, cap: float) -> FloatArray:
        return np.clip(scores, -cap, cap)


@deviates("SCORE-SOFTCAP", fault_class="A", report="no report: a reciprocal of the cap that went missing")
class CapsTheWrongQuotient(AppliesTheCap):
    """tanh sees the score, not score / cap."""

    def cap(self, scores: FloatArray, cap: float) -> FloatArray:
        return np.asarray(cap * np.tanh(scores))
