"""The coverage report counts what cases hold, and tells a backend which of its axes leave them out."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import OPTIONAL_AXES, Capabilities, OneOf, Whole
from attnconform.conformance.cases.coverage import Coverage, OperationCoverage, measure, total
from attnconform.conformance.cases.covering import AXES
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.command_line import main
from attnconform.conformance.judge.judge import undeclared


def of(coverage: Coverage, operation: str) -> OperationCoverage:
    """One operation's part."""
    (found,) = (entry for entry in coverage.operations if entry.operation == operation)
    return found


@pytest.mark.parametrize("operation", tuple(AXES))
def test_l1_holds_every_pair_of_core_axes(operation: str) -> None:
    core = [e for e in of(measure("L1", matrix("L1")), operation).pairs if not OPTIONAL_AXES.keys() & set(e.axes)]
    assert core
    assert [entry for entry in core if entry.covered < entry.possible] == []


def test_cases_per_value_add_up() -> None:
    found = of(measure("L1", matrix("L1")), "forward")
    assert found.cases == sum(case.operation == "forward" for case in matrix("L1"))
    for axis in AXES["forward"]:
        assert sum(found.values[axis].values()) == found.cases, axis


def test_cases_that_are_gone_are_missed() -> None:
    kept = [case for case in matrix("L1") if case.axes.get("dtype") != "float16"]
    found = of(measure("L1", kept), "forward")
    assert found.values["dtype"]["float16"] == 0
    gaps = [entry for entry in found.pairs if "dtype" in entry.axes]
    assert all(entry.covered < entry.possible for entry in gaps)
    assert total(found.triples).covered < total(of(measure("L1", matrix("L1")), "forward").triples).covered


def test_no_more_is_covered_than_is_possible() -> None:
    found = of(measure("L1", matrix("L1")), "forward")
    assert all(0 <= entry.covered <= entry.possible for entry in (*found.pairs, *found.triples))


def test_a_declaration_leaves_out_what_the_judge_would_not_run() -> None:
    class Narrow(StepsBackend):
        capabilities = Capabilities(supported={"sink": OneOf(("none",)), "rope": Whole()}, has_backward=False)

    cases = matrix("L1")
    found = measure("L1", cases, Narrow.capabilities, "narrow")
    judged = [c for c in cases if c.operation != "structure" and undeclared(c, Narrow()) is not None]
    assert found.undeclared == len(judged) + sum(
        c.operation == "structure" and undeclared_by_axes(c.axes, Narrow.capabilities) for c in cases
    )
    by_axis = {entry.axis: entry for entry in found.left_out}
    assert "rope" not in by_axis
    assert by_axis["sink"].values == {"logits": sum(c.axes.get("sink") == "logits" for c in cases)}
    assert by_axis["operation"].cases == sum(c.operation == "backward" for c in cases)
    assert all(entry.alone <= entry.cases for entry in found.left_out)


def undeclared_by_axes(axes: dict[str, str], capabilities: Capabilities) -> bool:
    """Whether some axis value is not declared."""
    return not all(capabilities.declares(axis, value) for axis, value in axes.items())


def test_the_command_prints_and_writes_the_same(tmp_path: Path) -> None:
    path = tmp_path / "coverage.json"
    done = CliRunner().invoke(
        main, ["cases", "--level", "L1", "-b", "flex-eager", "--device", "cpu", "--json", str(path)]
    )
    assert done.exit_code == 0, done.output
    written = json.loads(path.read_text())
    assert written["cases"] == len(matrix("L1"))
    assert written["backend"] == "flex-eager"
    assert any(entry["axis"] == "sink" for entry in written["left_out"])


def test_an_unknown_level_is_refused_in_one_line() -> None:
    done = CliRunner().invoke(main, ["cases", "--level", "L9"])
    assert done.exit_code == 2
    assert "level is L9" in done.output
