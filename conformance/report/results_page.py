"""Many runs on one page: who conforms to what, where backends disagree, and what was found in released packages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path

from jinja2 import Environment

from attnconform.conformance.bundles import RESULTS
from attnconform.conformance.clauses import CLAUSES
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
from attnconform.conformance.report.record import (
    Failure,
    Marks,
    Record,
    is_record,
    read_record_or_run,
    record_of,
    write_records,
)
from attnconform.conformance.results import Run, Verdict

FORMATS = {".md": "results.md.j2", ".html": "results.html.j2"}
CONFORMS = "conforms"
UNKNOWN = "?"  # of a run that may or may not have run the case: no agreement, and no disagreement


@dataclass(frozen=True)
class Column:
    """One run on the page."""

    label: str
    record: Record
    failures: dict[str, Failure]  # by case id
    outcomes: dict[str, str]  # case id -> CONFORMS, or the state; those that ran, as far as they are known

    @property
    def verdict(self) -> Verdict:
        return self.record.verdict

    @property
    def clauses(self) -> dict[str, Marks]:
        return self.record.clauses

    @property
    def versions(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.record.versions.items())

    @property
    def words(self) -> str:
        """The verdict; a run that was cut off, or was not judged in all its cases, is never said to conform."""
        verdict, record = self.verdict, self.record
        parts = ["undecided" if self.is_partial and not verdict.failing else verdict.words.lower()]
        if verdict.expected:
            parts.append(f"{verdict.expected} expected failures")
        if record.is_cut_off:
            parts.append(f"cut off after {record.reached} of {record.selected} cases")
        if record.own_faults:
            parts.append(f"{record.own_faults} not judged by a fault of the suite's own")
        return ", ".join(parts)

    @property
    def is_partial(self) -> bool:
        return self.record.is_cut_off or self.record.own_faults > 0

    @property
    def pass_rate(self) -> float | None:
        """Conforming of those that ran; None where nothing did."""
        return self.verdict.conforming / self.verdict.ran if self.verdict.ran else None


@dataclass(frozen=True)
class Contested:
    """A case on which backends differ."""

    case_id: str
    outcomes: dict[str, str]  # label -> CONFORMS, the state, or UNKNOWN; nothing of a run that did not run it
    why: str  # the first finding of the first that fails and says one


@dataclass(frozen=True)
class Page:
    """Everything that the templates print."""

    columns: list[Column]
    clauses: list[str]  # that some run exercises, in the order of SPEC.md
    contested: list[Contested]
    shared: int  # cases that at least two runs ran, as far as that is known
    findings: tuple[PackageFinding, ...]
    expected: list[tuple[KnownFault, tuple[PackageFinding, ...]]]
    withdrawn: list[Withdrawn]  # those that some run here has
    not_run: list[NotRun]  # those of them that no run here is of

    @property
    def suite(self) -> str:
        return self.columns[0].record.suite_version

    @property
    def incomplete(self) -> int:
        """Runs of which some outcomes are not known."""
        return sum(not column.record.is_complete for column in self.columns)

    @property
    def is_of_several_matrices(self) -> bool:
        """Whether runs of one level are over different cases."""
        matrices = {(column.record.level, column.record.suite_hash) for column in self.columns}
        return len(matrices) > len({level for level, _ in matrices})


def results_command(paths: Iterable[Path], *, findings: Path | None, out: Path | None, folder: Path | None) -> int:
    """Writes the page of some runs, their records into a folder, or both; 0.

    Raises ValueError for anything that does not belong on one page, and where there is nothing to write.
    """
    if out is None and folder is None:
        raise ValueError("nothing to write: --out is the page, --record the folder of its records")
    if out is not None and out.suffix not in FORMATS:
        raise ValueError(f"--out is {out}, but must end in {' or '.join(FORMATS)}")
    found = read_findings_file(findings) if findings is not None else bundled_findings()
    records = read_records(result_files(paths), withdrawn_cases(found))
    page = make_page(records, found) if out is not None else None
    if folder is not None:
        write_records(records, folder)
    if page is not None and out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(render(page, FORMATS[out.suffix]), encoding="utf-8")
    return 0


def bundled_findings() -> FindingsFile:
    """The findings that come with the suite."""
    return read_findings_file(BUNDLED) if BUNDLED.exists() else FindingsFile()


def withdrawn_cases(found: FindingsFile) -> frozenset[str]:
    return frozenset(entry.case for entry in found.withdrawn)


def result_files(paths: Iterable[Path]) -> list[Path]:
    """Every results file and every record that the paths name or hold. Raises ValueError for a path without any."""
    files = []
    for path in paths:
        found = sorted(file for file in path.rglob("*") if is_result_file(file)) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"{path} holds no {RESULTS} and no record")
        files += found
    return files


def is_result_file(file: Path) -> bool:
    """Whether a file in a folder is one of the page's; a run leaves others beside its own, in JSON too."""
    return file.name == RESULTS or (file.suffix == ".json" and file.is_file() and is_record(file))


