"""Branches that list one position: three policies, and gates after separate softmaxes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.reference.branches import (
    POLICIES,
    Branch,
    BranchPolicy,
    accumulate_gates,
    cover,
    gate_branches,
    keep_larger_score,
    merge_branches,
    repeat_positions,
)
from attnconform.reference.errors import RefusedInput

profiles.load_profile()

LOCAL = Branch(np.array([4, 6]), np.array([0.9, 0.2]), np.array([0.25, 0.25]))
FAR = Branch(np.array([1, 4]), np.array([0.7, 0.4]), np.array([0.5, 0.5]))


@st.composite
def branches(draw: st.DrawFn) -> list[Branch]:
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        positions = draw(st.lists(st.integers(0, 6), unique=True, max_size=7))
        numbers = st.lists(st.integers(-4, 4), min_size=len(positions), max_size=len(positions))
        scores, gates = (np.array(draw(numbers), dtype=np.float64) / 4 for _ in range(2))
        parts.append(Branch(np.array(positions, dtype=np.int64), scores, gates))
    return parts


@settings(max_examples=profiles.examples(200))
@given(branches())
def test_each_policy_says_of_every_position_what_its_clause_says(parts: list[Branch]) -> None:
    said: dict[int, list[tuple[float, float]]] = {}
    for part in parts:
        for t, score, gate in zip(part.positions.tolist(), part.scores.tolist(), part.gates.tolist(), strict=True):
            said.setdefault(t, []).append((score, gate))
    wanted = {
        "cover": {t: entries[-1] for t, entries in said.items()},
        "keep_larger_score": {t: max(entries, key=lambda e: e[0]) for t, entries in said.items()},
        "accumulate_gates": {
            t: (max(s for s, _ in entries), sum(g for _, g in entries)) for t, entries in said.items()
        },
    }
    for policy in POLICIES:
        got = merge_branches(parts, policy)
        assert got.positions.tolist() == sorted(said)
        entries = list(zip(got.scores.tolist(), got.gates.tolist(), strict=True))
        assert entries == [wanted[policy][t] for t in sorted(said)]


def test_the_three_policies_differ_on_one_example() -> None:
    results = [merge_branches([LOCAL, FAR], policy) for policy in POLICIES]
    assert len({(r.scores.tobytes(), r.gates.tobytes()) for r in results}) == 3
    assert {r.positions.tobytes() for r in results} == {np.array([1, 4, 6]).tobytes()}


def test_the_order_of_branches_decides_only_where_the_policy_says_so() -> None:
    for policy, is_free in (("cover", False), ("keep_larger_score", True), ("accumulate_gates", True)):
        there, back = merge_branches([LOCAL, FAR], policy), merge_branches([FAR, LOCAL], policy)  # type: ignore[arg-type]
        same = np.array_equal(there.scores, back.scores) and np.array_equal(there.gates, back.gates)
        assert same == is_free


def test_policies_are_the_functions_that_the_clauses_name() -> None:
    assert list(POLICIES.values()) == [cover, keep_larger_score, accumulate_gates]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_branch_that_names_a_position_twice_is_refused(policy: BranchPolicy) -> None:
    twice = Branch(np.array([4, 4]), np.array([0.9, 0.2]), np.array([0.25, 0.25]))
    with pytest.raises(RefusedInput, match=r"positions\[1\] is 4.*\[SET-FORM\]"):
        merge_branches([FAR, twice], policy)


def test_scores_that_are_no_numbers_and_unknown_policies_are_refused() -> None:
    with pytest.raises(RefusedInput, match=r"scores\[0\] is nan.*\[SAFE-FINITE\]"):
        merge_branches([Branch(np.array([1]), np.array([np.nan]), np.array([1.0]))], "cover")
    with pytest.raises(RefusedInput, match=r"gates.shape.*\[SAFE-SHAPE\]"):
        merge_branches([Branch(np.array([1]), np.array([1.0]), np.array([1.0, 2.0]))], "cover")
    with pytest.raises(RefusedInput, match="policy is average"):
        merge_branches([FAR], "average")  # type: ignore[arg-type]


def test_gated_branches_are_the_gated_sum_of_their_softmaxes() -> None:
    rng = np.random.default_rng(3)
    scores, v = rng.standard_normal(6), rng.standard_normal((6, 3))
    lists, gates = [np.array([0, 2, 5]), np.array([5, 1])], np.array([0.7, 1.9])
    wanted = np.zeros(3)
    for listed, gate in zip(lists, gates, strict=True):
        p = np.exp(scores[listed])
        wanted += gate * (p / p.sum()) @ v[listed]
    np.testing.assert_allclose(gate_branches(lists, gates, scores, v), wanted, rtol=1e-13)


def test_a_repeated_index_is_another_function_even_with_equal_gates() -> None:
    scores, v = np.zeros(2), np.array([[0.0], [1.0]])
    lists, gates = [np.array([0, 1]), np.array([1])], np.array([1.0, 1.0])
    assert gate_branches(lists, gates, scores, v)[0] == 1.5
    assert repeat_positions(lists, gates, scores, v)[0] == pytest.approx(2 / 3)


def test_a_branch_without_positions_adds_nothing_and_none_at_all_gives_zero() -> None:
    scores, v, none = np.zeros(2), np.ones((2, 1)), np.array([], dtype=np.int64)
    assert gate_branches([none, np.array([0])], np.array([5.0, 0.5]), scores, v)[0] == 0.5
    assert gate_branches([none], np.array([5.0]), scores, v)[0] == 0
    assert repeat_positions([none], np.array([5.0]), scores, v)[0] == 0


def test_gates_are_one_finite_number_a_branch() -> None:
    for gates in (np.array([1.0, 2.0]), np.array([np.inf])):
        with pytest.raises(RefusedInput, match="gates"):
            gate_branches([np.array([0])], gates, np.zeros(1), np.ones((1, 1)))
