"""How good is `explain`? Every deviation is put behind the backend interface under a number, and must be named again.

The explanation sees a backend that gives away nothing but what it computes; the deviations it may name come in a
shuffled order. A deviation counts as found where it is ranked first, alone or together with others that agree with it
bit for bit on all that was seen.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from itertools import islice, zip_longest
from multiprocessing import get_context
from pathlib import Path

import msgspec
import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.deviations import DEVIATIONS, FAULT_CLASSES, Deviation
from attnconform.conformance.deviations.judging import NOT_A_KILL, WITH_NUMBERS, is_tagged
from attnconform.conformance.deviations.structures import is_structural
from attnconform.conformance.explain.discriminate import size_of
from attnconform.conformance.explain.evidence import Script
from attnconform.conformance.explain.explain import explain
from attnconform.conformance.explain.rank import Match
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.verdict import CaseResult
from attnconform.reference import philox
from attnconform.reference.steps import AttentionResult

MAX_JUDGED = 60  # cases that a deviation is given to fail one
SCREENED = 24  # cases of its clause that are tried first
TARGET = 0.9  # of the deviations have to be found
STREAM, NUDGE = 77, 0.25  # of the pattern of roundings; of a float32 unit in the last place


class BlindRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one deviation."""

    id: str  # the true one
    clause: str
    fault_class: str
    is_structural: bool
    case_id: str = ""  # the case it failed; empty where it failed none
    state: str = ""
    check: str = ""
    minimal_case_id: str = ""
    rank: int | None = None  # 1: no other is ahead; None: not ranked at all
    is_found: bool = False
    ties: tuple[str, ...] = ()  # the others that nothing seen tells from it
    named_first: str = ""  # the deviation that is printed first
    is_clause_first: bool = False  # whether that one breaks the same clause
    seconds: float = 0.0
    error: str = ""


class BlindReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of them, and the figures."""

    seed: int
    rounding: bool
    records: tuple[BlindRecord, ...]

    @property
    def share_found(self) -> float:
        return sum(r.is_found for r in self.records) / len(self.records)


def shuffled(items: Sequence[Deviation], seed: int) -> list[Deviation]:
    """The deviations in an order that their ids and places do not show."""
    return sorted(items, key=lambda d: hashlib.sha256(f"{seed} {d.id}".encode()).digest())


def anonymous(deviation: Deviation, number: int, rounding: bool) -> Backend:
    """A fresh backend of a deviation under a number; with roundings of another implementation where it is asked for."""
    backend = deviation.build()
    backend.name = f"subject-{number:03d}"  # type: ignore[misc]  # of this instance alone
    if rounding and isinstance(backend, StepsBackend):
        store = backend.store
        backend.store = lambda tensors, result: store(tensors, rounded(result))  # type: ignore[method-assign]
    return backend


def rounded(result: AttentionResult) -> AttentionResult:
    """The numbers as float32 accumulators of another implementation might hold them before they are stored.

    A number that float32 holds exactly stays what it is, once it is stored.
    """
    out, lse = (
        array * (1 + NUDGE * np.finfo(np.float32).eps * np.sign(philox.normal(STREAM, STREAM, array.shape)))
        for array in (result.out, result.lse)
    )
    return AttentionResult(out, lse)


def first_failure(deviation: Deviation, cases: Sequence[Case]) -> tuple[Case, CaseResult] | None:
    """A case that a deviation fails, small ones first; None where it fails none of MAX_JUDGED that were judged."""
    judged = 0
    for case in likely_failures(deviation, cases):
        result = judge_case(case, deviation.build())
        if result.state not in NOT_A_KILL and result.findings:
            return case, result
        judged += result.state != "UNSUPPORTED"
        if judged >= MAX_JUDGED:
            return None
    return None


def likely_failures(deviation: Deviation, cases: Sequence[Case]) -> Iterator[Case]:
    """Cases of its clause on which one call shows the deviation, then those of its clause, then others that show it."""
    tagged = sorted((case for case in cases if exercises(case, deviation.clause)), key=size_of)
    others = sorted((case for case in cases if not exercises(case, deviation.clause)), key=size_of)
    first = tagged[:SCREENED]
    shown = [case for case in first if shows(case, deviation)]
    yield from shown
    yield from (case for case in first if case not in shown)
    yield from (case for case in tagged[SCREENED:] if shows(case, deviation))
    yield from (case for case in others if case.operation in WITH_NUMBERS and shows(case, deviation))


def exercises(case: Case, clause: str) -> bool:
    """Whether a case is about a clause, by its tags or, for a bound, by the outputs it has."""
    return clause in case.clauses or is_tagged(case, clause)


def shows(case: Case, deviation: Deviation) -> bool:
    """Whether the first calls differ in any bit from the reference's; any, where a case has no outputs to compare."""
    if case.operation not in WITH_NUMBERS:
        return True
    script = Script(case)
    answers = (islice(script.answers(make), len(WITH_NUMBERS)) for make in (deviation.build, StepsBackend))
    return any(a is None or b is None or not a.same_bits(b) for a, b in zip_longest(*answers))


