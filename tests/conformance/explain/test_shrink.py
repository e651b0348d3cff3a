"""Shrunk cases are sound, smaller, and still fail."""

import pytest

from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import CandidateStructure
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.explain.discriminate import size_of
from attnconform.conformance.explain.explain import minimal_case
from attnconform.conformance.explain.shrink import (
    MAX_TRIALS,
    is_sound,
    shrink,
    smaller_cases,
    with_heads,
    with_later_start,
)
from attnconform.conformance.judge.judge import judge_case
from attnconform.reference.rules import Alibi, Causal, Document, PrefixLM


def test_most_steps_of_shrinking_give_sound_cases():
    cases = [case for case in matrix("L1") if case.operation == "forward"][::25]
    steps = [is_sound(smaller) for case in cases for smaller in smaller_cases(case)]
    assert sum(steps) > 0.8 * len(steps)


def test_shrinking_ends_at_the_smallest_case_of_what_fails(small_case):
    case = small_case(q=(2, 3), kv=(20, 35), heads="4/2", mask=Causal(), score=(Alibi((0.5, 0.25, 0.5, 0.25)),))
    smallest = shrink(case, lambda smaller: True).structure
    assert (smallest.seqlens_q, smallest.seqlens_kv) == ((1,), (1,))
    assert (smallest.num_qo_heads, smallest.num_kv_heads, smallest.num_pages) == (1, 1, 1)
    assert smallest.mask_rule is None
    assert smallest.score_rules == ()
    assert shrink(case, lambda smaller: False) == case


def test_shrinking_is_bounded(small_case):
    asked = []
    shrink(small_case(q=(40,), kv=(400,)), lambda smaller: asked.append(smaller) or False)
    assert len(asked) <= MAX_TRIALS


def test_heads_take_what_is_theirs_along(small_case):
    lists = CandidateStructure(lists=((0,), (1,), (2,), (3,)), sharing="query_head")
    case = small_case(
        heads="4/2",
        score=(Alibi((0.5, 0.25, 0.125, 0.0625)),),
        changes={"candidates": lists, "sink_logits": (0.0, 1.0, 2.0, 3.0)},
    )
    kept = with_heads(case.structure, (1,), (2, 3))
    assert kept.score_rules == (Alibi((0.125, 0.0625)),)
    assert kept.sink_logits == (2.0, 3.0)
    assert kept.candidates.lists == ((2,), (3,))


def test_a_later_start_moves_lists_and_queries_along(small_case):
    lists = CandidateStructure(lists=((33, -1, 40),), sharing="shared")
    case = small_case(kv=(48,), changes={"candidates": lists, "q_offset": (45,)})
    moved = next(with_later_start(case.structure, 0))
    assert moved.seqlens_kv == (16,)
    assert moved.q_offset == (13,)
    assert moved.candidates.lists == ((1, -1, 8),)
    assert moved.page_table == (case.structure.page_table[0][2:],)


@pytest.mark.parametrize("rule", [PrefixLM((4,)), Document(((0, 5),))])
def test_a_rule_that_names_positions_keeps_the_start(small_case, rule):
    assert not list(with_later_start(small_case(kv=(48,), mask=rule).structure, 0))


@pytest.mark.parametrize("deviation", ["counts-a-duplicate-twice", "sees-one-key-of-the-future", "scales-twice"])
def test_a_minimal_case_fails_the_same_check_and_is_smaller(deviation):
    make = DEVIATIONS[deviation].build
    cases = (case for case in matrix("L1") if case.operation == "forward")
    case, result = next((c, r) for c in cases if not (r := judge_case(c, make())).is_conforming)
    small = minimal_case(case, make, result)
    again = judge_case(small, make())
    assert result.findings[0].check in {finding.check for finding in again.findings}
    assert size_of(small) < size_of(case)
