"""Draws one row of candidates after another from a group's distributions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnconform.traces.draws import draw, walk
from attnconform.traces.placement import round_to_total, settle, spread_churn, swap_cells, tilt

if TYPE_CHECKING:
    from attnconform.traces.draws import Floats
    from attnconform.traces.selection_model import SelectionModel
    from attnconform.traces.statistics import Granularity, Ints

    Flags = NDArray[np.bool_]

# What a row in the second half of a recorded tile has before it, on average: rows that an id may return from.
HISTORY_ROWS = 12
# Counts drift by at most this quantile from a row to the next.
WALK_STEP = 1 / 16
# Of a place where nothing was recorded, taken only when nothing else is left.
LEAST_WEIGHT = 1e-9
import os
RP=float(os.environ.get("RP","0.5"))
STICKINESS = float(os.environ.get("ST","0.75"))
NONE: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Shape:
    """What the drawer must know besides the distributions."""

    granularity: Granularity
    block_size: int
    window: int | None  # a row sees the tokens i - window + 1 to i; None: all up to i
    consecutive: bool


class RowDrawer:
    """The rows of one request, in order; remembers the rows just drawn, because the next resembles them."""

    def __init__(self, model: SelectionModel, shape: Shape, seed: int, num_rows: int) -> None:
        self.model = model
        self.shape = shape
        self.seed = seed
        self.quantiles = {name: self._quantiles(name, num_rows) for name in ("n", "blocks", "start")}
        self.block_history: deque[Ints] = deque(maxlen=HISTORY_ROWS)
        self.id_history: deque[Ints] = deque(maxlen=HISTORY_ROWS)

    def _quantiles(self, name: str, num_rows: int) -> Floats:
        if self.shape.consecutive:
            return walk(self.seed, name, num_rows, WALK_STEP)
        return draw(self.seed, name, 0, num_rows)

    def next(self, r: int, q_position: int) -> Ints:
        """The ids of row r at a position, sorted and distinct."""
        if not self.shape.consecutive:
            self.block_history.clear()
            self.id_history.clear()
        first = 0 if self.shape.window is None else max(0, q_position - self.shape.window + 1)
        if self.shape.granularity == "block":
            ids = self._blocks(r, q_position, first, 0)
        else:
            wanted = self.model.value("candidates", self.quantiles["n"][r], 1)
            count = max(1, min(wanted, q_position - first + 1))
            ids = self._tokens(r, q_position, first, count)
            self.id_history.append(ids)
        return ids

    # Blocks

    def _blocks(self, r: int, q_position: int, first: int, num_tokens: int) -> Ints:
        """The blocks of a row, enough of them to hold num_tokens."""
        size = self.shape.block_size
        own, low = q_position // size, first // size
        visible = own - low + 1
        total = max(1, min(self.model.blocks_at(q_position + 1, self.quantiles["blocks"][r], visible), visible))
        if num_tokens:
            total = min(total, num_tokens)
        if total == visible or num_tokens == q_position - first + 1:
            blocks = np.arange(low, own + 1)
        else:
            blocks = self._choose_blocks(r, own, low, total)
        blocks = self._make_room(blocks, q_position, first, num_tokens)
        self.block_history.append(blocks)
        return blocks

    def _choose_blocks(self, r: int, own: int, low: int, total: int) -> Ints:
        before = self.block_history[-1] if self.block_history else NONE
        start = self._start_block(r, own, low)
        farthest = own - max(low, 1)
        total = min(total - len(start), farthest + 1)
        if total <= 0:
            return start if len(start) else np.array([own])
        u = draw(self.seed, "blocks", r, own + 4)
        density = self.model.blocks
        capacities = density.capacities(0, farthest)
        expected = tilt(density.shares, capacities, total)
        cells = density.cells(own - before[(before >= max(low, 1)) & (before <= own)])
        held = np.bincount(cells, minlength=len(capacities)).astype(np.int64)
        most = np.where(expected > 0, capacities, 0)
        least = np.where(expected >= capacities - 1e-6, capacities, 0)
        drawn = held if len(before) else round_to_total(expected, u[own + 1])
        counts = settle(expected, drawn, least, most, total)
        shared = round(self.model.fraction("block_overlap", u[own + 2]) * (total + len(start)))
        shared -= int(np.isin(start, before).sum())
        keep = self._keep(held, counts, capacities, shared, u[own + 3])
        if len(before) and (left := int(keep.sum()) - shared) > 0:
            free = capacities - held - (counts - keep)
            shares = expected / np.maximum(capacities, 1)
            counts, keep = swap_cells(counts, keep, free, shares, left, draw(self.seed, "swap", r, 2 * left))
        return self._exchange(r, own, low, before, start, counts, keep, u)

    def _start_block(self, r: int, own: int, low: int) -> Ints:
        """Block 0, where the row sees it from another block and selects something of it."""
        if own == 0 or low > 0:
            return NONE
        return np.zeros(min(self.model.value("start_occupancy", self.quantiles["start"][r], 0), 1), dtype=np.int64)

    def _exchange(
        self, r: int, own: int, low: int, before: Ints, start: Ints, counts: Ints, keep: Ints, order: Floats
    ) -> Ints:
        """counts blocks at each distance, keep of them from the row before; new ones return, or lie beside others."""
        blocks = np.arange(own + 1)
        cells = np.where(blocks >= max(low, 1), self.model.blocks.cells(own - blocks), -1)
        held = _flags(blocks, before)
        past = _flags(blocks, np.concatenate(self.block_history)) if self.block_history else np.zeros_like(held)
        chosen = _flags(blocks, start)
        # Recorded blocks come in two kinds, those that stay for long and those that come and go.
        going = STICKINESS * (1 - self._latent(own)) + (1 - STICKINESS) * order[: own + 1]
        for cell in np.flatnonzero(counts):
            pool = np.flatnonzero(cells == cell)
            kept = pool[held[pool]]
            chosen[kept[np.argsort(going[kept], kind="stable")[: keep[cell]]]] = True
        u = draw(self.seed, "newblock", r, 3 * int((counts - keep).sum()))
        for cell in np.flatnonzero(counts - keep):
            pool = cells == cell
            for _ in range(counts[cell] - keep[cell]):
                chosen[self._new_block(chosen, pool, held, past, u[:3])] = True
                u = u[3:]
        return np.flatnonzero(chosen)

    def _new_block(self, chosen: Flags, pool: Flags, held: Flags, past: Flags, u: Floats) -> int:
        """One more block of the pool; one of the row before only when there is no other."""
        free = pool & ~chosen & ~held
        if not free.any():
            free = pool & ~chosen
        back = free & past
        if back.any() and (u[0] < self._return_share("block_return") or (free == back).all()):
            free = back
        elif (free & ~past).any():
            free = free & ~past
        step = self.model.value("block_gap", u[1], 1)
        beside = _beside(chosen, free, step, u[2]) if chosen.any() else None
        return int(np.flatnonzero(free)[int(u[2] * free.sum())]) if beside is None else beside

    def _return_share(self, name: str) -> float:
        """How many new ids return from earlier rows; fewer as long as there are few such rows."""
        return self.model.share(name) * min(1.0, len(self.block_history) / HISTORY_ROWS) ** RP

    def _latent(self, own: int) -> Floats:
        """A uniform of each block's own, the same in every row: how full it is, and how long it stays."""
        return draw(self.seed, "latent", 0, own + 1)

    def _make_room(self, blocks: Ints, q_position: int, first: int, num_tokens: int) -> Ints:
        """The blocks, and the nearest other ones where they see fewer than num_tokens tokens."""
        size = self.shape.block_size
        while self._room(blocks, q_position, first) < num_tokens:
            others = np.setdiff1d(np.arange(first // size, q_position // size + 1), blocks)
            blocks = np.union1d(blocks, others[-1:])
        return blocks

    def _room(self, blocks: Ints, q_position: int, first: int) -> int:
        size = self.shape.block_size
        return int((np.minimum(blocks * size + size - 1, q_position) - np.maximum(blocks * size, first) + 1).sum())

    # Tokens

    def _tokens(self, r: int, q_position: int, first: int, count: int) -> Ints:
        """`count` tokens of a row, in blocks drawn for it."""
        size = self.shape.block_size
        blocks = self._blocks(r, q_position, first, count)
        ids = blocks[:, None] * size + np.arange(size)
        weights = self._weights(ids, q_position, first)
        if (weights > 0).sum() < count:
            weights = np.where((ids <= q_position) & (ids >= first), np.maximum(weights, LEAST_WEIGHT), 0.0)
        before = _flags(ids, self.id_history[-1] if self.id_history else NONE) & (weights > 0)
        u = draw(self.seed, "tokens", r, ids.size + 2)
        counts = self._occupancies(r, blocks, weights, before.sum(1), count)
        keep = self._keep(before.sum(1), counts, (weights > 0).sum(1), round(self._overlap(u[0]) * count), u[1])
        chosen = self._place(r, ids, weights, before, keep, counts, u[2:].reshape(ids.shape))
        return ids[chosen]

    def _overlap(self, u: float) -> float:
        return self.model.fraction("overlap", u)

    def _weights(self, ids: Ints, q_position: int, first: int) -> Floats:  # (blocks, block_size)
        """The recorded density at each token of the blocks; 0 where the row does not see it."""
        visible = (ids <= q_position) & (ids >= first)
        weights = self.model.ids.at(np.maximum(q_position - ids, 0))
        if ids[0, 0] == 0 and q_position >= self.shape.block_size:
            weights[0] = self.model.start_weights(self.shape.block_size)
        weights = np.where(visible, weights, 0.0)
        # A block with no recorded places takes any place that the row sees.
        return np.where(visible & ~(weights > 0).any(1, keepdims=True), LEAST_WEIGHT, weights)

    def _occupancies(self, r: int, blocks: Ints, weights: Floats, held: Ints, count: int) -> Ints:
        """How many tokens of each block, `count` in all, at least one each."""
        most = (weights > 0).sum(1)
        least = np.ones_like(most)
        wanted = self._wanted(r, blocks, weights)
        if blocks[0] == 0 and len(blocks) > 1 and most[1:].sum() >= count - wanted[0] >= len(blocks) - 1:
            # What the first block holds is recorded for itself.
            least[0] = most[0] = np.clip(round(wanted[0]), 1, most[0])
        shares = ((wanted - 0.5) / np.maximum(most, 1)).clip(1e-6, 1)
        expected = least + tilt(shares, most - least, count - int(least.sum()))
        before = np.where(held > 0, held, np.rint(expected).astype(np.int64))
        return settle(expected, before, least, most, count)

    def _wanted(self, r: int, blocks: Ints, weights: Floats) -> Floats:
        """Tokens that each block would have by itself: a quantile of its own, which it keeps from row to row."""
        own = blocks[-1]
        wanted = self.model.given_quantiles("occupancy", own - blocks, self._latent(int(own))[blocks])
        if blocks[0] == 0 and own > 0:
            wanted[0] = max(self.model.value("start_occupancy", self.quantiles["start"][r], 1), 1)
        # The own block is only partly there: what was recorded at each distance says more than a count.
        wanted[-1] = weights[-1].sum() + 0.5
        return np.minimum(wanted, (weights > 0).sum(1))

    @staticmethod
    def _keep(held: Ints, counts: Ints, capacities: Ints, shared: int, u: float) -> Ints:
        """How many ids of the row before each block keeps, `shared` in all where that is possible."""
        kept = np.minimum(held, counts)
        return kept - spread_churn(kept, capacities - held - (counts - kept), max(int(kept.sum()) - shared, 0), u)

    def _place(
        self, r: int, ids: Ints, weights: Floats, before: Flags, keep: Ints, counts: Ints, order: Floats
    ) -> Flags:  # (blocks, block_size)
        """Which tokens: first those kept, then those that return, then new ones beside them."""
        usable = weights > 0
        chosen = _first_by(order, before, keep)
        past = np.concatenate(self.id_history) if self.id_history else NONE
        share = self._return_share("return")
        returning = (share * (counts - keep) + order[:, 0]).astype(np.int64)
        chosen |= _first_by(order, usable & ~before & _flags(ids, past), np.minimum(returning, counts - keep))
        full = counts >= usable.sum(1)
        chosen[full] = usable[full]
        missing = counts - chosen.sum(1)
        # Ids let go should stay away, unless nothing else is left.
        avoid = before & ((usable & ~before).sum(1) + keep >= counts)[:, None]
        u = draw(self.seed, "new", r, 3 * int(missing.sum()))
        for c in np.flatnonzero(missing):
            mine, u = u[: 3 * missing[c]].reshape(3, -1), u[3 * missing[c] :]
            steps = self.model.given_quantiles("inner_gap", np.full(missing[c], counts[c]), mine[0]).astype(np.int64)
            for step, side, place in zip(steps, mine[1], mine[2], strict=True):
                free = usable[c] & ~chosen[c] & ~avoid[c]
                beside = _beside(chosen[c], free, int(step), side)
                chosen[c, _weighted(free, weights[c], place) if beside is None else beside] = True
        return chosen


def _flags(ids: Ints, marked: Ints) -> Flags:
    """Which of the ids are marked."""
    flags = np.zeros(max(int(ids.max(initial=0)), int(marked.max(initial=0))) + 1, dtype=bool)
    flags[marked] = True
    return flags[ids]


def _first_by(order: Floats, among: Flags, counts: Ints) -> Flags:
    """In each line, the first `counts` of those flagged, by order."""
    ranks = np.argsort(np.argsort(np.where(among, order, 2.0), axis=1, kind="stable"), axis=1, kind="stable")
    return among & (ranks < counts[:, None])


def _beside(chosen: Flags, free: Flags, step: int, u: float) -> int | None:
    """A free place one step from a chosen one, on either side; None where there is none."""
    taken = np.flatnonzero(chosen)
    places = np.concatenate([taken - step, taken + step])
    places = places[(places >= 0) & (places < len(free))]
    places = places[free[places]]
    return int(places[int(u * len(places))]) if len(places) else None


def _weighted(free: Flags, weights: Floats, u: float) -> int:
    """A free place, by weight."""
    places = np.flatnonzero(free)
    edges = np.cumsum(weights[places])
    return int(places[np.searchsorted(edges, u * edges[-1], side="right").clip(max=len(places) - 1)])
