"""Synthesized rows are distributed as recorded; uniformly random ones are not."""

from __future__ import annotations

import numpy as np
import pytest

from attnconform.traces import GroupKey, Histogram, Trace, bundled_traces, compare, compare_uniform, read_trace
from attnconform.traces.fidelity import THRESHOLD, cumulative_distance
from attnconform.traces.statistics import Events

# A global and a local layer; every group is in the table of the trace's README.
BUNDLED = [
    GroupKey(layer, 0, phase, selector)
    for layer, phase in ((11, "prefill"), (0, "decode"))
    for selector in ("block_topk", "token_topk", "window_sink")
]


@pytest.fixture(scope="module")
def gemma() -> Trace:
    """The bundled trace."""
    return read_trace(bundled_traces()["gemma3_270m"])


def histogram(counts: dict[int, int]) -> Histogram:
    values = np.array(sorted(counts))
    weights = np.array([counts[value] for value in values.tolist()])
    return Histogram(values, values, weights, weights * values, weights)


def test_distance_is_zero_for_the_same_and_one_for_the_disjoint() -> None:
    recorded = histogram({1: 30, 4: 10})
    assert cumulative_distance(recorded, Events.of(np.array([1, 1, 1, 4]), np.arange(4))) == 0
    assert cumulative_distance(recorded, Events.of(np.array([7, 9]), np.arange(2))) == 1
    assert cumulative_distance(recorded, Events.of(np.array([1, 4]), np.arange(2))) == 0.25


def test_values_between_recorded_bins_count_as_different() -> None:
    assert cumulative_distance(histogram({1: 50, 9: 50}), Events.of(np.full(4, 5), np.arange(4))) == 0.5


@pytest.mark.parametrize("selector", ["block_topk", "token_topk"])
def test_rows_from_a_small_trace_are_faithful_and_uniform_ones_are_not(trace: Trace, selector: str) -> None:
    group = GroupKey(0, 0, "prefill", selector)
    assert compare(trace, group, seed=5, num_tiles=24).faithful
    assert not compare_uniform(trace, group, seed=5, num_tiles=24).faithful


@pytest.mark.parametrize("group", BUNDLED, ids=lambda g: f"{g.layer}-{g.phase}-{g.selector}")
def test_rows_from_the_bundled_trace_are_faithful_and_uniform_ones_are_not(gemma: Trace, group: GroupKey) -> None:
    drawn = compare(gemma, group, seed=1, num_tiles=16)
    assert drawn.faithful, drawn.worst
    uniform = compare_uniform(gemma, group, seed=1, num_tiles=16)
    assert not uniform.faithful
    # Not by a hair: the worst statistic of uniform rows is far over the threshold.
    assert uniform.worst[1] > 1.5 * THRESHOLD
