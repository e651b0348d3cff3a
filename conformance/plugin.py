"""The pytest plugin: every case of a level is an item, and its id is its node id.

It stays silent unless --attn-backend is given, so that it can be loaded in any project.
"""

import argparse
import faulthandler
import sys
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec
import pytest

if TYPE_CHECKING:
    from attnconform.conformance.backend import Backend
    from attnconform.conformance.cases.structure import Case
    from attnconform.conformance.judge.verdict import CaseResult, ExpectedFailure

RESULT_PROPERTY = "attnconform"
SPOILT_EXIT_CODE = 87  # of a worker that ends itself after a case, so that a fresh one takes the rest
SPOILT = pytest.StashKey[bool]()  # on an item: its case left the process unfit for others
# in the engine's scratch folder: ids of cases that a resumed run has results of; cases of the backend's own domain; all
# that the run takes
SKIPPED, OWN_CASES, SELECTED_CASES = "already-judged", "own-cases.json", "selected-cases.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("attnconform", "conformance of sparse attention kernels")
    group.addoption("--attn-backend", help="bundled name or MODULE:CLASS of the backend to judge")
    group.addoption("--attn-level", default="L1", help="level of the matrix (default L1)")
    group.addoption("--attn-device", default="cpu", help="device of the backend (default cpu)")
    group.addoption("--attn-select", default="", help="keep cases whose id contains this, or whose clauses do")
    group.addoption("--attn-shard", default="1/1", metavar="I/N", help="run the I-th of N shards")
    group.addoption("--attn-timeout", type=float, default=300.0, help="seconds after which a case counts as HANG")
    group.addoption("--attn-expectations", metavar="FILE", help="TOML file of failures that are known and tracked")
    group.addoption("--attn-hang-dir", default="", help=argparse.SUPPRESS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Adds one item a case. Runs first, so that -k and --deselect see them."""
    if not config.getoption("--attn-backend"):
        return
    from attnconform.conformance.backend import Unavailable

    try:
        backend = load(config)
        config.add_cleanup(backend.close)
        own = own_domain_of(config, backend)
        cases = selected_cases(config, own)
        expected = load_expected(config, own)
    except (ValueError, Unavailable) as error:
        raise pytest.UsageError(str(error)) from None
    judged = already_judged(config)
    cases = [c for c in cases if c.id not in judged]
    for case in cases:
        expectation = expected.get(case.id)
        item = CaseItem.from_parent(
            session, name=case.id, nodeid=case.id, case=case, backend=backend, expectation=expectation
        )
        items.append(item)


def pytest_configure(config: pytest.Config) -> None:
    """A worker may be the one to die where memory runs out; the process that keeps the record may not."""
    if config.getoption("--attn-backend") and is_worker(config):
        from attnconform.conformance.isolation import prefer_as_victim

        prefer_as_victim()


def is_worker(config: pytest.Config) -> bool:
    """Whether this process is one of xdist's, which are replaced when they end."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Ends the process after a case that spoilt it.

    The case's own report has been sent by now, and the case is not yet off the worker's list: so it is this case, and
    none of those to come, that the end of the process is laid to.
    """
    done = yield
    if not item.stash.get(SPOILT, False):
        return done
    from attnconform.conformance.isolation import end_process

    if is_worker(item.config):
        end_process(SPOILT_EXIT_CODE)
    pytest.exit(f"{item.nodeid} left this process unfit for other cases; with -n 1 it would be replaced", returncode=1)


def already_judged(config: pytest.Config) -> set[str]:
    """Ids that the engine has results of."""
    scratch: str = config.getoption("--attn-hang-dir")
    path = Path(scratch) / SKIPPED
    return set(path.read_text().split()) if scratch and path.exists() else set()


def own_domain_of(config: pytest.Config, backend: "Backend") -> "tuple[Case, ...]":
    """Cases of the backend's own domain: as the engine made them, else made here."""
    from attnconform.conformance.selection import own_cases

    made = made_by_engine(config, OWN_CASES)
    if made is not None:
        return made
    return own_cases(config.getoption("--attn-level"), config.getoption("--attn-select"), backend.capabilities)


def selected_cases(config: pytest.Config, own: "tuple[Case, ...]") -> "Sequence[Case]":
    """The cases of the run: as the engine made them, else made here, which takes seconds."""
    from attnconform.conformance.selection import select_cases

    made = made_by_engine(config, SELECTED_CASES)
    if made is not None:
        return made
    level, select = config.getoption("--attn-level"), config.getoption("--attn-select")
    return select_cases(level, select, config.getoption("--attn-shard"), own)


def made_by_engine(config: pytest.Config, name: str) -> "tuple[Case, ...] | None":
    """Cases that the engine wrote into its scratch folder under a name; None where no engine runs."""
    from attnconform.conformance.cases.structure import Case

    scratch: str = config.getoption("--attn-hang-dir")
    path = Path(scratch) / name
    return msgspec.json.decode(path.read_bytes(), type=tuple[Case, ...]) if scratch and path.exists() else None


def load_expected(config: pytest.Config, own: "tuple[Case, ...]") -> "dict[str, ExpectedFailure]":
    """Failures that are known, by case id."""
    from attnconform.conformance.expectations import load_expectations

    file: str | None = config.getoption("--attn-expectations")
    if not file:
        return {}
    return load_expectations(
        Path(file),
        level=config.getoption("--attn-level"),
        backend=config.getoption("--attn-backend"),
        device=config.getoption("--attn-device"),
        own=own,
    )


def load(config: pytest.Config) -> "Backend":
    """The backend under judgement."""
    from attnconform.conformance.adapters.registry import load_backend

    return load_backend(config.getoption("--attn-backend"), config.getoption("--attn-device"))


class CaseFailure(Exception):
    """A case that did not conform; its text is the report."""


class CaseItem(pytest.Item):
    """One case before one backend."""

    def __init__(
        self, *, case: "Case", backend: "Backend", expectation: "ExpectedFailure | None", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.case = case
        self.backend = backend
        self.expectation = expectation
        self.extra_keyword_matches.update(case.clauses)

    def runtest(self) -> None:
        from attnconform.conformance.report.text import expected_text, failure_text

        result = self.judge()
        self.user_properties.append((RESULT_PROPERTY, msgspec.json.encode(result).decode()))
        if result.state == "UNSUPPORTED":
            pytest.skip(result.reason)
        if result.is_expected_failure:
            pytest.xfail(expected_text(result))
        if result.is_failing:
            raise CaseFailure(failure_text(self.case, result, self.config.getoption("--attn-backend")))

    def judge(self) -> "CaseResult":
        """The verdict, and what was expected of it; notes whether the process is fit for another case."""
        from attnconform.conformance.isolation import is_spoilt, with_device_state
        from attnconform.conformance.judge.judge import judge_case

        with watchdog(self.config, self.case.id):
            result = judge_case(self.case, self.backend)
            result = with_device_state(result, self.backend.device)
        self.stash[SPOILT] = is_spoilt(result)
        return msgspec.structs.replace(result, expected=self.expectation)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, CaseFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return Path("attnconform"), None, ""  # a name here would be shown with its dots replaced


class watchdog:  # noqa: N801  reads as a word after `with`
    """Ends the process where a case outlives its time; only a worker's process can be lost that way.

    The clock is one of faulthandler's, which needs no turn of the interpreter: a backend that hangs while it holds the
    interpreter's lock is ended like any other. It leaves the stacks of all threads behind.
    """

    def __init__(self, config: pytest.Config, case_id: str) -> None:
        self.seconds: float = config.getoption("--attn-timeout")
        scratch: str = config.getoption("--attn-hang-dir")
        self.stacks = hang_file(Path(scratch), case_id) if scratch else None

    def __enter__(self) -> None:
        self.file: TextIO = self.stacks.open("w") if self.stacks else sys.stderr
        faulthandler.dump_traceback_later(self.seconds, exit=True, file=self.file)

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self.stacks:
            self.file.close()
            self.stacks.unlink()


def hang_file(scratch: Path, case_id: str) -> Path:
    """Where the stacks of a case lie that outlived its time; empty while it still runs."""
    return scratch / f"{case_id}.stacks"


def results_in(report: pytest.TestReport) -> Iterator[str]:
    """The JSON of the result that a report carries, if it carries one."""
    for name, value in report.user_properties:
        if name == RESULT_PROPERTY and report.when == "call":
            yield str(value)
