"""Events to histograms whose every bin holds at least k rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnconform.traces.statistics import ROW_BITS, bin_bounds

if TYPE_CHECKING:
    from attnconform.traces.statistics import Events, Ints, Key

K_ANONYMITY = 20


@dataclass(frozen=True)
class Histogram:
    """Disjoint bins in rising order: values low to high (inclusive), how many events, their sum, from how many rows."""

    bin_low: Ints
    bin_high: Ints
    count: Ints
    value_sum: Ints
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
    lows, first, which = np.unique(low, return_index=True, return_inverse=True)
    bins = [[int(a), int(b)] for a, b in zip(lows, high[first], strict=True)]
    rows = _rows_of_each(which, events.sources, len(bins))
    # Events, and the sum of their values: without it, a rare tail would smear the bin that it is merged into.
    totals = np.zeros((len(bins), 2), dtype=np.int64)
    np.add.at(totals, which, np.stack([events.weights, events.weights * events.values], 1))
    sums = totals.tolist()
    while len(bins) > 1 and min(map(len, rows)) < k:
        rare = min(range(len(bins)), key=lambda i: len(rows[i]))
        left = rare if rare + 1 < len(bins) and (rare == 0 or len(rows[rare + 1]) < len(rows[rare - 1])) else rare - 1
        bins[left : left + 2] = [[bins[left][0], bins[left + 1][1]]]
        rows[left : left + 2] = [np.union1d(rows[left], rows[left + 1])]
        sums[left : left + 2] = [[a + b for a, b in zip(sums[left], sums[left + 1], strict=True)]]
    kept = [i for i in range(len(bins)) if len(rows[i]) >= k]
    return Histogram(
        bin_low=np.array([bins[i][0] for i in kept], dtype=np.int64),
        bin_high=np.array([bins[i][1] for i in kept], dtype=np.int64),
        count=np.array([sums[i][0] for i in kept], dtype=np.int64),
        value_sum=np.array([sums[i][1] for i in kept], dtype=np.int64),
        num_rows=np.array([len(rows[i]) for i in kept], dtype=np.int64),
    )


def _rows_of_each(which: Ints, sources: Ints, num_bins: int) -> list[Ints]:
    """The distinct rows of each bin."""
    pairs = np.unique(which << ROW_BITS | sources)
    starts = np.searchsorted(pairs >> ROW_BITS, np.arange(1, num_bins))
    return [part & ((1 << ROW_BITS) - 1) for part in np.split(pairs, starts)]
