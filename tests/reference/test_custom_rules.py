"""Rules that running code registers under a name: equal to the built-in ones they repeat, named once, never brought."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from feature_structures import FEATURES, SMALL, featured_cases, with_features
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import build_values
from attnconform.reference.attention import attention, attention_gradients, effective_sets
from attnconform.reference.custom_rules import MASKS, SCORES, register_mask, register_score
from attnconform.reference.rules import And, Causal, CustomMask, CustomScore, Or, SoftCap, Window

profiles.load_profile()

CASES = featured_cases(with_features(SMALL, features=tuple(name for name in FEATURES if name != "epilogue")))
BEFORE, CAPPED, PLACE = "tests.before", "tests.capped", "tests.place"
CAP = 3.0


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[list[tuple[int, int]]]:
    """Registers the rules of this file, and collects the request and head that one of them is asked about."""
    asked: list[tuple[int, int]] = []
    register_mask(BEFORE, lambda request, qo_head, q_idx, kv_idx: kv_idx <= q_idx)
    register_mask(PLACE, lambda request, qo_head, q_idx, kv_idx: asked.append((request, qo_head)) or kv_idx >= 0)  # type: ignore[func-returns-value]
    register_score(
        CAPPED,
        lambda scores, qo_head, q_idx, kv_idx: CAP * np.tanh(scores / CAP),
        lambda scores, qo_head, q_idx, kv_idx: 1 - np.tanh(scores / CAP) ** 2,
    )
    yield asked
    del MASKS[BEFORE], MASKS[PLACE], SCORES[CAPPED]


@settings(max_examples=profiles.examples(60))
@given(CASES, st.integers(0, 5))
def test_a_registered_mask_is_the_built_in_one_that_it_repeats(case: Case, left: int) -> None:
    problem = build_problem(case.structure)
    for compose in (lambda r: r, lambda r: And((r, Window(left, None))), lambda r: Or((Window(left, 0), r))):
        one, other = (effective_sets(replace(problem, mask_rule=compose(r))) for r in (CustomMask(BEFORE), Causal()))
        assert np.array_equal(one.positions, other.positions)
        assert np.array_equal(one.indptr, other.indptr)


@settings(max_examples=profiles.examples(60))
@given(CASES)
def test_a_registered_score_is_the_built_in_one_that_it_repeats_and_so_are_its_gradients(case: Case) -> None:
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    rules = problem.score_rules
    custom, built_in = (replace(problem, score_rules=(*rules, rule)) for rule in (CustomScore(CAPPED), SoftCap(CAP)))
    got, want = (attention(p, values.q, values.k, values.v) for p in (custom, built_in))
    assert np.array_equal(got.out, want.out)
    found, owed = (
        attention_gradients(p, values.q, values.k, values.v, values.dout, values.dlse) for p in (custom, built_in)
    )
    for name in ("dq", "dk", "dv"):
        assert np.array_equal(getattr(found, name), getattr(owed, name)), name
    assert all(np.array_equal(x, y) for x, y in zip(found.dscore[:-1], owed.dscore[:-1], strict=True))
    assert found.dscore[-1].shape == (0,)


def test_a_rule_is_asked_about_every_request_and_query_head(registered: list[tuple[int, int]]) -> None:
    @settings(max_examples=profiles.examples(20))
    @given(CASES)
    def check(case: Case) -> None:
        problem = replace(build_problem(case.structure), mask_rule=CustomMask(PLACE))
        registered.clear()
        effective_sets(problem)
        asking = {where.request for where in problem.rows()}
        asked = {(n, h) for n in asking for h in range(problem.num_qo_heads)}
        assert set(registered) == asked | {(0, 0)}  # the last is the question whether it is pure

    check()


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ValueError, match=r"a mask rule named 'tests\.before' is registered already"):
        register_mask(BEFORE, lambda request, qo_head, q_idx, kv_idx: kv_idx >= 0)
    with pytest.raises(ValueError, match=r"a score rule named 'tests\.capped' is registered already"):
        register_score(CAPPED, lambda scores, *_: scores, lambda scores, *_: scores)
