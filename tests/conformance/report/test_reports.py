"""What a run's reports count and print: whom a failing case counts against, and how ratios read."""

import io
import re
import sys

import msgspec
import pytest
from rich.console import Console

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.judge.ratio import ratio_text
from attnconform.conformance.judge.verdict import CaseResult, Finding
from attnconform.conformance.report.html import clause_rows, write_html
from attnconform.conformance.report.summary import summary_markdown
from attnconform.conformance.report.terminal import print_matrix, print_verdict
from attnconform.conformance.results import Footer, ResultLine, Run, make_header, verdict_of

CASES = list(matrix("L0"))[:3]
HUGE_USAGE = {"out": sys.float_info.max, "lse": 2.5e6}


def run_of(*results):
    lines = tuple(ResultLine(case=case, result=result) for case, result in zip(CASES, results, strict=True))
    return Run(make_header(StepsBackend(), "L0", CASES, len(CASES)), lines, Footer(counts={}, seconds=1.0))


def passed(case):
    return CaseResult(case_id=case.id, state="PASS", clauses=case.clauses, usage={"out": 0.25})


def failed(case, *clauses, state="FAIL_value"):
    findings = tuple(Finding(state=state, clauses=(clause, *case.clauses), message="wrong") for clause in clauses)
    return CaseResult(
        case_id=case.id, state=state, clauses=case.clauses, findings=findings, usage=HUGE_USAGE,
        usage_probable=HUGE_USAGE,
    )  # fmt: skip


def test_a_failing_case_counts_against_the_clause_that_is_named_and_against_no_other():
    named = CASES[0].clauses[0]
    rows = {row.id: row for row in clause_rows(run_of(failed(CASES[0], named), passed(CASES[1]), passed(CASES[2])))}
    assert rows[named].broken == 1
    assert rows[named].not_shown == 0
    for bystander in CASES[0].clauses[1:]:
        row = rows[bystander]
        assert (row.broken, row.not_shown) == (0, 1)
        assert row.good == row.ran - 1


def test_a_clause_that_no_case_exercises_counts_where_a_finding_names_it():
    rows = {row.id: row for row in clause_rows(run_of(failed(CASES[0], "BOUND-LSE"), *map(passed, CASES[1:])))}
    assert (rows["BOUND-LSE"].broken, rows["BOUND-LSE"].ran) == (1, 0)


def test_a_case_that_fails_without_a_finding_breaks_no_clause():
    lost = CaseResult(case_id=CASES[0].id, state="OOM", clauses=CASES[0].clauses)
    rows = clause_rows(run_of(lost, *map(passed, CASES[1:])))
    assert not any(row.broken for row in rows)
    assert {row.id for row in rows if row.not_shown} == set(CASES[0].clauses)


def test_a_finding_of_quality_beside_a_failure_breaks_no_clause():
    result = failed(CASES[0], "SET-HOLE")
    note = Finding(state="QUALITY", clauses=("BOUND-PROBABILISTIC",), message="rare")
    result = msgspec.structs.replace(result, findings=(*result.findings, note))
    assert result.named_clauses == {"SET-HOLE"}


def test_the_page_tells_broken_from_not_shown(tmp_path):
    write_html(run_of(failed(CASES[0], "SET-HOLE"), *map(passed, CASES[1:])), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert '<th class="n">broken</th><th class="n">not shown</th>' in text
    (row,) = [line for line in text.splitlines() if line.startswith("<tr><td><code>SET-HOLE</code>")]
    assert '<td class="n bad">1</td><td class="n off">0</td>' in row
    assert "name no clause" not in text


def test_the_matrix_counts_a_failing_case_in_the_area_that_is_named_alone():
    results = [failed(CASES[0], "BOUND-LSE"), *map(passed, CASES[1:])]
    shown = printed(lambda console: print_matrix(console, {case.id: case for case in CASES}, results))
    counts = dict(re.findall(r"([A-Z]+) .*?(\d+/\d+)", shown))
    assert counts.pop("BOUND") == "0/1"
    assert set(counts.values()) == {"1/1", "2/2"}


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.0, "0"), (0.12345, "0.123"), (2.0, "2"), (999.4, "999"), (1234.0, "1230"), (999_999.0, "1000000"),
        (1.01e6, "> 1e6"), (1e300, "> 1e6"), (sys.float_info.max, "inf"), (float("inf"), "inf"),
    ],
)  # fmt: skip
def test_a_ratio_has_three_digits_and_no_more_than_it_needs(ratio, text):
    assert ratio_text(ratio) == text


def test_no_report_prints_a_long_ratio(tmp_path):
    run = run_of(failed(CASES[0], "SET-HOLE"), *map(passed, CASES[1:]))
    write_html(run, tmp_path / "report.html")
    shown = printed(lambda console: print_verdict(console, verdict_of(run.results), run.results, "b"))
    assert "max error / worst-case bound: out inf, lse > 1e6" in shown
    assert "| lse | > 1e6 | > 1e6 |" in summary_markdown(run)
    for text in (shown, summary_markdown(run), (tmp_path / "report.html").read_text()):
        assert "0000000" not in text


def printed(show):
    stream = io.StringIO()
    show(Console(file=stream, width=200))
    return stream.getvalue()
