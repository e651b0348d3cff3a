"""Draws one row of candidates after another from a group's distributions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attnconform.traces.draws import draw, walk
from attnconform.traces.placement import pick_new, round_to_total, settle, spread_churn, tilt
from attnconform.traces.selection_model import quantile

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
        total = max(1, min(self.model.value("blocks", self.quantiles["blocks"][r], visible), visible))
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
        kept = np.minimum(held, counts)
        shared = round(self.model.fraction("block_overlap", u[own + 2]) * (total + len(start)))
        spare = int(kept.sum()) + int(np.isin(start, before).sum()) - shared
        churn = spread_churn(kept, capacities - held - (counts - kept), max(spare, 0), u[own + 3])
        chosen = [start]
        for cell in np.flatnonzero(counts):
            nearest, far = density.lows[cell], density.lows[cell] + capacities[cell] - 1
            pool = np.arange(own - far, own - nearest + 1)
            chosen.append(self._exchange(pool, before, int(kept[cell] - churn[cell]), int(counts[cell]), u))
        return np.sort(np.concatenate(chosen))

    def _start_block(self, r: int, own: int, low: int) -> Ints:
        """Block 0, where the row sees it from another block and selects something of it."""
        if own == 0 or low > 0:
            return NONE
        return np.zeros(min(self.model.value("start_occupancy", self.quantiles["start"][r], 0), 1), dtype=np.int64)

    def _exchange(self, pool: Ints, before: Ints, keep: int, count: int, u: Floats) -> Ints:
        """`count` blocks of a pool, `keep` of them among those of the row before."""
        held = np.isin(pool, before)
        kept = pool[held][np.argsort(u[pool[held]], kind="stable")[:keep]]
        others = pool[~held] if count - keep <= int((~held).sum()) else np.setdiff1d(pool, kept)
        past = np.concatenate(self.block_history) if self.block_history else NONE
        return np.concatenate([kept, pick_new(others, count - keep, past, self.model.share("block_return"), u[others])])

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
        size = self.shape.block_size
        before = self.id_history[-1] if self.id_history else NONE
        blocks = self._blocks(r, q_position, first, count)
        ids = blocks[:, None] * size + np.arange(size)
        weights = self._weights(ids, q_position, first)
        if (weights > 0).sum() < count:
            weights = np.where((ids <= q_position) & (ids >= first), np.maximum(weights, LEAST_WEIGHT), 0.0)
        capacities = (weights > 0).sum(1)
        u = draw(self.seed, "tokens", r, 2)
        expected = 1 + tilt(self._fill_shares(blocks, weights, q_position), capacities - 1, count - len(blocks))
        held = (np.isin(ids, before) & (weights > 0)).sum(1)
        drawn = np.where(held > 0, held, np.rint(expected).astype(np.int64))
        counts = settle(expected, drawn, np.ones_like(capacities), capacities, count)
        kept = np.minimum(held, counts)
        spare = int(kept.sum()) - round(self.model.fraction("overlap", u[0]) * count)
        churn = spread_churn(kept, capacities - held - (counts - kept), max(spare, 0), u[1])
        past = np.concatenate(self.id_history) if self.id_history else NONE
        chosen = [
            self._fill(r, ids[c], weights[c], before, past, int(kept[c] - churn[c]), int(counts[c]))
            for c in range(len(blocks))
        ]
        return np.concatenate(chosen)

    def _weights(self, ids: Ints, q_position: int, first: int) -> Floats:  # (blocks, block_size)
        """The recorded density at each token of the blocks; 0 where the row does not see it."""
        visible = (ids <= q_position) & (ids >= first)
        weights = self.model.ids.at(np.maximum(q_position - ids, 0))
        if len(ids) and ids[0, 0] == 0 and q_position >= self.shape.block_size:
            weights[0] = self.model.start_weights(self.shape.block_size)
        weights = np.where(visible, weights, 0.0)
        # A block with too few recorded places takes any place that the row sees.
        return np.where(visible & ~(weights > 0).any(1, keepdims=True), LEAST_WEIGHT, weights)

    def _fill_shares(self, blocks: Ints, weights: Floats, q_position: int) -> Floats:
        """How full each block is, beyond its first token, as a quantile that the block keeps from row to row."""
        capacities = (weights > 0).sum(1)
        own = q_position // self.shape.block_size
        latent = draw(self.seed, "latent", 0, own + 1)
        shares = np.zeros(len(blocks))
        for c, block in enumerate(blocks):
            if block == own:
                # The own block is only partly there: what was recorded at each distance says more than a count.
                shares[c] = weights[c].sum() / max(capacities[c], 1)
                continue
            h = self.model.group.get(("start_occupancy", 0, 0)) if block == 0 else None
            h = h or self.model.given("occupancy", int(own - block))
            ids = 1 if h is None else int(quantile(h, latent[block])[0])
            shares[c] = (min(ids, capacities[c]) - 0.5) / max(capacities[c], 1)
        return shares.clip(1e-6, 1)

    def _fill(self, r: int, ids: Ints, weights: Floats, before: Ints, past: Ints, keep: int, count: int) -> Ints:
        """`count` tokens of a block, `keep` of them among those of the row before."""
        usable = weights > 0
        if count >= int(usable.sum()):
            return ids[usable]
        u = draw(self.seed, f"b{ids[0]:x}", r, len(ids) + 3 * count)
        order, u = u[: len(ids)], u[len(ids) :]
        held = usable & np.isin(ids, before)
        chosen = np.zeros(len(ids), bool)
        chosen[np.flatnonzero(held)[np.argsort(order[held], kind="stable")[:keep]]] = True
        back = usable & ~held & np.isin(ids, past)
        returning = min(int(self.model.share("return") * (count - keep) + order[0]), int(back.sum()))
        chosen[np.flatnonzero(back)[np.argsort(order[back], kind="stable")[:returning]]] = True
        # Ids let go should stay away, unless nothing else is left.
        avoid = held if int((usable & ~held).sum()) + keep >= count else np.zeros_like(held)
        gaps = self.model.given("inner_gap", count)
        steps = NONE if gaps is None else quantile(gaps, u[:count])
        for t in range(count - int(chosen.sum())):
            free = usable & ~chosen & ~avoid
            place = _beside(chosen, free, int(steps[t]), u[count + t]) if chosen.any() and len(steps) else None
            chosen[_weighted(free, weights, u[2 * count + t]) if place is None else place] = True
        return ids[chosen]


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
