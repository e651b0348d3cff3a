"""Dropout's edges against a scalar loop of Philox, and what dropping an edge may change."""

from dataclasses import replace

import numpy as np
from feature_structures import FEATURES, SMALL, featured_cases, with_features
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import weight_of

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import build_values
from attnconform.reference.attention import attention, attention_gradients, effective_sets
from attnconform.reference.cache import PagedCache
from attnconform.reference.dropout import Dropout, kept_edges
from attnconform.reference.problem import AttentionProblem

profiles.load_profile()

SEEDS = st.integers(0, 2**64 - 1)
RATES = st.sampled_from((0.0, 2.0**-32, 0.1, 0.5, 0.9, 1 - 2.0**-32)) | st.floats(0, 1, exclude_max=True)
OTHERS = tuple(name for name in FEATURES if name != "dropout")


@settings(max_examples=profiles.examples(200))
@given(
    RATES,
    SEEDS,
    st.integers(0, 2**20),
    st.integers(0, 200),
    st.integers(-5, 2**33),
    st.lists(st.integers(0, 2**31), max_size=6),
)
def test_an_edge_is_kept_as_a_scalar_loop_says(
    rate: float, seed: int, request: int, qo_head: int, q_idx: int, keys: list[int]
) -> None:
    dropout = Dropout(rate, seed)
    got = kept_edges(dropout, request, qo_head, q_idx, np.array(keys, dtype=np.int64))
    assert got.tolist() == [weight_of(dropout, request, qo_head, q_idx, j) > 0 for j in keys]


@settings(max_examples=profiles.examples(60))
@given(featured_cases(with_features(SMALL, features=OTHERS)), SEEDS)
def test_dropout_never_moves_lse_nor_the_sets_and_a_rate_of_zero_changes_no_bit(case: Case, seed: int) -> None:
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    want = attention(problem, values.q, values.k, values.v)
    half, none = (replace(problem, dropout=Dropout(rate, seed)) for rate in (0.5, 0.0))
    assert np.array_equal(attention(half, values.q, values.k, values.v).lse, want.lse)
    assert np.array_equal(effective_sets(half).positions, effective_sets(problem).positions)
    got = attention(none, values.q, values.k, values.v)
    assert np.array_equal(got.out, want.out)
    assert np.array_equal(got.lse, want.lse)


def uniform_problem(num_keys: int, num_heads: int) -> AttentionProblem:
    """One row whose keys all weigh the same once q is 0."""
    return AttentionProblem(
        qo_indptr=np.array([0, 1]),
        seqlen_kv=np.array([num_keys]),
        q_offset=np.array([num_keys - 1]),
        num_qo_heads=num_heads,
        num_kv_heads=1,
        head_dim_qk=1,
        head_dim_vo=1,
        cache=PagedCache(page_size=num_keys, num_pages=1, page_table=np.array([[0]])),
        sm_scale=1.0,
    )


def test_the_share_of_kept_edges_is_one_minus_the_rate_and_the_mean_output_is_that_of_no_dropout() -> None:
    num_keys, num_heads, rate = 4096, 4, 0.3
    problem = replace(uniform_problem(num_keys, num_heads), dropout=Dropout(rate, seed=11))
    q, k, v = np.zeros((1, num_heads, 1)), np.zeros((num_keys, 1, 1)), np.ones((num_keys, 1, 1))
    kept = np.stack([kept_edges(problem.dropout, 0, h, num_keys - 1, np.arange(num_keys)) for h in range(num_heads)])  # type: ignore[arg-type]
    sigma = (rate * (1 - rate) / kept.size) ** 0.5
    assert abs(kept.mean() - (1 - rate)) < 4 * sigma
    assert abs(np.corrcoef(kept[0], kept[1])[0, 1]) < 4 * num_keys**-0.5
    got = attention(problem, q, k, v)
    np.testing.assert_allclose(got.out[0, :, 0], kept.mean(axis=1) / (1 - rate), rtol=1e-13)
    np.testing.assert_allclose(got.lse[0], np.log(num_keys), rtol=1e-15)


def test_a_dropped_key_takes_no_value_gradient_and_still_takes_a_key_gradient() -> None:
    num_keys = 64
    problem = replace(uniform_problem(num_keys, 1), dropout=Dropout(0.5, seed=3))
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(1, 1, 1)), rng.normal(size=(num_keys, 1, 1)), 1 + rng.random((num_keys, 1, 1))
    kept = np.array([weight_of(problem.dropout, 0, 0, num_keys - 1, j) > 0 for j in range(num_keys)])
    found = attention_gradients(problem, q, k, v, np.ones((1, 1, 1)))
    assert 16 < kept.sum() < 48
    assert np.array_equal(found.dv[:, 0, 0] != 0, kept)
    assert np.all(found.dk != 0)


@settings(max_examples=profiles.examples(40))
@given(SEEDS, SEEDS)
def test_two_seeds_that_differ_keep_different_edges(first: int, second: int) -> None:
    keys = np.arange(256)
    one, two = (kept_edges(Dropout(0.5, seed), 0, 0, 255, keys) for seed in (first, second))
    assert np.array_equal(one, two) == (first == second)
