"""Draws which blocks one row after another touches."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnconform.traces.draws import draw, walk
from attnconform.traces.placement import beside, flag, keep_shared, round_to_total, settle, swap_cells, tilt

if TYPE_CHECKING:
    from attnconform.traces.draws import Floats
    from attnconform.traces.placement import Flags
    from attnconform.traces.selection_model import SelectionModel
    from attnconform.traces.statistics import Granularity, Ints

# What a row in the second half of a recorded tile has before it, on average: rows that an id may return from.
HISTORY_ROWS = 12
# Counts drift by at most this quantile from a row to the next.
WALK_STEP = 1 / 32
# Of what orders blocks by how long they stay, the part that is the block's own; the rest is drawn for each row.
STICKINESS = 0.8
# How much more readily short-lived blocks make room for blocks at other distances.
PUSH_SHARPNESS = 8
# The share of new ids that return grows with the rows there are to return from, by this power of their number.
RETURN_GROWTH = 0.4
NONE: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Shape:
    """What drawing needs to know besides the distributions."""

    granularity: Granularity
    block_size: int
    window: int | None  # a row sees the tokens i - window + 1 to i; None: all up to i
    consecutive: bool

    def first_visible(self, q_position: int) -> int:
        """The first token that a row sees."""
        return 0 if self.window is None else max(0, q_position - self.window + 1)


@dataclass(frozen=True)
class _View:
    """The blocks 0 to own as a row finds them. A cell is a bin of distances; -1 for blocks outside all cells."""

    own: int
    cell: Ints  # (own + 1,)
    held: Flags  # touched by the row before
    past: Flags  # touched by an earlier row
    num_cells: int

    def count(self, among: Flags) -> Ints:
        """Flagged blocks of each cell."""
        inside = self.cell[among & (self.cell >= 0)]
        return np.bincount(inside, minlength=self.num_cells).astype(np.int64)

    @property
    def capacities(self) -> Ints:
        return self.count(self.cell >= 0)


class BlockDrawer:
    """The touched blocks of a request's rows, in order; remembers rows, because the next resembles them."""

    def __init__(self, model: SelectionModel, shape: Shape, seed: int, num_rows: int) -> None:
        self.model = model
        self.shape = shape
        self.seed = seed
        self.blocks_quantiles = row_quantiles(shape, seed, "blocks", num_rows)
        self.start_quantiles = row_quantiles(shape, seed, "start", num_rows)
        self.history: deque[Ints] = deque(maxlen=HISTORY_ROWS + 1)

    def next(self, r: int, q_position: int, num_tokens: int = 0) -> Ints:
        """The blocks of row r, sorted; enough of them to hold num_tokens."""
        first, size = self.shape.first_visible(q_position), self.shape.block_size
        own, low = q_position // size, first // size
        visible = own - low + 1
        total = max(1, min(self.model.blocks_at(q_position + 1, self.blocks_quantiles[r], visible), visible))
        if num_tokens:
            total = min(total, num_tokens)
        everything = total == visible or num_tokens == q_position - first + 1
        blocks = np.arange(low, own + 1) if everything else self._choose(r, own, low, total)
        while self._room(blocks, q_position) < num_tokens:
            # The nearest of the others.
            blocks = np.union1d(blocks, np.setdiff1d(np.arange(low, own + 1), blocks)[-1:])
        self.history.append(blocks)
        return blocks

    def latent(self, own: int) -> Floats:
        """A uniform of each block's own, the same in every row: how full it is, and how long it stays."""
        return draw(self.seed, "latent", 0, own + 1)

    def _return_share(self) -> float:
        return return_share(self.model, "block_return", len(self.history))

    def start_ids(self, r: int) -> int:
        """Ids of row r in the first block."""
        return self.model.value("start_occupancy", self.start_quantiles[r], 0)

    def _room(self, blocks: Ints, q_position: int) -> int:
        """Tokens of the blocks that the row sees."""
        size, first = self.shape.block_size, self.shape.first_visible(q_position)
        return int((np.minimum(blocks * size + size - 1, q_position) - np.maximum(blocks * size, first) + 1).sum())

    def _choose(self, r: int, own: int, low: int, total: int) -> Ints:
        """`total` blocks, the first one apart: whether it is touched was recorded for itself."""
        view = self._view(own, low)
        start = NONE if own == 0 or low > 0 else np.zeros(min(self.start_ids(r), 1), dtype=np.int64)
        total = min(total - len(start), int((view.cell >= 0).sum()))
        if total <= 0:
            return start if len(start) else np.array([own])
        u = draw(self.seed, "blocks", r, 3 + own + 1)
        shared = round(self.model.fraction("block_overlap", u[0]) * (total + len(start)))
        shared -= int(view.held[start].sum())
        counts, keep = self._plan(r, view, total, shared, u[1:3])
        chosen = self._keep(view, keep, u[3:]) | flag(np.arange(own + 1), start)
        return self._add(r, view, chosen, counts - keep)

    def _view(self, own: int, low: int) -> _View:
        blocks = np.arange(own + 1)
        density = self.model.blocks
        cell = np.where(blocks >= max(low, 1), density.cells(own - blocks), -1)
        before = self.history[-1] if self.history else NONE
        past = np.concatenate(self.history) if self.history else NONE
        return _View(own, cell, flag(blocks, before), flag(blocks, past), len(density.lows))

    def _plan(self, r: int, view: _View, total: int, shared: int, u: Floats) -> tuple[Ints, Ints]:
        """Blocks of each cell, and how many of them stay from the row before: `shared` in all, where possible."""
        capacities, held = view.capacities, view.count(view.held)
        expected = tilt(self.model.blocks.shares, capacities, total)
        most = np.where(expected > 0, capacities, 0)
        least = np.where(expected >= capacities - 1e-6, capacities, 0)
        before = held if self.history else round_to_total(expected, u[0])
        counts = settle(expected, before, least, most, total)
        keep = keep_shared(held, counts, capacities, shared, u[1])
        swaps = int(keep.sum()) - shared
        if swaps <= 0:
            return counts, keep
        inside = expected / np.maximum(capacities, 1)
        pull = self._pull(view, counts - keep) * inside
        push = self._push(view) * (1 - inside)
        return swap_cells(counts, keep, push, pull, most - counts, draw(self.seed, "swap", r, 2 * swaps))

    def _push(self, view: _View) -> Floats:
        """How readily each cell lets go of a block of the row before: by how long its blocks stay, on average."""
        held = view.held & (view.cell >= 0)
        leaving = np.bincount(view.cell[held], weights=self._leaving(view)[held], minlength=view.num_cells)
        return np.asarray((leaving / np.maximum(view.count(held), 1)) ** PUSH_SHARPNESS)

    def _leaving(self, view: _View) -> Floats:
        """Who goes first, as 0 to 1: blocks whose own uniform is low, and those that were in few of the last rows."""
        seen = np.bincount(np.concatenate([NONE, *self.history]), minlength=view.own + 1)[: view.own + 1]
        return np.asarray(1 - self.latent(view.own) * seen / max(len(self.history), 1))

    def _pull(self, view: _View, taken: Ints) -> Floats:
        """How much each cell attracts a new block: by those that could return to it, and by those new to it."""
        back = view.count(view.past & ~view.held)
        fresh = (view.capacities - view.count(view.past | view.held) - taken).clip(min=0)
        share = self._return_share() if back.sum() else 0.0
        return share * back / max(int(back.sum()), 1) + (1 - share) * fresh / max(int(fresh.sum()), 1)

    def _keep(self, view: _View, keep: Ints, order: Floats) -> Flags:
        """The blocks that stay: recorded blocks come in two kinds, those that stay and those that come and go."""
        going = STICKINESS * self._leaving(view) + (1 - STICKINESS) * order
        chosen = np.zeros(view.own + 1, dtype=bool)
        for cell in np.flatnonzero(keep):
            pool = np.flatnonzero((view.cell == cell) & view.held)
            chosen[pool[np.argsort(going[pool], kind="stable")[: keep[cell]]]] = True
        return chosen

    def _add(self, r: int, view: _View, chosen: Flags, missing: Ints) -> Ints:
        """The chosen blocks and the missing ones of each cell."""
        u = draw(self.seed, "newblock", r, 3 * int(missing.sum())).reshape(-1, 3)
        cells = np.repeat(np.arange(view.num_cells), missing)
        for cell, draws in zip(cells, u, strict=True):
            chosen[self._new_block(view, chosen, view.cell == cell, draws)] = True
        return np.flatnonzero(chosen)

    def _new_block(self, view: _View, chosen: Flags, pool: Flags, u: Floats) -> int:
        """One more block of the pool; one of the row before only when there is no other."""
        free = pool & ~chosen & ~view.held
        if not free.any():
            free = pool & ~chosen
        back = free & view.past
        returns = back.any() and (u[0] < self._return_share() or bool((free == back).all()))
        free = back if returns else free & ~back
        # Blocks picked for their own score lie together; those that hold picked tokens lie as their density says.
        if self.shape.granularity == "block":
            place = beside(chosen, free, self.model.value("block_gap", u[1], 1), u[2])
            if place is not None:
                return place
        return int(np.flatnonzero(free)[int(u[2] * free.sum())])


def return_share(model: SelectionModel, name: str, num_rows: int) -> float:
    """How many new ids return from rows before the last, of num_rows remembered; fewer while those are few."""
    return model.share(name) * float(min(1.0, max(num_rows - 1, 0) / HISTORY_ROWS) ** RETURN_GROWTH)


def row_quantiles(shape: Shape, seed: int, name: str, num_rows: int) -> Floats:
    """A quantile per row: drifting where rows follow each other, else drawn apart."""
    return walk(seed, name, num_rows, WALK_STEP) if shape.consecutive else draw(seed, name, 0, num_rows)
