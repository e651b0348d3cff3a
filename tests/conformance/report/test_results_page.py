"""Many runs on one page: what it counts, what it compares, and what it will not put side by side."""

import json
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.command_line import main
from attnconform.conformance.judge.verdict import CaseResult, Finding
from attnconform.conformance.report.findings import BUNDLED, FindingsFile, known_faults, read_findings
from attnconform.conformance.report.record import SCHEMA_VERSION, Record, read_record, record_of, write_records
from attnconform.conformance.report.results_page import (
    CONFORMS,
    UNKNOWN,
    cell_class,
    clause_cell,
    make_page,
    percent,
    read_records,
)
from attnconform.conformance.results import Footer, ResultLine, Run, encode_run, make_header

CASES = list(matrix("L0"))
FINDING = """
[[finding]]
clause = "EMPTY-LSE"
case = "L1.forward.x"
backend = "sdpa-lse"
package = "torch"
version = "2.13.0"
device = "cpu"
repro = "python reproduce.py"
observed = "lse 0.0 | of an empty row"
expected = "-inf"
documented = "not documented"
known = "{known}"
"""


def result_of(case, state, message="out[0, 0, 0] is 1.5"):
    findings = (
        () if state in ("PASS", "UNSUPPORTED") else (Finding(state=state, clauses=("SET-HOLE",), message=message),)
    )
    return CaseResult(case_id=case.id, state=state, clauses=case.clauses, findings=findings)


def run_of(name, states=None, **header):
    """A run of L0 by a backend of that name, every case a PASS but for those given by their index."""
    states = states or {}
    lines = tuple(ResultLine(case=case, result=result_of(case, states.get(i, "PASS"))) for i, case in enumerate(CASES))
    made = msgspec.structs.replace(make_header(StepsBackend(), "L0", CASES, len(CASES)), backend=name, **header)
    return Run(made, lines, Footer(counts=dict(Counter(x.result.state for x in lines)), seconds=1.0))


def write(folder: Path, *runs: Run) -> list[Path]:
    """The runs' files, each in a folder of its own."""
    files = []
    for i, run in enumerate(runs):
        file = folder / f"run{i}" / "results.jsonl"
        file.parent.mkdir(parents=True)
        file.write_bytes(encode_run(run))
        files.append(file)
    return files


def called(*arguments):
    return CliRunner().invoke(main, ["results", *map(str, arguments)])


class Cells(HTMLParser):
    """The texts of all table cells of a page, row by row."""

    def __init__(self):
        super().__init__()
        self.rows, self.open = [], False

    def handle_starttag(self, tag, attributes):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.open = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self.open = False

    def handle_data(self, data):
        if self.open:
            self.rows[-1][-1] += data


def test_every_clause_of_every_run_is_counted():
    page = make_page([run_of("a"), run_of("b", {0: "FAIL_value", 1: "UNSUPPORTED"})], FindingsFile())
    clause = CASES[0].clauses[0]
    with_clause = [i for i, case in enumerate(CASES) if clause in case.clauses]
    row = page.columns[1].clauses[clause]
    assert row.ran == len(with_clause) - (1 in with_clause)
    assert row.good == row.ran - 1
    assert set(page.clauses) == {"SET-HOLE"} | {clause for case in CASES for clause in case.clauses}


def test_a_case_counts_against_its_clauses_and_blames_one():
    page = make_page([run_of("a", {0: "FAIL_value"})], FindingsFile())
    column, bystander = page.columns[0], CASES[0].clauses[0]
    assert bystander != "SET-HOLE"
    assert {clause: marks.blamed for clause, marks in column.clauses.items() if marks.blamed} == {"SET-HOLE": 1}
    assert "blamed" not in clause_cell(column, bystander)
    assert cell_class(column, bystander) == "due"
    assert "SET-HOLE" in page.clauses
    assert clause_cell(column, "SET-HOLE").endswith("blamed 1")
    assert cell_class(column, "SET-HOLE") == "bad"


