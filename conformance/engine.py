"""A run of the matrix: pytest with our plugin, xdist for cores, and a record that grows as cases finish."""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.expectations import load_expectations, with_expectation
from attnconform.conformance.isolation import count_kernel_kills, death_of
from attnconform.conformance.judge.verdict import CaseResult, ExpectedFailure, Finding, State
from attnconform.conformance.plugin import OWN_CASES, SELECTED_CASES, SKIPPED, hang_file, results_in
from attnconform.conformance.process import exit_code_within
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
from attnconform.conformance.selection import own_cases, select_cases

Progress = Callable[[CaseResult, int, int], None]  # result, cases done, cases in all
MAX_WORKER_RESTARTS = 10_000
MAX_BARREN = 3  # times the number of workers
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
PATIENCE = 10.0  # seconds that a worker, whose pipe has closed, has to end
FRAME = re.compile(r'File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>\S+)')


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
    expectations: Path | None = None  # a file of failures that are known and tracked


@dataclass
class Record:
    """Collects results as workers report them, and writes each to the results file at once."""

    cases: dict[str, Case]
    file: Path
    hang_dir: Path
    progress: Progress
    expected: dict[str, ExpectedFailure] = field(default_factory=dict)
    results: dict[str, CaseResult] = field(default_factory=dict)
    kernel_kills: int | None = field(default_factory=count_kernel_kills)
    max_barren: int = MAX_BARREN
    barren: int = 0  # workers in a row that ended before they judged a case

    def pytest_testnodedown(self, error: object) -> None:
        """Gives up where fresh workers end again and again before they judge anything."""
        self.barren += error is not None
        if self.barren > self.max_barren:
            pytest.exit(
                f"{self.barren} workers ended before they judged a case", returncode=pytest.ExitCode.TESTS_FAILED
            )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A case's own report, or xdist's report that its worker died."""
        for encoded in results_in(report):
            self.add(msgspec.json.decode(encoded, type=CaseResult))
        if report.when not in ("setup", "call", "teardown") and report.nodeid in self.cases:
            self.add(self.lost(report.nodeid, exit_code_of(report)))

    def lost(self, case_id: str, returncode: int | None = None) -> CaseResult:
        """The result of a case that took its process with it."""
        stacks = hang_file(self.hang_dir, case_id)
        state: State
        if stacks.exists() and stacks.stat().st_size:
            state, message = "HANG", f"outlived its time limit in {innermost_frame(stacks)}"
        else:
            state, message = death_of(returncode, kernel_killed=self.kernel_killed())
        finding = Finding(state=state, clauses=("SAFE-PATH",), message=message, check="isolation")
        return CaseResult(case_id=case_id, state=state, clauses=self.cases[case_id].clauses, findings=(finding,))

    def kernel_killed(self) -> bool | None:
        """Whether the kernel killed a process for want of memory since this was last asked; None if it is silent."""
        before, self.kernel_kills = self.kernel_kills, count_kernel_kills()
        return None if before is None or self.kernel_kills is None else self.kernel_kills > before

    def add(self, result: CaseResult) -> None:
        """Writes a result, unless the case has one."""
        if result.case_id in self.results:
            return
        result = with_expectation(result, self.expected)
        with self.file.open("ab") as file:
            file.write(encode_line(ResultLine(case=self.cases[result.case_id], result=result)))
        self.take(result)

    def take(self, result: CaseResult) -> None:
        """Counts a result that the file has."""
        self.barren = 0
        self.results[result.case_id] = result
        self.progress(result, len(self.results), len(self.cases))


def exit_code_of(report: pytest.TestReport) -> int | None:
    """How the worker of a report ended, as subprocess has it; None where it cannot be told."""
    node = getattr(report, "node", None)
    popen = getattr(getattr(getattr(node, "gateway", None), "_io", None), "popen", None)
    return None if popen is None else exit_code_within(popen, PATIENCE)


def innermost_frame(stacks: Path) -> str:
    """Function and line at which the case's thread stood, of the stacks that faulthandler left."""
    main = stacks.read_text(errors="replace").rpartition("(most recent call first):")[2]
    frame = FRAME.search(main)
    return f"{frame['function']}, {Path(frame['file']).name} line {frame['line']}" if frame else "code without a stack"


def run_matrix(options: RunOptions, progress: Progress) -> tuple[Verdict, list[CaseResult]]:
    """Judges a backend on a level; writes results.jsonl and junit.xml under options.out.

    Raises ValueError where the backend does not load, or nothing is selected.
    """
    backend = load_backend(options.backend, options.device)
    own = own_cases(options.level, options.select, backend.capabilities)
    cases = select_cases(options.level, options.select, options.shard, own)
    options.out.mkdir(parents=True, exist_ok=True)
    results_file = options.out / "results.jsonl"
    header = make_header(backend, options.level, matrix(options.level), len(cases))
    backend.close()
    expected = expected_failures(options, own)
    kept = results_to_keep(results_file, header, cases) if options.resume else []
    kept = [msgspec.structs.replace(line, result=with_expectation(line.result, expected)) for line in kept]
    begin_results(results_file, header, kept)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        record = Record({c.id: c for c in cases}, results_file, Path(scratch), progress, expected)
        record.max_barren = MAX_BARREN * options.workers
        for line in kept:
            record.take(line.result)
        (Path(scratch) / SKIPPED).write_text("\n".join(record.results))
        # workers need not make them again
        (Path(scratch) / OWN_CASES).write_bytes(msgspec.json.encode(own))
        (Path(scratch) / SELECTED_CASES).write_bytes(msgspec.json.encode(cases))
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


def expected_failures(options: RunOptions, own: Sequence[Case] = ()) -> dict[str, ExpectedFailure]:
    """The expectations that a run was given, by case id; `own` are the cases of the backend's own domain."""
    if options.expectations is None:
        return {}
    return load_expectations(
        options.expectations, level=options.level, backend=options.backend, device=options.device, own=own
    )


def begin_results(path: Path, header: Header, kept: list[ResultLine]) -> None:
    """A results file with what an earlier run left. A run that ends meanwhile leaves the earlier file as it was."""
    draft = path.with_name(path.name + ".part")
    draft.write_bytes(b"".join([encode_line(header), *(encode_line(line) for line in kept)]))
    draft.replace(path)


def results_to_keep(path: Path, header: Header, cases: list[Case]) -> list[ResultLine]:
    """Results that an unfinished run has of the cases. Raises ValueError where suite, backend or device differ."""
    unfinished = read_unfinished(path)
    if unfinished is None:
        return []
    for name in ("suite_hash", "level", "backend", "capabilities", "versions", "device"):
        if getattr(unfinished[0], name) != getattr(header, name):
            raise ValueError(f"{path}: its {name} is not that of this run, so it cannot be resumed")
    wanted = {case.id for case in cases}
    return [line for line in unfinished[1] if line.case.id in wanted]


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
        *([f"--attn-expectations={options.expectations.resolve()}"] if options.expectations else []),
    ]
    with threads_shared_out(options.workers):
        ended = pytest.main(arguments, plugins=[record, Quiet()])
    if ended == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt  # what is recorded stays, without a footer: the run can be resumed


@contextmanager
def threads_shared_out(workers: int) -> Iterator[None]:
    """Workers that start meanwhile have a share of the cores each, for torch and for BLAS, unless the user says so.

    More threads than cores wait for one another: small cases take several times as long.
    """
    share = str(max((os.cpu_count() or 1) // workers, 1))
    unset = [name for name in THREAD_VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, share))
    try:
        yield
    finally:
        for name in unset:
            os.environ.pop(name, None)
