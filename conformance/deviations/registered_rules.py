"""Mistakes about rules that code brings, and about rules whose numbers change from call to call. [RULE]"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Forward, Tensors
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import FloatArray, Positions
from attnconform.reference.custom_rules import MASKS, SCORES
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rules import CustomMask, CustomScore, ScoreRule
from attnconform.reference.steps import Steps


@deviates("RULE-CUSTOM", fault_class="A", report="article 2, 2.2: mask_mod kept for partial blocks, and not asked")
class IgnoresARegisteredMask(Steps):
    """A registered mask allows everything."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        rule = problem.mask_rule
        return super().effective(
            replace(problem, mask_rule=None if isinstance(rule, CustomMask) else rule), where, qo_head
        )


@deviates("RULE-CUSTOM", fault_class="G", report="article 2, 1.2: a parameter of the KV side needs the head map")
class AsksARegisteredMaskForTheKvHead(Steps):
    """A registered mask is asked with the KV head."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        if not isinstance(problem.mask_rule, CustomMask):
            return super().effective(problem, where, qo_head)
        listed = self.candidates(problem, where, qo_head).values
        allows = MASKS[problem.mask_rule.name]
        return Positions(listed[allows(where.request, self.kv_head(problem, qo_head), where.q_idx, listed)])


@deviates("RULE-CUSTOM", fault_class="A", report="article 2, 1.2: score_mod gets the scaled score")
class AppliesARegisteredScoreRuleBeforeTheScale(Steps):
    """A registered rule sees dot products, and what it makes of them is scaled; one that is linear hides that."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        rules = tuple(r for r in problem.score_rules if not isinstance(r, CustomScore))
        if len(rules) == len(problem.score_rules):
            return super().scores(problem, where, qo_head, positions, dot)
        return super().scores(replace(problem, score_rules=rules), where, qo_head, positions, dot)


@deviates("RULE-CUSTOM", fault_class="M", report="article 2, 5.1: a rule asked with the local query index")
class AsksARegisteredScoreRuleFromTheFirstRow(Steps):
    """A registered score rule counts queries from their request's first row."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        if any(isinstance(rule, CustomScore) for rule in problem.score_rules):
            where = replace(where, q_idx=where.local)
        return super().scores(problem, where, qo_head, positions, dot)


@deviates("RULE-CUSTOM", fault_class="R", report="article 2, 4: a score rule without its derivative")
class LeavesOutTheSlopeOfARegisteredRule(Steps):
    """The backward takes a registered rule for the identity."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        scores, slope = super().scores(problem, where, qo_head, positions, dot)
        custom = any(isinstance(rule, CustomScore) for rule in problem.score_rules)
        return scores, np.ones_like(slope) if custom else slope


@deviates("RULE-NAME", fault_class="A", report="no report: an unknown rule taken for none")
class TakesAnUnknownNameForNoRule(Steps):
    """A name that nobody registered stands for no rule."""

    def refuse(self, problem: AttentionProblem) -> None:
        super().refuse(known(problem))

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        return super().effective(known(problem), where, qo_head)


def known(problem: AttentionProblem) -> AttentionProblem:
    """The problem without rules that nobody registered."""
    mask = problem.mask_rule
    scores = tuple(r for r in problem.score_rules if not (isinstance(r, CustomScore) and r.name not in SCORES))
    unknown = isinstance(mask, CustomMask) and mask.name not in MASKS
    return replace(problem, mask_rule=None if unknown else mask, score_rules=scores)


@deviates("RULE-PURE", fault_class="C", report="article 2, 1.2: a rule that reads a mutable step is folded")
class AcceptsAnImpureRule(Steps):
    """A registered rule is used as it comes."""

    def refuse(self, problem: AttentionProblem) -> None:
        try:
            super().refuse(problem)
        except RefusedInput as error:
            if error.clause != "RULE-PURE":
                raise


@deviates("RULE-EDIT", fault_class="C", report="article 2, 4.1: a bias folded into compiled code as a constant")
class KeepsTheNumbersOfTheFirstRules(StepsBackend):
    """Score rules of a kind keep the numbers that they had at the first call."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.first: dict[tuple[object, ...], tuple[ScoreRule, ...]] = {}

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        rules = problem.spec.score_rules
        key = (problem.spec.num_qo_heads, *(type(rule).__name__ for rule in rules))
        spec = replace(problem.spec, score_rules=self.first.setdefault(key, rules))
        return super().forward(replace(problem, spec=spec), tensors)


@deviates("RULE-EDIT", fault_class="C", report="article 2, 1.2: a document change rebuilds the block mask")
class KeepsTheFirstMask(StepsBackend):
    """A mask rule of a kind keeps the numbers that it had at the first call, as a cached block mask would."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.first: dict[tuple[object, ...], AttentionProblem] = {}

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        spec = problem.spec
        key = (type(spec.mask_rule).__name__, spec.batch_size, spec.num_qo_heads, tuple(spec.seqlen_kv.tolist()))
        rule = self.first.setdefault(key, spec).mask_rule
        return super().forward(replace(problem, spec=replace(spec, mask_rule=rule)), tensors)
