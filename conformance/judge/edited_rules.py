"""A rule's numbers belong to their call: the next call with other numbers gives its own answer. [RULE-EDIT]"""

import msgspec

from attnconform.conformance.cases.structure import Case, Structure
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.hygiene import same_outputs
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.values import compare_forward
from attnconform.conformance.judge.verdict import Finding
from attnconform.reference.rules import (
    Alibi,
    And,
    Document,
    HeadWindow,
    MaskRule,
    Or,
    PrefixLM,
    RelativeBias,
    ScoreRule,
    SoftCap,
    Window,
)

CLAUSE = "RULE-EDIT"


@checks(CLAUSE)
def check_edited_rule(trial: Trial) -> list[Finding]:
    """After a first call, the same problem with other numbers in its rules, and then the first one again."""
    if CLAUSE not in trial.case.clauses:
        return []
    before = trial.base
    other = Trial(edited(trial.case), trial.backend)
    for comparison in compare_forward(other, other.values, other.base, other.oracle):
        if comparison.worst_ratio > 1:
            message = f"after the rules' numbers changed: {comparison.message(comparison.worst)}"
            return [Finding(state="FAIL_value", clauses=(CLAUSE,), message=message)]
    deterministic = trial.backend.capabilities.determinism != "none"
    if deterministic and not same_outputs(before, trial.run(trial.values)):
        message = "the first call's rules again, and not the first call's bits"
        return [Finding(state="FAIL_determinism", clauses=(CLAUSE, "DETERMINISM-RUN"), message=message)]
    return []


def edited(case: Case) -> Case:
    """The case with other numbers in its rules, of the same shapes."""
    structure: Structure = case.structure
    scores = tuple(edited_score(rule) for rule in structure.score_rules)
    mask = None if structure.mask_rule is None else edited_mask(structure.mask_rule, structure.seqlens_kv)
    return msgspec.structs.replace(
        case, structure=msgspec.structs.replace(structure, score_rules=scores, mask_rule=mask)
    )


def edited_score(rule: ScoreRule) -> ScoreRule:
    """A rule of the same kind with other numbers."""
    match rule:
        case Alibi(slopes):
            return Alibi(tuple(2 * slope + 0.03125 for slope in slopes))
        case RelativeBias(tables):
            return RelativeBias(tuple(tuple(0.5 - bias for bias in table) for table in tables))
        case SoftCap(cap):
            return SoftCap(2 * cap)
        case _:
            return rule


def edited_mask(rule: MaskRule, seqlens_kv: tuple[int, ...]) -> MaskRule:
    """A rule of the same kind that allows other keys."""
    match rule:
        case And(parts):
            return And(tuple(edited_mask(part, seqlens_kv) for part in parts))
        case Or(parts):
            return Or(tuple(edited_mask(part, seqlens_kv) for part in parts))
        case Window(left, right):
            return Window(left=None if left is None else left + 1, right=right)
        case HeadWindow(left, right):
            return HeadWindow(left=tuple(None if size is None else size + 1 for size in left), right=right)
        case PrefixLM(prefix_len):
            return PrefixLM(tuple(min(n + 1, t) for n, t in zip(prefix_len, seqlens_kv, strict=True)))
        case Document(starts):
            return Document(tuple((0, *(s - 1 for s in row[1:] if s > 1)) for row in starts))
        case _:
            return rule
