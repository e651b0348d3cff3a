"""What a variation asks has the answer that the first problem's answer says, and a backend that differs is found."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.deviations import DEVIATIONS, VARIANTS
from attnconform.conformance.judge import metamorphic
from attnconform.conformance.judge.trial import Trial, same_bits
from attnconform.conformance.judge.variations import (
    edges_as_lists,
    knows_requests,
    whole_requests_as_lists,
    with_candidates,
    with_half_the_keys,
    with_ids_mirrored,
    with_lists_relisted,
    with_pages_renumbered,
    with_request_appended,
    with_requests_reversed,
)
from attnconform.reference.candidates import HOLE

FORWARD = [case for case in matrix("L1") if case.operation == "forward"]
SAMPLE = [case for case in FORWARD if case.structure.page_stride is None][5::29]


def trial_of(case, backend=None):
    return Trial(case, backend or StepsBackend())


def first_case(clause, **axes):
    """The first case of a clause with these axis values, under a seed that every relation takes."""
    return next(c for c in FORWARD if clause in c.clauses and all(c.axes.get(a) == v for a, v in axes.items()))


def at_remainder(case, remainder):
    """The case under a seed that a relation is tried on."""
    return msgspec.structs.replace(case, seed=case.seed - case.seed % metamorphic.PERIOD + remainder)


def outputs(trial):
    """out and lse of the oracle for the trial's own problem and numbers."""
    return trial.oracle.out, trial.oracle.lse


def assert_same(got, want, rows=slice(None)):
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a[rows], b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", SAMPLE, ids=lambda c: c.id)
def test_renumbered_pages_have_the_same_answer(case):
    trial = trial_of(case)
    other = with_pages_renumbered(trial)
    assert case.structure.num_pages < 3 or (other.problem.cache.page_table != trial.problem.cache.page_table).any()
    assert_same(outputs(other), outputs(trial))


@pytest.mark.parametrize("case", [c for c in SAMPLE if not knows_requests(c.structure)], ids=lambda c: c.id)
def test_a_reversed_batch_has_the_same_rows_elsewhere(case):
    trial = trial_of(case)
    other, rows = with_requests_reversed(trial)
    assert_same(outputs(other), outputs(trial), rows)


@pytest.mark.parametrize("case", SAMPLE, ids=lambda c: c.id)
def test_an_appended_request_leaves_the_rows_before_it(case):
    trial = trial_of(case)
    other = with_request_appended(trial)
    assert other.problem.total_q == trial.problem.total_q + 1
    assert_same(outputs(other), outputs(trial), slice(trial.problem.total_q))


@pytest.mark.parametrize("listing", metamorphic.LISTINGS)
def test_relisted_entries_have_the_same_answer_and_another_listing(listing):
    case = next(c for c in FORWARD if c.axes["granularity"] == "token" and c.axes["form"] == "set")
    trial = trial_of(case)
    other = with_lists_relisted(trial, listing)
    lists = other.case.structure.candidates.lists
    assert lists != case.structure.candidates.lists
    assert any(HOLE in entries for entries in lists) == ("holes" in listing)
    assert_same(outputs(other), outputs(trial))


def test_lists_of_what_a_mask_leaves_have_the_masks_answer():
    trial = trial_of(next(c for c in FORWARD if c.axes["granularity"] == "dense" and c.axes["mask"] == "document"))
    alone = with_candidates(trial, edges_as_lists(trial), mask_rule=None)
    assert alone.problem.mask_rule is None
    assert_same(outputs(alone), outputs(trial))
    for block_size in (1, 16):
        both = with_candidates(trial, whole_requests_as_lists(trial, block_size))
        assert_same(outputs(both), outputs(trial))


@pytest.mark.parametrize("make", [with_half_the_keys, with_ids_mirrored], ids=["half", "mirrored"])
def test_problems_for_planning_again_have_the_same_shapes_and_another_answer(make):
    trial = trial_of(next(c for c in FORWARD if c.axes["granularity"] == "token" and c.axes["mask"] == "none"))
    other = make(trial)
    assert other.problem.total_q == trial.problem.total_q
    assert (np.diff(other.problem.candidates.indptr) == np.diff(trial.problem.candidates.indptr)).all()
    assert not np.allclose(other.oracle.out, trial.oracle.out)


