"""Cases of a backend's own domain are judged, recorded, found again, resumed, merged, gated, expected like others."""

import textwrap
from dataclasses import replace as replaced
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from attnconform.conformance import bundles, engine
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.backend import OneOf
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix
from attnconform.conformance.cases.structure import Case, is_own
from attnconform.conformance.command_line import main
from attnconform.conformance.expectations import load_expectations
from attnconform.conformance.explain.explain import load_case
from attnconform.conformance.gate import compare_runs, gate_markdown
from attnconform.conformance.judge.verdict import CaseResult
from attnconform.conformance.report.text import repro_command
from attnconform.conformance.results import Footer, ResultLine, Run, encode_line, encode_run, make_header, read_run
from attnconform.conformance.selection import case_by_id, level_of, own_cases, select_cases

NAME = "narrow:Narrow"
# one geometry in bfloat16, of which the common matrix has nothing; with sinks, and both layouts
MODULE = textwrap.dedent(
    f"""
    from dataclasses import replace

    from attnconform.conformance import Capabilities, OneOf
    from attnconform.conformance.adapters.reference_steps import StepsBackend

    ROW = {SMOKE_ROW!r} | {{"dtype": "bfloat16", "heads": "8/2", "head_dim": "32/32"}}
    FREE = {{"layout": ("NHD", "HND"), "sink": ("none", "logits")}}


    class Narrow(StepsBackend):
        name = "narrow"
        capabilities = Capabilities(
            supported={{axis: OneOf(FREE.get(axis, (value,))) for axis, value in ROW.items()}}
            | {{"refusal": OneOf(())}},
            has_backward=False,
        )


    class ForgetsSinks(Narrow):
        name = "forgets-sinks"

        def forward(self, problem, tensors):
            if problem.spec.cache.layout == "HND":
                problem = replace(problem, spec=replace(problem.spec, sink_logits=None))
            return super().forward(problem, tensors)


    class DiesOnSinks(Narrow):
        name = "dies-on-sinks"

        def forward(self, problem, tensors):
            if problem.spec.sink_logits is not None:
                import os
                os._exit(9)
            return super().forward(problem, tensors)
    """
)


