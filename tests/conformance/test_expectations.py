"""Known failures stand apart, and a file that no longer tells the truth is an error."""

import os
import subprocess
import sys
from datetime import date
from pathlib import Path

import msgspec
import pytest

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.expectations import load_expectations, with_expectation
from attnconform.conformance.judge.verdict import CaseResult, ExpectedFailure
from attnconform.conformance.report.html import write_html
from attnconform.conformance.report.summary import badge, summary_markdown
from attnconform.conformance.results import Footer, ResultLine, Run, make_header, verdict_of

SOURCE = Path(__file__).parents[2] / "src"
CASES = matrix("L0")
TODAY = date(2026, 6, 1)
ENTRY = {
    "case": CASES[0].id,
    "state": "FAIL_value",
    "reason": "the soft cap is rounded",
    "tracker": "https://example.org/17",
    "expires": "2027-01-31",
}


def write(folder, *entries):
    """An expectations file of entries, each a change of ENTRY; None leaves a key out."""
    text = ""
    for entry in entries:
        text += "[[expect]]\n"
        for key, value in (ENTRY | entry).items():
            if value is not None:
                text += f"{key} = {value if key == 'expires' else repr(value)}\n"
    path = folder / "expectations.toml"
    path.write_text(text)
    return path


def load(path, *, backend="triton", device="cpu", today=TODAY):
    return load_expectations(path, level="L0", backend=backend, device=device, today=today)


def test_an_id_and_a_glob_name_their_cases(tmp_path):
    found = load(write(tmp_path, {}, {"case": "L0.forward.*causal*", "state": "HANG"}))
    causal = {case.id for case in CASES if "causal" in case.id}
    assert {case_id for case_id, e in found.items() if e.state == "HANG"} == causal
    assert found[CASES[0].id].tracker == "https://example.org/17"


def test_an_entry_counts_only_in_its_scope(tmp_path):
    path = write(tmp_path, {"backend": "triton*", "device": "cuda*", "case": "no-such-case"})
    assert load(path, backend="flex-eager", device="cuda:1") == {}
    assert load(path, backend="triton", device="cpu") == {}
    with pytest.raises(ValueError, match="matches no case of L0"):
        load(path, backend="triton-atomic", device="cuda:1")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"case": "L0.no-such-case"}, r"entry 1 \(L0.no-such-case\) matches no case of L0"),
        ({"expires": "2026-05-31"}, "expired on 2026-05-31; see https://example.org/17"),
        ({"tracker": None}, "missing required field `tracker` - at `\\$.expect\\[0\\]`"),
        ({"tracker": " "}, "tracker is empty"),
        ({"reason": ""}, "reason is empty"),
        ({"expires": None}, "missing required field `expires`"),
        ({"expires": "'soon'"}, "no expectations file: Invalid RFC3339"),
        ({"state": "FAIL_everything"}, "state is 'FAIL_everything', which no case can have"),
        ({"state": "PASS"}, "state is PASS, which is no failure of a backend"),
        ({"state": "UNSUPPORTED"}, "state is UNSUPPORTED, which is no failure of a backend"),
        ({"stat": "FAIL_value"}, "unknown field `stat`"),
    ],
)
def test_an_entry_that_says_nothing_true_is_an_error_of_one_line(tmp_path, entry, message):
    with pytest.raises(ValueError, match=message) as error:
        load(write(tmp_path, entry))
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[[expect]\n", "no expectations file: Expected"),
        (b"\xff\xfe", "no expectations file: 'utf-8'"),
        (b"", "missing required field `expect`"),
        (None, "No such file"),
    ],
)
def test_a_file_of_another_form_is_an_error_of_one_line(tmp_path, content, message):
    path = tmp_path / "expectations.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        load(path)
    assert "\n" not in str(error.value)


def test_an_entry_is_expected_to_the_end_of_its_last_day(tmp_path):
    path = write(tmp_path, {})
    assert load(path, today=date(2027, 1, 31))
    with pytest.raises(ValueError, match="expired"):
        load(path, today=date(2027, 2, 1))


def test_two_entries_may_not_claim_one_case(tmp_path):
    with pytest.raises(ValueError, match="entries 1 and 2 both claim"):
        load(write(tmp_path, {}, {"case": "L0.*"}))


EXPECTED = ExpectedFailure(state="FAIL_value", reason="known", tracker="t/1", expires=date(2027, 1, 31))


def run_of(*states):
    """A run in which the first case's failure is expected."""
    cases = CASES[: len(states)]
    results = [CaseResult(case_id=c.id, state=s) for c, s in zip(cases, states, strict=True)]
    results = [with_expectation(r, {CASES[0].id: EXPECTED}) for r in results]
    lines = tuple(ResultLine(case=c, result=r) for c, r in zip(cases, results, strict=True))
    return Run(make_header(StepsBackend(), "L0", CASES, len(lines)), lines, Footer(counts={}, seconds=1.0))


