"""Rules that running code registers under a name, and that data names.

A file holds the name alone: reading a case or a trace never imports or runs what it says. [RULE-NAME]
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray
from attnconform.reference.errors import RefusedInput

# (request, query head, query position, key positions) -> True where the query may look
Allows = Callable[[int, int, IntArray | int, IntArray], BoolArray]
# (scores, query head, query position, key positions) -> scores, or their derivative by the score that came in
OnScores = Callable[[FloatArray, int, IntArray | int, IntArray], FloatArray]


@dataclass(frozen=True)
class RegisteredScore:
    """A score rule and its derivative, which no reference can find by itself."""

    apply: OnScores
    slope: OnScores


MASKS: dict[str, Allows] = {}
SCORES: dict[str, RegisteredScore] = {}


def register_mask(name: str, allows: Allows, *, again: bool = False) -> None:
    """Makes a mask rule known as CustomMask(name). Raises ValueError where the name is taken, unless again."""
    if name in MASKS and not again:
        raise ValueError(f"a mask rule named {name!r} is registered already")
    MASKS[name] = allows


def register_score(name: str, apply: OnScores, slope: OnScores, *, again: bool = False) -> None:
    """Makes a score rule known as CustomScore(name). Raises ValueError where the name is taken, unless again."""
    if name in SCORES and not again:
        raise ValueError(f"a score rule named {name!r} is registered already")
    SCORES[name] = RegisteredScore(apply, slope)


def check_custom_mask(name: str) -> None:
    """Refuses a name that nobody registered, and a rule that answers the same question differently. [RULE-PURE]"""
    if name not in MASKS:
        raise RefusedInput("RULE-NAME", "CustomMask.name", name, "no mask rule is registered under that name")
    q_idx, kv_idx = np.arange(4)[:, None], np.arange(8)[None, :]
    first, second = (np.asarray(MASKS[name](0, 0, q_idx, kv_idx)) for _ in range(2))
    if not np.array_equal(first, second):
        raise RefusedInput("RULE-PURE", "CustomMask.name", name, "asked twice about the same keys, it answers twice")


def check_custom_score(name: str) -> None:
    """Refuses a name that nobody registered, and a rule that is not a function of its arguments. [RULE-PURE]"""
    if name not in SCORES:
        raise RefusedInput("RULE-NAME", "CustomScore.name", name, "no score rule is registered under that name")
    scores, kv_idx = np.linspace(-2.0, 2.0, 8), np.arange(8)
    first, second = (np.asarray(SCORES[name].apply(scores, 0, 4, kv_idx)) for _ in range(2))
    if not np.array_equal(first, second):
        raise RefusedInput("RULE-PURE", "CustomScore.name", name, "asked twice about the same keys, it answers twice")