@pytest.mark.parametrize("check", metamorphic.METAMORPHIC_CHECKS, ids=lambda c: c.__name__)
def test_the_reference_is_accepted_and_each_relation_makes_calls_on_some_case(check):
    calls = 0
    for case in FORWARD[::9]:
        trial = trial_of(case)
        assert check(trial) == []
        calls += trial.calls
    assert calls > 0


def assert_named(check, deviation, clause, cases):
    for case in cases:
        found = check(trial_of(case, DEVIATIONS[deviation].build()))
        if found:
            assert clause in found[0].clauses
            return
    pytest.fail(f"{check.__name__} did not find {deviation}")


@pytest.mark.parametrize(
    ("check", "deviation", "clause"),
    [
        (metamorphic.check_appended_request, "splits-by-the-batch", "DETERMINISM-BATCH"),
        (metamorphic.check_representations, "takes-a-whole-list-for-dense", "SET-REPRESENTATION"),
        (metamorphic.check_weights, "clamps-values", "SCORE-WEIGHTS"),
        (metamorphic.check_weights, "rounds-outputs-to-a-fixed-quantum", "SCORE-WEIGHTS"),
    ],
)
def test_a_relation_finds_its_deviation(check, deviation, clause):
    assert_named(check, deviation, clause, [c for c in FORWARD if clause in c.clauses])


@pytest.mark.parametrize(
    ("check", "remainder", "deviation", "clause"),
    [
        (metamorphic.check_renumbered_pages, metamorphic.RENUMBERED, "treats-page-zero-as-null", "COORD-RENUMBER"),
        (metamorphic.check_reversed_requests, metamorphic.REVERSED, "reads-the-first-requests-table", "COORD-ROW"),
        (metamorphic.check_relisted, metamorphic.RELISTED, "counts-a-duplicate-twice", "SET-DUPLICATE"),
    ],
)
def test_relations_of_older_clauses_need_no_oracle_to_find_their_deviations(check, remainder, deviation, clause):
    tagged = [c for c in FORWARD if clause in c.clauses and c.structure.candidates is not None]
    assert_named(check, deviation, clause, [at_remainder(c, remainder) for c in tagged[:12]])


class SplitsByHint(StepsBackend):
    """Adds the number of splits to every output: a hint that changes the answer."""

    def store(self, tensors, result):
        super().store(tensors, replace(result, out=result.out + self.splits))

    def forward(self, problem, tensors):
        self.splits = problem.hints.num_kv_splits
        return super().forward(problem, tensors)


def test_a_hint_that_changes_the_answer_is_found():
    case = at_remainder(first_case("MERGE-SPLIT"), metamorphic.RESPLIT)
    assert metamorphic.check_other_splits(trial_of(case, SplitsByHint()))[0].clauses == ("MERGE-SPLIT",)


def test_other_orders_and_precisions_keep_to_the_bounds_of_both_problems():
    for name in ("sorts-by-slot", "computes-in-float32", "eight-splits-by-output"):
        for case in FORWARD[3::40]:
            trial = trial_of(case, VARIANTS[name].build())
            assert [f for check in metamorphic.METAMORPHIC_CHECKS for f in check(trial)] == []


def test_batch_invariance_is_asked_for_bit_by_bit_only_where_declared():
    case = first_case("DETERMINISM-BATCH", dtype="float32")
    backend = DEVIATIONS["splits-by-the-batch"].build()
    backend.capabilities = msgspec.structs.replace(backend.capabilities, determinism="run_to_run")
    assert metamorphic.check_appended_request(trial_of(case, backend)) == []


def test_twice_the_values_give_twice_the_reference_to_the_bit():
    trial = trial_of(first_case("SCORE-WEIGHTS", quant="none", dtype="float32"))
    doubled = trial.run(replace(trial.values, v=2 * trial.values.v))
    assert same_bits(doubled.out_bits, 2 * trial.base.out_bits)
