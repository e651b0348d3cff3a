"""The conventions that attention kernels differ on, as variations of the reference: which one does a backend follow?

Each axis has the contract's value first. A combination names one value an axis; `attend` gives what a kernel of that
combination would answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from attnconform.conformance.cases.values import Values
from attnconform.reference.candidates import HOLE, Candidates, expand_entries
from attnconform.reference.coordinates import FloatArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rules import Alibi, And, MaskRule, Or, SoftCap, Window
from attnconform.reference.steps import Steps

LN_2 = float(np.log(2.0))
Combination = Mapping[str, str]  # axis -> value


@dataclass(frozen=True)
class Convention:
    """One thing that kernels do differently."""

    clause: str  # that says how the contract does it
    values: tuple[str, ...]  # the contract's first


CONVENTIONS: dict[str, Convention] = {
    "lse base": Convention("LSE-NATURAL", ("as declared", "base 2, declared natural", "natural, declared base 2")),
    "lse of an empty row": Convention("EMPTY-LSE", ("-inf", "+inf", "0")),
    "causal alignment": Convention("MASK-OFFSET", ("bottom right", "top left")),
    "window": Convention("MASK-WINDOW", ("left counts the keys before the query", "left counts the query as well")),
    "sm_scale": Convention("SCORE-SCALE", ("as given", "log2(e) expected in it", "log2(e) multiplied in twice")),
    "duplicates": Convention("SET-DUPLICATE", ("count once", "count each time")),
    "holes": Convention("SET-HOLE", ("anywhere", "end the list")),
    "KV head of query head h": Convention("GQA-MAP", ("h // group_size", "h % num_kv_heads")),
    "ALiBi": Convention("SCORE-ALIBI", ("slope * (kv_idx - q_idx)", "slope * (q_idx - kv_idx)")),
    "soft cap": Convention("SCORE-ORDER", ("in the order given", "before every bias", "after every bias")),
}
CONTRACT: Combination = {name: convention.values[0] for name, convention in CONVENTIONS.items()}
SCALES = {"as given": 1.0, "log2(e) expected in it": LN_2, "log2(e) multiplied in twice": 1 / LN_2}
LSE_FACTORS = {"as declared": 1.0, "base 2, declared natural": 1 / LN_2, "natural, declared base 2": LN_2}
EMPTY_LSE = {"-inf": -np.inf, "+inf": np.inf, "0": 0.0}


def combinations(axes: tuple[str, ...]) -> list[Combination]:
    """Every combination of some axes' values; the other axes stay with the contract. The contract comes first."""
    chosen = product(*(CONVENTIONS[axis].values for axis in axes))
    return [{**CONTRACT, **dict(zip(axes, values, strict=True))} for values in chosen]


class ConventionSteps(Steps):
    """The reference with the conventions that a changed problem cannot say."""

    def __init__(self, combination: Combination) -> None:
        self.combination = combination

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = super().candidates(problem, where, qo_head)
        if problem.candidates is None or self.combination["duplicates"] == CONTRACT["duplicates"]:
            return listed
        entries = problem.candidates.entries(problem.list_index(where, qo_head))
        every = expand_entries(
            entries[entries != HOLE],
            block_size=problem.candidates.block_size,
            seqlen_kv=int(problem.seqlen_kv[where.request]),
        )
        # window and sink positions join a list once, however often it names them
        return Positions(np.concatenate([every, np.setdiff1d(listed.values, every)]))

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        right = super().kv_head(problem, qo_head)
        return right if self.follows("KV head of query head h") else qo_head % problem.num_kv_heads

    def follows(self, axis: str) -> bool:
        """Whether an axis has the contract's value."""
        return self.combination[axis] == CONTRACT[axis]


def attend(combination: Combination, problem: AttentionProblem, values: Values) -> tuple[FloatArray, FloatArray]:
    """out and lse of a kernel that follows a combination; lse as it would arrive after the declared conversion."""
    steps = ConventionSteps(combination)
    result = steps.forward(seen_by(combination, problem), values.q, values.k, values.v)
    lse = result.lse * LSE_FACTORS[combination["lse base"]]
    return result.out, np.where(np.isneginf(result.lse), EMPTY_LSE[combination["lse of an empty row"]], lse)


def seen_by(combination: Combination, problem: AttentionProblem) -> AttentionProblem:
    """The problem as a kernel of a combination reads it."""
    changes: dict[str, object] = {"sm_scale": problem.sm_scale * SCALES[combination["sm_scale"]]}
    if combination["causal alignment"] != CONTRACT["causal alignment"]:
        changes["q_offset"] = np.zeros_like(problem.q_offset)
    if combination["window"] != CONTRACT["window"]:
        changes["mask_rule"] = narrowed(problem.mask_rule)
    if problem.candidates is not None and combination["holes"] != CONTRACT["holes"]:
        changes["candidates"] = ended_by_holes(problem.candidates)
    rules = list(problem.score_rules)
    if combination["ALiBi"] != CONTRACT["ALiBi"]:
        rules = [Alibi(tuple(-s for s in rule.slopes)) if isinstance(rule, Alibi) else rule for rule in rules]
    order = {"before every bias": True, "after every bias": False}.get(combination["soft cap"])
    if order is not None:
        rules.sort(key=lambda rule: isinstance(rule, SoftCap) != order)
    return replace(problem, score_rules=tuple(rules), **changes)  # type: ignore[arg-type]


def narrowed(rule: MaskRule | None) -> MaskRule | None:
    """A rule whose windows are one position shorter on the left."""
    if isinstance(rule, And | Or):
        return type(rule)(tuple(part for r in rule.rules if (part := narrowed(r)) is not None))
    if isinstance(rule, Window) and rule.left:
        return Window(rule.left - 1, rule.right)
    return rule


def ended_by_holes(candidates: Candidates) -> Candidates:
    """Lists that are over at their first hole."""
    indices = candidates.indices.copy()
    for start, stop in zip(candidates.indptr[:-1], candidates.indptr[1:], strict=True):
        holes = np.flatnonzero(indices[start:stop] == HOLE)
        if holes.size:
            indices[start + holes[0] : stop] = HOLE
    return replace(candidates, indices=indices)