@pytest.mark.parametrize(
    ("states", "exit_code", "words"),
    [
        (("FAIL_value", "PASS"), 0, "NOT CONFORMING, AS EXPECTED"),
        (("PASS", "PASS"), 1, "NOT CONFORMING"),
        (("FAIL_membership", "PASS"), 1, "NOT CONFORMING"),
        (("FAIL_value", "FAIL_value"), 1, "NOT CONFORMING"),
        (("UNSUPPORTED", "PASS"), 0, "CONFORMING"),
    ],
)
def test_the_verdict_counts_only_what_nobody_expected(states, exit_code, words):
    verdict = verdict_of(run_of(*states).results)
    assert (verdict.exit_code, verdict.words) == (exit_code, words)


def test_reports_show_expected_failures_apart(tmp_path):
    run = run_of("FAIL_value", "FAIL_value")
    summary = summary_markdown(run)
    assert f"### Expected failures (1)\n\n- FAIL_value {CASES[0].id}: known (t/1, until 2027-01-31)" in summary
    assert f"- **FAIL_value** `{CASES[1].id}`" in summary
    assert f"- **FAIL_value** `{CASES[0].id}`" not in summary
    write_html(run, tmp_path / "report.html")
    assert "<h2>Expected failures</h2>" in (tmp_path / "report.html").read_text()
    assert '"color": "yellow"' in badge(run_of("FAIL_value", "PASS"))


def test_an_unexpected_pass_is_called_one():
    assert "- **UNEXPECTED PASS**" in summary_markdown(run_of("PASS", "PASS"))


def test_a_result_keeps_its_expectation_through_the_results_file():
    result = run_of("FAIL_value").results[0]
    assert msgspec.json.decode(msgspec.json.encode(result), type=CaseResult) == result


def command(folder, *arguments):
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{folder}", "COLUMNS": "200", "PYTEST_ADDOPTS": ""}
    return subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def run_command(folder, backend, *arguments):
    options = ("run", "-b", f"miniatures:{backend}", "--level", "L0", "-n", "1", "--device", "cpu")
    return command(folder, "attnconform.conformance.command_line", *options, *arguments)


def test_a_run_whose_failures_are_all_expected_exits_with_0(miniatures):
    write(miniatures, {"case": "*causal*", "state": "CRASH"})
    done = run_command(miniatures, "Dies", "--expectations", "expectations.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "expected failures (2)" in done.stdout
    assert "NOT CONFORMING, AS EXPECTED on 6 cases" in done.stdout
    assert "2 fail as expected" in done.stdout


def test_a_run_with_an_unexpected_pass_exits_with_1(miniatures):
    write(miniatures, {"case": "*causal*", "state": "CRASH"})
    done = run_command(miniatures, "Right", "--expectations", "expectations.toml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "UNEXPECTED PASS L0.forward." in done.stdout


def test_a_stale_file_ends_the_run_before_it_begins(miniatures):
    write(miniatures, {"case": "L0.gone", "state": "CRASH"})
    done = run_command(miniatures, "Right", "--expectations", "expectations.toml")
    assert done.returncode == 2
    assert done.stderr == "attnconform: expectations.toml: entry 1 (L0.gone) matches no case of L0\n"
    assert not (miniatures / "attnconform-results").exists()


def test_the_plugin_reports_expected_failures_as_xfail_and_unexpected_passes_as_failures(miniatures):
    plugin = ("pytest", "-p", "attnconform.conformance.plugin", "-p", "no:cacheprovider", "-rx")
    options = (
        "--attn-backend",
        "miniatures:GivesNan",
        "--attn-level",
        "L0",
        "--attn-expectations",
        "expectations.toml",
    )
    write(miniatures, {"case": "*causal*", "state": "FAIL_nonfinite"})
    done = command(miniatures, *plugin, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed, 2 xfailed" in done.stdout
    write(miniatures, {"case": "*", "state": "FAIL_nonfinite"})
    done = command(miniatures, *plugin, *options)
    assert done.returncode == 1
    assert "4 failed, 2 xfailed" in done.stdout
    assert "FAIL_nonfinite was expected: the soft cap is rounded (https://example.org/17)" in done.stdout


def test_the_plugin_refuses_a_bad_file_in_one_line(miniatures):
    plugin = ("pytest", "-p", "attnconform.conformance.plugin", "-p", "no:cacheprovider")
    done = command(miniatures, *plugin, "--attn-backend", "miniatures:Right", "--attn-expectations", "gone.toml")
    assert done.returncode == 4
    assert "ERROR: gone.toml: No such file or directory" in done.stderr
