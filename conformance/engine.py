"""A run of the matrix: pytest with our plugin, xdist for cores, and a record that grows as cases finish."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.verdict import CaseResult, Finding, State
from attnconform.conformance.plugin import SKIPPED, results_in
from attnconform.conformance.results import (
    Footer,
    Header,
    ResultLine,
    Verdict,
    encode_line,
    make_header,
    read_unfinished,
    verdict_of,
)
from attnconform.conformance.selection import select_cases

Progress = Callable[[CaseResult, int, int], None]  # result, cases done, cases in all
MAX_WORKER_RESTARTS = 10_000


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What `attnconform run` is asked for."""

    backend: str
    level: str = "L1"
    device: str = "cpu"
    workers: int = 1
    select: str = ""
    shard: str = "1/1"
    out: Path = Path("attnconform-results")
    case_timeout: float = 300.0  # seconds
    resume: bool = False  # keep the results of a run that was cut off


@dataclass
class Record:
    """Collects results as workers report them, and writes each to the results file at once."""

    cases: dict[str, Case]
    file: Path
    hang_dir: Path
    progress: Progress
    results: dict[str, CaseResult] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A case's own report, or xdist's report that its worker died."""
        for encoded in results_in(report):
            self.add(msgspec.json.decode(encoded, type=CaseResult))
        if report.when not in ("setup", "call", "teardown") and report.nodeid in self.cases:
            self.add(self.lost(report.nodeid))

    def lost(self, case_id: str) -> CaseResult:
        """The result of a case that took its process with it."""
        state: State = "HANG" if (self.hang_dir / case_id).exists() else "CRASH"
        message = "outlived its time limit" if state == "HANG" else "the process died (signal, exit or device fault)"
        finding = Finding(state=state, clauses=("SAFE-PATH",), message=message, check="isolation")
        return CaseResult(case_id=case_id, state=state, clauses=self.cases[case_id].clauses, findings=(finding,))

    def add(self, result: CaseResult) -> None:
        if result.case_id in self.results:
            return
        self.results[result.case_id] = result
        with self.file.open("ab") as file:
            file.write(encode_line(ResultLine(case=self.cases[result.case_id], result=result)))
        self.progress(result, len(self.results), len(self.cases))


def run_matrix(options: RunOptions, progress: Progress) -> tuple[Verdict, list[CaseResult]]:
    """Judges a backend on a level; writes results.jsonl and junit.xml under options.out.

    Raises ValueError where the backend does not load, or nothing is selected.
    """
    cases = select_cases(options.level, options.select, options.shard)
    backend = load_backend(options.backend, options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    results_file = options.out / "results.jsonl"
    header = make_header(backend, options.level, matrix(options.level), len(cases))
    backend.close()
    kept = results_to_keep(results_file, header) if options.resume else []
    results_file.write_bytes(encode_line(header))
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        record = Record({c.id: c for c in cases}, results_file, Path(scratch), progress)
        for line in kept:
            if line.case.id in record.cases:
                record.add(line.result)
        (Path(scratch) / SKIPPED).write_text("\n".join(record.results))
        run_pytest(options, record, scratch)
    for case in cases:  # a worker that could not even start reports nothing
        if case.id not in record.results:
            record.add(record.lost(case.id))
    results = [record.results[c.id] for c in cases]
    counts: dict[str, int] = {}
    for result in results:
        counts[result.state] = counts.get(result.state, 0) + 1
    with results_file.open("ab") as file:
        file.write(encode_line(Footer(counts=counts, seconds=time.perf_counter() - started)))
    return verdict_of(results), results


def results_to_keep(path: Path, header: Header) -> list[ResultLine]:
    """Results of an unfinished run of the same backend, suite and device. Raises ValueError where it was another."""
    unfinished = read_unfinished(path)
    if unfinished is None:
        return []
    for name in ("suite_hash", "level", "backend", "capabilities", "versions", "device"):
        if getattr(unfinished[0], name) != getattr(header, name):
            raise ValueError(f"{path}: its {name} is not that of this run, so it cannot be resumed")
    return unfinished[1]


class Quiet:
    """Takes pytest's own terminal report away: the run has one of its own."""

    @pytest.hookimpl(trylast=True)  # after the reporter is there, before xdist takes hold of it
    def pytest_configure(self, config: pytest.Config) -> None:
        reporter: Any = config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            config.pluginmanager.unregister(reporter)


def run_pytest(options: RunOptions, record: Record, scratch: str) -> None:
    """One pytest session over an empty folder, whose only items are our cases."""
    empty = Path(scratch) / "empty"
    empty.mkdir()
    arguments = [
        str(empty),
        f"--rootdir={empty}",
        f"--confcutdir={empty}",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
        "-p",
        "attnconform.conformance.plugin",
        f"--numprocesses={options.workers}",
        f"--max-worker-restart={MAX_WORKER_RESTARTS}",
        f"--junit-xml={(options.out / 'junit.xml').resolve()}",
        f"--attn-backend={options.backend}",
        f"--attn-level={options.level}",
        f"--attn-device={options.device}",
        f"--attn-select={options.select}",
        f"--attn-shard={options.shard}",
        f"--attn-timeout={options.case_timeout}",
        f"--attn-hang-dir={scratch}",
    ]
    pytest.main(arguments, plugins=[record, Quiet()])