def test_the_declared_share_stands_beside_the_pass_rate(tmp_path):
    states = dict.fromkeys(range(len(CASES) // 2), "UNSUPPORTED")
    write(tmp_path, run_of("half", states))
    page = tmp_path / "page.md"
    assert called(tmp_path, "--out", page).exit_code == 0
    line = next(x for x in page.read_text().splitlines() if x.startswith("| half |"))
    share = percent((len(CASES) - len(states)) / len(CASES))
    assert f"| 100 % | {share} | {len(states)} |" in line


@pytest.mark.parametrize(
    ("share", "text"), [(0.9999, "99.9 %"), (0.00001, "0.1 %"), (1.0, "100 %"), (0.0, "0 %"), (None, "nothing ran")]
)
def test_a_share_is_never_rounded_to_all_or_nothing(share, text):
    assert percent(share) == text


def test_cases_on_which_backends_differ_are_listed_and_no_others():
    runs = [
        run_of("a", {0: "FAIL_value", 2: "QUALITY"}),
        run_of("b", {0: "FAIL_membership", 1: "UNSUPPORTED"}),
        run_of("c", {1: "CRASH", 3: "UNSUPPORTED"}),
    ]
    contested = {c.case_id: c for c in make_page(runs, FindingsFile()).contested}
    assert contested.keys() == {CASES[0].id, CASES[1].id}
    assert contested[CASES[0].id].outcomes == {"a": "FAIL_value", "b": "FAIL_membership", "c": CONFORMS}
    assert contested[CASES[1].id].outcomes == {"a": CONFORMS, "c": "CRASH"}
    assert "SET-HOLE" in contested[CASES[1].id].why


def test_a_run_alone_disagrees_with_nobody():
    page = make_page([run_of("a", {0: "FAIL_value"})], FindingsFile())
    assert (page.contested, page.shared) == ([], 0)


def test_text_from_backends_is_escaped(tmp_path):
    write(tmp_path, run_of("a"), run_of("<script>alert(1)</script>", {0: "FAIL_value"}))
    page = tmp_path / "page.html"
    assert called(tmp_path, "--out", page).exit_code == 0
    assert "<script>alert" not in page.read_text()


def test_the_tables_of_both_formats_are_whole_and_the_same(tmp_path):
    write(tmp_path, run_of("a|b"), run_of("c", {0: "FAIL_value", 1: "UNSUPPORTED"}))
    for name in ("page.html", "page.md"):
        assert called(tmp_path, "--out", tmp_path / name).exit_code == 0
    parser = Cells()
    parser.feed((tmp_path / "page.html").read_text())
    grid = [row for row in parser.rows if row and row[0] == CASES[0].clauses[0]]
    marked = (tmp_path / "page.md").read_text()
    assert len(grid) == 1
    assert f"| {' | '.join(grid[0])} |" in marked
    tables = [line for line in marked.splitlines() if line.startswith("|")]
    widths = [
        line.replace("\\|", "").count("|") for line in tables if line.startswith(("| a\\|b", "| c |", "| backend"))
    ]
    assert len(set(widths)) == 1


def test_versions_device_and_day_are_named(tmp_path):
    write(
        tmp_path, run_of("a", device="NVIDIA H200", started="2026-11-30T23:10:00+00:00", versions={"torch": "2.11.0"})
    )
    page = tmp_path / "page.md"
    called(tmp_path, "--out", page)
    assert "| NVIDIA H200 | torch 2.11.0 | 2026-11-30 |" in page.read_text()


def test_runs_of_two_suite_versions_are_refused_in_one_line(tmp_path):
    files = write(tmp_path, run_of("a"), run_of("b", suite_version="9.9.9"))
    done = called(*files, "--out", tmp_path / "page.md")
    assert done.exit_code == 2
    assert f"{files[1]}: suite_version is 9.9.9, but that of {files[0]} is" in done.output
    assert done.output.count("\n") == 1
    assert not (tmp_path / "page.md").exists()


def test_runs_over_other_cases_of_a_level_stand_on_one_page_with_their_hashes(tmp_path):
    files = write(tmp_path, run_of("a"), run_of("b", suite_hash="0123456789ab"))
    page = make_page(read_records(files), FindingsFile())
    for name in ("page.md", "page.html"):
        assert called(*files, "--out", tmp_path / name).exit_code == 0
        text = (tmp_path / name).read_text()
        assert "The matrix grew between these runs" in text
        assert "|\nThe matrix" not in text  # or it is a row of the table
        assert all(column.record.suite_hash in text for column in page.columns)


def test_runs_of_one_matrix_need_no_word_on_it(tmp_path):
    files = write(tmp_path, run_of("a"), run_of("b"))
    assert called(*files, "--out", tmp_path / "page.md").exit_code == 0
    assert "The matrix grew" not in (tmp_path / "page.md").read_text()


def test_runs_over_other_cases_are_compared_on_equal_cases_alone(tmp_path):
    """The first case of b is one that a was not asked for: no run but b's has it."""
    other = run_of("b", {0: "FAIL_value", 1: "FAIL_value"}, suite_hash="0123456789ab")
    changed = msgspec.structs.replace(CASES[0], id="L0.forward.another.01234567")
    first = ResultLine(case=changed, result=result_of(changed, "FAIL_value"))
    other = Run(other.header, (first, *other.lines[1:]), other.footer)
    page = make_page([run_of("a", {2: "UNSUPPORTED"}), other], FindingsFile())
    assert [c.case_id for c in page.contested] == [CASES[1].id]
    assert page.shared == len(CASES) - 2


@pytest.mark.parametrize(("states", "words"), [({}, "undecided"), ({0: "FAIL_value"}, "not conforming")])
def test_a_run_that_was_cut_off_says_where_and_never_conforms(tmp_path, states, words):
    (file,) = write(tmp_path, run_of("a", states))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:4]) + lines[4][:50])
    assert called(file, "--out", tmp_path / "page.md").exit_code == 0
    assert f"| a | {words}, cut off after 3 of {len(CASES)} cases |" in (tmp_path / "page.md").read_text()


