import doctest
import re
from pathlib import Path

import pytest

from attnconform import reference
from attnconform.conformance import clauses
from attnconform.conformance.clauses import (
    CLAUSES,
    Clause,
    checks,
    cited_ids,
    coverage,
    problems,
    read_clauses,
    resolve,
)

SPEC = clauses.spec_text()
AREAS = "SET COORD MASK BLOCK SCORE EMPTY LSE MERGE GQA GRAD SAFE PLAN FALLBACK DETERMINISM BOUND".split()  # noqa: SIM905


def run_examples(text: str, name: str, names: dict[str, object]) -> list[str]:
    """Runs a text's examples in `names`, which keeps what they define; reports of the failed ones."""
    report: list[str] = []
    examples = doctest.DocTestParser().get_doctest(text, names, name, "SPEC.md", 0)
    doctest.DocTestRunner(verbose=False).run(examples, out=report.append, clear_globs=False)
    names.update(examples.globs)
    return report


def before_first_clause(chapter: str) -> str:
    """What stands between a chapter's heading and its first clause."""
    first = clauses.HEADING.search(chapter)
    return chapter[: first.start()] if first else chapter


@pytest.fixture(scope="module")
def opening() -> dict[str, object]:
    """What the examples before the first clause define: the helper."""
    names: dict[str, object] = {"__name__": "SPEC"}
    assert not run_examples(before_first_clause(SPEC), "opening", names)
    return names


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """An empty registry of checks for one test."""
    empty: dict[str, tuple[str, ...]] = {}
    monkeypatch.setattr(clauses, "CHECKS", empty)
    return empty


@pytest.mark.parametrize("clause", CLAUSES.values(), ids=list(CLAUSES))
def test_example_runs_with_nothing_but_the_openings_before_it(clause: Clause, opening: dict[str, object]) -> None:
    names = dict(opening)
    chapter = next(chapter for chapter in SPEC.split("\n## ") if f"\n### {clause.id}: " in chapter)
    assert not run_examples(before_first_clause(chapter), "chapter", names)
    assert clause.has_example
    assert not run_examples(clause.text, clause.id, names)


def test_all_examples_run_from_top_to_bottom() -> None:
    assert not run_examples(SPEC, "SPEC.md", {"__name__": "SPEC"})


@pytest.mark.parametrize("clause", CLAUSES.values(), ids=list(CLAUSES))
def test_clause_says_must_or_may_and_names_a_reference_that_exists(clause: Clause) -> None:
    assert re.match(r"\s*(MUST|MAY)\b", clause.text)
    assert clause.reference is not None
    assert callable(resolve(clause.reference))


def test_every_area_has_clauses_and_no_heading_looks_like_one_but_is_not() -> None:
    assert {clause_id.split("-")[0] for clause_id in CLAUSES} >= set(AREAS)
    looks = {line.split()[1].rstrip(":") for line in SPEC.splitlines() if re.match(r"### [A-Z]+-", line)}
    assert looks == set(CLAUSES)


