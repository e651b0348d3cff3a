"""Events to histograms whose every bin holds at least k rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnconform.traces.statistics import bin_bounds

if TYPE_CHECKING:
    from attnconform.traces.statistics import Events, Ints, Key

K_ANONYMITY = 20


@dataclass(frozen=True)
class Histogram:
    """Disjoint bins in rising order: values low to high (inclusive), how many events, from how many rows."""

    bin_low: Ints
    bin_high: Ints
    count: Ints
    num_rows: Ints

    @property
    def total(self) -> int:
        """All events."""
        return int(self.count.sum())


def anonymize(events: dict[Key, Events], k: int = K_ANONYMITY) -> dict[Key, Histogram]:
    """Histograms of the events in which no bin comes from fewer than k distinct rows (tiles, for page_reuse).

    A rarer bin is merged with the neighbour that comes from fewer rows; a statistic with fewer than k rows in all is
    left out. Merging is by distinct rows, counted again after every merge, so a row with many events counts once.
    """
    if k < 1:
        raise ValueError(f"k is {k}, want at least 1")
    histograms = {key: merge_rare_bins(key[0], e, k) for key, e in events.items()}
    return {key: histogram for key, histogram in histograms.items() if len(histogram.count)}


def merge_rare_bins(statistic: str, events: Events, k: int) -> Histogram:
    """The histogram of one statistic; without bins where fewer than k rows have it."""
    low, high = bin_bounds(statistic, events.values)
    lows, which = np.unique(low, return_inverse=True)
    bins = [[int(a), int(b)] for a, b in zip(lows, _first_of(which, high), strict=True)]
    rows = [np.unique(events.sources[which == i]) for i in range(len(bins))]
    counts = [int(events.weights[which == i].sum()) for i in range(len(bins))]
    while len(bins) > 1 and min(map(len, rows)) < k:
        rare = min(range(len(bins)), key=lambda i: len(rows[i]))
        left = rare if rare + 1 < len(bins) and (rare == 0 or len(rows[rare + 1]) < len(rows[rare - 1])) else rare - 1
        bins[left : left + 2] = [[bins[left][0], bins[left + 1][1]]]
        rows[left : left + 2] = [np.union1d(rows[left], rows[left + 1])]
        counts[left : left + 2] = [counts[left] + counts[left + 1]]
    kept = [i for i in range(len(bins)) if len(rows[i]) >= k]
    return Histogram(
        bin_low=np.array([bins[i][0] for i in kept], dtype=np.int64),
        bin_high=np.array([bins[i][1] for i in kept], dtype=np.int64),
        count=np.array([counts[i] for i in kept], dtype=np.int64),
        num_rows=np.array([len(rows[i]) for i in kept], dtype=np.int64),
    )


def _first_of(which: Ints, values: Ints) -> Ints:
    """The value at the first occurrence of each group."""
    return values[np.unique(which, return_index=True)[1]]
