"""Wishes of a group's heads merged into the list of their KV head, against enumeration."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.reference.errors import RefusedInput
from attnconform.reference.group_merge import (
    GROUP_POLICIES,
    GroupPolicy,
    keep_private,
    merge_by_max,
    merge_by_sum,
    merge_groups,
)
from attnconform.reference.scored_list import ScoredList, best_positions

profiles.load_profile()


@st.composite
def scored(draw: st.DrawFn) -> ScoredList:
    positions = draw(st.lists(st.integers(0, 9), unique=True, max_size=8))
    scores = draw(st.lists(st.integers(0, 3), min_size=len(positions), max_size=len(positions)))
    return ScoredList(np.array(positions, dtype=np.int64), np.array(scores, dtype=np.float64) / 4)


def best(scores: dict[int, float], budget: int) -> list[int]:
    """By definition: one after the other, the highest score, of equals the lowest position."""
    left: dict[int, float] = dict(scores)
    chosen: list[int] = []
    while left and len(chosen) < budget:
        top = max(left.values())
        chosen.append(min(t for t, score in left.items() if score == top))
        del left[chosen[-1]]
    return sorted(chosen)


@settings(max_examples=profiles.examples(200))
@given(st.lists(scored(), min_size=1, max_size=4), st.integers(0, 6))
def test_merged_lists_are_those_of_the_definition(heads: list[ScoredList], budget: int) -> None:
    said = [dict(zip(h.positions.tolist(), h.scores.tolist(), strict=True)) for h in heads]
    listed = {t for one in said for t in one}
    largest = {t: max(one[t] for one in said if t in one) for t in listed}
    total = {t: sum(one.get(t, 0.0) for one in said) for t in listed}
    for got, wanted in ((merge_by_max(heads, budget=budget), largest), (merge_by_sum(heads, budget=budget), total)):
        assert got.loaded.tolist() == best(wanted, budget)
        assert [one.tolist() for one in got.of_head] == [got.loaded.tolist()] * len(heads)
    private = keep_private(heads, budget=budget)
    assert [one.tolist() for one in private.of_head] == [best(one, budget) for one in said]
    assert private.loaded.tolist() == sorted({t for one in private.of_head for t in one.tolist()})


@settings(max_examples=profiles.examples(100))
@given(scored(), st.integers(0, 6), st.randoms(use_true_random=False))
def test_the_order_of_a_list_decides_no_tie(one: ScoredList, budget: int, random) -> None:  # type: ignore[no-untyped-def]
    order = random.sample(range(len(one.positions)), len(one.positions))
    shuffled = ScoredList(one.positions[order], one.scores[order])
    assert best_positions(shuffled, budget=budget).tolist() == best_positions(one, budget=budget).tolist()


def test_the_order_of_the_heads_decides_no_sum() -> None:
    weights = (0.1, 0.2, 0.3, 0.7)  # (0.1 + 0.2) + 0.3 is not 0.1 + (0.2 + 0.3) in float64
    heads = [ScoredList(np.array([3, 8]), np.array([w, 0.6 if i == 2 else 0.0])) for i, w in enumerate(weights[:3])]
    assert merge_by_sum(heads, budget=1).loaded.tolist() == merge_by_sum(heads[::-1], budget=1).loaded.tolist() == [3]


def test_the_three_policies_differ_on_one_example() -> None:
    heads = [ScoredList(np.array([2, 5]), np.array([0.5, 0.4])), ScoredList(np.array([5, 9]), np.array([0.4, 0.7]))]
    loaded = {policy: rule(heads, budget=1).loaded.tolist() for policy, rule in GROUP_POLICIES.items()}
    assert loaded == {"max": [9], "sum": [5], "private": [2, 9]}


def test_query_heads_are_grouped_by_neighbourhood() -> None:
    heads = [ScoredList(np.array([h]), np.array([1.0])) for h in range(6)]
    lists = merge_groups(heads, num_kv_heads=2, policy="max", budget=9)
    assert [one.loaded.tolist() for one in lists] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("policy", GROUP_POLICIES)
def test_a_head_that_names_a_position_twice_is_refused(policy: GroupPolicy) -> None:
    twice = ScoredList(np.array([4, 4]), np.array([0.5, 0.25]))
    with pytest.raises(RefusedInput, match=r"\[SET-FORM\]"):
        GROUP_POLICIES[policy]([twice], budget=1)


def test_what_cannot_be_merged_is_refused() -> None:
    one = ScoredList(np.array([4]), np.array([0.5]))
    with pytest.raises(RefusedInput, match=r"\[GQA-MAP\]"):
        merge_groups([one] * 3, num_kv_heads=2, policy="max", budget=1)
    with pytest.raises(RefusedInput, match="policy is mean"):
        merge_groups([one], num_kv_heads=1, policy="mean", budget=1)  # type: ignore[arg-type]
    with pytest.raises(RefusedInput, match=r"budget is -1.*\[GQA-MERGE-TIE\]"):
        merge_by_max([one], budget=-1)
    with pytest.raises(RefusedInput, match=r"scores\[1, 0\] is -0.5.*\[GQA-MERGE-SUM\]"):
        merge_by_sum([one, ScoredList(np.array([4]), np.array([-0.5]))], budget=1)
    with pytest.raises(RefusedInput, match=r"\[SAFE-FINITE\]"):
        merge_by_max([ScoredList(np.array([4]), np.array([np.inf]))], budget=1)
    with pytest.raises(RefusedInput, match=r"\[SAFE-SHAPE\]"):
        merge_by_max([ScoredList(np.array([4]), np.array([0.5, 0.25]))], budget=1)