def read_records(files: list[Path], withdrawn: frozenset[str] = frozenset()) -> list[Record]:
    """The runs, whole or cut off, by backend. Raises ValueError where they are of different versions of the suite.

    Matrices may differ: a case's id holds a digest of its content, so what is compared are equal cases.
    """
    records = [read_record_or_run(file, withdrawn) for file in files]
    for file, record in zip(files, records, strict=True):
        mine, first = record.suite_version, records[0].suite_version
        if mine != first:
            raise ValueError(f"{file}: suite_version is {mine}, but that of {files[0]} is {first}: one page, one suite")
    return sorted(records, key=lambda record: (record.backend, record.device, record.level, record.started))


def make_page(runs: Sequence[Run | Record], found: FindingsFile) -> Page:
    """What the page says, of runs and of records alike. Raises ValueError for a run that is there twice."""
    withdrawn = withdrawn_cases(found)
    records = [record_of(run, withdrawn) if isinstance(run, Run) else run for run in runs]
    columns = [make_column(label, record) for label, record in zip(labels(records), records, strict=True)]
    backends = {record.backend for record in records}
    used = {clause for column in columns for clause in column.clauses}
    return Page(
        columns=columns,
        clauses=[clause for clause in CLAUSES if clause in used],
        contested=contested(columns),
        shared=len(shared_cases(columns)),
        findings=found.finding,
        expected=[(known, found_of(known, found.finding)) for known in known_faults()],
        withdrawn=[entry for entry in found.withdrawn if any(entry.case in record.withdrawn for record in records)],
        not_run=[entry for entry in found.not_run if entry.backend not in backends],
    )


def labels(records: list[Record]) -> list[str]:
    """A name for each run: its backend, with as much of device, level and start as tells it from the others."""
    for fields in (("backend",), ("backend", "device"), ("backend", "device", "level", "started")):
        found = [", ".join(getattr(record, field) for field in fields) for record in records]
        if len(set(found)) == len(found):
            return found
    twice = next(label for label in found if found.count(label) > 1)
    raise ValueError(f"the run {twice} is given twice")


def make_column(label: str, record: Record) -> Column:
    """One run's part of the page; every way to conform is one outcome."""
    failures = {failure.case: failure for failure in record.failing}
    outcomes = dict.fromkeys(record.conforming_cases, CONFORMS)
    return Column(label, record, failures, outcomes | {case: failure.state for case, failure in failures.items()})


def shared_cases(columns: list[Column]) -> list[str]:
    """Cases that at least two runs are known to have run, by id."""
    every = sorted({case_id for column in columns for case_id in column.outcomes})
    return [case_id for case_id in every if sum(case_id in column.outcomes for column in columns) > 1]


def contested(columns: list[Column]) -> list[Contested]:
    """Cases with more than one outcome; those that most backends conform on come first."""
    incomplete = [column for column in columns if not column.record.is_complete]
    # of these, an incomplete run that does not tell of a case did not run it
    told = {case_id for column in incomplete for case_id in column.outcomes}
    found = []
    for case_id in shared_cases(columns):
        outcomes = {column.label: column.outcomes[case_id] for column in columns if case_id in column.outcomes}
        if len(set(outcomes.values())) > 1:
            unknown = dict.fromkeys([column.label for column in incomplete if case_id not in told], UNKNOWN)
            found.append(Contested(case_id, outcomes | unknown, why_of(case_id, columns)))
    return sorted(found, key=lambda c: (sum(x not in (CONFORMS, UNKNOWN) for x in c.outcomes.values()), c.case_id))


def why_of(case_id: str, columns: list[Column]) -> str:
    """The clauses and the message of the first finding against a case that a run here tells of."""
    failures = [column.failures[case_id] for column in columns if case_id in column.failures]
    return next((failure.why for failure in failures if failure.why), "")


def clause_cell(column: Column, clause: str) -> str:
    """conforming / run, and how often it is blamed; a dot where no case of it is declared, empty where none exists."""
    marks = column.clauses.get(clause)
    if marks is None:
        return ""
    texts = [f"{marks.good}/{marks.ran}" if marks.ran else "", f"blamed {marks.blamed}" if marks.blamed else ""]
    return ", ".join(text for text in texts if text) or "·"


def cell_class(column: Column, clause: str) -> str:
    """The page's style of a cell."""
    marks = column.clauses.get(clause)
    if marks is None:
        return "off"
    if marks.blamed:
        return "bad"
    if not marks.ran:
        return "off"
    return "good" if marks.good == marks.ran else "due"


def outcome_class(outcome: str) -> str:
    """The page's style of an outcome."""
    return {CONFORMS: "good", UNKNOWN: "off", "": "off"}.get(outcome, "bad")


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
        page=page, titles=CLAUSES, clause_cell=clause_cell, cell_class=cell_class, outcome_class=outcome_class
    )
