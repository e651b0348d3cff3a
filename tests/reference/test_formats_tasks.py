"""Task tables and capacity tiers: every entry in one task, rows that keep their identity, tiers of least cost."""

from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.reference.errors import RefusedInput
from attnconform.reference.task_table import (
    TaskTable,
    build_task_table,
    cut_points,
    decode_task_table,
    live_tasks,
)
from attnconform.reference.tiers import optimal_tiers, smallest_tier, tier_cost, wasted_entries

profiles.load_profile()

LENGTHS = st.lists(st.integers(0, 20), max_size=8)


def indptr_of(lengths: list[int]) -> np.ndarray:
    return np.cumsum([0, *lengths])


@settings(max_examples=profiles.examples(200))
@given(LENGTHS, st.integers(1, 9), st.integers(0, 2**32))
def test_tasks_divide_every_row_and_keep_its_identity_in_any_order(lengths: list[int], target: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    row_ids = rng.permutation(3 * len(lengths))[: len(lengths)]
    indices = rng.integers(0, 99, sum(lengths))
    indptr = indptr_of(lengths)
    table = build_task_table(indptr, target=target, row_ids=row_ids)
    wanted = {int(r): indices[indptr[i] : indptr[i + 1]].tolist() for i, r in enumerate(row_ids)}
    assert decode_task_table(table, indices) == wanted
    assert decode_task_table(table.take(rng.permutation(len(table))), indices) == wanted


@settings(max_examples=profiles.examples(200))
@given(LENGTHS, st.integers(1, 9))
def test_rows_are_cut_into_the_fewest_pieces_of_the_target_all_nearly_equal(lengths: list[int], target: int) -> None:
    table = build_task_table(indptr_of(lengths), target=target)
    for row, length in enumerate(lengths):
        pieces = (table.end - table.start)[table.row == row]
        assert len(pieces) == max(1, -(-length // target))
        assert pieces.sum() == length
        assert pieces.max() - pieces.min() <= 1
        assert pieces.max() <= target
        assert table.split[table.row == row].tolist() == list(range(len(pieces)))


@settings(max_examples=profiles.examples(200))
@given(st.lists(st.integers(1, 9), max_size=14), st.integers(1, 30))
def test_pieces_of_weighted_entries_exceed_their_share_by_less_than_one_entry(weights: list[int], target: int) -> None:
    cuts = cut_points(np.array(weights, dtype=np.int64), target=target)
    pieces = [weights[a:b] for a, b in pairwise(cuts)]
    assert [w for piece in pieces for w in piece] == weights
    if weights:
        count = -(-sum(weights) // target)
        assert len(pieces) <= count
        assert all(piece and sum(piece) < Fraction(sum(weights), count) + max(piece) for piece in pieces)


def test_a_row_within_the_target_is_never_split_and_an_empty_row_has_a_task() -> None:
    table = build_task_table(np.array([0, 4, 4, 9]), target=4)
    assert table.row.tolist() == [0, 1, 2, 2]
    assert (table.start[1], table.end[1]) == (4, 4)


def test_the_articles_116_tiles_make_4_tasks_of_29() -> None:
    table = build_task_table(np.array([0, 116]), target=29)
    assert (table.end - table.start).tolist() == [29, 29, 29, 29]


def test_a_task_of_an_older_generation_may_not_write() -> None:
    table = build_task_table(np.array([0, 3, 6]), target=2, generations=np.array([4, 7]))
    now = np.array([4, 8])  # row 1 was given to another request
    late = table.take(np.flatnonzero(~live_tasks(table, now)))
    assert set(late.row.tolist()) == {1}
    assert len(late) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": 0}, r"target is 0, but must be at least 1 \[FORMAT-TASK-BALANCE\]"),
        ({"row_ids": np.array([1])}, r"row_ids.shape is \(1,\), but must be \(2,\) \[FORMAT-TASK-TABLE\]"),
        ({"row_ids": np.array([1, 1])}, r"row_ids is 1, but two rows have this identity \[FORMAT-ROW-IDENTITY\]"),
        ({"weights": np.array([1, 1, 0])}, r"weights\[2\] is 0, but must be at least 1 \[FORMAT-TASK-BALANCE\]"),
    ],
)
def test_a_plan_of_nonsense_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(RefusedInput, match=message):
        build_task_table(np.array([0, 1, 3]), **{"target": 2, **change})  # type: ignore[arg-type]


def test_a_row_without_a_place_is_refused() -> None:
    one = np.array([0])
    table = TaskTable(row=np.array([3]), start=one, end=one, split=one, generation=one)
    with pytest.raises(RefusedInput, match=r"^row\[0\] is 3, but there are 2 rows \[FORMAT-ROW-IDENTITY\]$"):
        live_tasks(table, np.array([0, 0]))


def best_by_trying(lengths: list[int], cost: dict[int, int], price: Fraction) -> Fraction:
    """The least cost over every set of tiers that reaches the longest row."""
    longest = max(max(lengths), 1)
    return min(
        tier_cost(lengths, (*chosen, longest), cost=cost.__getitem__, price=price)  # type: ignore[arg-type]
        for count in range(longest)
        for chosen in combinations(range(1, longest), count)
    )


@settings(max_examples=profiles.examples(150))
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=7),
    st.lists(st.integers(0, 5), min_size=10, max_size=10),
    st.sampled_from((0, 1, 3, Fraction(1, 3))),
)
def test_the_chosen_tiers_cost_what_the_best_of_all_sets_costs(
    lengths: list[int], steps: list[int], price: Fraction
) -> None:
    cost = dict(enumerate(np.cumsum(steps).tolist()))
    tiers = optimal_tiers(lengths, cost=cost.__getitem__, price=price)  # type: ignore[arg-type]
    assert tier_cost(lengths, tiers, cost=cost.__getitem__, price=price) == best_by_trying(lengths, cost, price)  # type: ignore[arg-type]


@settings(max_examples=profiles.examples(100))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.lists(st.integers(1, 40), min_size=1, max_size=4))
def test_a_row_goes_into_the_smallest_tier_that_holds_it(lengths: list[int], sizes: list[int]) -> None:
    tiers = tuple(sorted({*sizes, 40}))
    for length in lengths:
        assert smallest_tier(length, tiers) == min(t for t in tiers if t >= length)
    assert wasted_entries(lengths, tiers) == sum(min(t for t in tiers if t >= k) - k for k in lengths)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: smallest_tier(257, (128, 256)), r"length is 257, but the largest tier is 256 \[FORMAT-TIER-LIMIT\]"),
        (lambda: smallest_tier(-1, (8,)), r"length is -1, but must be at least 0 \[FORMAT-TIER\]"),
        (lambda: smallest_tier(1, (8, 8)), r"tiers\[1\] is 8, but must be at least 9 \[FORMAT-TIER\]"),
        (lambda: smallest_tier(1, ()), r"tiers is \(\), but there must be at least one \[FORMAT-TIER\]"),
        (lambda: optimal_tiers([], cost=float, price=0), r"len\(lengths\) is 0, but there must be at least one row"),
        (lambda: optimal_tiers([1, -3], cost=float, price=0), r"lengths\[1\] is -3, but must be at least 0"),
        (lambda: optimal_tiers([1], cost=float, price=-1), r"price is -1, but must be finite and at least 0"),
        (lambda: optimal_tiers([1, 2], cost=lambda n: -n, price=0), r"cost\[2\] is -2, but cost\(1\) is -1"),
    ],
)
def test_tiers_of_nonsense_are_refused_by_name(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RefusedInput, match=message):
        call()
