"""No bin of a trace comes from fewer than k rows, and a trace holds nothing but bins."""

from __future__ import annotations

import itertools
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.traces import (
    K_ANONYMITY,
    GroupKey,
    Histogram,
    SelectedRows,
    Trace,
    anonymize,
    bundled_traces,
    compute_statistics,
    read_trace,
)
from attnconform.traces.anonymize import merge_rare_bins
from attnconform.traces.format import COLUMNS
from attnconform.traces.statistics import STATISTICS, Events


def rows_inside(events: Events, low: int, high: int) -> int:
    """Distinct rows with a value in a bin, counted from the events themselves."""
    return len(set(events.sources[(events.values >= low) & (events.values <= high)].tolist()))


@settings(deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 15)), min_size=1, max_size=60),
    k=st.integers(1, 8),
    statistic=st.sampled_from(["page_reuse", "gap"]),
)
def test_every_bin_has_k_distinct_rows(pairs: list[tuple[int, int]], k: int, statistic: str) -> None:
    values, sources = np.array(pairs).T
    events = Events.of(values, sources)
    histogram = merge_rare_bins(statistic, events, k)
    spans = list(zip(histogram.bin_low.tolist(), histogram.bin_high.tolist(), strict=True))
    assert all(
        rows_inside(events, low, high) == n >= k for (low, high), n in zip(spans, histogram.num_rows, strict=True)
    )
    assert all(high < low for (_, high), (low, _) in itertools.pairwise(spans))
    assert histogram.total == (len(pairs) if len(set(sources.tolist())) >= k else 0)


def test_one_row_with_many_events_does_not_make_a_bin() -> None:
    events = Events.of(
        np.concatenate([np.zeros(1000), np.full(20, 3)]), np.concatenate([np.zeros(1000), np.arange(20)])
    )
    histogram = merge_rare_bins("candidates", events, 20)
    assert histogram.bin_low.tolist() == [0]
    assert histogram.bin_high.tolist() == [3]


def test_a_statistic_of_too_few_rows_is_left_out() -> None:
    events = Events.of(np.arange(19), np.arange(19))
    assert ("gap", 0, 0) not in anonymize({("gap", 0, 0): events}, 20)
    assert ("gap", 0, 0) in anonymize({("gap", 0, 0): events}, 19)


def test_no_published_bin_of_real_statistics_is_under_k(selections: dict[GroupKey, list[SelectedRows]]) -> None:
    for tiles in selections.values():
        events = compute_statistics(tiles)
        for key, h in anonymize(events).items():
            for low, high in zip(h.bin_low.tolist(), h.bin_high.tolist(), strict=True):
                if not key[0].startswith("visible"):
                    assert rows_inside(events[key], low, high) >= K_ANONYMITY, key


def test_k_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="k is 0"):
        anonymize({}, 0)


@pytest.mark.parametrize("name", sorted(bundled_traces()))
def test_bundled_traces_hold_bins_of_k_rows_and_nothing_else(name: str) -> None:
    folder = bundled_traces()[name]
    trace: Trace = read_trace(folder)
    assert trace.header.k >= K_ANONYMITY
    histograms: list[Histogram] = [h for group in trace.groups.values() for h in group.values()]
    assert min(int(h.num_rows.min()) for h in histograms) >= trace.header.k
    table = pq.read_table(str(folder.joinpath(trace.header.table)))
    assert tuple(table.column_names) == COLUMNS
    assert set(table.column("statistic").to_pylist()) <= set(STATISTICS)
    assert not table.schema.metadata
    files: list[Any] = [file for file in folder.iterdir() if not file.name.startswith("__")]
    assert {file.name for file in files} == {"header.json", "README.md", trace.header.table}
    assert sum(len(file.read_bytes()) for file in files) < 300_000


def test_a_histogram_has_no_room_for_rows() -> None:
    assert [f.name for f in fields(Histogram)] == ["bin_low", "bin_high", "count", "value_sum", "num_rows"]