def examine(deviation: Deviation, number: int, cases: Sequence[Case], seed: int, rounding: bool) -> BlindRecord:
    """One deviation: a case that it fails, the explanation, and its own place in it."""
    started = time.perf_counter()
    record = BlindRecord(
        id=deviation.id,
        clause=deviation.clause,
        fault_class=deviation.fault_class,
        is_structural=is_structural(deviation),
    )
    with np.errstate(all="ignore"):
        failure = first_failure(deviation, cases)
        if failure is None:
            return msgspec.structs.replace(record, error="fails no case", seconds=time.perf_counter() - started)
        case, result = failure
        make = partial(anonymous, deviation, number, rounding)
        result = judge_case(case, make())
        if not result.findings:
            return msgspec.structs.replace(record, error="passes", seconds=time.perf_counter() - started)
        order = shuffled(list(DEVIATIONS.values()), seed)
        explanation = explain(case, make, result, deviations=order, cases=cases)
    place = place_of(deviation, explanation.matches)
    return msgspec.structs.replace(
        record,
        case_id=case.id,
        state=result.state,
        check=result.findings[0].check,
        minimal_case_id=explanation.small.id,
        seconds=time.perf_counter() - started,
        **place,
    )


def place_of(deviation: Deviation, matches: Sequence[Match]) -> dict[str, object]:
    """Where a deviation stands in the ranking, and with whom."""
    mine = next((m for m in matches if m.deviation.id == deviation.id), None)
    first = {"named_first": matches[0].deviation.id} if matches else {}
    if mine is None:
        return {**first, "error": "not ranked"}
    ahead = sum(m.order < mine.order for m in matches)
    return {
        **first,
        "rank": 1 + ahead,
        "is_found": not ahead and mine.reproduces,
        "ties": tuple(m.deviation.id for m in matches if m is not mine and m.order == mine.order),
        "is_clause_first": matches[0].deviation.clause == deviation.clause,
    }


def run_blind(
    deviations: Sequence[Deviation],
    *,
    seed: int = 0,
    rounding: bool = False,
    processes: int = 1,
    progress: Callable[[BlindRecord, int, int], None] = lambda *_: None,
) -> BlindReport:
    """Examines deviations under shuffled numbers; records come back in the order of their ids."""
    cases = matrix("L1")
    numbered = list(enumerate(shuffled(deviations, seed + 1)))
    records = []
    for record in examined(numbered, cases, seed, rounding, processes):
        records.append(record)
        progress(record, len(records), len(numbered))
    return BlindReport(seed=seed, rounding=rounding, records=tuple(sorted(records, key=lambda r: r.id)))


def examined(
    numbered: Sequence[tuple[int, Deviation]], cases: Sequence[Case], seed: int, rounding: bool, processes: int
) -> Iterator[BlindRecord]:
    """Records as they are finished."""
    if processes == 1:
        for number, deviation in numbered:
            yield examine(deviation, number, cases, seed, rounding)
        return
    # spawned, not forked: torch's threads do not survive a fork
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        waiting = [pool.submit(examine_by_id, d.id, number, seed, rounding) for number, d in numbered]
        for future in as_completed(waiting):
            yield future.result()


def examine_by_id(deviation_id: str, number: int, seed: int, rounding: bool) -> BlindRecord:
    """The same in a worker process, which has its own registry and matrix."""
    return examine(DEVIATIONS[deviation_id], number, matrix("L1"), seed, rounding)


def blind_command(
    console: Console, *, select: str, processes: int, seed: int, rounding: bool, json_path: Path | None
) -> int:
    """Runs it, prints what was not found and the figures by fault class; 0 where TARGET is reached, else 1.

    `select` keeps deviations whose id, clause or fault class it is part of. Raises ValueError where none is left.
    """
    kept = [d for d in DEVIATIONS.values() if select in d.id or select in d.clause or select == d.fault_class]
    if not kept:
        raise ValueError(f"select is {select!r}, and no deviation has that in its id or clause")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("explaining blind", total=len(kept))

        def show(record: BlindRecord, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=f"{done} of {total}")
            if not record.is_found:
                bar.console.print(not_found(record), highlight=False, markup=False, soft_wrap=True)

        report = run_blind(kept, seed=seed, rounding=rounding, processes=processes, progress=show)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report, order="deterministic")))
    print_report(console, report)
    return 0 if report.share_found >= TARGET else 1


def not_found(record: BlindRecord) -> str:
    """One line on a deviation that was not ranked first."""
    if record.error:
        return f"{record.id} [{record.clause}]: {record.error}"
    return (
        f"{record.id} [{record.clause}]: rank {record.rank}, behind {record.named_first}, on {record.minimal_case_id}"
    )


def print_report(console: Console, report: BlindReport) -> None:
    """Found and alone, by fault class, and in all."""
    table = Table(title="explain, tried blind")
    for column in ("fault class", "deviations", "found", "found alone", "clause named first", "seconds"):
        table.add_column(column, justify="left" if column == "fault class" else "right")
    groups = {name: [r for r in report.records if r.fault_class == name] for name in FAULT_CLASSES}
    for name, records in [*groups.items(), ("all", list(report.records))]:
        if records:
            title = name if name == "all" else f"{name}: {FAULT_CLASSES[name]}"  # type: ignore[index]
            table.add_row(title, *figures(records))
    console.print(table)


def figures(records: Sequence[BlindRecord]) -> tuple[str, ...]:
    """The columns of some records."""
    found = [r for r in records if r.is_found]
    return (
        str(len(records)),
        str(len(found)),
        str(sum(not r.ties for r in found)),
        str(sum(r.is_clause_first for r in records)),
        f"{sum(r.seconds for r in records):.0f}",
    )