def test_a_fault_of_the_suites_own_is_nobodys_failure_and_nobodys_pass():
    page = make_page([run_of("a", {0: "HARNESS_ERROR"}), run_of("b")], FindingsFile())
    column = page.columns[0]
    assert (column.verdict.failing, column.verdict.ran) == (0, len(CASES) - 1)
    assert column.words == "undecided, 1 not judged by a fault of the suite's own"
    assert page.contested == []


def test_a_withdrawn_case_is_named_and_not_counted(tmp_path):
    write(tmp_path / "runs", run_of("a", {0: "FAIL_value"}))
    findings = tmp_path / "findings.toml"
    entries = [(CASES[0].id, "no package documents it"), ("L0.forward.other.01234567", "nobody ran it")]
    findings.write_text("".join(f'[[withdrawn]]\ncase = "{case}"\nwhy = "{why}"\n' for case, why in entries))
    for name in ("page.md", "page.html"):
        page = tmp_path / name
        assert called(tmp_path / "runs", "--findings", findings, "--out", page).exit_code == 0
        assert "no package documents it" in page.read_text()
        assert "nobody ran it" not in page.read_text()
    assert f"| a | conforming | {len(CASES) - 1}/{len(CASES) - 1} |" in (tmp_path / "page.md").read_text()


@pytest.mark.parametrize("kept", [1, 2])
def test_a_file_that_is_no_run_is_refused(tmp_path, kept):
    """Nothing but a header; and lines that cannot be read before others that can."""
    (file,) = write(tmp_path, run_of("a"))
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:kept]) + (b"nonsense\n" + b"".join(lines[2:]) if kept == 2 else b""))
    assert called(file, "--out", tmp_path / "page.md").exit_code == 2


def test_one_run_twice_is_refused(tmp_path):
    files = write(tmp_path, run_of("a"))
    assert "given twice" in called(*files, *files, "--out", tmp_path / "page.md").output


def test_runs_of_one_backend_are_told_apart_by_what_differs():
    page = make_page([run_of("a", device="cpu"), run_of("a", device="NVIDIA H200")], FindingsFile())
    assert [column.label for column in page.columns] == ["a, cpu", "a, NVIDIA H200"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("empty", "--out", "page.md"), "empty holds no results.jsonl and no record"),
        (("runs", "--out", "page.pdf"), "must end in .md or .html"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "runs", run_of("a"))
    done = called(*arguments)
    assert done.exit_code == 2
    assert words in done.output
    assert done.output.count("\n") == 1


def test_findings_stand_beside_what_was_known(tmp_path):
    write(tmp_path / "runs", run_of("a"))
    findings = tmp_path / "findings.toml"
    findings.write_text(FINDING.format(known="aten CPU flash") + FINDING.format(known=""))
    page = tmp_path / "page.md"
    assert called(tmp_path / "runs", "--findings", findings, "--out", page).exit_code == 0
    text = page.read_text()
    assert "2 findings, 1 of them not known before" in text
    assert "| torch | the CPU's flash kernel gives an empty row the lse 0 | run | EMPTY-LSE, `L1.forward.x` |" in text
    assert "lse 0.0 \\| of an empty row" in text
    assert text.count("not yet") == len(known_faults()) - 1


