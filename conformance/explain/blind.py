"""How good is `explain`? Every deviation is put behind the backend interface under a number, and must be named again.

The explanation sees a backend that gives away nothing but what it computes; the deviations it may name come in a
shuffled order. A deviation counts as found where it is ranked first, alone or together with others that agree with it
bit for bit on all that was seen.
"""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from multiprocessing import get_context

import msgspec
import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.deviations import DEVIATIONS, Deviation
from attnconform.conformance.deviations.judging import NOT_A_KILL, WITH_NUMBERS, is_tagged
from attnconform.conformance.deviations.structures import is_structural
from attnconform.conformance.explain.answer import Answer, Make
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
    sizes: dict[str, int] = {}  # of the smallest case
    stage: str = ""  # the first wrong one
    where: str = ""  # in kernel terms
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


def first_failure(deviation: Deviation, make: Make, cases: Sequence[Case]) -> tuple[Case, CaseResult] | None:
    """A case that its subject fails, small ones first; None where it fails none of MAX_JUDGED that were judged."""
    judged = 0
    for case in likely_failures(deviation, cases):
        result = judge_case(case, make())
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
    hidden: list[Case] = []
    for case in tagged[:SCREENED]:
        if shows(case, deviation):
            yield case
        else:
            hidden.append(case)
    yield from hidden
    yield from (case for case in tagged[SCREENED:] if shows(case, deviation))
    yield from (case for case in others if case.operation in WITH_NUMBERS and shows(case, deviation))


def exercises(case: Case, clause: str) -> bool:
    """Whether a case is about a clause, by its tags or, for a bound, by the outputs it has."""
    return clause in case.clauses or is_tagged(case, clause)


# by case id, which names the content: what does not depend on the deviation is made once
FIRST_CALLS: dict[str, tuple[Script, list[Answer]]] = {}


def first_calls(case: Case) -> tuple[Script, list[Answer]]:
    """A case's script, and what the reference gives in its first calls; the tensors themselves are let go."""
    if case.id not in FIRST_CALLS:
        script = Script(case)
        answers = islice(script.answers(StepsBackend), len(WITH_NUMBERS))
        FIRST_CALLS[case.id] = script, [replace(answer, seen=None) for answer in answers]
    return FIRST_CALLS[case.id]


def shows(case: Case, deviation: Deviation) -> bool:
    """Whether the first calls differ in any bit from the reference's; any, where a case has no outputs to compare."""
    if case.operation not in WITH_NUMBERS:
        return True
    script, right = first_calls(case)
    given = islice(script.answers(deviation.build), len(WITH_NUMBERS))
    return any(a is None or b is None or not a.same_bits(b) for a, b in zip_longest(given, right))


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
        make = partial(anonymous, deviation, number, rounding)
        failure = first_failure(deviation, make, cases)
        if failure is None:
            return msgspec.structs.replace(record, error="fails no case", seconds=time.perf_counter() - started)
        case, result = failure
        order = shuffled(list(DEVIATIONS.values()), seed)
        explanation = explain(case, make, result, deviations=order, cases=cases)
    place = place_of(deviation, explanation.matches)
    return msgspec.structs.replace(
        record,
        case_id=case.id,
        state=result.state,
        check=result.findings[0].check,
        minimal_case_id=explanation.small.id,
        sizes=sizes_of(explanation.small),
        stage="" if explanation.stage is None else explanation.stage.name,
        where=explanation.where,
        seconds=time.perf_counter() - started,
        **place,
    )


def sizes_of(case: Case) -> dict[str, int]:
    """How large a case is, in what shrinking takes away; nothing of one that is not shrunk."""
    s = case.structure
    if case.operation not in WITH_NUMBERS:
        return {}
    return {
        "requests": len(s.seqlens_q),
        "rows": sum(s.seqlens_q),
        "heads": s.num_qo_heads,
        "pages": s.num_pages,
        "keys": sum(s.seqlens_kv),
    }


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
    known: Sequence[BlindRecord] = (),  # of other runs; these deviations are not tried again
    progress: Callable[[BlindRecord, int, int], None] = lambda *_: None,
) -> BlindReport:
    """Examines deviations under shuffled numbers; records come back in the order of their ids."""
    cases, tried = matrix("L1"), {record.id for record in known}
    numbered = [(i, d) for i, d in enumerate(shuffled(deviations, seed + 1)) if d.id not in tried]
    records = list(known)
    for record in examined(numbered, cases, seed, rounding, processes):
        records.append(record)
        progress(record, len(records), len(numbered) + len(known))
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
