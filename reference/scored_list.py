"""Scored positions: what a selector hands over before its lists become candidates."""

from dataclasses import dataclass

import numpy as np

from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.errors import RefusedInput


@dataclass(frozen=True)
class ScoredList:
    """Positions that one query head, or one branch, wants, each with its score."""

    positions: IntArray  # (n,) logical, each once
    scores: FloatArray  # (n,)


def check_distinct(name: str, positions: IntArray) -> None:
    """Refuses a position that one list names twice: it would have two scores. [SET-FORM]"""
    seen: set[int] = set()
    for at, position in enumerate(positions.tolist()):
        if position in seen:
            raise RefusedInput("SET-FORM", name, position, "the list names it before: it would have two scores", (at,))
        seen.add(position)


def check_finite(name: str, values: FloatArray) -> None:
    """Refuses values that are not finite numbers. [SAFE-FINITE]"""
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size:
        at = int(bad[0])
        raise RefusedInput("SAFE-FINITE", name, float(values[at]), "must be finite", (at,))


def best_positions(scored: ScoredList, *, budget: int) -> IntArray:
    """The `budget` positions of highest score, ascending; of equal scores the lower position. [GQA-MERGE-TIE]

    All of them, where there are no more. Raises RefusedInput for a negative budget.

    >>> best_positions(ScoredList(np.array([9, 4, 7]), np.array([0.5, 0.5, 0.75])), budget=2)
    array([4, 7])
    """
    if budget < 0:
        raise RefusedInput("GQA-MERGE-TIE", "budget", budget, "must be at least 0")
    order = np.lexsort((scored.positions, -scored.scores))
    return np.sort(scored.positions[order[:budget]])
