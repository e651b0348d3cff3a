"""Designed cases of features on paths: each shows a feature that one path lacks, which no row of the arrays shows."""

import hashlib

import pytest

from attnconform.conformance.cases.designed_paths import BACKWARD, FORWARD, cases_of_paths
from attnconform.conformance.cases.detectability import ENOUGH, detect
from attnconform.conformance.cases.freeze import fault_of
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.deviations import DEVIATIONS, feature_paths

CASES: dict[tuple[str, str], Case] = {
    (case.operation, case.id.split(".")[2].removeprefix("designed-")): case for case in cases_of_paths(SMOKE_ROW)
}
IDS_DIGEST = "74a70c5e027a97c75c513187162e616dee5ed7ff28360241db62fd3e4b60f6fb"
# operation and slug -> the deviations that it is there for
SHOWN: dict[tuple[str, str], tuple[str, ...]] = {
    ("forward", "unsplit-prompts-with-slopes"): ("ignores-slopes-in-unsplit-prompts",),
    ("forward", "unsplit-prompts-with-sinks"): ("forgets-the-sink-of-unsplit-prompts",),
    ("forward", "unsplit-prompts-of-blocks-with-slopes"): ("ignores-slopes-in-unsplit-prompts-of-blocks",),
    ("forward", "unsplit-prompts-of-blocks-with-all"): ("forgets-the-sink-of-unsplit-prompts",),
    ("forward", "unsplit-prompts-of-lists-with-all"): ("ignores-tables-in-unsplit-prompts-of-lists",),
    ("forward", "unsplit-lists-of-codes"): ("ignores-the-cap-in-unsplit-lists-of-codes",),
    ("forward", "unsplit-blocks-of-codes"): ("ignores-the-cap-in-unsplit-blocks-of-codes",),
    ("forward", "codes-with-sinks"): ("forgets-the-sink-of-dense-codes",),
    ("forward", "unsplit-codes-with-sinks"): ("forgets-the-sink-of-dense-codes",),
    ("backward", "prompts-under-a-cap"): ("forgets-the-slope-of-the-cap-in-prompts",),
    ("backward", "single-rows-of-blocks"): (
        "forgets-the-slope-of-the-cap-in-blocks-of-single-rows",
        "forgets-slopes-in-the-backward-of-decoded-blocks",
    ),
    ("backward", "blocks-of-codes"): ("forgets-slopes-in-the-backward-of-blocks-of-codes",),
    ("backward", "codes-with-sinks"): ("leaves-dsink-of-dense-codes-at-zero",),
}
# what rows of the arrays, or designs for something else, show already
SHOWN_BY_THE_ARRAYS = {"forgets-the-sink-of-unsplit-decode", "forgets-the-sink-of-unsplit-lists"}


@pytest.mark.parametrize("place", [*CASES], ids="-".join)
def test_every_design_is_a_sound_case_of_l1(place: tuple[str, str]) -> None:
    case = CASES[place]
    assert fault_of(case.structure) is None
    assert case in matrix("L1")


@pytest.mark.parametrize(("place", "mistakes"), [*SHOWN.items()], ids=["-".join(place) for place in SHOWN])
def test_a_feature_that_a_path_lacks_shows_on_its_case(place: tuple[str, str], mistakes: tuple[str, ...]) -> None:
    for mistake in mistakes:
        detection = detect(CASES[place], DEVIATIONS[mistake])
        assert detection is not None, mistake
        assert detection.ratio >= ENOUGH, mistake


def test_every_deviation_of_one_path_has_a_case_that_is_there_for_it() -> None:
    of_paths = {
        name for name, entry in DEVIATIONS.items() if entry.build().__class__.__module__ == feature_paths.__name__
    }
    assert of_paths == {mistake for mistakes in SHOWN.values() for mistake in mistakes} | SHOWN_BY_THE_ARRAYS


def test_ids_are_frozen() -> None:
    ids = sorted(case.id for case in CASES.values())
    assert hashlib.sha256("\n".join(ids).encode()).hexdigest() == IDS_DIGEST


def test_the_designs_are_those_that_are_listed() -> None:
    listed = [("forward", slug) for slug in FORWARD] + [("backward", slug) for slug in BACKWARD]
    assert listed == [*CASES]
    assert len({case.seed for case in CASES.values()}) == len(CASES)


def test_no_other_case_of_l1_has_a_design_s_features_on_its_path() -> None:
    def traits(case: Case) -> tuple[str, ...]:
        split = "split" if case.axes["splits"] != "1" else "whole"
        codes = "codes" if case.axes["quant"] != "none" else "numbers"
        return (*(case.axes[axis] for axis in ("phase", "granularity", "score", "sink")), split, codes)

    mine = {case.id for case in CASES.values()}
    others = {
        (c.operation, traits(c)) for c in matrix("L1") if c.operation in ("forward", "backward") and c.id not in mine
    }
    repeated = [case.id for case in CASES.values() if (case.operation, traits(case)) in others]
    assert repeated == []
