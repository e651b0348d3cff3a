"""The designed cases: each has the input that it is named for, and asks what a mistake about it would change."""

import hashlib

import msgspec
import numpy as np
import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.designed import designed_cases
from attnconform.conformance.cases.detectability import detect
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix
from attnconform.conformance.cases.structure import Case, Structure, build_problem
from attnconform.conformance.cases.values import build_values, edge_slots, middle_rows
from attnconform.conformance.cases.work import MAX_TILE_STEPS_L1, tile_steps
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.metamorphic import PERIOD, REVERSED
from attnconform.reference.attention import effective_sets
from attnconform.reference.rules import Causal
from attnconform.reference.steps import Steps

DESIGNED = {case.id.split(".")[2].removeprefix("designed-"): case for case in matrix("L1") if ".designed-" in case.id}
OF_FORWARD = [slug for slug, case in DESIGNED.items() if case.operation == "forward"]
IDS_DIGEST = "cb163619458fda91f90cf9923e1afa7e510d6b315d17279c8e1c84b17e949dbe"


def test_ids_are_frozen() -> None:
    ids = sorted(case.id for case in designed_cases(SMOKE_ROW))
    assert hashlib.sha256("\n".join(ids).encode()).hexdigest() == IDS_DIGEST


@pytest.mark.parametrize("case", [c for c in matrix("L1") if ".designed-" in c.id], ids=lambda case: case.id)
def test_the_reference_conforms_and_the_case_is_small(case: Case) -> None:
    assert judge_case(case, StepsBackend()).state == "PASS"
    assert tile_steps(case) <= MAX_TILE_STEPS_L1
    assert case.seed % PERIOD == REVERSED


@pytest.mark.parametrize("slug", ["every-edge-in-one-batch", "every-edge-in-lists"])
def test_one_batch_has_every_length_around_a_page_and_a_tile(slug: str) -> None:
    structure = DESIGNED[slug].structure
    tile = 2 * structure.page_size
    edges = {size + by for size in (structure.page_size, tile) for by in (-1, 0, 1)}
    assert edges | {0, 1} < set(structure.seqlens_kv)
    assert max(structure.seqlens_kv) > 3 * tile
    assert {q for q, t in zip(structure.seqlens_q, structure.seqlens_kv, strict=True) if t} == {0, 1}
    assert "COORD-ROW" in DESIGNED[slug].clauses  # the batch is asked in reverse, and with one more request
    assert "DETERMINISM-BATCH" in DESIGNED[slug].clauses


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_the_first_rows_stand_before_the_first_token(operation: str) -> None:
    case = next(c for c in matrix("L1") if c.id.startswith(f"L1.{operation}.designed-rows-before-the-first-token"))
    assert case.structure.seqlens_q[0] > case.structure.seqlens_kv[0]
    empty = (effective_sets(build_problem(case.structure)).counts() == 0).all(axis=1)
    assert empty.tolist() == [True, True] + [False] * 6
    assert {"EMPTY-OUT", "EMPTY-LSE", "EMPTY-NEIGHBOUR"} <= set(case.clauses)


def test_the_last_splits_hold_nothing_but_masked_keys() -> None:
    case = DESIGNED["last-splits-empty"]
    attended = effective_sets(build_problem(case.structure)).positions.max()
    splits, length = case.structure.hints.num_kv_splits, case.structure.seqlens_kv[0]
    assert splits is not None
    assert attended < length // splits


def test_the_first_tile_and_the_first_split_of_every_list_are_holes() -> None:
    structure = DESIGNED["first-tile-of-holes"].structure
    assert structure.candidates is not None
    for entries in structure.candidates.lists:
        first = next(i for i, entry in enumerate(entries) if entry != -1)
        assert 32 < first < len(entries)
        assert first >= -(-len(entries) // (structure.hints.num_kv_splits or 1))


@pytest.mark.parametrize("slug", [slug for slug in OF_FORWARD if slug.startswith(("last-visible", "first-hidden"))])
def test_the_marked_keys_lie_at_the_edge_of_what_the_middle_row_sees(slug: str) -> None:
    case = DESIGNED[slug]
    problem = build_problem(case.structure)
    values, sets = build_values(case, problem), effective_sets(problem)
    marked = edge_slots(problem, case.values)[:, 0]
    visible = slug.startswith("last-visible")
    for where in middle_rows(problem):
        slots = sets.of(where.row, 0)[1]
        mine = np.isin(slots, marked)
        assert mine.sum() == (len({0, len(slots) - 1}) if visible else 0)
        assert mine[[0, -1]].all() == visible
    scores = problem.sm_scale * np.einsum("d,sd->s", values.q[0, 0], values.k[:, 0])
    others = np.delete(scores, marked)
    assert scores[marked].min() > others.max() - 1


@pytest.mark.parametrize(
    ("slug", "mistake"),
    [
        ("last-visible-of-a-window", "window-loses-its-oldest-key"),
        ("last-visible-of-a-window", "does-not-see-itself"),
        ("first-hidden-of-a-window", "window-keeps-one-key-more"),
        ("first-hidden-of-a-window", "sees-one-key-of-the-future"),
        ("last-visible-of-a-document", "does-not-see-itself"),
        ("first-hidden-of-a-document", "sees-one-key-of-the-future"),
    ],
)
def test_an_edge_that_is_off_by_one_moves_a_row_far_past_its_bound(slug: str, mistake: str) -> None:
    detection = detect(DESIGNED[slug], DEVIATIONS[mistake])
    assert detection is not None
    assert detection.ratio > 20


def test_near_ties_differ_by_a_few_roundings() -> None:
    case = DESIGNED["near-ties"]
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    first = effective_sets(problem).of(problem.total_q - 1, 0)[1]
    scores = problem.sm_scale * values.k[first, 0] @ values.q[-1, 0]
    assert 0 < np.ptp(scores) < 0.2
    assert np.abs(scores).max() > 10 * np.ptp(scores) / len(scores)


def test_misaligned_pages_lie_an_odd_number_of_elements_apart() -> None:
    case = DESIGNED["misaligned-pages"]
    assert case.structure.page_stride is not None
    assert case.structure.page_stride % 2 == 1
    assert case.axes["base"] == "misaligned"  # a backend that needs alignment can leave it out


def test_the_gradient_of_a_sum_is_all_ones_and_nothing_arrives_through_lse() -> None:
    case = DESIGNED["loss-is-the-sum-of-out"]
    values = build_values(case, build_problem(case.structure))
    assert (values.dout == 1).all()
    assert not values.dlse.any()
    assert "GRAD-LSE" not in case.clauses


def test_without_a_mask_every_key_of_a_request_is_seen_and_its_ends_are_marked() -> None:
    case = DESIGNED["last-visible-of-a-window"]
    structure: Structure = msgspec.structs.replace(case.structure, mask_rule=None)
    problem = build_problem(structure)
    assert len(edge_slots(problem, "first_hidden")) == 0
    assert len(edge_slots(problem, "last_visible")) == 2 * len(structure.seqlens_kv)
    causal = build_problem(msgspec.structs.replace(structure, mask_rule=Causal()))
    assert len(edge_slots(causal, "first_hidden")) == sum(
        len(Steps().effective(causal, where, 0)) < int(causal.seqlen_kv[where.request]) for where in middle_rows(causal)
    )