def test_what_did_not_run_is_listed_until_it_has(tmp_path):
    files = write(tmp_path / "runs", run_of("fa3"), run_of("a"))
    findings = tmp_path / "findings.toml"
    findings.write_text(
        '[[not_run]]\nbackend = "fa3"\npackage = "p3"\nwhy = "never on a GPU"\n'
        '[[not_run]]\nbackend = ""\npackage = "tileops"\nwhy = "too large | to travel"\n'
    )
    for name in ("both", "one"):
        runs = files if name == "both" else files[1:]
        for suffix in ("md", "html"):
            page = tmp_path / f"{name}.{suffix}"
            assert called(*runs, "--findings", findings, "--out", page).exit_code == 0
            assert ("never on a GPU" in page.read_text()) is (name == "one")
    assert "| tileops | none | too large \\| to travel |" in (tmp_path / "both.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"EMPTY-LSE"', '"EMPTY-ELSE"', "finding 1: clause is 'EMPTY-ELSE'"),
        ('known = ""', 'known = "nobody"', "finding 1: known is 'nobody'"),
        ('device = "cpu"\n', "", "`device`"),
        ('device = "cpu"', "device = 3", "Expected `str`, got `int`"),
        ('device = "cpu"', 'divice = "cpu"\ndevice = "cpu"', "divice"),
        ('"python reproduce.py"', '"""a\nb"""', "must be one line"),
        ("[[finding]]", "[[finding", "is not a findings file"),
    ],
)
def test_a_finding_that_is_none_is_named(tmp_path, old, new, words):
    path = tmp_path / "findings.toml"
    text = FINDING.format(known="")
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=r"findings\.toml") as error:
        read_findings(path)
    assert words in str(error.value)


def test_the_findings_that_come_with_the_suite_are_on_the_page_with_cases_of_their_own(tmp_path):
    write(tmp_path, run_of("a"))
    page = tmp_path / "page.md"
    assert called(tmp_path, "--out", page).exit_code == 0
    found = read_findings(BUNDLED)
    cases = {json.loads(path.read_bytes())["id"] for path in BUNDLED.parent.glob("*.json")}
    assert {finding.case for finding in found} <= cases
    assert all(page.read_text().count(f"`{finding.case}`") for finding in found)
    assert len([finding for finding in found if not finding.known]) >= 5


def incomplete(run: Run, told: list[int]) -> Record:
    """The record of a run of which only some cases' outcomes are known, by their index."""
    record, known = record_of(run), {CASES[i].id for i in told}
    return msgspec.structs.replace(
        record,
        outcomes="where runs differed",
        counts={},
        conforming={"conforms": tuple(case for case in record.conforming_cases if case in known)},
        failing=tuple(failure for failure in record.failing if failure.case in known),
    )


RECORDED = (
    ("a|b", {0: "FAIL_value", 1: "QUALITY", 2: "UNSUPPORTED", 4: "HARNESS_ERROR"}, {"device": "NVIDIA H200"}),
    ("c", {0: "CRASH", 3: "FAIL_membership"}, {"suite_hash": "0123456789ab"}),
    ("d", {}, {}),
)


@pytest.mark.parametrize("suffix", ["md", "html"])
def test_the_page_of_records_is_that_of_their_runs(tmp_path, suffix):
    """With one run cut off, one case withdrawn, an expected failure, and states that conform and are no PASS."""
    files = write(tmp_path / "runs", *(run_of(name, states, **header) for name, states, header in RECORDED))
    lines = files[2].read_bytes().splitlines(keepends=True)
    files[2].write_bytes(b"".join(lines[:5]))
    findings = tmp_path / "findings.toml"
    findings.write_text(f'[[withdrawn]]\ncase = "{CASES[3].id}"\nwhy = "no package documents it"\n')
    direct, via = tmp_path / f"direct.{suffix}", tmp_path / f"via.{suffix}"
    assert called(tmp_path / "runs", "--findings", findings, "--out", direct).exit_code == 0
    assert called(tmp_path / "runs", "--findings", findings, "--record", tmp_path / "records").exit_code == 0
    assert called(tmp_path / "records", "--findings", findings, "--out", via).exit_code == 0
    assert via.read_text() == direct.read_text()
    assert "cut off after 4" in via.read_text()
    assert "no package documents it" in via.read_text()
    assert len(list((tmp_path / "records").iterdir())) == len(RECORDED)


