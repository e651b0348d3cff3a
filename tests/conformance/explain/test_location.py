"""Where wrong elements lie, told in one line; the patterns are recorded ones."""

import numpy as np
import pytest

from attnconform.conformance.cases.structure import CandidateStructure
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.explain.explain import where_of
from attnconform.conformance.explain.location import Trait, position_traits, shared_traits, where_edges_are_wrong
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.views import Hints
from attnconform.reference.rules import Causal


def positions_of(small_case, wrong, seqlen_kv=128):
    """The line for wrong positions of one row over all committed ones, page by page in reverse."""
    trial = Trial(small_case(kv=(seqlen_kv,)), DEVIATIONS["gives-zeros"].build())
    every = np.arange(seqlen_kv)
    return shared_traits(position_traits(trial, every, 100 - every // 16), np.array(wrong))


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ([37], "position 37; page 98"),
        (list(range(15, 128, 16)), "position in {15, 31, 47, 63, 79, 95, 111, 127}; position mod page_size 16 15"),
        (
            list(range(3, 128, 32)),
            "position in {3, 35, 67, 99}; page in {94, 96, 98, 100}; position mod page_size 16 3",
        ),
        ([j for j in range(128) if j % 16 == 5], "position mod page_size 16 5"),
        ([j for j in range(128) if j % 64 == 63], "position in {63, 127}; page in {93, 97}"),
        (list(range(32, 48)), "page 98"),
        (list(range(128)), "everywhere"),
        ([j for j in range(128) if j % 32 != 31], "position mod warp 32 not 31"),
    ],
)
def test_recorded_positions_are_told_by_page_tile_and_warp(small_case, wrong, line):
    told = positions_of(small_case, wrong)
    assert line in told
    assert "\n" not in told


def test_positions_in_listed_blocks_are_told_by_their_place_in_a_block(small_case):
    lists = CandidateStructure(lists=((0, 2),), granularity="block", block_size=24, sharing="shared")
    trial = Trial(small_case(kv=(96,), changes={"candidates": lists}), DEVIATIONS["gives-zeros"].build())
    every = np.arange(96)
    wrong = np.array([j for j in every if j % 24 == 23])
    assert "position mod block_size 24 23" in shared_traits(position_traits(trial, every, every // 16), wrong)


def test_a_trait_that_follows_from_another_is_told_only_where_it_says_less():
    row = Trait("row", np.arange(8), ("half",))
    half = Trait("half", np.arange(8) // 4)
    assert shared_traits([row, half], np.array([1])) == "row 1"
    assert shared_traits([row, half], np.array([0, 1])) == "row in {0, 1}; half 0"


@pytest.mark.parametrize(
    ("deviation", "line"),
    [
        ("uses-the-prefetched-page", "position 15"),
        ("reads-the-first-requests-table", "request 1"),
    ],
)
def test_wrong_edges_of_a_batch_are_placed(small_case, deviation, line):
    case, make = small_case(q=(2, 3), kv=(20, 35), heads="2/1"), DEVIATIONS[deviation].build
    assert line in where_of(case, make, judge_case(case, make()))


def test_edges_of_one_split_are_told_by_the_split(small_case):
    hints = Hints(num_kv_splits=3, tile_kv=16)
    case = small_case(q=(4,), kv=(70,), heads="2/1", mask=Causal(), changes={"hints": hints})
    make = DEVIATIONS["merges-the-first-split-twice"].build
    assert "KV split (of 3) not 2" in where_of(case, make, judge_case(case, make()))


def test_one_kv_head_and_a_head_of_its_group_are_told(small_case):
    trial = Trial(small_case(heads="4/2", kv=(9,)), DEVIATIONS["gives-zeros"].build())
    slots = [int(slot) for slot in trial.edges.of(0, 2)[1]]
    assert (
        where_edges_are_wrong(trial, [(0, h, slot) for h in (2, 3) for slot in slots])
        == "query head in {2, 3}; KV head 1"
    )
    assert where_edges_are_wrong(trial, [(0, 3, slot) for slot in slots]) == "query head 3; KV head 1"
    assert "head mod group_size 2 1" in where_edges_are_wrong(trial, [(0, h, slot) for h in (1, 3) for slot in slots])
