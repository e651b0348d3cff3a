"""A group's histograms as what the synthesizer asks of them: quantiles, densities and shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnconform.traces.statistics import FRACTION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnconform.traces.anonymize import Histogram
    from attnconform.traces.draws import Floats
    from attnconform.traces.statistics import Ints, Key


@dataclass(frozen=True)
class Density:
    """The share of visible ids that were selected, by distance bins; the last bin goes on for ever."""

    lows: Ints
    shares: Floats

    @classmethod
    def of(cls, selected: Histogram | None, visible: Histogram) -> Density:
        """Selected over visible, on the coarsest cut of both binnings; where nothing was selected, 0."""
        if selected is None:
            return cls(visible.bin_low, np.zeros(len(visible.bin_low)))
        edges = np.unique(np.concatenate([h for x in (selected, visible) for h in (x.bin_low, x.bin_high + 1)]))
        lows, highs = edges[:-1], edges[1:] - 1
        hits, seen = spread(selected, lows, highs), spread(visible, lows, highs)
        shares = np.divide(hits, seen, out=np.zeros(len(lows)), where=seen > 0)
        return cls(lows, shares.clip(0, 1))

    def at(self, distances: Ints) -> Floats:
        """The share at each distance."""
        return self.shares[self.cells(distances)]

    def cells(self, distances: Ints) -> Ints:
        """The bin of each distance."""
        return np.searchsorted(self.lows, distances, side="right").clip(1) - 1


def spread(h: Histogram, lows: Ints, highs: Ints) -> Floats:
    """Counts of h on finer bins, each of its own bins spread evenly over its integers."""
    below = np.concatenate([[0], np.cumsum(h.count)])
    edges = np.concatenate([h.bin_low, [h.bin_high[-1] + 1]]).astype(np.float64)

    def cumulative(x: Ints) -> Floats:
        idx = np.searchsorted(h.bin_low, x, side="right").clip(1) - 1
        width = (h.bin_high - h.bin_low + 1)[idx]
        return np.asarray(below[idx] + h.count[idx] * ((x - edges[idx]) / width).clip(0, 1))

    return cumulative(highs + 1) - cumulative(lows)


def quantile(h: Histogram, u: Floats) -> Ints:
    """The value at each quantile; inside a bin the integers have the mean that was recorded for it."""
    rank = u * h.total
    cumulative = np.cumsum(h.count)
    idx = np.minimum(np.searchsorted(cumulative, rank, side="right"), len(cumulative) - 1)
    inside = np.clip((rank - cumulative[idx]) / h.count[idx] + 1, 0, 1)
    low, width = h.bin_low[idx], h.bin_high[idx] - h.bin_low[idx] + 1
    above = h.value_sum[idx] / h.count[idx] - low
    # A power of a uniform has any mean that is asked for; of two integers, the mean tells all.
    power = width / (above + 0.5) - 1
    offset = np.where(width == 2, inside > 1 - above, width * inside**power)
    return np.asarray(np.minimum(low + offset.astype(np.int64), h.bin_high[idx]))


class SelectionModel:
    """The distributions of one layer, KV head, phase and selector."""

    def __init__(self, group: Mapping[Key, Histogram]) -> None:
        self.group = group
        self._nearest: dict[tuple[str, int], Histogram | None] = {}
        for name in ("candidates", "blocks", "visible_block_distance"):
            if (name, 0, 0) not in group:
                raise ValueError(f"the trace has no statistic {name!r} for this group: nothing can be drawn from it")
        self.blocks = Density.of(self._plain("block_distance"), group["visible_block_distance", 0, 0])
        visible = self._plain("visible_distance")
        self.ids = self.blocks if visible is None else Density.of(self._plain("distance"), visible)

    def _plain(self, name: str) -> Histogram | None:
        return self.group.get((name, 0, 0))

    def value(self, name: str, u: float, default: int) -> int:
        """The quantile of a statistic, or a default where the trace keeps none."""
        h = self._plain(name)
        return default if h is None else int(quantile(h, np.array([u]))[0])

    def blocks_at(self, length: int, u: float, default: int) -> int:
        """The quantile of the number of blocks that rows of about this length touch."""
        h = self.given("blocks", length) or self._plain("blocks")
        return default if h is None else int(quantile(h, np.array([u]))[0])

    def fraction(self, name: str, u: float) -> float:
        """The quantile of a statistic kept in 64ths; 0 where the trace keeps none. Uniform inside a 64th."""
        return self.value(name, u, 0) / FRACTION

    def share(self, name: str) -> float:
        """How often a 0-or-1 statistic is 1."""
        h = self._plain(name)
        return 0.0 if h is None else float(h.value_sum.sum() / h.total)

    def given(self, name: str, condition: int) -> Histogram | None:
        """The histogram whose condition is the nearest to the one asked for."""
        if (name, condition) not in self._nearest:
            known = [key for key in self.group if key[0] == name and key[2]]
            near = min(known, key=lambda key: max(key[1] - condition, condition - key[2], 0), default=None)
            self._nearest[name, condition] = None if near is None else self.group[near]
        return self._nearest[name, condition]

    def given_quantiles(self, name: str, conditions: Ints, u: Floats) -> Floats:
        """The quantile of each condition's histogram; 1 where the trace keeps none."""
        out = np.ones(len(conditions))
        for condition in np.unique(conditions):
            h = self.given(name, int(condition))
            if h is not None:
                out[conditions == condition] = quantile(h, u[conditions == condition])
        return out

    def start_weights(self, block_size: int) -> Floats:
        """How often each token of the first block was selected, relative to each other."""
        h = self._plain("start")
        if h is None:
            return np.zeros(block_size)
        offsets = np.arange(block_size)
        return spread(h, offsets, offsets)
