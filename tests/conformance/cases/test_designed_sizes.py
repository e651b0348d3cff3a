"""Designed cases of sizes: each has the size that it is named for, and shows a mistake that begins there."""

import hashlib

import numpy as np
import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.designed_sizes import BACKWARD, FORWARD, FURTHER, cases_of_sizes
from attnconform.conformance.cases.detectability import detect
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix
from attnconform.conformance.cases.structure import Case, Structure, build_problem
from attnconform.conformance.cases.work import MAX_TILE_STEPS_L1, tile_steps
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.judge.judge import judge_case
from attnconform.reference.attention import effective_sets
from attnconform.reference.candidates import HOLE

ALL = cases_of_sizes(SMOKE_ROW)
CASES = {case.id.split(".")[2].removeprefix("designed-"): case for case in ALL if case.operation == "forward"}
IDS_DIGEST = "9b545988114922222a1b4911c9b0a2bc9b5058ec08aeeec366d597fc39f454fc"
# slug -> deviations that it is there for
SHOWN = {
    "requests-without-keys": (
        "leaves-requests-without-keys-unwritten",
        "divides-a-request-without-keys-by-zero",
        "gives-a-request-without-keys-an-lse-of-zero",
    ),
    "rows-without-keys-and-sinks": ("forgets-the-sink-of-a-request-without-keys",),
    "lists-of-rows-past-a-tile": (
        "writes-one-tile-of-rows-per-request",
        "reads-a-lane-past-the-list-in-later-tiles-of-rows",
    ),
    "four-kv-heads": ("rounds-the-group-size-up",),
    "scales-of-four-heads": ("knows-scales-of-two-heads",),
    "a-group-of-24": ("cuts-heads-into-tiles-across-groups",),
    "a-head-of-72": ("dots-multiples-of-sixteen-alone",),
    "window-past-a-tile": (
        "drops-the-page-where-a-window-begins",
        "starts-the-window-at-the-tiles-last-row",
        "visits-as-many-pages-of-a-window-as-the-longest-request",
    ),
    "window-of-the-query-alone": ("reads-a-left-edge-of-zero-as-unlimited",),
    "queries-past-the-end": ("clamps-queries-to-the-last-token",),
    "pages-of-272": ("takes-the-page-size-for-a-power-of-two", "wraps-offsets-in-large-pages"),
    "pages-past-256": ("wraps-a-table-of-many-pages", "keeps-page-ids-in-eight-bits"),
    "blocks-of-64": ("expands-blocks-by-sixteen",),
    "tiles-of-holes-within": ("stops-at-a-tile-of-holes",),
    "turned-in-part": ("pairs-across-the-whole-head",),
    "a-long-table": ("knows-distances-up-to-three",),
    "rows-past-a-tile-over-pages-of-128": ("multiplies-the-tail-of-large-pages-by-zero",),
}


def test_ids_are_frozen() -> None:
    ids = sorted(case.id for case in ALL)
    assert hashlib.sha256("\n".join(ids).encode()).hexdigest() == IDS_DIGEST


def test_every_design_is_there_for_some_deviation() -> None:
    assert set(SHOWN) == {*FORWARD, *FURTHER}
    assert {case.operation for case in ALL} == {"forward", "backward"}
    assert len(ALL) == len(FORWARD) + len(BACKWARD) + len(FURTHER)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_the_reference_conforms_and_the_case_is_small(case: Case) -> None:
    assert judge_case(case, StepsBackend()).state == "PASS"
    assert tile_steps(case) <= MAX_TILE_STEPS_L1


@pytest.mark.parametrize(("slug", "mistake"), [(slug, mistake) for slug in SHOWN for mistake in SHOWN[slug]])
def test_a_mistake_that_begins_at_the_size_shows(slug: str, mistake: str) -> None:
    detection = detect(CASES[slug], DEVIATIONS[mistake])
    assert detection is not None
    assert detection.is_enough


@pytest.mark.parametrize("slug", ["requests-without-keys", "rows-without-keys-and-sinks"])
def test_some_requests_have_rows_and_no_keys(slug: str) -> None:
    structure = CASES[slug].structure
    rows = [q for q, t in zip(structure.seqlens_q, structure.seqlens_kv, strict=True) if t == 0]
    assert len(rows) == 2
    assert min(rows) > 0
    assert structure.seqlens_kv[0] == 0
    assert {"EMPTY-OUT", "EMPTY-LSE", "EMPTY-NEIGHBOUR"} <= set(CASES[slug].clauses)


def test_rows_of_one_tile_see_from_different_tiles_on_and_the_longest_meets_fewer_pages() -> None:
    structure = CASES["window-past-a-tile"].structure
    sets, size = effective_sets(build_problem(structure)), structure.page_size
    first = [int(sets.of(row, 0)[0].min()) for row in range(sum(structure.seqlens_q))]
    assert first[0] // 16 < first[2] // 16
    pages = [-(-t // size) - first[row] // size for row, t in zip((2, 4), structure.seqlens_kv, strict=True)]
    assert pages[0] < pages[1]
    assert structure.seqlens_kv[0] - first[2] > 32


def test_a_query_that_sees_itself_alone_has_one_key() -> None:
    assert (effective_sets(build_problem(CASES["window-of-the-query-alone"].structure)).counts() == 1).all()


def test_queries_past_the_end_see_fewer_keys_from_row_to_row() -> None:
    structure = CASES["queries-past-the-end"].structure
    problem = build_problem(structure)
    places = [(where.q_idx, int(problem.seqlen_kv[where.request])) for where in problem.rows()]
    assert sum(q_idx >= length for q_idx, length in places) >= 3
    assert (np.diff(effective_sets(problem).counts()[:3, 0]) < 0).all()


def test_a_page_of_272_is_full_and_followed_by_another() -> None:
    structure = CASES["pages-of-272"].structure
    assert structure.page_size == 17 * 16
    assert len(structure.page_table[0]) == 2


def test_no_other_case_has_a_page_of_whole_tiles_and_more_rows_than_a_tile() -> None:
    of_whole_tiles = [
        case for case in matrix("L1") if case.structure.page_size % 128 == 0 and packed_rows(case.structure) > 192
    ]
    assert of_whole_tiles == [CASES["rows-past-a-tile-over-pages-of-128"]]
    (length,), (pages,) = of_whole_tiles[0].structure.seqlens_kv, of_whole_tiles[0].structure.page_table
    assert length < 128 * len(pages)


def packed_rows(structure: Structure) -> int:
    """Query rows of the longest request, those of all heads of a group counted."""
    return max(structure.seqlens_q) * structure.num_qo_heads // structure.num_kv_heads


def test_more_than_256_pages_belong_to_one_request() -> None:
    table = CASES["pages-past-256"].structure.page_table
    assert len(table[0]) > 256
    assert max(table[0]) > 256


def test_lists_name_keys_on_both_sides_of_a_tile_of_holes() -> None:
    candidates = CASES["tiles-of-holes-within"].structure.candidates
    assert candidates is not None
    for entries in candidates.lists:
        holes = np.array(entries) == HOLE
        starts = range(32, len(entries) - 32, 32)
        assert any(holes[start : start + 32].all() for start in starts)
        assert not holes[:32].all()
        assert not holes[-32:].all()
