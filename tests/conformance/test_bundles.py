"""Shards join to the whole or not at all; a bundle that was cut or edited is found out; a cut run is gone on with."""

import msgspec
import pytest

from attnconform.conformance import bundles, engine
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.judge.verdict import CaseResult
from attnconform.conformance.results import (
    Footer,
    ResultLine,
    Run,
    encode_line,
    encode_run,
    make_header,
    read_run,
    read_unfinished,
)

CASES = matrix("L0")


def make_run(cases=CASES, state="PASS"):
    lines = tuple(ResultLine(case=c, result=CaseResult(case_id=c.id, state=state)) for c in cases)
    counts = {state: len(lines)}
    return Run(make_header(StepsBackend(), "L0", CASES, len(lines)), lines, Footer(counts=counts, seconds=1.0))


def stored(folder, run):
    folder.mkdir()
    (folder / "results.jsonl").write_bytes(encode_run(run))
    return folder


def test_shards_that_cover_the_level_merge_to_one_run(tmp_path):
    shards = [stored(tmp_path / "a", make_run(CASES[:4])), stored(tmp_path / "b", make_run(CASES[3:]))]
    merged = bundles.merge_runs(shards)
    assert {line.case.id for line in merged.lines} == {case.id for case in CASES}
    assert merged.header.selected == merged.footer.counts["PASS"] == len(CASES)


def test_a_missing_case_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"1 cases are in no shard, .*" + CASES[-1].id):
        bundles.merge_runs([stored(tmp_path / "a", make_run(CASES[:-1]))])


def test_shards_of_two_devices_are_refused(tmp_path):
    run = make_run()
    other = Run(msgspec.structs.replace(run.header, device="another"), run.lines, run.footer)
    with pytest.raises(ValueError, match="device is not that of"):
        bundles.merge_runs([stored(tmp_path / "a", run), stored(tmp_path / "b", other)])


def test_shards_that_disagree_on_a_case_are_refused(tmp_path):
    with pytest.raises(ValueError, match="is PASS in one shard and FAIL_value in"):
        bundles.merge_runs([stored(tmp_path / "a", make_run()), stored(tmp_path / "b", make_run(state="FAIL_value"))])


def test_runs_that_differ_are_compared_case_by_case():
    found = bundles.compare_states(make_run(), make_run(state="FAIL_value"))
    assert [(d.case_id, d.first, d.second) for d in found] == [(c.id, "PASS", "FAIL_value") for c in CASES]
    assert bundles.compare_states(make_run(), make_run()) == []


def test_a_whole_bundle_has_no_fault(tmp_path):
    assert bundles.faults_of_bundle(stored(tmp_path / "a", make_run())) == []


def test_an_edited_case_and_an_edited_count_are_faults(tmp_path):
    run = make_run()
    first = run.lines[0]
    edited = ResultLine(case=msgspec.structs.replace(first.case, seed=1), result=first.result)
    bundle = Run(run.header, (edited, *run.lines[1:]), Footer(counts={"PASS": 99}, seconds=1.0))
    faults = bundles.faults_of_bundle(stored(tmp_path / "a", bundle))
    assert faults == [f"{first.case.id}: the case was edited", "the footer's counts are not those of the lines"]


def test_a_cut_run_keeps_its_whole_lines(tmp_path):
    run = make_run()
    path = tmp_path / "results.jsonl"
    lines = [encode_line(line) for line in (run.header, *run.lines[:3])]
    path.write_bytes(b"".join(lines) + encode_line(run.lines[3])[:40])
    unfinished = read_unfinished(path)
    assert unfinished is not None
    assert [line.case.id for line in unfinished[1]] == [case.id for case in CASES[:3]]
    assert engine.results_to_keep(path, run.header, list(CASES)) == unfinished[1]


def test_a_cut_run_of_another_backend_is_not_gone_on_with(tmp_path):
    run = make_run()
    path = tmp_path / "results.jsonl"
    path.write_bytes(encode_line(run.header) + encode_line(run.lines[0]))
    with pytest.raises(ValueError, match="its backend is not that of this run"):
        engine.results_to_keep(path, msgspec.structs.replace(run.header, backend="other"), list(CASES))


def test_a_resumed_run_judges_what_is_missing_and_is_whole(tmp_path):
    options = engine.RunOptions(backend="reference", level="L0", out=tmp_path, workers=1, resume=True)
    header = make_header(StepsBackend(), "L0", CASES, len(CASES))
    kept = ResultLine(case=CASES[0], result=CaseResult(case_id=CASES[0].id, state="FAIL_value"))
    (tmp_path / "results.jsonl").write_bytes(encode_line(header) + encode_line(kept))
    verdict, results = engine.run_matrix(options, lambda result, done, total: None)
    assert [r.state for r in results] == ["FAIL_value", *["PASS"] * (len(CASES) - 1)]
    assert verdict.exit_code == 1
    assert len(read_run(tmp_path / "results.jsonl").lines) == len(CASES)
