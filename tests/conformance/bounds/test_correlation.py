"""How partial sums are bounded and averaged, whatever the order. [BOUND-PROBABILISTIC]"""

import numpy as np
import pytest

from attnconform.conformance.bounds.correlation import (
    average_partial_sums,
    bound_partial_sums,
    compute_average_partial,
    split_evenly,
)

ROW, ONES = np.arange(1.0, 4.0)[None], np.ones((3, 1))


def test_partial_sums_are_averaged_in_both_orders():
    none, large = np.zeros((1, 1)), np.full((1, 1), 100.0)
    in_order = average_partial_sums([np.array([[x]]) for x in (1.0, 3.0, 6.0)], none, large)
    turned = average_partial_sums([np.array([[x]]) for x in (3.0, 5.0, 6.0)], none, large)
    np.testing.assert_allclose(in_order, np.sqrt((6.0**2 + 5**2 + 3**2) / 3))
    np.testing.assert_allclose(turned, in_order)


def test_the_average_is_at_most_the_sum_of_sizes_and_holds_one_deviation():
    np.testing.assert_allclose(compute_average_partial(ROW, ONES), 6.0)
    alternating = np.tile([1.0, -1.0], 32)[None]
    assert 8.0 <= compute_average_partial(alternating, np.ones((64, 1)))[0, 0] < 12.0


@pytest.mark.parametrize("seed", range(5))
def test_no_random_order_goes_through_much_larger_partial_sums(seed):
    rng = np.random.default_rng(seed)
    terms = rng.standard_normal(256) + 0.05
    average = compute_average_partial(terms[None], np.ones((256, 1)))[0, 0]
    met = [np.sqrt((np.cumsum(rng.permutation(terms)) ** 2).mean()) for _ in range(200)]
    assert np.quantile(met, 0.9) <= average


def test_no_contiguous_partial_sum_exceeds_its_bound():
    terms = np.random.default_rng(1).standard_normal(64)
    prefixes = [np.array([[x]]) for x in np.cumsum(terms)]
    bound = bound_partial_sums(prefixes, np.array([[(terms**2).sum()]]), np.array([[np.abs(terms).sum()]]))[0, 0]
    largest = max(abs(terms[i:j].sum()) for i in range(64) for j in range(i + 1, 65))
    assert largest <= bound <= np.abs(terms).sum()


def test_an_axis_shorter_than_its_blocks_is_split_into_single_elements():
    assert list(split_evenly(3, 16)) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert list(split_evenly(0, 16)) == []
