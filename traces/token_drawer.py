"""Draws which tokens one row after another selects, in the blocks that it touches."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from attnconform.traces.block_drawer import HISTORY_ROWS, NONE, BlockDrawer, Shape, return_share, row_quantiles
from attnconform.traces.draws import draw
from attnconform.traces.placement import beside, first_by, flag, keep_shared, settle, tilt, weighted

if TYPE_CHECKING:
    from attnconform.traces.draws import Floats
    from attnconform.traces.placement import Flags
    from attnconform.traces.selection_model import SelectionModel
    from attnconform.traces.statistics import Ints

# Of a place where nothing was recorded, taken only when nothing else is left.
LEAST_WEIGHT = 1e-9


class RowDrawer:
    """The rows of one request, in order: block numbers or token positions, as the selector lists them."""

    def __init__(self, model: SelectionModel, shape: Shape, seed: int, num_rows: int) -> None:
        self.model = model
        self.shape = shape
        self.seed = seed
        self.blocks = BlockDrawer(model, shape, seed, num_rows)
        self.count_quantiles = row_quantiles(shape, seed, "n", num_rows)
        self.history: deque[Ints] = deque(maxlen=HISTORY_ROWS + 1)

    def next(self, r: int, q_position: int) -> Ints:
        """The ids of row r, at a position; sorted and distinct."""
        if not self.shape.consecutive:
            self.blocks.history.clear()
            self.history.clear()
        if self.shape.granularity == "block":
            return self.blocks.next(r, q_position)
        wanted = self.model.value("candidates", self.count_quantiles[r], 1)
        count = max(1, min(wanted, q_position - self.shape.first_visible(q_position) + 1))
        ids = self._tokens(r, q_position, count)
        self.history.append(ids)
        return ids

    def _tokens(self, r: int, q_position: int, count: int) -> Ints:
        blocks = self.blocks.next(r, q_position, count)
        ids = blocks[:, None] * self.shape.block_size + np.arange(self.shape.block_size)
        weights = self._weights(ids, q_position, count)
        before = flag(ids, self.history[-1] if self.history else NONE) & (weights > 0)
        held = before.sum(1)
        u = draw(self.seed, "tokens", r, 2 + ids.size)
        counts = self._occupancies(r, q_position, blocks, weights, held, count)
        shared = round(self.model.fraction("overlap", u[0]) * count)
        keep = keep_shared(held, counts, (weights > 0).sum(1), shared, u[1])
        return ids[self._place(r, ids, weights, before, keep, counts, u[2:].reshape(ids.shape))]

    def _weights(self, ids: Ints, q_position: int, count: int) -> Floats:  # (blocks, block_size)
        """The recorded density at each token of the blocks; 0 where the row does not see it."""
        visible = (ids <= q_position) & (ids >= self.shape.first_visible(q_position))
        weights = self.model.ids.at(np.maximum(q_position - ids, 0))
        if ids[0, 0] == 0 and q_position >= self.shape.block_size:
            weights[0] = self.model.start_weights(self.shape.block_size)
        weights = np.where(visible, weights, 0.0)
        # A block without recorded places takes any that the row sees, and so do all when there are too few.
        empty = ~(weights > 0).any(1, keepdims=True) | ((weights > 0).sum() < count)
        return np.where(visible & empty, np.maximum(weights, LEAST_WEIGHT), weights)

    def _occupancies(self, r: int, q_position: int, blocks: Ints, weights: Floats, held: Ints, count: int) -> Ints:
        """How many tokens of each block: `count` in all, at least one each."""
        most = (weights > 0).sum(1)
        least = np.ones_like(most)
        wanted = self._wanted(r, blocks, weights, q_position // self.shape.block_size)
        if blocks[0] == 0 and len(blocks) > 1 and most[1:].sum() >= count - wanted[0] >= len(blocks) - 1:
            # What the first block holds was recorded for itself.
            least[0] = most[0] = int(wanted[0])
        shares = ((wanted - 0.5) / np.maximum(most, 1)).clip(1e-6, 1)
        expected = least + tilt(shares, most - least, count - int(least.sum()))
        before = np.where(held > 0, held, np.rint(expected).astype(np.int64))
        return settle(expected, before, least, most, count)

    def _wanted(self, r: int, blocks: Ints, weights: Floats, own: int) -> Floats:
        """Tokens that each block would have by itself: a quantile of its own, which it keeps from row to row."""
        wanted = self.model.given_quantiles("occupancy", own - blocks, self.blocks.latent(own)[blocks])
        if blocks[-1] == own:
            # It may be only partly there: what was recorded at each distance says more than a count.
            wanted[-1] = weights[-1].sum() + 0.5
        if blocks[0] == 0 and own > 0:
            wanted[0] = max(self.blocks.start_ids(r), 1)
        return np.asarray(np.minimum(wanted, (weights > 0).sum(1)))

    def _place(
        self, r: int, ids: Ints, weights: Floats, before: Flags, keep: Ints, counts: Ints, order: Floats
    ) -> Flags:  # (blocks, block_size)
        """Which tokens: first those that stay, then those that return, then new ones beside them."""
        usable = weights > 0
        past = flag(ids, np.concatenate(self.history) if self.history else NONE)
        returning = (return_share(self.model, "return", len(self.history)) * (counts - keep) + order[:, 0]).astype(
            np.int64
        )
        chosen = first_by(order, before, keep)
        chosen |= first_by(order, usable & ~before & past, np.minimum(returning, counts - keep))
        full = counts >= usable.sum(1)
        chosen[full] = usable[full]
        # Ids let go should stay away, unless nothing else is left.
        avoid = before & ((usable & ~before).sum(1) + keep >= counts)[:, None]
        missing = counts - chosen.sum(1)
        u = draw(self.seed, "new", r, 3 * int(missing.sum())).reshape(-1, 3)
        lines = np.repeat(np.arange(len(ids)), missing)
        steps = self.model.given_quantiles("inner_gap", counts[lines], u[:, 0]).astype(np.int64)
        for line, step, (_, side, place) in zip(lines, steps, u, strict=True):
            free = usable[line] & ~chosen[line] & ~avoid[line]
            free = free & ~past[line] if (free & ~past[line]).any() else free
            near = beside(chosen[line], free, int(step), side)
            chosen[line, weighted(free, weights[line], place) if near is None else near] = True
        return chosen
