"""What is done with finished runs: join shards, hold two runs together, check a bundle that somebody sent."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case, case_digest
from attnconform.conformance.judge.verdict import CaseResult, State
from attnconform.conformance.results import Footer, Header, ResultLine, Run, read_run, suite_hash
from attnconform.conformance.selection import own_cases

RESULTS = "results.jsonl"
SAME_IN_SHARDS = ("suite_hash", "level", "backend", "capabilities", "versions", "device")


def merge_runs(folders: list[Path]) -> Run:
    """One run of all shards. Raises ValueError where they differ in device or suite, or where a case is missing."""
    runs = [read_run(folder / RESULTS) for folder in folders]
    first = runs[0].header
    for folder, run in zip(folders, runs, strict=True):
        for name in SAME_IN_SHARDS:
            if getattr(run.header, name) != getattr(first, name):
                raise ValueError(f"{folder}: {name} is not that of {folders[0]}")
    lines: dict[str, ResultLine] = {}
    for folder, run in zip(folders, runs, strict=True):
        for line in run.lines:
            known = lines.setdefault(line.case.id, line)
            if known.result.state != line.result.state:
                raise ValueError(
                    f"{line.case.id} is {known.result.state} in one shard and {line.result.state} in {folder}"
                )
    missing = [case.id for case in cases_of_run(first) if case.id not in lines]
    if missing:
        raise ValueError(f"{len(missing)} cases are in no shard, {missing[0]} for one")
    counts = Counter[str](line.result.state for line in lines.values())
    footer = Footer(counts=dict(counts), seconds=sum(run.footer.seconds for run in runs))
    return Run(first.announcing(len(lines)), tuple(lines.values()), footer)


def cases_of_run(header: Header) -> tuple[Case, ...]:
    """Every case that a whole run takes: the common ones of its level, and those of the domain that it declares."""
    return (*matrix(header.level), *own_cases(header.level, "", header.capabilities))


@dataclass(frozen=True)
class Disagreement:
    """A case on which two runs differ."""

    case_id: str
    first: State
    second: State


def compare_states(a: Run, b: Run) -> list[Disagreement]:
    """Cases of both runs with different states. Raises ValueError where the two are of different suites."""
    if a.header.suite_hash != b.header.suite_hash:
        raise ValueError(f"the suites differ: {a.header.suite_hash} and {b.header.suite_hash}")
    seconds: dict[str, CaseResult] = {result.case_id: result for result in b.results}
    return [
        Disagreement(first.case_id, first.state, seconds[first.case_id].state)
        for first in a.results
        if first.case_id in seconds and seconds[first.case_id].state != first.state
    ]


def faults_of_bundle(folder: Path) -> list[str]:
    """What keeps a bundle from being a whole, unedited run of this suite; nothing where it is one."""
    run = read_run(folder / RESULTS)
    cases = matrix(run.header.level)
    faults = []
    if run.header.suite_hash != suite_hash(cases):
        faults.append(f"suite_hash is {run.header.suite_hash}, but this suite's is {suite_hash(cases)}")
    known, given = {case.id for case in cases_of_run(run.header)}, {line.case.id for line in run.lines}
    if known - given:
        faults.append(f"{len(known - given)} cases are missing, {min(known - given)} for one")
    if given - known:
        faults.append(f"{len(given - known)} cases are not of this suite, {min(given - known)} for one")
    faults += [f"{x.case.id}: the case was edited" for x in run.lines if not x.case.id.endswith(case_digest(x.case))]
    faults += [f"{x.case.id}: its result is of another case" for x in run.lines if x.result.case_id != x.case.id]
    if dict(Counter(line.result.state for line in run.lines)) != run.footer.counts:
        faults.append("the footer's counts are not those of the lines")
    return faults
