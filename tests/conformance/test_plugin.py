"""The plugin from another project: cases are items, ids are node ids, and the project's own tests run beside them."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec

from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.plugin import OWN_CASES, SELECTED_CASES, made_by_engine, selected_cases

SOURCE = Path(__file__).parents[2] / "src"
PLUGIN = "attnconform.conformance.plugin"


def run_pytest(folder, *arguments):
    """pytest in a second project, which loads the plugin by name, as an entry point would."""
    environment = os.environ | {"PYTHONPATH": f"{SOURCE}:{folder}", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def make_project(folder):
    (folder / "test_own.py").write_text("def test_the_projects_own():\n    assert True\n")


def test_every_case_of_the_level_is_an_item_named_by_its_id(miniatures):
    make_project(miniatures)
    done = run_pytest(miniatures, "-v", "--attn-backend", "miniatures:Right", "--attn-level", "L0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout
    assert "test_own.py::test_the_projects_own PASSED" in done.stdout
    lines = [line for line in done.stdout.splitlines() if line.startswith("L0.forward.") and "PASSED" in line]
    assert len(lines) == 6


def test_a_failing_case_fails_its_item_and_prints_clause_and_reproduction(miniatures):
    make_project(miniatures)
    done = run_pytest(miniatures, "--attn-backend", "miniatures:DropsAKey", "--attn-level", "L0", "-n", "1")
    assert done.returncode == 1
    assert "2 failed, 5 passed" in done.stdout
    assert "FAIL_membership [" in done.stdout
    assert "reproduce: attnconform run -b miniatures:DropsAKey --select L0.forward." in done.stdout


def test_clauses_select_cases_by_keyword(miniatures):
    make_project(miniatures)
    done = run_pytest(miniatures, "--attn-backend", "miniatures:Right", "--attn-level", "L0", "-k", "BLOCK-EXPAND")
    assert "1 passed, 6 deselected" in done.stdout


def test_without_a_backend_the_plugin_adds_nothing(miniatures):
    make_project(miniatures)
    done = run_pytest(miniatures)
    assert "1 passed" in done.stdout


def test_a_poisoned_device_costs_a_worker_and_no_other_case(miniatures):
    done = run_pytest(
        miniatures, "--attn-backend", "miniatures:PoisonsTheDevice", "--attn-level", "L0", "-n", "1", "-v"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[gw")]
    passed = {line.split()[-1].replace("::", ".") for line in lines if "PASSED" in line}
    failed = {
        line.split()[-1].replace("::", ".")
        for line in done.stdout.splitlines()
        if line.startswith("[gw") and "FAILED" in line
    }
    assert len(passed) == 4
    assert len(failed) == 2
    assert all("causal" in name for name in failed)


def test_a_poisoned_device_ends_a_session_that_has_no_workers(miniatures):
    done = run_pytest(miniatures, "--attn-backend", "miniatures:PoisonsTheDevice", "--attn-level", "L0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "left this process unfit for other cases" in done.stdout
    assert "1 failed" in done.stdout


def test_an_unknown_backend_is_a_usage_error_of_one_line(miniatures):
    make_project(miniatures)
    done = run_pytest(miniatures, "--attn-backend", "nosuch")
    assert done.returncode == 4
    assert "ERROR: backend is 'nosuch'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_worker_takes_the_cases_that_the_engine_made(tmp_path):
    cases = matrix("L0")[:2]
    (tmp_path / SELECTED_CASES).write_bytes(msgspec.json.encode(cases))
    config = SimpleNamespace(getoption={"--attn-hang-dir": str(tmp_path)}.__getitem__)
    assert selected_cases(config, ()) == cases
    assert made_by_engine(config, OWN_CASES) is None
