"""Deviations that one case does not tell apart, told apart by more cases of the matrix."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, zip_longest

import numpy as np

from attnconform.conformance.cases.structure import Case
from attnconform.conformance.deviations.judging import WITH_NUMBERS
from attnconform.conformance.explain.answer import Answer, Make
from attnconform.conformance.explain.check_calls import OF_MEMORY
from attnconform.conformance.explain.evidence import Script
from attnconform.conformance.explain.rank import Match, Scales, compare
from attnconform.conformance.judge.judge import CHECKS_OF, undeclared

MAX_ASKED = 12  # cases on which the backend is asked again
MAX_RUNS = 80, 24  # of deviations that are laid beside each other, in each round
MAX_ALIKE = 48  # deviations that are told apart at all; a case that more of them reproduce says nothing
KINDS = {"forward": WITH_NUMBERS, "backward": WITH_NUMBERS}  # operations that say more of one; else the same alone


def tell_apart(
    matches: Sequence[Match], make: Make, failed: Case, cases: Sequence[Case], *, check: str = ""
) -> list[Match]:
    """The matches in a new order: those first that reproduce the backend on every case that tells them apart.

    `failed` is the case as it was given, and comes first; `check` failed it. What that check does not tell apart is
    asked by all the others.
    """
    alive: Sequence[Match] = [match for match in matches if match.reproduces][:MAX_ALIKE]
    for checks, runs in zip(rounds(failed, check), MAX_RUNS, strict=False):
        alive = asked(alive, make, chain((failed,), pool(alive, failed, cases)), checks, runs)
    kept = {match.deviation.id: match for match in alive}
    return sorted((kept.get(m.deviation.id, m) for m in matches), key=lambda match: match.order)


def rounds(failed: Case, check: str) -> Iterator[tuple[str, ...]]:
    """Whose calls are compared: first the failed check's, which are few, then those of every check.

    A check of memory makes many calls, and has said what it can on the smallest case.
    """
    if failed.operation not in WITH_NUMBERS:
        yield ()
        return
    names = tuple(each.__name__ for each in CHECKS_OF[failed.operation] if each.__name__ not in OF_MEMORY)
    yield tuple(name for name in names if name == check)
    yield names


def asked(
    alive: Sequence[Match], make: Make, cases: Iterable[Case], checks: Sequence[str], max_runs: int
) -> Sequence[Match]:
    """Those that reproduce the backend on case after case, until one is left or so many runs are made.

    A case on which all of them give the same bits says nothing, and the backend is not asked about it.
    """
    runs, questions = 0, 0
    for case in cases:
        if len(alive) < 2 or runs >= max_runs or questions >= MAX_ASKED:
            break
        if undeclared(case, make()) is not None:
            continue
        script = Script(case, checks)
        answers = [list(script.answers(match.deviation.build)) for match in alive]
        runs += len(alive)
        if all(alike(answers[0], other) for other in answers[1:]):
            continue
        questions += 1
        alive = reproducing(alive, script, make)
    return alive


def pool(alive: Sequence[Match], failed: Case, cases: Sequence[Case]) -> Iterator[Case]:
    """Cases that may tell the deviations apart, each once: of each one's clause in turn, then all others."""
    kinds = KINDS.get(failed.operation, (failed.operation,))
    of_kind = sorted((case for case in cases if case.operation in kinds), key=size_of)
    clauses = dict.fromkeys(match.deviation.clause for match in alive)
    tagged = [varied([case for case in of_kind if clause in case.clauses]) for clause in clauses]
    in_turn = (case for together in zip_longest(*tagged) for case in together if case is not None)
    given = {failed.id}
    for case in chain(in_turn, varied(of_kind)):
        if case.id not in given:
            given.add(case.id)
            yield case


def varied(cases: Sequence[Case]) -> Iterator[Case]:
    """Cases so that each brings the most axis values that none before it has, the first where several do."""
    left, seen = list(cases), set[tuple[str, str]]()
    while left:
        best = max(range(len(left)), key=lambda i: len(left[i].axes.items() - seen))
        seen |= left[best].axes.items()
        yield left.pop(best)


def size_of(case: Case) -> int:
    """Roughly how long a case runs: rows, heads and keys."""
    s = case.structure
    if case.operation == "refusal":
        return 0
    return s.num_qo_heads * int(np.dot(s.seqlens_q, s.seqlens_kv)) * (4 if case.operation == "structure" else 1)


def alike(a: Sequence[Answer], b: Sequence[Answer]) -> bool:
    """Whether two deviations give the same bits on every call."""
    return len(a) == len(b) and all(x.same_bits(y) for x, y in zip(a, b, strict=True))


def reproducing(alive: Sequence[Match], script: Script, make: Make) -> list[Match]:
    """The deviations that reproduce the backend on one more case; all of them where none does."""
    seen, bounds = list(script.answers(make)), Scales(script.trial(make()))
    scales = [bounds.of(answer) for answer in seen]
    again = [compare(match.deviation, script, seen, scales, []) for match in alive]
    kept = [
        replace(
            match,
            distance=max(match.distance, more.distance),
            is_exact=match.is_exact and more.is_exact,
            agreed_cases=match.agreed_cases + 1,
        )
        for match, more in zip(alive, again, strict=True)
        if more.reproduces
    ]
    return kept or list(alive)
