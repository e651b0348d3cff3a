"""Rotations against complex multiplication, and raw caches against those rotated when they were written."""

from dataclasses import replace

import numpy as np
import pytest
from feature_structures import FEATURES, SMALL, featured_cases, with_features
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import turned

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import build_values
from attnconform.reference.attention import attention, attention_gradients
from attnconform.reference.cache import PagedCache
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rope import Rope, rotate

profiles.load_profile()

HEAD_DIM = 10
ROPES = st.builds(
    Rope,
    theta=st.sampled_from((10000.0, 500.0, 2.0)),
    rotary_dim=st.sampled_from((2, 4, 8, 10)),
    interleaved=st.booleans(),
    k_position=st.just("raw"),
)
VECTORS = st.lists(st.floats(-4, 4), min_size=HEAD_DIM, max_size=HEAD_DIM)
POSITIONS = st.integers(-3, 1000)


@settings(max_examples=profiles.examples(200))
@given(ROPES, VECTORS, POSITIONS)
def test_a_rotation_is_a_complex_multiplication(rope: Rope, x: list[float], position: int) -> None:
    got = rotate(np.array([x]), np.array([position]), rope)[0]
    np.testing.assert_allclose(got, turned(x, position, rope), rtol=0, atol=1e-11)
    assert got[rope.rotary_dim :].tolist() == x[rope.rotary_dim :]


@settings(max_examples=profiles.examples(100))
@given(ROPES, VECTORS, POSITIONS)
def test_the_inverse_turns_back_and_no_rotation_changes_a_length(rope: Rope, x: list[float], position: int) -> None:
    there = rotate(np.array([x]), np.array([position]), rope)
    np.testing.assert_allclose(rotate(there, np.array([position]), rope, inverse=True)[0], x, rtol=0, atol=1e-14)
    np.testing.assert_allclose(np.linalg.norm(there), np.linalg.norm(x), rtol=1e-14, atol=1e-300)


@settings(max_examples=profiles.examples(100))
@given(ROPES, VECTORS, VECTORS, POSITIONS, st.integers(0, 500))
def test_a_score_depends_on_the_distance_alone(
    rope: Rope, q: list[float], k: list[float], position: int, distance: int
) -> None:
    near = rotate(np.array([q, k]), np.array([distance, 0]), rope)
    far = rotate(np.array([q, k]), np.array([position + distance, position]), rope)
    np.testing.assert_allclose(far[0] @ far[1], near[0] @ near[1], rtol=0, atol=1e-10)


OTHERS = tuple(name for name in FEATURES if name not in ("rope", "k_quant"))


def turned_pool(problem: AttentionProblem, k: np.ndarray, rope: Rope) -> np.ndarray:
    """A pool whose keys were rotated when they were written, each at its logical position."""
    written, cache = k.copy(), problem.cache
    for n, seqlen_kv in enumerate(problem.seqlen_kv.tolist()):
        for j in range(seqlen_kv):
            for head in range(problem.num_kv_heads):
                page = int(cache.page_table[n, j // cache.page_size])
                place = page if cache.head_pages is None else int(cache.head_pages[page, head])
                slot = place * cache.page_size + j % cache.page_size
                written[slot, head] = turned(k[slot, head].tolist(), j, rope)
    return written


def is_written_once(problem: AttentionProblem) -> bool:
    """Whether every page stands at one logical place."""
    pairs = {(int(p), at) for row in problem.cache.page_table for at, p in enumerate(row) if p >= 0}
    return len({page for page, _ in pairs}) == len(pairs)


def test_a_raw_cache_gives_what_a_rotated_one_gives() -> None:
    compared = 0

    @settings(max_examples=profiles.examples(60))
    @given(featured_cases(with_features(SMALL, features=OTHERS)), st.booleans(), st.sampled_from((10000.0, 2.0)))
    def check(case: Case, interleaved: bool, theta: float) -> None:
        nonlocal compared
        problem = build_problem(case.structure)
        if not is_written_once(problem):
            return
        values = build_values(case, problem)
        rope = Rope(theta=theta, rotary_dim=2 * (problem.head_dim_qk // 2), interleaved=interleaved, k_position="raw")
        q = np.stack([[turned(x, w.q_idx, rope) for x in values.q[w.row].tolist()] for w in problem.rows()])
        raw, encoded = replace(problem, rope=rope), replace(problem, rope=replace(rope, k_position="encoded"))
        got = attention(raw, values.q, values.k, values.v)
        want = attention(encoded, q, turned_pool(problem, values.k, rope), values.v)
        # a cast of the epilogue may fall on either side of a tie: what precedes it is compared
        np.testing.assert_allclose(got.before_epilogue, want.before_epilogue, rtol=0, atol=1e-9)
        np.testing.assert_allclose(got.lse, want.lse, rtol=0, atol=1e-10)
        compared += 1

    check()
    assert compared > 20


def one_page_twice(page_table: list[int], num_pages: int, rope: Rope) -> AttentionProblem:
    return AttentionProblem(
        qo_indptr=np.array([0, 1]),
        seqlen_kv=np.array([8]),
        q_offset=np.array([7]),
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=4,
        head_dim_vo=2,
        cache=PagedCache(page_size=4, num_pages=num_pages, page_table=np.array([page_table])),
        sm_scale=0.5,
        rope=rope,
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_raw_page_at_two_logical_places_is_turned_for_each(interleaved: bool) -> None:
    rope = Rope(rotary_dim=4, interleaved=interleaved, k_position="raw")
    rng = np.random.default_rng(5)
    q, k, v = rng.normal(size=(1, 1, 4)), rng.normal(size=(8, 1, 4)), rng.normal(size=(8, 1, 2))
    k[4:], v[4:] = k[:4], v[:4]  # a copy at the second place
    twice, copied = one_page_twice([0, 0], 1, rope), one_page_twice([0, 1], 2, rope)
    got, want = attention(twice, q, k[:4], v[:4]), attention(copied, q, k, v)
    assert np.array_equal(got.out, want.out)
    dout = rng.normal(size=(1, 1, 2))
    both, each = attention_gradients(twice, q, k[:4], v[:4], dout), attention_gradients(copied, q, k, v, dout)
    np.testing.assert_allclose(both.dk, each.dk[:4] + each.dk[4:], rtol=0, atol=1e-15)