def test_every_link_inside_the_page_has_its_heading() -> None:
    headings = re.findall(r"^#+ (.+)$", SPEC, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", SPEC)) <= anchors


def test_every_id_that_the_page_itself_names_has_a_heading() -> None:
    named = {i for area in AREAS for i in re.findall(rf"(?<![A-Z-]){area}(?:-[A-Z]+)+\b", SPEC)}
    assert named <= set(CLAUSES)


def test_every_id_cited_in_reference_has_a_heading() -> None:
    cited = cited_ids(Path(reference.__file__).parent)
    assert {"SET-FORM", "MERGE-EMPTY"} <= set(cited)  # by a refusal, by a docstring
    assert set(cited) <= set(CLAUSES)


def test_citations_are_told_from_other_brackets(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text(
        '"""Two. [SET-HOLE,\n    LSE-SINK]"""\nre.compile("[A-Z]-[0-9]")\nx[TILE_Q]\nRefusedInput("SET-RANGE", 1)\n'
    )
    places = {"SET-HOLE": 1, "LSE-SINK": 1, "SET-RANGE": 5}
    assert cited_ids(tmp_path) == {name: [f"{source}:{line}"] for name, line in places.items()}


def test_checks_records_the_function_and_leaves_it_as_it_is(registry: dict[str, tuple[str, ...]]) -> None:
    def check_holes() -> int:
        return 7

    assert checks("SET-HOLE", "SET-ORDER")(check_holes) is check_holes
    assert registry == {f"{__name__}.{check_holes.__qualname__}": ("SET-HOLE", "SET-ORDER")}


@pytest.mark.parametrize("ids", [("SET-HOLES",), ("SET-HOLE", "set-order"), ()])
def test_checks_refuses_an_unknown_id_and_none(ids: tuple[str, ...], registry: dict[str, tuple[str, ...]]) -> None:
    with pytest.raises(ValueError, match="checks"):
        checks(*ids)
    assert not registry


def test_coverage_lists_every_clause_with_what_answers_to_it(registry: dict[str, tuple[str, ...]]) -> None:
    registry["judge.check_holes"] = ("SET-HOLE",)
    covered = {c.clause.id: c for c in coverage({"SET-HOLE": {"hole_reads_page_zero"}})}
    assert list(covered) == list(CLAUSES)
    assert covered["SET-HOLE"].checks == ("judge.check_holes",)
    assert covered["SET-HOLE"].deviations == ("hole_reads_page_zero",)
    assert covered["SET-HOLE"].reference == "attnconform.reference.formats.fixed_width_to_csr"
    assert covered["SET-ORDER"].checks == ()
    assert covered["SET-ORDER"].deviations == ()


def test_problems_is_empty_only_when_all_is_covered(registry: dict[str, tuple[str, ...]]) -> None:
    registry["judge.check_all"] = tuple(CLAUSES)
    deviations = {clause_id: {"broken"} for clause_id in CLAUSES}
    assert problems(deviations) == []
    registry["judge.check_all"] = tuple(clause_id for clause_id in CLAUSES if clause_id != "SET-HOLE")
    del deviations["SET-ORDER"]
    assert problems(deviations) == ["SET-ORDER has no deviation", "SET-HOLE has no check"]


def test_problems_names_unknown_citations_and_deviations(registry: dict[str, tuple[str, ...]], tmp_path: Path) -> None:
    registry["judge.check_all"] = tuple(CLAUSES)
    source = tmp_path / "kernel.py"
    source.write_text("# a hole is not page 0 [SET-HOOLE]\n")
    deviations = {clause_id: {"broken"} for clause_id in [*CLAUSES, "SET-WHOLE"]}
    assert problems(deviations, [tmp_path]) == [
        "deviations break SET-WHOLE, which has no heading in SPEC.md",
        f"{source}:1 cites SET-HOOLE, which has no heading in SPEC.md",
    ]


def test_problems_names_references_that_do_not_exist(
    registry: dict[str, tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (
        "### SET-HOLE: nothing\n\nMUST.\n\nReference: attnconform.reference.formats.no_such\n\n    >>> 1\n    1\n"
        "### SET-ORDER: none\n\nMUST.\n"
    )
    monkeypatch.setattr(clauses, "CLAUSES", read_clauses(text))
    registry["judge.check_all"] = ("SET-HOLE", "SET-ORDER")
    assert problems({"SET-HOLE": {"broken"}, "SET-ORDER": {"broken"}}) == [
        "SET-HOLE: attnconform.reference.formats.no_such does not exist: attnconform.reference.formats has no no_such",
        "SET-ORDER has no example",
        "SET-ORDER names no reference function",
    ]


def test_two_headings_of_one_id_are_refused() -> None:
    with pytest.raises(ValueError, match="SET-HOLE has two headings, at lines 1 and 3"):
        read_clauses("### SET-HOLE: one\n\n### SET-HOLE: two\n")


def test_a_name_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no module named nowhere"):
        resolve("nowhere.at.all")
