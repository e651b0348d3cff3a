"""Deviations that one case does not tell apart, told apart by more cases of the matrix."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from attnconform.conformance.cases.structure import Case
from attnconform.conformance.explain.evidence import Answer, Make, Script
from attnconform.conformance.explain.rank import Match, Scales, compare
from attnconform.conformance.judge.judge import undeclared

MAX_ASKED = 12  # cases on which the backend is asked again
MAX_TRIED = 24  # cases on which the deviations that are left are laid beside each other
MAX_ALIKE = 48  # deviations that are told apart at all; a case that more of them reproduce says nothing


def tell_apart(matches: Sequence[Match], make: Make, failed: Case, cases: Sequence[Case]) -> list[Match]:
    """The matches in a new order: those first that reproduce the backend on every case that tells them apart.

    `failed` is the case as it was given, and comes first. A case on which all of them give the same bits says nothing,
    and the backend is not asked about it.
    """
    alive = [match for match in matches if match.reproduces][:MAX_ALIKE]
    asked = 0
    for case in (failed, *pool(alive, failed, cases)):
        if len(alive) < 2 or asked >= MAX_ASKED:
            break
        if undeclared(case, make()) is not None:
            continue
        script = Script(case)
        answers = [list(script.answers(match.deviation.build)) for match in alive]
        if all(alike(answers[0], other) for other in answers[1:]):
            continue
        asked += 1
        alive = reproducing(alive, script, make)
    kept = {match.deviation.id: match for match in alive}
    return sorted((kept.get(m.deviation.id, m) for m in matches), key=lambda match: match.order)


def pool(alive: Sequence[Match], failed: Case, cases: Sequence[Case]) -> Iterator[Case]:
    """Cases that may tell the deviations apart: of their clauses first, the small ones before the large ones."""
    clauses = {match.deviation.clause for match in alive}
    of_kind = [case for case in cases if (case.operation == "structure") == (failed.operation == "structure")]
    ordered = sorted(of_kind, key=lambda case: (not clauses & set(case.clauses), size_of(case)))
    yield from ordered[:MAX_TRIED]


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