@pytest.fixture
def narrow(tmp_path, monkeypatch):
    """A folder with narrow.py, which is the current one; the backend of that module."""
    (tmp_path / "narrow.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return load_backend(NAME, "cpu")


def own_of(backend: StepsBackend) -> tuple[Case, ...]:
    """The cases of its own domain that a run of L1 takes."""
    return own_cases("L1", "", backend.capabilities)


def make_run(backend: StepsBackend, cases: list[Case], state: str = "PASS") -> Run:
    """A run of L1 in which every declared case has one state."""
    off = {case.id for case in matrix("L1")}
    states = {case.id: "UNSUPPORTED" if case.id in off else state for case in cases}
    lines = tuple(ResultLine(case=c, result=CaseResult(case_id=c.id, state=states[c.id])) for c in cases)
    counts = {s: list(states.values()).count(s) for s in set(states.values())}
    return Run(make_header(backend, "L1", matrix("L1"), len(lines)), lines, Footer(counts=counts, seconds=1.0))


def stored(folder: Path, run: Run) -> Path:
    folder.mkdir()
    (folder / "results.jsonl").write_bytes(encode_run(run))
    return folder


def test_a_run_judges_them_beside_the_common_matrix_and_says_so(narrow, tmp_path):
    done = CliRunner().invoke(
        main, ["run", "-b", "narrow:ForgetsSinks", "--device", "cpu", "-n", "1", "--select", "L1d.", "--out", "out"]
    )
    assert done.exit_code == 1, done.output
    run = read_run(tmp_path / "out" / "results.jsonl")
    failing = [line for line in run.lines if line.result.is_failing]
    assert len(run.lines) == len([case for case in own_of(narrow) if case.level == "L1d"]) > len(failing) > 0
    assert {(line.case.axes["layout"], line.case.axes["sink"]) for line in failing} == {("HND", "logits")}
    text = " ".join(done.output.split())
    assert f"declares 0 of 0 cases of the common matrix (0%), and {len(run.lines)} of its own domain" in text
    assert "of its own domain" in (tmp_path / "out" / "summary.md").read_text()
    assert "of its own domain" in (tmp_path / "out" / "report.html").read_text()


def test_the_share_is_that_of_the_common_matrix(narrow):
    run = make_run(narrow, [*matrix("L1"), *own_of(narrow)])
    text = gate_markdown(compare_runs(run, run), run)
    assert f"declared: 0 of {len(matrix('L1'))} cases of the common matrix (0%), and {len(own_of(narrow))} of" in text


def test_a_failed_case_is_explained_by_its_id_by_its_run_by_its_line_and_by_its_file(narrow, tmp_path):
    case = own_of(narrow)[-1]
    assert load_case(case.id, narrow.capabilities) == case
    folder = stored(tmp_path / "run", make_run(narrow, [case]))
    assert load_case(f"{folder}/{case.id}") == case
    line = tmp_path / "line.json"
    line.write_bytes(encode_line(read_run(folder / "results.jsonl").lines[0]))
    assert load_case(str(line)) == case
    with pytest.raises(ValueError, match=r"results\.jsonl has no case L1d\.other"):
        load_case(f"{folder}/L1d.other")
    with pytest.raises(ValueError, match=rf"{case.id} is not the id of a case of this backend's domain"):
        load_case(case.id, StepsBackend.capabilities)
    edited = msgspec.structs.replace(case, seed=1)
    line.write_bytes(encode_line(ResultLine(case=edited, result=CaseResult(case_id=case.id, state="PASS"))))
    with pytest.raises(ValueError, match="does not match its content"):
        load_case(str(line))


def test_explain_names_the_clause_of_a_case_of_the_own_domain(narrow, tmp_path):
    case = next(c for c in own_of(narrow) if (c.axes["layout"], c.axes["sink"]) == ("HND", "logits"))
    done = CliRunner().invoke(main, ["explain", case.id, "-b", "narrow:ForgetsSinks", "--device", "cpu"])
    assert done.exit_code == 1, done.output
    assert "your output equals the reference with LSE-SINK broken" in done.output
    small = next(tmp_path.glob("L1d.forward.shrunk.*.json"))
    again = CliRunner().invoke(main, ["explain", small.name, "-b", "narrow:ForgetsSinks", "--device", "cpu"])
    assert again.exit_code == 1, again.output


def test_an_id_says_which_run_has_the_case(narrow):
    case = own_of(narrow)[-1]
    assert (level_of(case.id), level_of("L3d.forward.x.0"), level_of("L0d.forward.x.0")) == ("L1", "L3", "L1")
    assert repro_command(case.id, NAME) == f"attnconform run -b {NAME} --select {case.id}"
    assert select_cases("L1", case.id, own=own_of(narrow)) == [case]
    assert case_by_id(case.id, capabilities=narrow.capabilities) == case
    assert own_cases("L1", matrix("L1")[-1].id, narrow.capabilities) == ()  # one common case needs no others


def test_shards_part_them_and_each_has_the_smoke_cases(narrow):
    shards = [select_cases("L1", shard=f"{i}/2", own=own_of(narrow)) for i in (1, 2)]
    ids = [{case.id for case in shard if is_own(case.id)} for shard in shards]
    assert ids[0] | ids[1] == {case.id for case in own_of(narrow)}
    assert ids[0] & ids[1] == {case.id for case in own_of(narrow) if case.level == "L0d"} != set()


def test_a_bundle_without_them_is_not_whole_and_shards_with_them_are(narrow, tmp_path):
    common, own = list(matrix("L1")), list(own_of(narrow))
    assert bundles.faults_of_bundle(stored(tmp_path / "whole", make_run(narrow, [*common, *own]))) == []
    without = stored(tmp_path / "without", make_run(narrow, common))
    first = min(case.id for case in own)
    assert bundles.faults_of_bundle(without) == [f"{len(own)} cases are missing, {first} for one"]
    with pytest.raises(ValueError, match=rf"{len(own)} cases are in no shard, {own[0].id} for one"):
        bundles.merge_runs([without])
    assert len(bundles.merge_runs([without, stored(tmp_path / "b", make_run(narrow, own))]).lines) == len(
        [*common, *own]
    )


def test_a_cut_run_goes_on_with_them(narrow, tmp_path):
    own = own_of(narrow)
    options = engine.RunOptions(backend=NAME, out=tmp_path / "out", select="d.forward", resume=True)
    (tmp_path / "out").mkdir()
    chosen = select_cases("L1", "d.forward", own=own)
    header = make_header(narrow, "L1", matrix("L1"), len(chosen))
    kept = ResultLine(case=chosen[0], result=CaseResult(case_id=chosen[0].id, state="FAIL_value"))
    (tmp_path / "out" / "results.jsonl").write_bytes(encode_line(header) + encode_line(kept))
    _, results = engine.run_matrix(options, lambda result, done, total: None)
    assert [r.state for r in results] == ["FAIL_value", *["PASS"] * (len(chosen) - 1)]


def test_one_that_ends_its_worker_is_a_crash_of_its_own(narrow, tmp_path):
    case = next(c for c in own_of(narrow) if c.axes["sink"] == "logits")
    options = engine.RunOptions(backend="narrow:DiesOnSinks", out=tmp_path / "out", select=case.id)
    _, results = engine.run_matrix(options, lambda result, done, total: None)
    assert [(r.case_id, r.state) for r in results] == [(case.id, "CRASH")]


def test_the_gate_closes_where_a_value_is_no_longer_declared_and_not_where_the_array_is_another(narrow):
    before = make_run(narrow, [*matrix("L1"), *own_of(narrow)])
    fewer = {**narrow.capabilities.supported, "sink": OneOf(("none",))}
    narrower = StepsBackend()
    narrower.name = narrow.name
    narrower.capabilities = msgspec.structs.replace(narrow.capabilities, supported=fewer)
    now = make_run(narrower, [*matrix("L1"), *own_of(narrower)])
    report = compare_runs(before, now)
    with_sinks = {case.id for case in own_of(narrow) if case.axes["sink"] == "logits"}
    assert set(report.undeclared) == with_sinks - {case.id for case in own_of(narrower)} != set()
    assert not report.is_open
    other = replaced(before, lines=tuple(line for line in before.lines if line.case.id not in with_sinks))
    assert compare_runs(before, other).is_open  # the same declaration: another array covers what this case did


def test_a_new_failure_among_them_closes_the_gate(narrow):
    own = list(own_of(narrow))
    report = compare_runs(make_run(narrow, own), make_run(narrow, own, "FAIL_value"))
    assert {result.case_id for result in report.newly_failing} == {case.id for case in own}


def test_a_failure_among_them_can_be_expected(narrow, tmp_path):
    path = tmp_path / "expectations.toml"
    path.write_text(
        '[[expect]]\ncase = "L1d.*"\nstate = "FAIL_value"\nreason = "r"\ntracker = "t"\nexpires = 2999-01-01\n'
    )
    found = load_expectations(path, level="L1", backend=NAME, device="cpu", own=own_of(narrow))
    assert set(found) == {case.id for case in own_of(narrow) if case.level == "L1d"}
    with pytest.raises(ValueError, match=r"matches no case of L1"):
        load_expectations(path, level="L1", backend=NAME, device="cpu")
