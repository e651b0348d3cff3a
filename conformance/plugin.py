"""The pytest plugin: every case of a level is an item, and its id is its node id.

It stays silent unless --attn-backend is given, so that it can be loaded in any project.
"""

import argparse
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

if TYPE_CHECKING:
    from attnconform.conformance.backend import Backend
    from attnconform.conformance.cases.structure import Case

RESULT_PROPERTY = "attnconform"
HANG_EXIT_CODE = 86
SKIPPED = "already-judged"  # in the engine's scratch folder: ids of cases that a resumed run has results of


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnconform", "conformance of sparse attention kernels")
    group.addoption("--attn-backend", help="bundled name or MODULE:CLASS of the backend to judge")
    group.addoption("--attn-level", default="L1", help="level of the matrix (default L1)")
    group.addoption("--attn-device", default="cpu", help="device of the backend (default cpu)")
    group.addoption("--attn-select", default="", help="keep cases whose id contains this, or whose clauses do")
    group.addoption("--attn-shard", default="1/1", metavar="I/N", help="run the I-th of N shards")
    group.addoption("--attn-timeout", type=float, default=300.0, help="seconds after which a case counts as HANG")
    group.addoption("--attn-hang-dir", default="", help=argparse.SUPPRESS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds one item a case. Runs first, so that -k and --deselect see them."""
    if not config.getoption("--attn-backend"):
        return
    from attnconform.conformance.backend import Unavailable
    from attnconform.conformance.selection import select_cases

    try:
        cases = select_cases(
            config.getoption("--attn-level"), config.getoption("--attn-select"), config.getoption("--attn-shard")
        )
        backend = load(config)
    except (ValueError, Unavailable) as error:
        raise pytest.UsageError(str(error)) from None
    judged = already_judged(config)
    cases = [c for c in cases if c.id not in judged]
    items.extend(CaseItem.from_parent(session, name=c.id, nodeid=c.id, case=c, backend=backend) for c in cases)


def already_judged(config: pytest.Config) -> set[str]:
    """Ids that the engine has results of."""
    scratch: str = config.getoption("--attn-hang-dir")
    path = Path(scratch) / SKIPPED
    return set(path.read_text().split()) if scratch and path.exists() else set()


def load(config: pytest.Config) -> "Backend":
    """The backend under judgement."""
    from attnconform.conformance.adapters.registry import load_backend

    return load_backend(config.getoption("--attn-backend"), config.getoption("--attn-device"))


class CaseFailure(Exception):
    """A case that did not conform; its text is the report."""


class CaseItem(pytest.Item):
    """One case before one backend."""

    def __init__(self, *, case: "Case", backend: "Backend", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.case = case
        self.backend = backend
        self.extra_keyword_matches.update(case.clauses)

    def runtest(self) -> None:
        from attnconform.conformance.judge.judge import judge_case
        from attnconform.conformance.report.text import failure_text

        with watchdog(self.config, self.case.id):
            result = judge_case(self.case, self.backend)
        self.user_properties.append((RESULT_PROPERTY, msgspec.json.encode(result).decode()))
        if result.state == "UNSUPPORTED":
            pytest.skip(result.reason)
        if not result.is_conforming:
            raise CaseFailure(failure_text(self.case, result, self.config.getoption("--attn-backend")))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, CaseFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return Path("attnconform"), None, ""  # a name here would be shown with its dots replaced


class watchdog:  # noqa: N801  reads as a word after `with`
    """Ends the process where a case outlives its time; only a worker's process can be lost that way."""

    def __init__(self, config: pytest.Config, case_id: str) -> None:
        self.seconds: float = config.getoption("--attn-timeout")
        self.marker = config.getoption("--attn-hang-dir") and Path(config.getoption("--attn-hang-dir")) / case_id

    def __enter__(self) -> None:
        self.timer = threading.Timer(self.seconds, self.end_process)
        self.timer.daemon = True
        self.timer.start()

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()

    def end_process(self) -> None:
        if self.marker:
            self.marker.touch()
        os._exit(HANG_EXIT_CODE)


def results_in(report: pytest.TestReport) -> Iterator[str]:
    """The JSON of the result that a report carries, if it carries one."""
    for name, value in report.user_properties:
        if name == RESULT_PROPERTY and report.when == "call":
            yield str(value)
