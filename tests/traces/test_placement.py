"""Allocations meet their totals, and draws are functions of their arguments."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.traces import Histogram
from attnconform.traces.draws import draw, walk
from attnconform.traces.placement import beside, first_by, keep_shared, round_to_total, settle, swap_cells, tilt
from attnconform.traces.selection_model import Density, quantile

cells = st.lists(st.tuples(st.integers(0, 20), st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0])), min_size=1, max_size=8)


def histogram(bins: list[tuple[int, int, int, float]]) -> Histogram:
    """Bins of (low, high, count, mean)."""
    low, high, count = np.array([b[:3] for b in bins]).T
    return Histogram(low, high, count, np.rint(count * np.array([b[3] for b in bins])).astype(np.int64), count)


@settings(deadline=None)
@given(cells=cells, data=st.data())
def test_tilted_counts_sum_to_the_total_within_capacities(cells: list[tuple[int, float]], data: st.DataObject) -> None:
    capacities, shares = np.array([c for c, _ in cells]), np.array([s for _, s in cells])
    total = data.draw(st.integers(0, int(capacities.sum())), label="total")
    expected = tilt(shares, capacities, total)
    # A cell that is full with certainty gives way only when the total cannot be met otherwise.
    assert np.all(expected >= 0)
    assert np.all(expected <= capacities + 1e-6)
    if total >= (capacities * (shares >= 1)).sum():
        assert expected.sum() == pytest.approx(total, abs=1e-3)


def test_tilting_keeps_full_cells_full_and_empty_cells_empty() -> None:
    expected = tilt(np.array([1.0, 0.5, 0.0]), np.array([2, 10, 10]), 5)
    assert expected == pytest.approx([2, 3, 0], abs=1e-4)


@settings(deadline=None)
@given(
    cells=st.lists(st.tuples(st.floats(0, 20), st.integers(0, 20)), min_size=1, max_size=8),
    total=st.integers(0, 160),
)
def test_settled_counts_meet_the_total_or_are_refused(cells: list[tuple[float, int]], total: int) -> None:
    expected, before = np.array([e for e, _ in cells]), np.array([b for _, b in cells])
    most = np.full(len(cells), 20)
    if total > most.sum():
        with pytest.raises(ValueError, match="cannot sum"):
            settle(expected, before, most * 0, most, total)
        return
    counts = settle(expected, before, most * 0, most, total)
    assert counts.sum() == total
    assert counts.min() >= 0
    assert counts.max() <= 20


def test_counts_that_fit_do_not_move() -> None:
    before = np.array([3, 5, 2])
    assert settle(np.array([2.5, 5.5, 2.0]), before, before * 0, before + 9, 10).tolist() == [3, 5, 2]


def test_rounding_keeps_a_whole_total() -> None:
    for u in (0.0, 0.3, 0.99):
        assert round_to_total(np.array([0.5, 1.25, 2.25]), u).sum() == 4


def test_shared_ids_are_kept_unless_there_is_nothing_to_exchange() -> None:
    held, counts = np.array([3, 4]), np.array([3, 4])
    assert keep_shared(held, counts, np.array([10, 10]), 5, 0.5).sum() == 5
    assert keep_shared(held, counts, np.array([3, 4]), 5, 0.5).sum() == 7


def test_swapping_moves_ids_between_cells_and_keeps_their_number() -> None:
    counts, kept = swap_cells(
        np.array([2, 1]),
        np.array([2, 1]),
        np.array([1.0, 0.0]),
        np.array([0.0, 1.0]),
        np.array([0, 5]),
        np.full(2, 0.5),
    )
    assert counts.tolist() == [1, 2]
    assert kept.tolist() == [1, 1]


def test_first_by_takes_the_lowest_of_the_flagged_in_each_line() -> None:
    order = np.array([[0.3, 0.1, 0.2], [0.3, 0.1, 0.2]])
    among = np.array([[True, True, True], [True, False, True]])
    assert first_by(order, among, np.array([2, 1])).tolist() == [[False, True, True], [False, False, True]]


def test_beside_gives_free_places_only() -> None:
    chosen = np.array([False, False, True, False, False])
    assert beside(chosen, ~chosen, 2, 0.0) == 0
    assert beside(chosen, ~chosen, 2, 0.9) == 4
    assert beside(chosen, ~chosen, 3, 0.5) is None


def test_quantiles_of_a_merged_bin_have_its_mean() -> None:
    h = histogram([(1, 1, 50, 1.0), (10, 29, 50, 27.0)])
    values = quantile(h, (np.arange(20_000) + 0.5) / 20_000)
    assert set(values[:10_000].tolist()) == {1}
    assert values[10_000:].min() >= 10
    assert values[10_000:].max() <= 29
    assert values[10_000:].mean() == pytest.approx(27, abs=0.7)


def test_quantiles_of_two_merged_values_have_their_shares() -> None:
    values = quantile(histogram([(6, 7, 100, 6.1)]), (np.arange(1000) + 0.5) / 1000)
    assert np.mean(values == 7) == pytest.approx(0.1, abs=0.002)


def test_density_is_selected_over_visible_and_its_last_bin_goes_on() -> None:
    density = Density.of(
        histogram([(0, 0, 40, 0), (1, 2, 40, 1)]), histogram([(0, 0, 40, 0), (1, 2, 80, 1), (3, 3, 40, 3)])
    )
    assert density.at(np.array([0, 1, 2, 3, 99])).tolist() == [1.0, 0.5, 0.5, 0.0, 0.0]


def test_draws_are_pinned() -> None:
    assert draw(7, "test", 3, 2).tolist() == PINNED_DRAWS
    assert np.array_equal(draw(7, "test", 3, 9)[:2], draw(7, "test", 3, 2))


def test_walks_stay_inside_and_move_little() -> None:
    path = walk(1, "test", 4000, 1 / 16)
    assert path.min() >= 0
    assert path.max() < 1
    assert np.abs(np.diff(path)).max() <= 1 / 16
    assert path.mean() == pytest.approx(0.5, abs=0.15)


PINNED_DRAWS = [0.5276606555931789, 0.4438074072458269]
