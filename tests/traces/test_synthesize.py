"""Synthesized rows are valid whatever is asked for, and follow from their arguments alone."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.traces import CandidateRows, GroupKey, Histogram, Trace, synthesize


def check_valid(trace: Trace, rows: CandidateRows) -> None:
    """Every row: sorted distinct ids, at least one, all of them visible."""
    size = 1 if rows.granularity == "token" else rows.block_size
    window = trace.header.model.windows[rows.layer]
    assert rows.indptr[0] == 0
    assert rows.indptr[-1] == len(rows.indices)
    assert len(rows.indptr) == len(rows.q_positions) + 1
    for r, i in enumerate(rows.q_positions.tolist()):
        ids = rows.row(r)
        assert len(ids) > 0
        assert np.all(np.diff(ids) > 0)
        assert ids[-1] <= i // size
        assert ids[0] >= (0 if window is None else max(0, i - window + 1) // size)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    seqlen_kv=st.one_of(st.integers(1, 300), st.sampled_from([2048, 2049, 10_000])),
    rows=st.integers(1, 12),
    layer=st.sampled_from([0, 1, None]),
    selector=st.sampled_from(["block_topk", "token_topk"]),
    consecutive=st.booleans(),
)
def test_rows_are_valid_by_construction(
    trace: Trace, seed: int, seqlen_kv: int, rows: int, layer: int | None, selector: str, consecutive: bool
) -> None:
    num_rows = min(rows, seqlen_kv)
    drawn = synthesize(
        trace,
        seed=seed,
        num_rows=num_rows,
        seqlen_kv=seqlen_kv,
        layer=layer,
        phase="prefill",
        selector=selector,
        consecutive=consecutive,
    )
    assert len(drawn.q_positions) == num_rows
    assert np.all(np.diff(drawn.q_positions) >= 1)
    assert drawn.q_positions[0] >= 0
    assert drawn.q_positions[-1] < seqlen_kv
    check_valid(trace, drawn)


def draw_rows(trace: Trace, seed: int = 3, **changes: object) -> CandidateRows:
    asked = {"num_rows": 8, "seqlen_kv": 1000, "layer": 0, "phase": "prefill", "selector": "token_topk"} | changes
    return synthesize(trace, seed=seed, **asked)  # type: ignore[arg-type]


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(trace: Trace) -> None:
    first, again, other = draw_rows(trace), draw_rows(trace), draw_rows(trace, seed=4)
    assert np.array_equal(first.indices, again.indices)
    assert not np.array_equal(first.indices, other.indices)


def test_a_row_does_not_depend_on_how_many_follow(trace: Trace) -> None:
    apart = draw_rows(trace, num_rows=6, seqlen_kv=994)
    longer = draw_rows(trace, num_rows=12)
    assert apart.q_positions[-1] == longer.q_positions[5]
    assert np.array_equal(apart.row(5), longer.row(5))


def test_rows_are_pinned_for_one_seed(trace: Trace) -> None:
    def histogram(counts: dict[int, int]) -> Histogram:
        values, weights = np.array(list(counts)), np.array(list(counts.values()))
        return Histogram(values, values, weights, values * weights, weights)

    group = {
        ("candidates", 0, 0): histogram({4: 100}),
        ("blocks", 0, 0): histogram({4: 100}),
        ("block_distance", 0, 0): histogram({0: 100, 1: 80, 2: 60, 3: 40, 4: 120}),
        ("visible_block_distance", 0, 0): histogram({0: 100, 1: 100, 2: 100, 3: 100, 4: 1000}),
        ("block_overlap", 0, 0): histogram({48: 50, 64: 50}),
    }
    by_hand = Trace(trace.header, {GroupKey(0, 0, "prefill", "block_topk"): group})
    rows = draw_rows(by_hand, selector="block_topk", num_rows=4, seqlen_kv=200)
    assert [rows.row(r).tolist() for r in range(4)] == PINNED


def test_consecutive_rows_share_more_than_independent_ones(trace: Trace) -> None:
    def shared(rows: CandidateRows) -> float:
        lists = [set(rows.row(r).tolist()) for r in range(len(rows.q_positions))]
        return float(np.mean([len(a & b) / len(b) for a, b in itertools.pairwise(lists)]))

    assert shared(draw_rows(trace, num_rows=32)) > 0.5 + shared(draw_rows(trace, num_rows=32, consecutive=False)) / 2


def test_independent_rows_spread_over_the_whole_request(trace: Trace) -> None:
    positions = draw_rows(trace, num_rows=10, consecutive=False).q_positions
    assert np.array_equal(positions // 100, np.arange(10))


def test_listed_rows_are_the_same_sets_with_repetitions_and_holes(trace: Trace) -> None:
    plain = draw_rows(trace, selector="block_topk")
    listed = draw_rows(trace, selector="block_topk", as_listed=True)
    for r in range(8):
        entries = listed.row(r)
        assert set(entries[entries >= 0].tolist()) == set(plain.row(r).tolist())
    # The recorded lists name the row's own block twice where it is among the largest.
    assert len(listed.indices) > len(plain.indices)


def test_a_layer_is_picked_by_the_seed_where_none_is_named(trace: Trace) -> None:
    assert {draw_rows(trace, seed=seed, layer=None).layer for seed in range(16)} == {0, 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_rows": 0}, "num_rows is 0"),
        ({"num_rows": 1001}, "num_rows is 1001"),
        ({"selector": "best"}, "'best'"),
        ({"phase": "decode"}, "'decode'"),
        ({"layer": 7}, "layer 7"),
        ({"kv_head": 2}, "KV head 2"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_what_the_trace_does_not_have_is_refused(trace: Trace, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_rows(trace, **changes)  # type: ignore[arg-type]


PINNED = [[2, 10, 11, 12], [3, 10, 11, 12], [3, 10, 11, 12], [5, 10, 11, 12]]
