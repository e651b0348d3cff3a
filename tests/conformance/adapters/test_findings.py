"""Every finding in fixtures/findings is there to be judged again, and still is one in its version of the package."""

import importlib.metadata
from functools import cache
from pathlib import Path

import pytest
import torch

from attnconform.conformance.adapters.registry import BUNDLED, load_backend
from attnconform.conformance.backend import Unavailable
from attnconform.conformance.cases.structure import decode_case
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.report.findings import BUNDLED as FILE
from attnconform.conformance.report.findings import PackageFinding, read_findings

FINDINGS = read_findings(FILE)
PAST_A_BOUND = {"BOUND-OUT": "out", "BOUND-LSE": "lse"}  # the output that is past its bound


@cache
def case_file(finding: PackageFinding) -> Path:
    """The minimal case that a finding's one line names."""
    words = finding.repro.split()
    assert words[:2] == ["attnconform", "explain"]
    assert words[3:] == ["-b", finding.backend]
    return FILE.parent / Path(words[2]).name


def slug(finding: PackageFinding) -> str:
    return case_file(finding).stem


@pytest.mark.parametrize("finding", FINDINGS, ids=slug)
def test_a_finding_names_its_case_and_a_bundled_backend(finding: PackageFinding) -> None:
    path = case_file(finding)
    assert decode_case(path.read_bytes(), path.name).id == finding.case
    assert finding.backend in BUNDLED


def test_every_case_beside_the_list_is_of_a_finding() -> None:
    assert {path.name for path in FILE.parent.glob("*.json")} == {case_file(f).name for f in FINDINGS}


@pytest.mark.parametrize("path", sorted(FILE.parent.glob("*.json")), ids=lambda path: path.stem)
def test_the_reference_conforms_where_a_package_does_not(path: Path) -> None:
    result = judge_case(decode_case(path.read_bytes(), path.name), load_backend("reference", "cpu"))
    assert result.state in ("PASS", "REFUSED_OK"), [finding.message for finding in result.findings]


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.mark.parametrize("finding", FINDINGS, ids=slug)
def test_the_judge_reports_it_again_and_names_the_clause(finding: PackageFinding) -> None:
    found = installed_version(finding.package)
    if found != finding.version:
        pytest.skip(f"{finding.package} {finding.version} is not here, but {found}")
    if finding.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    try:
        backend = load_backend(finding.backend, finding.device)
    except Unavailable as missing:
        pytest.skip(str(missing))
    path = case_file(finding)
    result = judge_case(decode_case(path.read_bytes(), path.name), backend)
    assert not result.is_conforming
    if finding.clause in PAST_A_BOUND:  # the judge names what the number stands for, and which number it is
        output = PAST_A_BOUND[finding.clause]
        assert any(f.state == "FAIL_value" and f.message.startswith(f"{output}[") for f in result.findings)
    else:
        assert finding.clause in {clause for f in result.findings for clause in f.clauses}
