"""Partial softmax states: a commutative monoid, whose split count changes nothing."""

from dataclasses import dataclass

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from attnconform.conformance.cases import profiles
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.exact import exact_row
from attnconform.reference.states import (
    PartialState,
    add_sink,
    empty_state,
    finish,
    merge,
    merge_all,
    merge_outputs,
    softmax_state,
)

profiles.load_profile()

HEAD_DIM = 2
ROUNDING = 2.0**-48  # a dozen roundings, relative to Σ p|v| <= 16


@dataclass(frozen=True)
class Keys:
    """Scores and values of the keys of one row."""

    scores: FloatArray  # (n,)
    v: FloatArray  # (n, HEAD_DIM)

    def part(self, chosen: list[int]) -> PartialState:
        return softmax_state(self.scores[chosen], self.v[chosen])


@st.composite
def keys(draw: st.DrawFn, max_size: int = 12) -> Keys:
    n = draw(st.integers(0, max_size), label="num_keys")
    scores = draw(arrays.arrays(np.float64, n, elements=st.floats(-80, 80)), label="scores")
    v = draw(arrays.arrays(np.float64, (n, HEAD_DIM), elements=st.floats(-16, 16)), label="v")
    return Keys(scores, v)


@st.composite
def split_keys(draw: st.DrawFn, max_splits: int = 8) -> tuple[Keys, list[list[int]]]:
    """Keys, and a way to deal them out: splits may be empty, uneven and interleaved."""
    of = draw(keys())
    num_splits = draw(st.integers(1, max_splits), label="num_splits")
    split_of = [draw(st.integers(0, num_splits - 1)) for _ in of.scores]
    return of, [[i for i, s in enumerate(split_of) if s == split] for split in range(num_splits)]


def assert_same_state(a: PartialState, b: PartialState) -> None:
    assert (a.m, a.l) == (b.m, b.l)
    np.testing.assert_array_equal(a.o, b.o)


def assert_same_result(a: PartialState, b: PartialState) -> None:
    (out_a, lse_a), (out_b, lse_b) = finish(a), finish(b)
    np.testing.assert_allclose(out_a, out_b, rtol=0, atol=16 * ROUNDING)
    np.testing.assert_allclose(lse_a, lse_b, rtol=ROUNDING, atol=ROUNDING)


@settings(max_examples=profiles.examples(200))
@given(keys())
def test_the_empty_state_is_the_identity_bit_for_bit(of: Keys) -> None:
    state = of.part(list(range(len(of.scores))))
    assert_same_state(merge(state, empty_state(HEAD_DIM)), state)
    assert_same_state(merge(empty_state(HEAD_DIM), state), state)


@settings(max_examples=profiles.examples(200))
@given(keys(), keys())
def test_merge_commutes_bit_for_bit(a: Keys, b: Keys) -> None:
    state_a, state_b = (of.part(list(range(len(of.scores)))) for of in (a, b))
    assert_same_state(merge(state_a, state_b), merge(state_b, state_a))


@settings(max_examples=profiles.examples(200))
@given(keys(6), keys(6), keys(6))
def test_merge_is_associative_up_to_rounding(a: Keys, b: Keys, c: Keys) -> None:
    x, y, z = (of.part(list(range(len(of.scores)))) for of in (a, b, c))
    assert_same_result(merge(merge(x, y), z), merge(x, merge(y, z)))
    assert merge(merge(x, y), z).m == merge(x, merge(y, z)).m


@settings(max_examples=profiles.examples(300))
@given(split_keys())
def test_the_number_of_splits_changes_nothing(drawn: tuple[Keys, list[list[int]]]) -> None:
    of, splits = drawn
    whole = of.part(list(range(len(of.scores))))
    assert_same_result(merge_all([of.part(split) for split in splits], HEAD_DIM), whole)
    assert_same_result(merge_all([of.part(split) for split in reversed(splits)], HEAD_DIM), whole)


@settings(max_examples=profiles.examples(100))
@given(split_keys(), st.floats(-20, 20))
def test_a_sink_counts_once_whatever_the_splits(drawn: tuple[Keys, list[list[int]]], sink: float) -> None:
    of, splits = drawn
    with mpmath.workdps(40):
        want = exact_row([mpmath.mpf(s) for s in of.scores.tolist()], of.v, sink)
        out, lse = finish(add_sink(merge_all([of.part(split) for split in splits], HEAD_DIM), sink))
        assert abs(want.lse - lse) <= ROUNDING * max(1, abs(want.lse))
        assert all(abs(a - b) <= 16 * ROUNDING for a, b in zip(want.out, out.tolist(), strict=True))


