"""Mistakes about gradients of rules' parameters, and about gradients through what is done to complete rows."""

from dataclasses import replace

import ml_dtypes
import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.gradients import BackwardCall, ChangesGradients
from attnconform.reference.coordinates import FloatArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.results import AttentionResult, Gradients
from attnconform.reference.rules import Alibi, RelativeBias, SoftCap
from attnconform.reference.steps import Steps, Upstream


class ChangesRuleGradients(ChangesGradients):
    """The reference with one hook: one rule's gradient."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        pairs = zip(call.problem.score_rules, right.dscore, strict=True)
        return replace(right, dscore=tuple(self.gradient(rule, dscore) for rule, dscore in pairs))

    def gradient(self, rule: object, right: FloatArray) -> FloatArray:
        """What is returned for a rule."""
        raise NotImplementedError


@deviates("GRAD-RULE", fault_class="R", report="article 2, 4: captured tensors need gradients")
class GivesRulesNoGradient(ChangesRuleGradients):
    """Gradients of parameters are 0."""

    def gradient(self, rule: object, right: FloatArray) -> FloatArray:
        return np.zeros_like(right)


@deviates("GRAD-RULE", fault_class="G", report="article 2, 1.2: ALiBi's head is the query head")
class SumsSlopesOverAllHeads(ChangesRuleGradients):
    """Every head's slope gets the sum of all heads' gradients."""

    def gradient(self, rule: object, right: FloatArray) -> FloatArray:
        return np.full_like(right, right.sum()) if isinstance(rule, Alibi) else right


@deviates("GRAD-RULE", fault_class="R", report="no report: the last table entry takes no far keys in the backward")
class LosesFarDistancesOfATable(ChangesRuleGradients):
    """Entries at both ends of a relative table get nothing."""

    def gradient(self, rule: object, right: FloatArray) -> FloatArray:
        if not isinstance(rule, RelativeBias):
            return right
        kept = right.copy()
        kept[:, [0, -1]] = 0
        return kept


@deviates("GRAD-RULE", fault_class="R", report="article 2, 4: 1 - tanh^2, of the cap itself")
class TakesTanhForTheCapsGradient(Steps):
    """A cap's coefficient is tanh alone, as if its argument did not hold the cap."""

    def rule_gradients(
        self,
        problem: AttentionProblem,
        where: QueryRow,
        qo_head: int,
        positions: Positions,
        dot: FloatArray,
        upstream: FloatArray,
    ) -> list[FloatArray]:
        right = super().rule_gradients(problem, where, qo_head, positions, dot, upstream)
        first = problem.score_rules[0] if problem.score_rules else None
        if isinstance(first, SoftCap):
            right[0] = np.asarray(upstream @ np.tanh(self.scale(problem, dot) / first.cap))
        return right


@deviates("GRAD-RULE", fault_class="R", report="article 2, 4: the chain through the rules that follow")
class LeavesOutLaterRules(Steps):
    """A slope's gradient ignores the cap that comes after it."""

    def rule_gradients(
        self,
        problem: AttentionProblem,
        where: QueryRow,
        qo_head: int,
        positions: Positions,
        dot: FloatArray,
        upstream: FloatArray,
    ) -> list[FloatArray]:
        right = super().rule_gradients(problem, where, qo_head, positions, dot, upstream)
        for i, rule in enumerate(problem.score_rules):
            if isinstance(rule, Alibi):
                right[i] = np.zeros_like(right[i])
                right[i][qo_head] = upstream @ (positions.values - where.q_idx)
        return right


@deviates("BOUND-RULE", fault_class="Q", report="no report: parameters' gradients summed in the inputs' dtype")
class StoresRuleGradientsInBfloat16(ChangesRuleGradients):
    """Gradients of parameters are rounded to 8 bits."""

    def gradient(self, rule: object, right: FloatArray) -> FloatArray:
        return right.astype(ml_dtypes.bfloat16).astype(np.float64)


@deviates("GRAD-EPILOGUE", fault_class="R", report="article 1, 7.2: a fused epilogue left out of the backward")
class LeavesTheEpilogueOutOfTheBackward(Steps):
    """dout is taken for the gradient of the merged output."""

    def through_epilogue(
        self, problem: AttentionProblem, qo_head: int, merged: FloatArray, dout: FloatArray
    ) -> FloatArray:
        return dout


@deviates("GRAD-EPILOGUE", fault_class="R", report="no report: the saved output is the final one")
class TakesTheFinalOutputForTheMergedOne(Steps):
    """Δ and the epilogue's slope are computed from out after the epilogue."""

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
        return super().backward(problem, q, k, v, AttentionResult(result.out, result.lse), dout, dlse)


@deviates("GRAD-EPILOGUE", fault_class="R", report="no report: Δ of the final output, the rest of the merged one")
class TakesDeltaOfTheFinalOutput(Steps):
    """Δ alone is computed from dout and out after the epilogue."""

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
        self.final = self.epilogue(problem, qo_head, arrives.merged)
        super().add_row(problem, where, qo_head, k, v, arrives, into)

    def delta(self, dout: FloatArray, out: FloatArray, dlse: float) -> float:
        return super().delta(dout, self.final, dlse)
