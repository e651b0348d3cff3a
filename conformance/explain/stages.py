"""The first stage at which a backend parts from the reference: index, lse, out, gradients."""

from dataclasses import dataclass

import numpy as np

from attnconform.conformance.explain.rank import comparisons
from attnconform.conformance.judge.membership import check_membership
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.values import Comparison
from attnconform.reference.coordinates import IntArray


@dataclass(frozen=True)
class Stage:
    """A stage, and what is wrong there."""

    name: str
    message: str
    where: str  # in kernel terms


def first_wrong_stage(trial: Trial) -> Stage | None:
    """Stops at the first stage that differs; None where all agree."""
    edges = check_membership(trial)
    if edges:
        return Stage("index", edges[0].message, "")
    compared = sorted(comparisons(trial), key=lambda c: ("lse", "out", "dv", "dq", "dk", "dsink").index(c.name))
    wrong = next((c for c in compared if c.worst_ratio > 1), None)
    if wrong is None:
        return None
    return Stage(wrong.name, wrong.message(wrong.worst), pattern(trial, wrong))


def pattern(trial: Trial, comparison: Comparison) -> str:
    """What the wrong elements have in common: rows, heads within a group, slots within a page, columns."""
    wrong = np.argwhere(comparison.ratio(comparison.worst) > 1)
    problem = trial.problem
    if comparison.name in ("dk", "dv"):
        parts = [
            common("slot mod page_size", wrong[:, 0] % problem.cache.page_size, problem.cache.page_size),
            common("kv head", wrong[:, 1], problem.num_kv_heads),
        ]
    elif comparison.name == "dsink":
        parts = [common("query head", wrong[:, 0], problem.num_qo_heads)]
    else:
        parts = [
            common("row", wrong[:, 0], problem.total_q),
            common("query head", wrong[:, 1], problem.num_qo_heads),
            common("head mod group_size", wrong[:, 1] % problem.group_size, problem.group_size),
        ]
    if wrong.shape[1] == 3:
        parts.append(common("column mod 16", wrong[:, 2] % 16, 16))
    return "; ".join(part for part in parts if part) or "everywhere"


def common(name: str, values: IntArray, size: int) -> str:
    """`name in {..}` where the wrong elements do not cover the whole range."""
    seen = np.unique(values)
    if len(seen) == size or size <= 1:
        return ""
    return f"{name} in {{{', '.join(str(int(v)) for v in seen[:8])}{', ...' if len(seen) > 8 else ''}}} of {size}"