def test_records_and_runs_stand_on_one_page(tmp_path):
    runs = [run_of("a", {0: "FAIL_value"}), run_of("b")]
    files = write(tmp_path / "runs", *runs)
    write_records([record_of(runs[0])], tmp_path / "records")
    for name, paths in (("runs", files), ("mixed", [tmp_path / "records", files[1]])):
        assert called(*paths, "--out", tmp_path / f"{name}.md").exit_code == 0
    assert (tmp_path / "mixed.md").read_text() == (tmp_path / "runs.md").read_text()


def test_a_folder_of_a_run_may_hold_other_json(tmp_path):
    (file,) = write(tmp_path, run_of("a"))
    (file.parent / "badge.json").write_text('{"schemaVersion": 1}')
    assert called(tmp_path, "--out", tmp_path / "page.md").exit_code == 0


def test_a_record_is_named_by_backend_device_and_level_and_a_newer_one_takes_its_place(tmp_path):
    for started in ("2026-11-30T23:10:00+00:00", "2026-12-01T23:10:00+00:00"):
        files = write(tmp_path / started[:10], run_of("exec:./mine", device="NVIDIA H200", started=started))
        assert called(*files, "--record", tmp_path / "records").exit_code == 0
    (file,) = (tmp_path / "records").iterdir()
    assert file.name == "exec-.-mine-nvidia-h200-l0.json"
    assert read_record(file).started == started


def test_two_runs_for_one_record_are_refused_and_nothing_is_written(tmp_path):
    files = write(tmp_path, run_of("a", started="2026-11-30T23:10:00+00:00"), run_of("a"))
    done = called(*files, "--record", tmp_path / "records")
    assert done.exit_code == 2
    assert "two runs of a would both be" in done.output
    assert not (tmp_path / "records").exists()


def test_a_record_holds_no_capabilities_and_no_problem(tmp_path):
    (file,) = write(tmp_path, run_of("a", {0: "FAIL_value"}))
    assert called(file, "--record", tmp_path / "records").exit_code == 0
    (record,) = (tmp_path / "records").iterdir()
    text = record.read_text()
    assert not {"capabilities", "structure", "seed"} & json.loads(text).keys()
    assert len(text) < len(file.read_bytes()) / 5
    assert "out[0, 0, 0] is 1.5" in text


def test_every_state_of_a_run_is_in_its_record():
    states = {0: "FAIL_value", 1: "QUALITY", 2: "UNSUPPORTED"}
    record = record_of(run_of("a", states))
    told = {case: state for state, cases in record.conforming.items() for case in cases}
    told |= {failure.case: failure.state for failure in record.failing}
    assert told == {case.id: states.get(i, "PASS") for i, case in enumerate(CASES) if i != 2}
    assert record.counts == {"FAIL_value": 1, "PASS": len(CASES) - 3, "QUALITY": 1, "UNSUPPORTED": 1}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"schema_version": SCHEMA_VERSION + 1},
            f"schema_version of the record is {SCHEMA_VERSION + 1}, but this reads",
        ),
        ({"verdict": None}, "is not a record"),
        ({"surprise": 1}, "surprise"),
        ({"reached": 1}, "its counts are not of the 1 cases"),
        ({"clauses": {"EMPTY-ELSE": [1, 1, 0]}}, "EMPTY-ELSE, which SPEC.md does not have"),
        ({"failing": []}, "has the outcomes of"),
    ],
)
def test_a_record_that_is_none_is_refused_in_one_line(tmp_path, change, words):
    write_records([record_of(run_of("a", {0: "FAIL_value"}))], tmp_path / "records")
    (file,) = (tmp_path / "records").iterdir()
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    done = called(tmp_path / "records", "--out", tmp_path / "page.md")
    assert done.exit_code == 2
    assert words in done.output
    assert done.output.count("\n") == 1
    assert not (tmp_path / "page.md").exists()


def test_a_record_that_ends_early_is_refused_where_a_folder_has_it(tmp_path):
    write_records([record_of(run_of("a"))], tmp_path / "records")
    (file,) = (tmp_path / "records").iterdir()
    file.write_bytes(file.read_bytes()[:200])
    assert called(tmp_path / "records", "--out", tmp_path / "page.md").exit_code == 2


