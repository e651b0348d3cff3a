"""How many ids go where, and which: allocations that meet a total exactly and change little from row to row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from attnconform.traces.draws import Floats
    from attnconform.traces.statistics import Ints

    Flags = NDArray[np.bool_]


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
    low, high = 1e-12, 1e12
    while high > low * (1 + 1e-9):
        middle = np.sqrt(low * high)
        scaled = odds * middle
        counts = capacities * (scaled / (1 + scaled))
        low, high = (middle, high) if counts.sum() < total else (low, middle)
    return np.asarray(counts, dtype=np.float64)


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
        return np.asarray(room)
    return np.asarray(np.minimum(round_to_total(room * (total / max(int(room.sum()), 1)), u), room))


def keep_shared(held: Ints, counts: Ints, capacities: Ints, shared: int, u: float) -> Ints:
    """How many ids of the row before each cell keeps: `shared` in all, or more where a cell has nothing to exchange."""
    kept = np.minimum(held, counts)
    return kept - spread_churn(kept, capacities - held - (counts - kept), max(int(kept.sum()) - shared, 0), u)


def swap_cells(counts: Ints, kept: Ints, push: Floats, pull: Floats, room: Ints, u: Floats) -> tuple[Ints, Ints]:
    """counts and kept after moving ids between cells, for what no cell can exchange by itself: one id per two draws.

    A cell loses a kept id by its push and gains a new one by its pull, as long as it has room.
    """
    counts, kept, room = counts.copy(), kept.copy(), room.copy()
    for lose, gain in u.reshape(-1, 2):
        losing, gaining = kept * push, pull * (room > 0)
        if losing.sum() <= 1e-9:
            break
        source = _pick(losing, lose)
        gaining[source] = 0.0
        if gaining.sum() <= 0:
            break
        target = _pick(gaining, gain)
        counts[source], kept[source], room[source] = counts[source] - 1, kept[source] - 1, room[source] + 1
        counts[target], room[target] = counts[target] + 1, room[target] - 1
    return counts, kept


def _pick(weights: Floats, u: float) -> int:
    edges = np.cumsum(weights)
    return int(min(np.searchsorted(edges, u * edges[-1], side="right"), len(weights) - 1))


def flag(ids: Ints, marked: Ints) -> Flags:
    """Which of the ids are marked."""
    flags = np.zeros(max(int(ids.max(initial=0)), int(marked.max(initial=0))) + 1, dtype=bool)
    flags[marked] = True
    return flags[ids]


def first_by(order: Floats, among: Flags, counts: Ints) -> Flags:
    """In each line, the first `counts` of those flagged, by order."""
    ranks = np.argsort(np.argsort(np.where(among, order, 2.0), axis=1, kind="stable"), axis=1, kind="stable")
    return among & (ranks < counts[:, None])


def beside(chosen: Flags, free: Flags, step: int, u: float) -> int | None:
    """A free place one step from a chosen one, on either side; None where there is none."""
    taken = np.flatnonzero(chosen)
    places = np.concatenate([taken - step, taken + step])
    places = places[(places >= 0) & (places < len(free))]
    places = places[free[places]]
    return int(places[int(u * len(places))]) if len(places) else None


def weighted(free: Flags, weights: Floats, u: float) -> int:
    """A free place, by weight."""
    places = np.flatnonzero(free)
    return int(places[_pick(weights[places], u)])
