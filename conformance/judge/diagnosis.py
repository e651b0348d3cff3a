"""Which clause explains a wrong edge, from where the position stands in the row's own sets."""

from collections.abc import Iterator

import numpy as np

from attnconform.conformance.judge.trial import Trial
from attnconform.reference.candidates import HOLE
from attnconform.reference.coordinates import IntArray
from attnconform.reference.problem import QueryRow
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.rules import And, Causal, CustomMask, Document, HeadWindow, MaskRule, Or, PrefixLM, Window
from attnconform.reference.steps import Steps

RULE_CLAUSES: dict[type, str] = {
    Causal: "MASK-CAUSAL",
    Window: "MASK-WINDOW",
    HeadWindow: "MASK-HEAD-WINDOW",
    CustomMask: "RULE-CUSTOM",
    PrefixLM: "MASK-PREFIX",
    Document: "MASK-DOCUMENT",
    And: "MASK-COMPOSE",
    Or: "MASK-COMPOSE",
}


def name_extra(trial: Trial, where: QueryRow, qo_head: int, positions: IntArray) -> tuple[str, ...]:
    """Clauses that an attended position outside the row's effective set breaks."""
    if not len(positions):
        return "COORD-SLOT", "MASK-TAIL", "SAFE-OWNER"
    problem, position = trial.problem, int(positions[0])
    if position not in Steps().candidates(problem, where, qo_head).values:
        return unlisted_clauses(trial, where, qo_head, position)
    if position in Steps().effective(problem, where, qo_head).values:
        return "DROPOUT-COUNTER", "DROPOUT-NUMERATOR"  # attended, and dropped: only its value should be missing
    broken = broken_rules(problem.mask_rule, where, position, qo_head)
    return tuple(dict.fromkeys([*broken, "MASK-BEFORE-MAX", "MASK-OFFSET"]))


def unlisted_clauses(trial: Trial, where: QueryRow, qo_head: int, position: int) -> tuple[str, ...]:
    """A position that the row does not list was attended."""
    lists = trial.problem.candidates
    assert lists is not None
    if listed_for_another_head(trial, where, qo_head, position):
        return "GQA-LISTS", "GQA-MAP", "SET-IDENTITY"
    if lists.granularity == "block":
        return "BLOCK-BIND", "BLOCK-MEMBER", "BLOCK-EXPAND", "SET-IDENTITY"
    entries = lists.entries(trial.problem.list_index(where, qo_head))
    if position == 0 and (entries == HOLE).any():
        return "SET-HOLE", "SET-IDENTITY"
    return "SET-IDENTITY", "SET-UNION", "BLOCK-MEMBER"


def listed_for_another_head(trial: Trial, where: QueryRow, qo_head: int, position: int) -> bool:
    """Whether some other query head of the row lists the position."""
    others = (h for h in range(trial.problem.num_qo_heads) if h != qo_head)
    return any(position in Steps().candidates(trial.problem, where, h).values for h in others)


def broken_rules(rule: MaskRule | None, where: QueryRow, position: int, qo_head: int) -> Iterator[str]:
    """Clauses of the parts of a rule that forbid the position, the parts before the composition."""
    if rule is None or mask_allows(rule, where.request, where.q_idx, np.array([position]), qo_head).all():
        return
    if isinstance(rule, And | Or):
        for part in rule.rules:
            yield from broken_rules(part, where, position, qo_head)
    yield RULE_CLAUSES[type(rule)]


def rule_clauses(rule: MaskRule | None) -> Iterator[str]:
    """Clauses of every part of a rule."""
    if rule is None:
        return
    if isinstance(rule, And | Or):
        for part in rule.rules:
            yield from rule_clauses(part)
    yield RULE_CLAUSES[type(rule)]


def name_missing(trial: Trial, where: QueryRow, qo_head: int, position: int) -> tuple[str, ...]:
    """Clauses that a position left out of the effective set breaks."""
    problem = trial.problem
    clauses = ["SET-IDENTITY", "COORD-SLOT"]
    seqlen_kv = int(problem.seqlen_kv[where.request])
    lists = problem.candidates
    if lists is not None:
        entries = lists.entries(problem.list_index(where, qo_head))
        if (entries == HOLE).any():
            clauses.insert(0, "SET-HOLE")
        if lists.granularity == "block":
            clauses.append("BLOCK-EXPAND")
        if position < lists.num_sink_tokens or where.q_idx - position < lists.window:
            clauses.append("SET-UNION")
    if position // problem.cache.page_size == (seqlen_kv - 1) // problem.cache.page_size:
        clauses.append("MASK-TAIL")
    if problem.cache.head_pages is not None:
        clauses.insert(0, "COORD-HEAD-PAGE")
    if problem.dropout is not None:
        clauses = ["DROPOUT-COUNTER", *clauses]
    clauses += [*rule_clauses(problem.mask_rule), "MASK-OFFSET", "GQA-MAP", "MERGE-SPLIT", "MERGE-DISJOINT"]
    return tuple(dict.fromkeys(clauses))
