"""What finite mask values leak, and between what limits the use of blocks lies."""

from math import exp, inf, isclose

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.reference.cost.tiles import block_use
from attnconform.reference.cost.use_bounds import largest_block_use, least_block_use
from attnconform.reference.errors import RefusedInput
from attnconform.reference.leak import leaked_mass, least_bias

profiles.load_profile()


@settings(max_examples=profiles.examples(200))
@given(st.integers(1, 2**20), st.floats(0, 40), st.floats(1e-3, 1e6))
def test_the_leak_is_the_formula(m: int, c: float, z: float) -> None:
    assert isclose(leaked_mass(m, c, z), m * exp(-c) / (z + m * exp(-c)), rel_tol=1e-12)


def test_the_leak_is_what_a_softmax_gives_to_biased_keys() -> None:
    scores = np.array([0.3, -0.7, *[-10.0] * 50])
    p = np.exp(scores) / np.exp(scores).sum()
    assert isclose(leaked_mass(50, 10.0, exp(0.3) + exp(-0.7)), float(p[2:].sum()), rel_tol=1e-12)


@settings(max_examples=profiles.examples(100))
@given(st.integers(1, 2**20), st.floats(1e-3, 1e6), st.floats(1e-6, 0.9))
def test_the_least_bias_leaks_the_tolerance(m: int, z: float, tolerance: float) -> None:
    assert isclose(leaked_mass(m, least_bias(m, z, tolerance=tolerance), z), tolerance, rel_tol=1e-9)


def test_extremes_neither_overflow_nor_vanish() -> None:
    assert leaked_mass(1, 5e4, 1.0) == 0.0
    assert leaked_mass(1, -5e4, 1.0) == 1.0
    assert leaked_mass(1, 800.0, exp(-700)) == pytest.approx(exp(-100))
    assert (leaked_mass(5, inf, 0.0), leaked_mass(0, 1.0, 0.0), leaked_mass(5, -inf, 1.0)) == (0.0, 0.0, 1.0)
    assert (least_bias(0, 1.0, tolerance=0.5), least_bias(1, 0.0, tolerance=0.5)) == (-inf, inf)


def test_figures_that_are_no_counts_are_refused() -> None:
    for arguments in ((-1, 1.0, 1.0), (1, float("nan"), 1.0), (1, 1.0, -1.0), (1, 1.0, inf)):
        with pytest.raises(RefusedInput, match=r"\[MASK-LEAK\]"):
            leaked_mass(*arguments)
    with pytest.raises(RefusedInput, match=r"tolerance is 1\.0"):
        least_bias(1, 1.0, tolerance=1.0)


@settings(max_examples=profiles.examples(200))
@given(st.integers(1, 60), st.integers(1, 9), st.data())
def test_the_use_of_any_choice_of_tokens_lies_between_its_bounds(seqlen: int, size: int, data: st.DataObject) -> None:
    tokens = data.draw(st.sets(st.integers(0, seqlen - 1), min_size=1), label="tokens")
    use = block_use(len(tokens), len({t // size for t in tokens}), size)
    assert least_block_use(len(tokens), size, seqlen) <= use <= largest_block_use(len(tokens), size, seqlen)


def test_both_bounds_are_reached() -> None:
    assert least_block_use(4, 16, 64) == block_use(4, len({0, 16, 32, 48}), 16)
    assert largest_block_use(20, 16, 64) == block_use(20, 2, 16)
    with pytest.raises(RefusedInput, match=r"num_tokens is 65.*\[COST-USE-BOUND\]"):
        least_block_use(65, 16, 64)
