"""Statistics of recorded selections agree with counting them by hand."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from attnconform.traces import SelectedRows, compute_statistics
from attnconform.traces.statistics import OCTAVE_LOWS, bin_bounds

if TYPE_CHECKING:
    from attnconform.traces import GroupKey

SIZE = 4


def tile(*lists: list[int], start: int, **extra: np.ndarray) -> SelectedRows:
    """Token lists of consecutive rows, in blocks of 4 tokens."""
    positions = np.arange(start, start + len(lists))
    return SelectedRows(positions, positions * 0, np.array(lists), "token", SIZE, **extra)


TILES = [tile([0, 1, 9, -1], [0, 9, 10, 9], [4, 5, 10, 11], start=9), tile([0, 3, 20, 21], [0, 3, 20, -1], start=21)]


def values(name: str, given: tuple[int, int] = (0, 0)) -> dict[int, int]:
    events = compute_statistics(TILES)[name, *given]
    out: Counter[int] = Counter()
    for value, weight in zip(events.values.tolist(), events.weights.tolist(), strict=True):
        out[value] += weight
    return dict(out)


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("length", {10: 1, 11: 1, 12: 1, 22: 1, 23: 1}),
        ("candidates", {3: 3, 4: 2}),
        ("blocks", {2: 5}),
        ("holes", {0: 3, 1: 2}),
        ("duplicates", {0: 4, 1: 1}),
        # Rows 10, 11 and 22 after their predecessors: 2 of 3, 1 of 4, 3 of 3 shared.
        ("overlap", {43: 1, 16: 1, 64: 1}),
        ("block_overlap", {64: 2, 32: 1}),
        ("gap", {1: 5, 8: 1, 9: 1, 5: 1, 3: 2, 17: 2}),
        ("block_gap", {2: 2, 1: 1, 5: 2}),
        # Row 9: 9. Row 10: 9 and 10. Row 11: 4, 5, 10, 11. Row 21: 20, 21. Row 22: 20. The first block is apart.
        ("distance", {0: 4, 1: 3, 7: 1, 6: 1, 2: 1}),
        ("block_distance", {0: 5, 1: 1}),
        ("start_occupancy", {2: 3, 1: 1, 0: 1}),
        ("start", {0: 4, 1: 1, 3: 2}),
        ("page_reuse", {2: 3, 3: 1, 1: 1}),
    ],
)
def test_statistic_counts_what_it_says(name: str, want: dict[int, int]) -> None:
    assert values(name) == want


def test_occupancy_is_apart_for_each_distance_of_the_block() -> None:
    assert values("occupancy", (0, 0)) == {1: 2, 2: 3}
    assert values("occupancy", (1, 1)) == {2: 1}


def test_visible_ids_are_counted_up_to_the_first_block() -> None:
    # Rows at 9, 10, 11, 21 and 22 see 6, 7, 8, 18 and 19 tokens after the first block.
    assert sum(values("visible_distance").values()) == 6 + 7 + 8 + 18 + 19
    assert sum(values("visible_block_distance").values()) == 2 + 2 + 2 + 5 + 5


def test_an_id_returns_if_an_earlier_row_of_the_tile_had_it() -> None:
    rows = [[0, 5], [0, 6]] * 4 + [[0, 5], [0, 7]]
    events = compute_statistics([tile(*rows, start=30)])
    returns = events["return", 0, 0]
    # Rows 8 and 9 are in the second half: 5 was there before, 7 was not.
    assert returns.values.tolist() == [1, 0]
    assert returns.sources.tolist() == [8, 9]


def test_scores_and_heads_are_counted_when_given() -> None:
    extra = {"ties": np.array([0, 3]), "union": np.array([6, 8]), "private": np.array([4, 8])}
    events = compute_statistics([tile([0, 1], [0, 2], start=8, **extra)])
    assert events["ties", 0, 0].values.tolist() == [0, 3]
    assert events["gqa_union", 0, 0].values.tolist() == [96, 64]
    assert "ties" not in {key[0] for key in compute_statistics(TILES)}


def test_block_lists_are_counted_in_blocks(selections: dict[GroupKey, list[SelectedRows]]) -> None:
    events = compute_statistics(next(tiles for key, tiles in selections.items() if key.selector == "block_topk"))
    assert np.array_equal(events["distance", 0, 0].values, events["block_distance", 0, 0].values)
    assert events["duplicates", 0, 0].values.max() == 1


def test_wide_bins_cover_all_integers_once() -> None:
    low, high = bin_bounds("gap", np.arange(5000))
    assert np.all((low <= np.arange(5000)) & (np.arange(5000) <= high))
    edges = sorted(set(zip(low.tolist(), high.tolist(), strict=True)))
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(edges))
    assert OCTAVE_LOWS[-1] > 2**40


@pytest.mark.parametrize(
    ("lists", "message"),
    [([[0, 6]], r"listed\[0, 1\] is 6, want -1 to 5"), ([[0, -2]], r"listed\[0, 1\] is -2")],
)
def test_a_listed_id_out_of_range_is_refused(lists: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tile(*lists, start=5)


def test_rows_that_do_not_follow_each_other_are_refused() -> None:
    positions = np.array([3, 5])
    with pytest.raises(ValueError, match="not consecutive"):
        SelectedRows(positions, positions * 0, np.zeros((2, 1), dtype=np.int64), "token", SIZE)
