"""Many runs on one page: who conforms to what, where backends disagree, and what was found in released packages."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path

from jinja2 import Environment

from attnconform.conformance.bundles import RESULTS
from attnconform.conformance.clauses import CLAUSES
from attnconform.conformance.judge.verdict import NOT_RUN, CaseResult
from attnconform.conformance.report.findings import (
    BUNDLED,
    FindingsFile,
    KnownFault,
    NotRun,
    PackageFinding,
    Withdrawn,
    found_of,
    known_faults,
    read_findings_file,
)
from attnconform.conformance.report.html import ClauseRow, clause_rows
from attnconform.conformance.results import Run, Verdict, read_run_so_far, verdict_of

FORMATS = {".md": "results.md.j2", ".html": "results.html.j2"}
SAME = ("schema_version", "suite_version")  # of every run on a page; cases are told apart by their ids
CONFORMS = "conforms"
OF_THE_SUITE = "HARNESS_ERROR"  # says nothing of a backend


@dataclass(frozen=True)
class Column:
    """One run on the page. Neither withdrawn cases nor faults of the suite's own are counted."""

    label: str
    run: Run
    verdict: Verdict
    not_judged: int  # cases that a fault of the suite's own kept from being judged
    clauses: dict[str, ClauseRow]
    blamed: Counter[str]  # clause -> cases that do not conform, with a finding that names it first
    results: dict[str, CaseResult]  # by case id, those that ran

    @property
    def versions(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.run.header.versions.items())

    @property
    def words(self) -> str:
        """The verdict; a run that was cut off, or was not judged in all its cases, is never said to conform."""
        verdict, run = self.verdict, self.run
        parts = ["undecided" if self.is_partial and not verdict.failing else verdict.words.lower()]
        if verdict.expected:
            parts.append(f"{verdict.expected} expected failures")
        if run.is_cut_off:
            parts.append(f"cut off after {len(run.lines)} of {run.header.selected} cases")
        if self.not_judged:
            parts.append(f"{self.not_judged} not judged by a fault of the suite's own")
        return ", ".join(parts)

    @property
    def is_partial(self) -> bool:
        return self.run.is_cut_off or self.not_judged > 0

    @property
    def pass_rate(self) -> float | None:
        """Conforming of those that ran; None where nothing did."""
        return self.verdict.conforming / self.verdict.ran if self.verdict.ran else None


@dataclass(frozen=True)
class Contested:
    """A case on which backends differ."""

    case_id: str
    outcomes: dict[str, str]  # label -> CONFORMS, or the state; only those that ran it
    why: str  # the first finding of the first that fails


@dataclass(frozen=True)
class Page:
    """Everything that the templates print."""

    columns: list[Column]
    clauses: list[str]  # that some run exercises, in the order of SPEC.md
    contested: list[Contested]
    shared: int  # cases that at least two runs ran
    findings: tuple[PackageFinding, ...]
    expected: list[tuple[KnownFault, tuple[PackageFinding, ...]]]
    withdrawn: list[Withdrawn]  # those that some run here has
    not_run: list[NotRun]  # those of them that no run here is of

    @property
    def suite(self) -> str:
        return self.columns[0].run.header.suite_version

    @property
    def is_of_several_matrices(self) -> bool:
        """Whether runs of one level are over different cases."""
        matrices = {(column.run.header.level, column.run.header.suite_hash) for column in self.columns}
        return len(matrices) > len({level for level, _ in matrices})


def results_command(paths: Iterable[Path], *, findings: Path | None, out: Path) -> int:
    """Writes the page of some runs; 0. Raises ValueError for anything that does not belong on one page."""
    if out.suffix not in FORMATS:
        raise ValueError(f"--out is {out}, but must end in {' or '.join(FORMATS)}")
    found = read_findings_file(findings) if findings is not None else bundled_findings()
    page = make_page(read_runs(result_files(paths)), found)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(render(page, FORMATS[out.suffix]), encoding="utf-8")
    return 0


def bundled_findings() -> FindingsFile:
    """The findings that come with the suite."""
    return read_findings_file(BUNDLED) if BUNDLED.exists() else FindingsFile()


def result_files(paths: Iterable[Path]) -> list[Path]:
    """Every results file that the paths name or hold. Raises ValueError for a path without any."""
    files = []
    for path in paths:
        found = sorted(path.rglob(RESULTS)) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"{path} holds no {RESULTS}")
        files += found
    return files


def read_runs(files: list[Path]) -> list[Run]:
    """The runs, whole or cut off, by backend. Raises ValueError where they are of different versions of the suite.

    Matrices may differ: a case's id holds a digest of its content, so what is compared are equal cases.
    """
    runs = [read_run_so_far(file) for file in files]
    for file, run in zip(files, runs, strict=True):
        for name in SAME:
            mine, first = getattr(run.header, name), getattr(runs[0].header, name)
            if mine != first:
                raise ValueError(f"{file}: {name} is {mine}, but that of {files[0]} is {first}: one page, one suite")
    return sorted(runs, key=lambda run: (run.header.backend, run.header.device, run.header.level, run.header.started))


