"""How many ids go where, and which: allocations that meet a total exactly and change little from row to row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from attnconform.traces.draws import Floats
    from attnconform.traces.statistics import Ints


def tilt(shares: Floats, capacities: Ints, total: int) -> Floats:
    """Expected counts per cell that sum to total, none above its capacity.

    The odds of all cells change by one factor: a share of 1 stays full and a share of 0 stays empty, unless the total
    leaves no choice; then the cells of share 0 share what is left over.
    """
    open_cells = shares > 0
    room = int(capacities[open_cells].sum())
    if total >= room:
        rest = np.where(open_cells, 0, capacities)
        left = (total - room) / max(int(rest.sum()), 1)
        return np.where(open_cells, capacities, rest * min(left, 1.0)).astype(np.float64)
    odds = shares / np.maximum(1 - shares, 1e-12)
    low, high = -40.0, 40.0
    for _ in range(60):
        middle = (low + high) / 2
        scaled = odds * np.exp(middle)
        low, high = (middle, high) if (capacities * scaled / (1 + scaled)).sum() < total else (low, middle)
    scaled = odds * np.exp(high)
    return np.asarray(capacities * scaled / (1 + scaled), dtype=np.float64)


def settle(expected: Floats, before: Ints, least: Ints, most: Ints, total: int) -> Ints:
    """Whole counts near the expected ones with the given total: the counts before, where they still fit.

    A count moves only where it is further from its expectation than chance would take it, or where the total asks
    for it; so a row resembles the one before.
    """
    slack = 1 + np.sqrt(expected) / 2
    counts = np.clip(before, np.ceil(expected - slack), np.floor(expected + slack)).astype(np.int64)
    counts = np.clip(counts, least, most)
    surplus = int(counts.sum()) - total
    while surplus:
        sign = 1 if surplus > 0 else -1
        movable = counts > least if sign > 0 else counts < most
        if not movable.any():
            raise ValueError(f"counts {counts.tolist()} cannot sum to {total}")
        # The furthest from their expectation first, a few at a time.
        order = np.argsort(np.where(movable, sign * (expected - counts), np.inf), kind="stable")
        moved = order[: min(abs(surplus), max(int(movable.sum()) // 4, 1))]
        counts[moved] -= sign
        surplus -= sign * len(moved)
    return counts


def round_to_total(expected: Floats, u: float) -> Ints:
    """Whole counts within 1 of the expected ones; of the same total where that is whole."""
    edges = np.floor(np.concatenate([[0.0], np.cumsum(expected)]) + u + 1e-6).astype(np.int64)
    return np.diff(edges)


def spread_churn(held: Ints, free: Ints, total: int, u: float) -> Ints:
    """Of `total` ids to exchange, how many in each cell; a cell can exchange what it holds for what is free."""
    room = np.minimum(held, free)
    if total >= room.sum():
        return room
    return np.minimum(round_to_total(room * (total / max(int(room.sum()), 1)), u), room)


def pick_new(pool: Ints, count: int, returning: Ints, return_share: float, order: Floats) -> Ints:
    """`count` ids of the pool: about return_share of them among those returning, in the order given."""
    ranked = pool[np.argsort(order, kind="stable")]
    back = np.isin(ranked, returning)
    wanted_back = int(return_share * count + (order[0] if len(order) else 0.0))
    first = ranked[back][: min(wanted_back, count)]
    fresh = ranked[~back][: count - len(first)]
    late = ranked[back][len(first) : len(first) + count - len(first) - len(fresh)]
    return np.concatenate([first, fresh, late])
