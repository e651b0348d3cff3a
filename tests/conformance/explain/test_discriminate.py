"""Deviations that agree on the failed case, told apart by others."""

from itertools import islice
from types import SimpleNamespace

import msgspec
import pytest

from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.explain.discriminate import pool, rounds, tell_apart, varied
from attnconform.conformance.explain.rank import Match
from attnconform.reference.rules import Causal


def tied(*names):
    """Matches that nothing seen so far tells apart."""
    return [Match(DEVIATIONS[name], 0.0, 6, True, True) for name in names]


def first_of(matches):
    """Ids of those that are ahead of all others."""
    return [match.deviation.id for match in matches if match.order == matches[0].order]


def with_axes(name, **axes):
    return SimpleNamespace(id=name, axes=axes)


def test_each_case_brings_the_most_that_is_new():
    cases = [with_axes("a", x="1", y="1"), with_axes("b", x="1", y="2"), with_axes("c", x="2", y="2")]
    assert [case.id for case in varied(cases)] == ["a", "c", "b"]


def test_cases_come_once_and_each_clause_has_its_turn(small_case):
    def case(clause, rows):
        return msgspec.structs.replace(small_case(q=(rows,)), clauses=(clause,), id=f"{clause} {rows}")

    mine, other = DEVIATIONS["scales-twice"].clause, DEVIATIONS["returns-lse-in-base-two"].clause
    cases = [case(mine, 2), case(mine, 1), case(mine, 3), case(other, 4), case("SET-HOLE", 1)]
    found = pool(tied("scales-twice", "returns-lse-in-base-two"), case(mine, 3), cases)
    assert [c.id for c in islice(found, 4)] == [f"{mine} 1", f"{other} 4", f"{mine} 2", "SET-HOLE 1"]
    assert not list(found)


def test_attention_is_not_asked_of_structures(small_case):
    structure = msgspec.structs.replace(small_case(), operation="structure")
    assert not list(pool(tied("scales-twice"), small_case(), [structure]))
    assert list(rounds(structure, "check_keys")) == [()]


@pytest.mark.parametrize("true_one", ["takes-the-maximum-over-the-whole-request", "takes-the-maximum-before-masking"])
def test_what_a_case_without_lists_does_not_tell_one_with_lists_does(small_case, true_one):
    both = tied("takes-the-maximum-over-the-whole-request", "takes-the-maximum-before-masking")
    dense = small_case(q=(3,), changes={"mask_rule": Causal()})
    assert len(first_of(tell_apart(both, DEVIATIONS[true_one].build, dense, []))) == 2
    listed = msgspec.structs.replace(small_case(lists=[(1, 4)]), id="listed")
    assert first_of(tell_apart(both, DEVIATIONS[true_one].build, dense, [listed])) == [true_one]


@pytest.mark.parametrize("true_one", ["keeps-every-output", "gathers-keys-once"])
def test_what_the_failed_check_does_not_tell_the_others_do(small_case, true_one):
    both = tied("keeps-every-output", "gathers-keys-once")
    case = msgspec.structs.replace(small_case(), clauses=("PLAN-INPUTS",))
    assert first_of(tell_apart(both, DEVIATIONS[true_one].build, case, [], check="check_memory")) == [true_one]
