"""Capacity tiers: a few list lengths that plans, workspaces and graphs are made for, and which of them are best."""

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise

from attnconform.reference.errors import RefusedInput

Cost = Callable[[int], float]  # cost of a row that runs at a capacity, in any unit


def smallest_tier(length: int, tiers: Sequence[int]) -> int:
    """C(k): the smallest tier that holds a row of `length` entries. [FORMAT-TIER]

    Raises RefusedInput where none does: cutting the row off would lose keys. [FORMAT-TIER-LIMIT]

    >>> smallest_tier(129, (64, 128, 256)), smallest_tier(128, (64, 128, 256)), smallest_tier(0, (64, 128))
    (256, 128, 64)
    """
    check_tiers(tiers)
    if length < 0:
        raise RefusedInput("FORMAT-TIER", "length", length, "must be at least 0")
    for tier in tiers:
        if length <= tier:
            return tier
    raise RefusedInput("FORMAT-TIER-LIMIT", "length", length, f"the largest tier is {tiers[-1]}")


def wasted_entries(lengths: Sequence[int], tiers: Sequence[int]) -> int:
    """Slots of padding that rows of these lengths leave in their tiers. [FORMAT-TIER]

    >>> wasted_entries([129], (128, 256))
    127
    """
    return sum(smallest_tier(length, tiers) - length for length in lengths)


def tier_cost(lengths: Sequence[int], tiers: Sequence[int], *, cost: Cost, price: float) -> Fraction:
    """E[T(C(k))] + price * m over the rows, in exact arithmetic: article formula (21). [FORMAT-TIER-OPTIMAL]

    Raises RefusedInput without rows and for a negative price.
    """
    _check_rows(lengths, price)
    total = sum((Fraction(cost(smallest_tier(length, tiers))) for length in lengths), start=Fraction(0))
    return total / len(lengths) + Fraction(price) * len(tiers)


def optimal_tiers(lengths: Sequence[int], *, cost: Cost, price: float) -> tuple[int, ...]:
    """The tiers of least `tier_cost`; of equals the fewest, then the smallest. [FORMAT-TIER-OPTIMAL]

    cost must not fall as the capacity grows. Then an optimal tier is the length of some row, and a prefix of the
    lengths has an optimum of its own, whatever serves the rest. Exact: costs are compared as fractions.

    >>> optimal_tiers([30, 60, 60, 100, 250], cost=float, price=20.0)
    (60, 100, 250)
    >>> optimal_tiers([30, 60, 60, 100, 250], cost=float, price=1000.0)
    (250,)
    """
    _check_rows(lengths, price)
    rows = sorted(Counter(max(length, 1) for length in lengths).items())  # a tier holds at least one entry
    _check_cost([tier for tier, _ in rows], cost)
    best: list[tuple[Fraction, int, tuple[int, ...]]] = [(Fraction(0), 0, ())]
    for end in range(1, len(rows) + 1):
        tier = rows[end - 1][0]
        served, choices = 0, []
        for start in range(end - 1, -1, -1):
            served += rows[start][1]
            before, count, tiers = best[start]
            paid = Fraction(cost(tier)) * served / len(lengths) + Fraction(price)
            choices.append((before + paid, count + 1, (*tiers, tier)))
        best.append(min(choices))
    return best[-1][2]


def check_tiers(tiers: Sequence[int]) -> None:
    """Refuses tiers that do not ascend strictly from 1 on. [FORMAT-TIER]"""
    if not tiers:
        raise RefusedInput("FORMAT-TIER", "tiers", "()", "there must be at least one")
    for i, tier in enumerate(tiers):
        least = tiers[i - 1] + 1 if i else 1
        if tier < least:
            raise RefusedInput("FORMAT-TIER", "tiers", tier, f"must be at least {least}", (i,))


def _check_rows(lengths: Sequence[int], price: float) -> None:
    if not lengths:
        raise RefusedInput("FORMAT-TIER-OPTIMAL", "len(lengths)", 0, "there must be at least one row")
    for i, length in enumerate(lengths):
        if length < 0:
            raise RefusedInput("FORMAT-TIER-OPTIMAL", "lengths", length, "must be at least 0", (i,))
    if not 0 <= price < float("inf"):
        raise RefusedInput("FORMAT-TIER-OPTIMAL", "price", price, "must be finite and at least 0")


def _check_cost(tiers: list[int], cost: Cost) -> None:
    for smaller, larger in pairwise(tiers):
        if cost(larger) < cost(smaller):
            limit = f"cost({smaller}) is {cost(smaller)}: a larger capacity cannot cost less"
            raise RefusedInput("FORMAT-TIER-OPTIMAL", "cost", cost(larger), limit, (larger,))
