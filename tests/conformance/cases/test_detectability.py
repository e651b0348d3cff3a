"""No case is vacuous: some deviation of its clauses moves it by twice the bound, or a check catches it outright."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Capabilities, Tensors
from attnconform.conformance.cases.detectability import (
    ENOUGH,
    Detection,
    Measured,
    caught_outright,
    detect,
    is_detectable,
    measure,
    measure_all,
    of_clause,
    read,
    stored,
    vacuous,
)
from attnconform.conformance.cases.freeze import vacuous_cases
from attnconform.conformance.cases.matrix import matrix, smoke_cases
from attnconform.conformance.cases.structure import Case, named
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.report.detectability import detectability_command
from attnconform.reference.results import AttentionResult

ATTENTION = [case for case in matrix("L1") if case.operation in ("forward", "backward")]
PLAIN = smoke_cases()[0]


def retagged(case: Case, *clauses: str) -> Case:
    """The case with other clauses."""
    return msgspec.structs.replace(case, clauses=clauses)


def case_with(wanted: dict[str, str]) -> Case:
    """The first forward case with some axis values."""
    return next(case for case in ATTENTION if case.operation == "forward" and wanted.items() <= case.axes.items())


def test_every_frozen_case_has_a_deviation_that_moves_it_by_twice_the_bound_or_is_caught_outright() -> None:
    found = stored()
    assert [case.id for case in ATTENTION if case.id not in found] == []
    assert vacuous(found) == []


def test_what_is_stored_names_deviations_of_the_cases_own_clauses() -> None:
    cases = {case.id: case for case in ATTENTION}
    for case_id, measured in stored().items():
        assert case_id in cases
        assert measured.clauses.keys() <= set(cases[case_id].clauses), case_id
        for clause, detection in measured.clauses.items():
            assert DEVIATIONS[detection.deviation].clause == clause
            assert detection.ratio >= 0


def test_what_is_stored_is_what_is_measured() -> None:
    found = stored()
    few = [case for case in ATTENTION if len(case.clauses) < 24]
    assert len(few) > 2
    for case in (*few[:2], next(case for case in ATTENTION if case.operation == "backward")):
        kept, measured = found[case.id], measure(case)
        assert kept.complete
        assert measured.clauses.keys() == kept.clauses.keys()
        for clause, detection in measured.clauses.items():
            assert detection.kind == kept.clauses[clause].kind
            assert detection.ratio == pytest.approx(kept.clauses[clause].ratio, rel=1e-6)


def test_every_case_is_measured_on_all_of_its_clauses() -> None:
    assert [case_id for case_id, measured in stored().items() if not measured.complete] == []


@pytest.mark.parametrize(
    ("clause", "check"),
    [
        ("RULE-EDIT", "edited_rule"),
        ("PLAN-REPLAN", "planning_again"),
        ("PLAN-APART", "two_plans"),
        ("PLAN-ALLOCATE", "allocations"),
        ("SAFE-MEMORY", "memory"),
    ],
)
def test_what_takes_further_calls_is_caught_by_the_check_of_its_clause(clause: str, check: str) -> None:
    tagged = (case for case in ATTENTION if case.operation == "forward" and clause in case.clauses)
    case = max(tagged, key=lambda case: sum(case.structure.seqlens_kv))
    caught = (caught_outright(case, deviation) for deviation in of_clause(clause))
    assert check in {detection.kind for detection in caught if detection is not None}


def test_a_case_that_a_deviation_does_not_declare_says_nothing_of_it() -> None:
    case = case_with({"quant": "mixed"})
    narrow = replace(DEVIATIONS["forgets-the-scale"], build=TakesNoCodes)
    assert caught_outright(case, narrow) is None


class TakesNoCodes(StepsBackend):
    """Wrong everywhere, and declares no quantized cache."""

    capabilities = Capabilities()

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        tensors.out.zero_()


def test_a_wrong_scale_moves_a_plain_case_far_past_its_bound() -> None:
    detection = detect(PLAIN, DEVIATIONS["forgets-the-scale"])
    assert detection is not None
    assert detection.kind == "value"
    assert detection.ratio > 1000


def test_a_deviation_that_gives_the_references_bits_is_none() -> None:
    assert detect(PLAIN, DEVIATIONS["counts-a-duplicate-twice"]) is None


def test_an_input_that_changes_is_caught_outright() -> None:
    detection = detect(PLAIN, DEVIATIONS["scales-q-in-place"])
    assert detection is not None
    assert detection.is_enough


def test_a_case_whose_clauses_nothing_in_it_can_break_is_vacuous_and_named_at_generation() -> None:
    idle = named(retagged(PLAIN, "SET-DUPLICATE", "SET-HOLE"), "idle")
    assert not is_detectable(idle)
    assert measure(idle) == Measured(clauses={}, complete=True)
    assert vacuous({idle.id: measure(idle)}) == [idle.id]
    assert list(vacuous_cases([idle, retagged(PLAIN, "SCORE-SCALE")], 2)) == [idle.id]


def test_less_than_twice_the_bound_is_not_enough() -> None:
    little = Detection(deviation="x", ratio=ENOUGH - 0.01, kind="value")
    assert not little.is_enough
    assert Detection(deviation="x", ratio=ENOUGH, kind="value").is_enough
    assert Detection(deviation="x", ratio=0.0, kind="membership").is_enough
    assert vacuous({"a": Measured(clauses={"SET-HOLE": little}, complete=True)}) == ["a"]


def test_a_clause_has_every_deviation_of_it() -> None:
    assert {d.id for d in of_clause("SET-HOLE")} == {d.id for d in DEVIATIONS.values() if d.clause == "SET-HOLE"}
    assert of_clause("SET-HOLE")


def test_a_measurement_goes_on_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    cases = [retagged(PLAIN, "SCORE-SCALE"), retagged(smoke_cases()[1], "GQA-MAP")]
    assert [case_id for case_id, _ in measure_all(cases[:1], path)] == [cases[0].id]
    first = read(path)
    assert [case_id for case_id, _ in measure_all(cases, path)] == [cases[1].id]
    assert read(path).keys() == {case.id for case in cases}
    assert read(path)[cases[0].id] == first[cases[0].id]
    assert list(measure_all(cases, path)) == []


def test_a_quick_measurement_ends_with_the_first_that_is_enough_and_gives_way_to_a_complete_one(tmp_path: Path) -> None:
    path, case = tmp_path / "found.json", retagged(PLAIN, "SCORE-SCALE", "GQA-MAP")
    assert list(measure_all([case], path, quick=True))
    first = read(path)[case.id]
    assert (len(first.clauses), first.complete, first.is_detectable) == (1, False, True)
    assert list(measure_all([case], path, quick=True)) == []
    assert list(measure_all([case], path))
    assert read(path)[case.id].complete
    assert read(path)[case.id].clauses.keys() == {"SCORE-SCALE", "GQA-MAP"}


def test_the_command_prints_how_many_cases_can_fail(tmp_path: Path) -> None:
    path, out = tmp_path / "found.json", tmp_path / "out.txt"
    with out.open("w") as file:
        assert detectability_command(Console(file=file, width=200), json_path=path, select=PLAIN.id) == 0
    assert "1 of 1 cases can fail something; 1 measured on all" in out.read_text()
    assert read(path).keys() == {PLAIN.id}
