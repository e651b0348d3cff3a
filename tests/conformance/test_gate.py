"""The gate closes on anything that got worse, and only on that."""

import msgspec
import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.gate import compare_runs, gate_markdown
from attnconform.conformance.judge.verdict import CaseResult, Finding
from attnconform.conformance.results import Footer, ResultLine, Run, encode_line, make_header, read_run

CASES = matrix("L0")
GOOD = {case.id: ("PASS", 0.4) for case in CASES}


def make_run(states):
    """A run with the given state and use of the bound for every case."""
    lines = []
    for case in CASES:
        state, usage = states[case.id]
        findings = (Finding(state=state, clauses=("SET-ORDER",), message="m"),) if state.startswith("FAIL") else ()
        result = CaseResult(case_id=case.id, state=state, usage={"out": usage}, findings=findings)
        lines.append(ResultLine(case=case, result=result))
    header = make_header(StepsBackend(), "L0", CASES, len(CASES))
    return Run(header, tuple(lines), Footer(counts={}, seconds=1.0))


def changed(**first):
    """GOOD with the first case changed."""
    return GOOD | {CASES[0].id: (first.get("state", "PASS"), first.get("usage", 0.4))}


def test_an_equal_run_opens_the_gate():
    assert compare_runs(make_run(GOOD), make_run(GOOD)).is_open


def test_a_newly_failing_case_closes_it_and_is_named():
    now = make_run(changed(state="FAIL_value"))
    report = compare_runs(make_run(GOOD), now)
    assert not report.is_open
    assert CASES[0].id in gate_markdown(report, now)


def test_a_case_that_failed_before_does_not_close_it():
    failing = make_run(changed(state="FAIL_value"))
    assert compare_runs(failing, failing).is_open


def test_a_case_that_is_no_longer_declared_closes_it():
    report = compare_runs(make_run(GOOD), make_run(changed(state="UNSUPPORTED")))
    assert report.undeclared == [CASES[0].id]
    assert not report.is_open


def test_a_rise_past_the_margin_closes_it():
    report = compare_runs(make_run(GOOD), make_run(changed(usage=0.6)))
    assert [(r.output, r.before, r.after) for r in report.rises] == [("out", 0.4, 0.6)]
    assert compare_runs(make_run(GOOD), make_run(changed(usage=0.45))).is_open


def test_a_fixed_case_is_reported_and_opens_it():
    report = compare_runs(make_run(changed(state="FAIL_value")), make_run(GOOD))
    assert report.is_open
    assert report.fixed == [CASES[0].id]


@pytest.mark.parametrize("field", ["suite_hash", "level", "backend"])
def test_a_baseline_of_another_suite_is_refused(field):
    run = make_run(GOOD)
    other = Run(msgspec.structs.replace(run.header, **{field: "other"}), run.lines, run.footer)
    with pytest.raises(ValueError, match=f"the baseline's {field} is other"):
        compare_runs(other, run)


def test_a_run_reads_back_as_it_was_written(tmp_path):
    run = make_run(GOOD)
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"".join(encode_line(line) for line in (run.header, *run.lines, run.footer)))
    assert read_run(path).results == run.results


@pytest.mark.parametrize("cut", ["footer", "middle", "bytes", "empty"])
def test_a_run_that_is_not_whole_is_refused_in_one_line(tmp_path, cut):
    run = make_run(GOOD)
    lines = [encode_line(line) for line in (run.header, *run.lines, run.footer)]
    kept = {"footer": lines[:-1], "middle": lines[:2] + lines[-1:], "bytes": [*lines[:-1], lines[-1][:9]], "empty": []}
    path = tmp_path / "results.jsonl"
    path.write_bytes(b"".join(kept[cut]))
    with pytest.raises(ValueError, match=r"results\.jsonl") as refused:
        read_run(path)
    assert "\n" not in str(refused.value)