@settings(max_examples=profiles.examples(200))
@given(st.lists(st.tuples(keys(6), keys(6)), min_size=1, max_size=4))
def test_merging_outputs_equals_merging_states(rows: list[tuple[Keys, Keys]]) -> None:
    states = [[of.part(list(range(len(of.scores)))) for of in pair] for pair in rows]
    finished = [[finish(state) for state in side] for side in zip(*states, strict=True)]
    (out_a, lse_a), (out_b, lse_b) = ((np.array([o for o, _ in s]), np.array([lse for _, lse in s])) for s in finished)
    out, lse = merge_outputs(out_a, lse_a, out_b, lse_b)
    for i, (a, b) in enumerate(states):
        want_out, want_lse = finish(merge(a, b))
        np.testing.assert_allclose(out[i], want_out, rtol=0, atol=2.0**-40)  # exp of a difference of two lse below 100
        np.testing.assert_allclose(lse[i], want_lse, rtol=ROUNDING, atol=ROUNDING)


def test_two_empty_outputs_merge_to_an_empty_one() -> None:
    out, lse = np.zeros((3, HEAD_DIM)), np.full(3, -np.inf)
    got_out, got_lse = merge_outputs(out, lse, out, lse)
    assert not got_out.any()
    assert np.isneginf(got_lse).all()


def test_merge_outputs_with_an_empty_side_is_the_other_side_exactly() -> None:
    out, lse = np.array([[1.5, -2.0]]), np.array([3.25])
    none = (np.zeros_like(out), np.full(1, -np.inf))
    for got in (merge_outputs(out, lse, *none), merge_outputs(*none, out, lse)):
        np.testing.assert_array_equal(got[0], out)
        np.testing.assert_array_equal(got[1], lse)


@pytest.mark.parametrize(
    "shapes", [((2, 3), (2,), (2, 4), (2,)), ((2, 3), (3,), (2, 3), (2,)), ((2, 3), (2,), (2, 3), (1,))]
)
def test_merge_outputs_refuses_shapes_that_differ(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"^shapes differ: out \(2, 3\) and [^\n]*$"):
        merge_outputs(*(np.zeros(shape) for shape in shapes))


def test_two_splits_of_the_article_give_an_output_of_2() -> None:
    state = merge(PartialState(2.0, 3.0, np.array([6.0])), PartialState(1.0, 4.0, np.array([8.0])))
    assert state.m == 2.0
    assert state.l == pytest.approx(3 + 4 / np.e, rel=1e-15)
    assert state.o[0] == pytest.approx(6 + 8 / np.e, rel=1e-15)
    assert (round(state.l, 3), round(float(state.o[0]), 3)) == (4.472, 8.943)
    out, lse = finish(state)
    assert out[0] == pytest.approx(2.0, rel=1e-15)
    assert lse == pytest.approx(2 + np.log(3 + 4 / np.e), rel=1e-15)


def test_four_splits_of_the_article_have_a_denominator_of_17_85() -> None:
    states = [
        PartialState(row_max, total, np.array([total, -total]))
        for row_max, total in ((8.0, 12.0), (7.0, 18.0), (9.0, 10.0), (6.0, 20.0))
    ]
    merged = merge_all(states, HEAD_DIM)
    assert merged.m == 9.0
    assert merged.l == pytest.approx(np.exp(-1) * 12 + np.exp(-2) * 18 + 10 + np.exp(-3) * 20, rel=1e-15)
    # the article prints 17.85 for 17.8464...
    assert merged.l == pytest.approx(17.85, abs=0.005)
    np.testing.assert_allclose(merged.o, [merged.l, -merged.l], rtol=1e-15)


def test_a_row_of_one_key_is_its_value_and_its_score() -> None:
    out, lse = finish(softmax_state(np.array([-524288.0]), np.array([[3.0, -1.0]])))
    np.testing.assert_array_equal(out, [3.0, -1.0])
    assert lse == -524288.0


def test_an_empty_state_finishes_as_exact_zero_and_minus_infinity() -> None:
    out, lse = finish(empty_state(HEAD_DIM))
    np.testing.assert_array_equal(out, [0.0, 0.0])
    assert lse == -np.inf