def make_page(runs: list[Run], found: FindingsFile) -> Page:
    """What the page says. Raises ValueError for a run that is there twice."""
    withdrawn = frozenset(entry.case for entry in found.withdrawn)
    columns = [make_column(label, run, withdrawn) for label, run in zip(labels(runs), runs, strict=True)]
    backends = {run.header.backend for run in runs}
    used = {clause for column in columns for clause in (*column.clauses, *column.blamed)}
    return Page(
        columns=columns,
        clauses=[clause for clause in CLAUSES if clause in used],
        contested=contested(columns),
        shared=len(shared_cases(columns)),
        findings=found.finding,
        expected=[(known, found_of(known, found.finding)) for known in known_faults()],
        withdrawn=[entry for entry in found.withdrawn if any(has_case(run, entry.case) for run in runs)],
        not_run=[entry for entry in found.not_run if entry.backend not in backends],
    )


def labels(runs: list[Run]) -> list[str]:
    """A name for each run: its backend, with as much of device, level and start as tells it from the others."""
    for fields in (("backend",), ("backend", "device"), ("backend", "device", "level", "started")):
        found = [", ".join(getattr(run.header, field) for field in fields) for run in runs]
        if len(set(found)) == len(found):
            return found
    twice = next(label for label in found if found.count(label) > 1)
    raise ValueError(f"the run {twice} is given twice")


def make_column(label: str, run: Run, withdrawn: frozenset[str]) -> Column:
    """One run's part of the page."""
    lines = [line for line in run.lines if line.case.id not in withdrawn]
    judged = tuple(line for line in lines if line.result.state != OF_THE_SUITE)
    counted = Run(run.header, judged, run.footer)
    return Column(
        label=label,
        run=run,
        verdict=verdict_of(counted.results),
        not_judged=len(lines) - len(judged),
        clauses={row.id: row for row in clause_rows(counted)},
        blamed=Counter(clause for result in counted.results for clause in result.named_clauses),
        results={result.case_id: result for result in counted.results if result.state not in NOT_RUN},
    )


def has_case(run: Run, case_id: str) -> bool:
    return any(line.case.id == case_id for line in run.lines)


def shared_cases(columns: list[Column]) -> list[str]:
    """Cases that at least two runs ran, by id."""
    every = sorted({case_id for column in columns for case_id in column.results})
    return [case_id for case_id in every if sum(case_id in column.results for column in columns) > 1]


def contested(columns: list[Column]) -> list[Contested]:
    """Cases with more than one outcome; those that most backends conform on come first."""
    found = []
    for case_id in shared_cases(columns):
        results = {column.label: column.results[case_id] for column in columns if case_id in column.results}
        outcomes = {label: outcome(result) for label, result in results.items()}
        if len(set(outcomes.values())) > 1:
            found.append(Contested(case_id, outcomes, why_of(results.values())))
    return sorted(found, key=lambda c: (sum(x != CONFORMS for x in c.outcomes.values()), c.case_id))


def outcome(result: CaseResult) -> str:
    """What is compared: every way to conform is one."""
    return CONFORMS if result.is_conforming else result.state


def why_of(results: Iterable[CaseResult]) -> str:
    """The clauses and the message of the first finding against a case."""
    failing = next(result for result in results if not result.is_conforming)
    if not failing.findings:
        return failing.reason
    finding = failing.findings[0]
    return f"[{', '.join(finding.clauses[:2])}] {finding.message}"


def clause_cell(column: Column, clause: str) -> str:
    """conforming / run, and how often it is blamed; a dot where no case of it is declared, empty where none exists."""
    row, blamed = column.clauses.get(clause), column.blamed[clause]
    ran = f"{row.good}/{row.ran}" if row is not None and row.ran else ""
    texts = [ran, f"blamed {blamed}" if blamed else ""]
    return ", ".join(text for text in texts if text) or ("" if row is None else "·")


def cell_class(column: Column, clause: str) -> str:
    """The page's style of a cell."""
    row = column.clauses.get(clause)
    if column.blamed[clause]:
        return "bad"
    if row is None or not row.ran:
        return "off"
    return "good" if row.good == row.ran else "due"


def percent(share: float | None) -> str:
    """A share, never rounded up to all nor down to none."""
    if share is None:
        return "nothing ran"
    return f"{min(max(round(100 * share, 1), 0.1), 99.9):.1f} %" if 0 < share < 1 else f"{100 * share:.0f} %"


def day(started: str) -> str:
    """The day of a time stamp."""
    return datetime.fromisoformat(started).date().isoformat()


def table_text(text: object) -> str:
    """A text as a cell of a Markdown table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def render(page: Page, template: str) -> str:
    """The page; in HTML, text from backends is escaped."""
    source = resources.files("attnconform.conformance.report").joinpath(template).read_text(encoding="utf-8")
    environment = Environment(autoescape=".html" in template, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "day": day, "cell": table_text}
    return environment.from_string(source).render(
        page=page, titles=CLAUSES, clause_cell=clause_cell, cell_class=cell_class, conforms=CONFORMS
    )
