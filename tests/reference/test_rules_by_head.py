"""Relative bias and windows of each query head's own, against the rules that they contain."""

from dataclasses import replace

import numpy as np
import pytest
from feature_structures import FEATURES, SMALL, featured_cases, with_features
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import is_near, ruled

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import build_values
from attnconform.reference.attention import attention, attention_gradients, effective_sets
from attnconform.reference.rule_values import apply_score_rule, depends_on_head, mask_allows
from attnconform.reference.rules import Alibi, And, Causal, CustomMask, HeadWindow, Or, RelativeBias, Window

profiles.load_profile()

LIMITS = st.tuples(*[st.none() | st.integers(0, 6)] * 3)
TABLES = st.integers(0, 4).flatmap(lambda reach: st.tuples(*[st.tuples(*[st.floats(-4, 4)] * (2 * reach + 1))] * 3))
POSITIONS = st.lists(st.integers(0, 30), min_size=1, max_size=8)
CASES = featured_cases(with_features(SMALL, features=tuple(name for name in FEATURES if name != "epilogue")))


@settings(max_examples=profiles.examples(150))
@given(LIMITS, LIMITS, st.integers(0, 2), st.integers(-3, 30), POSITIONS)
def test_a_head_sees_through_its_own_window(
    left: tuple[int | None, ...], right: tuple[int | None, ...], qo_head: int, q_idx: int, keys: list[int]
) -> None:
    got = mask_allows(HeadWindow(left, right), 0, q_idx, np.array(keys), qo_head)
    assert got.tolist() == [is_near(left[qo_head], right[qo_head], q_idx, j) for j in keys]


@settings(max_examples=profiles.examples(150))
@given(TABLES, st.integers(0, 2), st.integers(-3, 30), POSITIONS)
def test_a_score_takes_its_heads_entry_for_the_distance_and_the_last_one_beyond(
    tables: tuple[tuple[float, ...], ...], qo_head: int, q_idx: int, keys: list[int]
) -> None:
    rule, scores = RelativeBias(tables), np.linspace(-1, 1, len(keys))
    got = apply_score_rule(rule, scores, qo_head, q_idx, np.array(keys))
    assert got.tolist() == [ruled(rule, s, qo_head, q_idx, j) for s, j in zip(scores.tolist(), keys, strict=True)]


@settings(max_examples=profiles.examples(60))
@given(CASES, st.none() | st.integers(0, 6), st.none() | st.integers(0, 3))
def test_one_window_for_all_heads_is_a_window_wherever_it_stands_in_a_rule(
    case: Case, left: int | None, right: int | None
) -> None:
    problem = build_problem(case.structure)
    heads = problem.num_qo_heads
    by_head, together = HeadWindow((left,) * heads, (right,) * heads), Window(left, right)
    for compose in (lambda rule: rule, lambda rule: And((Causal(), rule)), lambda rule: Or((rule, Window(0, 0)))):
        one, other = (effective_sets(replace(problem, mask_rule=compose(rule))) for rule in (by_head, together))
        assert np.array_equal(one.positions, other.positions)
        assert np.array_equal(one.indptr, other.indptr)


@settings(max_examples=profiles.examples(40))
@given(CASES, st.data())
def test_a_head_is_moved_by_its_own_window_alone(case: Case, data: st.DataObject) -> None:
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    heads = problem.num_qo_heads
    changed = data.draw(st.integers(0, heads - 1))
    limits: list[int | None] = [4] * heads
    before = replace(problem, mask_rule=HeadWindow(tuple(limits), tuple(limits)))
    limits[changed] = 1
    after = replace(problem, mask_rule=HeadWindow(tuple(limits), tuple(limits)))
    want, got = (attention(p, values.q, values.k, values.v) for p in (before, after))
    others = [h for h in range(heads) if h != changed]
    assert np.array_equal(got.out[:, others], want.out[:, others])
    assert np.array_equal(got.lse[:, others], want.lse[:, others])


def test_rules_that_may_tell_heads_apart_are_known() -> None:
    window = HeadWindow((1, 2), (None, 0))
    assert depends_on_head(And((Causal(), Or((window, Causal())))))
    assert depends_on_head(CustomMask("any"))
    assert not depends_on_head(And((Causal(), Or((Window(1, None), Causal())))))
    assert not depends_on_head(None)


@settings(max_examples=profiles.examples(50))
@given(CASES, st.lists(st.integers(-8, 8), min_size=4, max_size=4))
def test_a_table_of_multiples_of_the_distance_is_alibi_and_shares_its_gradient(case: Case, eighths: list[int]) -> None:
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    slopes = tuple(x / 8 for x in eighths[: problem.num_qo_heads])
    reach = 40
    tables = tuple(tuple(slope * d for d in range(-reach, reach + 1)) for slope in slopes)
    alibi, table = (replace(problem, score_rules=(rule,)) for rule in (Alibi(slopes), RelativeBias(tables)))
    want, got = (attention(p, values.q, values.k, values.v) for p in (alibi, table))
    np.testing.assert_allclose(got.out, want.out, rtol=0, atol=1e-13)
    owed, found = (
        attention_gradients(p, values.q, values.k, values.v, values.dout, values.dlse).dscore[0] for p in (alibi, table)
    )
    scale = max(1.0, np.abs(owed).max(initial=0.0), np.abs(found).max(initial=0.0) * reach)
    np.testing.assert_allclose(found @ np.arange(-reach, reach + 1), owed, rtol=0, atol=1e-13 * scale)


def test_a_rule_that_depends_on_the_head_is_never_asked_without_one() -> None:
    with pytest.raises(ValueError, match=r"^qo_head is None, but [^\n]* \[MASK-HEAD-WINDOW\]$"):
        mask_allows(And((Causal(), HeadWindow((1,), (0,)))), 0, 3, np.arange(4))
