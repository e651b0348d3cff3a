"""Sequences: an entry's place in its list biases its key, and nothing else about the list matters."""

import msgspec
import numpy as np
import pytest
from feature_structures import SMALL, featured_cases, with_features
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.structure import CandidateStructure, Case, Structure, build_problem
from attnconform.conformance.cases.values import build_values
from attnconform.reference.attention import attention, effective_sets
from attnconform.reference.candidates import rank_bias_of

profiles.load_profile()

OTHERS = ("head_pages", "k_quant", "dropout", "rope", "relative_bias", "head_window")
SEQUENCES = featured_cases(with_features(SMALL, features=("sequence", *OTHERS), always=("sequence",)))


@settings(max_examples=profiles.examples(100))
@given(st.lists(st.integers(0, 9), unique=True, max_size=8), st.lists(st.integers(0, 9), unique=True, max_size=8))
def test_a_keys_bias_is_that_of_its_place_in_the_list(entries: list[int], positions: list[int]) -> None:
    bias = np.arange(1.0, 11.0, dtype=np.float64)
    got = rank_bias_of(np.array(entries, dtype=np.int64), np.array(positions, dtype=np.int64), bias)
    assert got.tolist() == [1.0 + entries.index(p) if p in entries else 0.0 for p in positions]


def test_a_hole_keeps_its_rank() -> None:
    got = rank_bias_of(np.array([-1, 4, -1, 2]), np.array([2, 4]), np.array([1.0, 2.0, 3.0, 4.0]))
    assert got.tolist() == [4.0, 2.0]


def ranks_of(structure: Structure) -> tuple[CandidateStructure, tuple[float, ...]]:
    """The lists of a sequence and the bias of each rank."""
    lists = structure.candidates
    assert lists is not None
    assert lists.rank_bias is not None
    return lists, lists.rank_bias


def with_lists(structure: Structure, **changes: object) -> Structure:
    lists = msgspec.structs.replace(ranks_of(structure)[0], **changes)
    return msgspec.structs.replace(structure, candidates=lists)


@settings(max_examples=profiles.examples(50))
@given(SEQUENCES)
def test_a_sequence_attends_the_keys_of_its_set_and_with_no_bias_gives_the_same_bits(case: Case) -> None:
    ranked = case.structure
    as_set = with_lists(ranked, form="set", rank_bias=None)
    zeros = with_lists(ranked, rank_bias=(0.0,) * len(ranks_of(ranked)[1]))
    problem = build_problem(as_set)
    values = build_values(case, problem)
    assert np.array_equal(effective_sets(build_problem(ranked)).positions, effective_sets(problem).positions)
    got, want = (attention(build_problem(s), values.q, values.k, values.v) for s in (zeros, as_set))
    assert np.array_equal(got.out, want.out)
    assert np.array_equal(got.lse, want.lse)


@settings(max_examples=profiles.examples(50))
@given(SEQUENCES, st.randoms(use_true_random=False))
def test_entries_that_move_with_their_biases_change_no_bit(case: Case, random: object) -> None:
    lists, bias = ranks_of(case.structure)
    width = len(bias)
    order = list(range(width))
    random.shuffle(order)  # type: ignore[attr-defined]
    padded = [(*entries, *[-1] * (width - len(entries))) for entries in lists.lists]
    moved = with_lists(
        case.structure,
        lists=tuple(tuple(entries[i] for i in order) for entries in padded),
        rank_bias=tuple(bias[i] for i in order),
    )
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    want, got = (attention(p, values.q, values.k, values.v) for p in (problem, build_problem(moved)))
    assert np.array_equal(got.out, want.out)
    assert np.array_equal(got.lse, want.lse)


@pytest.mark.parametrize("bias", [0.75, -3.0])
def test_one_bias_for_all_ranks_moves_lse_alone(bias: float) -> None:
    @settings(max_examples=profiles.examples(30))
    @given(SEQUENCES)
    def check(case: Case) -> None:
        width = len(ranks_of(case.structure)[1])
        flat = msgspec.structs.replace(case.structure, sink_logits=None)
        even, raised = (with_lists(flat, rank_bias=(x,) * width) for x in (0.0, bias))
        problem = build_problem(even)
        values = build_values(case, problem)
        want, got = (attention(p, values.q, values.k, values.v) for p in (problem, build_problem(raised)))
        np.testing.assert_allclose(got.out, want.out, rtol=0, atol=1e-13)
        np.testing.assert_allclose(got.lse, want.lse + bias, rtol=0, atol=1e-13)

    check()
