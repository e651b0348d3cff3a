"""attention() and effective_sets() against scalar loops, with every feature of the contract beside every other."""

import numpy as np
from feature_structures import SMALL, all_pairs, case_with, featured_cases, pairs_of, with_features
from hypothesis import given, settings
from plain_attention import attended, plain_attention, queries, slot_of

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.structure import Case, Structure, build_problem
from attnconform.conformance.cases.values import build_values
from attnconform.reference.attention import attention, effective_sets

profiles.load_profile()

FEATURED = with_features(SMALL)
BOUND = 1e-11  # of out by Σ p|v|, of lse by 1 or its size; a score of hundreds costs the loops as much as the reference


def assert_close(got: np.ndarray, want: np.ndarray, by: np.ndarray, where: str) -> None:
    bad = ~(np.abs(got - want) <= BOUND * by)
    assert not bad.any(), (where, np.argwhere(bad)[:3].tolist(), got[bad][:3], want[bad][:3])


def assert_attention_is_plain(case: Case) -> None:
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    want = plain_attention(case.structure, problem.k_quant, problem.v_quant, values)
    got = attention(problem, values.q, values.k, values.v)
    seen = np.isfinite(want.lse)
    assert np.array_equal(seen, np.isfinite(got.lse))
    assert_close(got.lse[seen], want.lse[seen], np.maximum(1, np.abs(want.lse[seen])), "lse")
    assert_close(got.before_epilogue, want.merged, want.condition, "merged")
    assert_close(got.out, want.out, np.maximum(want.condition, np.abs(want.out)), "out")


def test_attention_is_what_scalar_loops_over_every_edge_give() -> None:
    met: set[frozenset[str]] = set()

    @settings(max_examples=profiles.examples(200))
    @given(featured_cases(FEATURED))
    def check(case: Case) -> None:
        assert_attention_is_plain(case)
        met.update(pairs_of(case.structure))

    check()
    # what is drawn depends on which modules are loaded, so a few pairs may be left
    for pair in sorted(all_pairs() - met, key=sorted):
        assert_attention_is_plain(case_with(pair, featured_cases(FEATURED)))


@settings(max_examples=profiles.examples(100))
@given(FEATURED)
def test_effective_sets_are_what_scalar_loops_over_every_edge_find(structure: Structure) -> None:
    edges = effective_sets(build_problem(structure))
    for row, n, r, i in queries(structure):
        for h in range(structure.num_qo_heads):
            keys = attended(structure, n, r, i, h)
            kv_head = h * structure.num_kv_heads // structure.num_qo_heads
            positions, slots = edges.of(row, h)
            assert positions.tolist() == keys, (row, h)
            assert slots.tolist() == [slot_of(structure, n, j, kv_head) for j in keys], (row, h)