def test_json_that_is_neither_run_nor_record_is_refused_in_one_line(tmp_path):
    file = tmp_path / "badge.json"
    file.write_text('{"schemaVersion": 1}\n')
    done = called(file, "--out", tmp_path / "page.md")
    assert done.exit_code == 2
    assert done.output.count("\n") == 1


def test_a_record_that_counts_a_withdrawn_case_is_refused(tmp_path):
    """Its clauses cannot be counted again without the case."""
    write_records([record_of(run_of("a"))], tmp_path / "records")
    findings = tmp_path / "findings.toml"
    findings.write_text(f'[[withdrawn]]\ncase = "{CASES[0].id}"\nwhy = "no package documents it"\n')
    done = called(tmp_path / "records", "--findings", findings, "--out", tmp_path / "page.md")
    assert done.exit_code == 2
    assert f"counts {CASES[0].id}, which is withdrawn" in done.output


def test_nothing_to_write_is_said(tmp_path):
    done = called(*write(tmp_path, run_of("a")))
    assert done.exit_code == 2
    assert "nothing to write" in done.output


@pytest.mark.parametrize("suffix", ["md", "html"])
def test_an_outcome_that_is_not_known_is_no_agreement(tmp_path, suffix):
    """The incomplete two were compared on the first case; that they conform on the second, their records do not say."""
    page_of = [incomplete(run_of("old"), [0]), incomplete(run_of("older", {0: "CRASH"}), [0])]
    new = [record_of(run_of("x", {1: "FAIL_value"})), record_of(run_of("y", {0: "UNSUPPORTED"}))]
    page = make_page([*page_of, *new], FindingsFile())
    found = {c.case_id: c.outcomes for c in page.contested}
    assert found == {
        CASES[0].id: {"old": CONFORMS, "older": "CRASH", "x": CONFORMS},
        CASES[1].id: {"old": UNKNOWN, "older": UNKNOWN, "x": "FAIL_value", "y": CONFORMS},
    }
    assert page.shared == len(CASES)
    write_records([*page_of, *new], tmp_path / "records")
    assert called(tmp_path / "records", "--out", tmp_path / f"page.{suffix}").exit_code == 0
    assert "Of 2 runs only those outcomes are known" in (tmp_path / f"page.{suffix}").read_text()


def test_a_case_that_one_run_alone_is_known_to_have_run_is_not_shared():
    page = make_page([incomplete(run_of("old"), []), run_of("x", {1: "FAIL_value"})], FindingsFile())
    assert (page.contested, page.shared) == ([], 0)


def test_a_run_of_which_not_all_is_known_counts_whole_in_the_tables(tmp_path):
    run = run_of("old", {0: "FAIL_value", 1: "UNSUPPORTED"})
    whole, part = (make_page([record], FindingsFile()).columns[0] for record in (record_of(run), incomplete(run, [2])))
    assert (part.verdict, part.clauses, part.words) == (whole.verdict, whole.clauses, whole.words)
    assert part.verdict.ran == len(CASES) - 1
    assert len(part.outcomes) == 1


def test_the_page_that_comes_with_the_suite_is_that_of_its_records(tmp_path):
    folder = BUNDLED.parent
    assert called(folder / "runs", "--out", tmp_path / "page.md").exit_code == 0
    assert (tmp_path / "page.md").read_text() == (folder / "RESULTS.md").read_text()


def test_known_faults_have_names_of_their_own():
    ids = [fault.id for fault in known_faults()]
    assert len(set(ids)) == len(ids) > 20


def test_a_folder_of_real_runs_makes_a_page(tmp_path):
    """From the command to the page, with the judge in between."""
    command = [sys.executable, "-P", "-m", "attnconform.conformance.command_line"]
    case = next(c.id for c in CASES if c.operation == "forward")
    for backend in ("sdpa", "reference"):
        options = ["--device", "cpu", "--level", "L0", "-n", "1", "--select", case, "--out", str(tmp_path / backend)]
        assert subprocess.run([*command, "run", "-b", backend, *options], capture_output=True).returncode == 0
    page = tmp_path / "page.html"
    subprocess.run([*command, "results", str(tmp_path), "--out", str(page)], check=True)
    assert {"sdpa", "reference"} <= {cell for row in read_cells(page) for cell in row}


def read_cells(page):
    parser = Cells()
    parser.feed(page.read_text())
    return parser.rows
