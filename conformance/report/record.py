"""What the page of many runs keeps of one: small enough to be committed, where results.jsonl is megabytes."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from attnconform.conformance.clauses import CLAUSES
from attnconform.conformance.judge.verdict import NOT_RUN, CaseResult
from attnconform.conformance.report.html import clause_rows
from attnconform.conformance.results import Run, Verdict, read_run_so_far, verdict_of

SCHEMA_VERSION = 1
OF_THE_SUITE = "HARNESS_ERROR"  # says nothing of a backend
STARTS = re.compile(rb'\s*\{\s*"type"\s*:\s*"record"')


class Marks(NamedTuple):
    """How one clause fared. None run and none blamed: the backend declares no case of it."""

    good: int  # cases that exercise it and conform
    ran: int  # cases that exercise it and were run
    blamed: int  # cases with a finding that names it first, whether they are said to exercise it or not


class Failure(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A case that does not conform, and the first finding against it."""

    case: str
    state: str
    clauses: tuple[str, ...] = ()  # the likeliest two
    message: str = ""

    @property
    def why(self) -> str:
        return f"[{', '.join(self.clauses)}] {self.message}" if self.clauses else self.message


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="record"):
    """One run, as the page needs it. Neither withdrawn cases nor faults of the suite's own are counted."""

    schema_version: int = SCHEMA_VERSION
    suite_version: str
    suite_hash: str
    level: str
    backend: str
    device: str
    versions: dict[str, str]
    started: str
    selected: int  # cases that the run was to have
    reached: int  # those that it has a result of
    own_faults: int  # of these, those that a fault of the suite's own kept from being judged
    withdrawn: tuple[str, ...] = ()  # of these, those withdrawn when this was written
    # "where runs differed": of a run that is known from a page alone, which named the cases on which its runs differed.
    # All such records are of one page: a case that one of them has is a case that the others have or did not run.
    outcomes: Literal["all", "where runs differed"] = "all"
    counts: dict[str, int]  # state -> cases; empty where not all outcomes are known
    verdict: Verdict
    clauses: dict[str, Marks]
    conforming: dict[str, tuple[str, ...]]  # state -> ids; "conforms" where it is not known which
    failing: tuple[Failure, ...]

    @property
    def is_cut_off(self) -> bool:
        """Whether the run ended before its last case."""
        return self.reached < self.selected

    @property
    def is_complete(self) -> bool:
        """Whether the outcome of every case that ran is known."""
        return self.outcomes == "all"

    @property
    def conforming_cases(self) -> list[str]:
        return [case for cases in self.conforming.values() for case in cases]

    @property
    def file_name(self) -> str:
        """One for each backend, device and level: a newer run takes the older one's place."""
        parts = (re.sub(r"[^a-z0-9_.]+", "-", part.lower()) for part in (self.backend, self.device, self.level))
        return "-".join(part.strip("-.") for part in parts) + ".json"


def record_of(run: Run, withdrawn: frozenset[str] = frozenset()) -> Record:
    """What a page keeps of a run, without the cases that were withdrawn."""
    header = run.header
    kept = [line for line in run.lines if line.case.id not in withdrawn]
    judged = tuple(line for line in kept if line.result.state != OF_THE_SUITE)
    counted = Run(header, judged, run.footer)
    ran = [result for result in counted.results if result.state not in NOT_RUN]
    conforming = [result for result in ran if result.is_conforming]
    return Record(
        suite_version=header.suite_version,
        suite_hash=header.suite_hash,
        level=header.level,
        backend=header.backend,
        device=header.device,
        versions=header.versions,
        started=header.started,
        selected=header.selected,
        reached=len(run.lines),
        own_faults=len(kept) - len(judged),
        withdrawn=tuple(sorted(line.case.id for line in run.lines if line.case.id in withdrawn)),
        counts=dict(sorted(Counter(result.state for result in counted.results).items())),
        verdict=verdict_of(counted.results),
        clauses={row.id: Marks(row.good, row.ran, row.broken) for row in clause_rows(counted)},
        conforming={
            state: tuple(sorted(result.case_id for result in conforming if result.state == state))
            for state in sorted({result.state for result in conforming})
        },
        failing=tuple(sorted((failure_of(r) for r in ran if not r.is_conforming), key=lambda failure: failure.case)),
    )


def failure_of(result: CaseResult) -> Failure:
    """A case that does not conform, with the first finding against it, or why there is none."""
    if not result.findings:
        return Failure(case=result.case_id, state=result.state, message=result.reason)
    first = result.findings[0]
    return Failure(case=result.case_id, state=result.state, clauses=first.clauses[:2], message=first.message)


def write_records(records: Iterable[Record], folder: Path) -> None:
    """A file for each. Raises ValueError, and writes nothing, where two would be one file."""
    files: dict[str, Record] = {}
    for record in records:
        if record.file_name in files:
            raise ValueError(f"two runs of {record.backend} would both be {folder / record.file_name}")
        files[record.file_name] = record
    folder.mkdir(parents=True, exist_ok=True)
    for name, record in files.items():
        (folder / name).write_bytes(msgspec.json.encode(record) + b"\n")


def is_record(path: Path) -> bool:
    """Whether a file says that it is a record, of whatever schema."""
    with path.open("rb") as file:
        return STARTS.match(file.read(64)) is not None


def read_record(path: Path) -> Record:
    """A record. Raises ValueError, in one line that names the file, where it is of another schema or not sound."""
    raw = path.read_bytes()
    try:
        version = msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).get("schema_version")
        schema = None if version is None else msgspec.json.decode(version, type=int)
        if schema is not None and schema != SCHEMA_VERSION:
            raise ValueError(f"{path}: schema_version of the record is {schema}, but this reads {SCHEMA_VERSION}")
        record = msgspec.json.decode(raw, type=Record)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is not a record: {error}") from None
    wrong = contradiction(record)
    if wrong:
        raise ValueError(f"{path} is not a record: {wrong}")
    return record


def contradiction(record: Record) -> str:
    """What in a record cannot be, or nothing: a number that was changed by hand, or a clause that is no more."""
    unknown = [clause for clause in record.clauses if clause not in CLAUSES]
    cases = [*record.conforming_cases, *(failure.case for failure in record.failing)]
    named, verdict = len(cases), record.verdict
    if unknown:
        return f"it counts {unknown[0]}, which SPEC.md does not have"
    if len(set(cases)) < named:
        return "it has a case twice"
    if named > verdict.ran or (record.is_complete and named != verdict.ran):
        return f"it has the outcomes of {named} cases, but its verdict is on {verdict.ran}"
    if verdict.ran + verdict.unsupported + record.own_faults + len(record.withdrawn) != record.reached:
        return f"its counts are not of the {record.reached} cases that it reached"
    if record.is_complete and sum(record.counts.values()) != verdict.ran + verdict.unsupported:
        return "its states are not of the cases that it counts"
    return ""


def read_record_or_run(path: Path, withdrawn: frozenset[str]) -> Record:
    """The record in a file, or that of the run in it, whole or cut off. Raises ValueError where it is neither."""
    try:
        if not is_record(path):
            return record_of(read_run_so_far(path), withdrawn)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    record = read_record(path)
    late = sorted(withdrawn.intersection([*record.conforming_cases, *(failure.case for failure in record.failing)]))
    if late:
        raise ValueError(f"{path} counts {late[0]}, which is withdrawn: write it anew from its run")
    return record
