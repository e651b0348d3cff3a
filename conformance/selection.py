"""Which cases of a level a run takes."""

import zlib
from collections.abc import Iterable, Sequence

from attnconform.conformance.backend import Capabilities
from attnconform.conformance.cases.frozen import FROZEN_LEVELS
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import OWN, Case, is_own

SMOKE = ("L0", f"L0{OWN}")


def select_cases(level: str, select: str = "", shard: str = "1/1", own: Sequence[Case] = ()) -> list[Case]:
    """Common cases of a level and those of a backend's own domain, by a text in their id or clauses, and by shard.

    Every shard runs L0 again. Raises ValueError for an unknown level, a shard that is not I/N, and a selection that
    keeps nothing.
    """
    index, count = parse_shard(shard)
    every = (*matrix(level), *own)
    kept = [c for c in every if matches(c, select) and (c.level in SMOKE or in_shard(c, index, count))]
    if not kept:
        raise ValueError(f"--select {select!r} keeps none of the {len(every)} cases of {level}")
    return kept


def own_cases(level: str, select: str, capabilities: Capabilities) -> tuple[Case, ...]:
    """The cases of a backend's own domain; none where the selection is the id of one common case, to spare the time.

    Raises ValueError where the declaration names a number of a form that no case can have.
    """
    from attnconform.conformance.cases.declared import declared_cases  # needs the judge

    return () if any(case.id == select for case in matrix(level)) else declared_cases(level, capabilities)


def matches(case: Case, select: str) -> bool:
    """Whether a case's id contains the text, or a clause of its is the text."""
    return not select or select in case.id or select in case.clauses


def parse_shard(shard: str) -> tuple[int, int]:
    """(index, count) of I/N, the index from 0."""
    parts = shard.split("/")
    if len(parts) != 2 or not all(p.isdecimal() for p in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise ValueError(f"shard is {shard!r}, but must be I/N with 1 <= I <= N")
    return int(parts[0]) - 1, int(parts[1])


def in_shard(case: Case, index: int, count: int) -> bool:
    """By a hash of the id, so that a case stays in its shard when others come and go."""
    return zlib.crc32(case.id.encode()) % count == index


def case_by_id(case_id: str, levels: Iterable[str] = (), capabilities: Capabilities | None = None) -> Case:
    """The case of an id, from its own level where none is named; those of a backend's own domain by its declaration.

    Raises ValueError where there is none.
    """
    for level in levels or (level_of(case_id),):
        own = own_cases(level, case_id, capabilities) if is_own(case_id) and capabilities is not None else ()
        for case in (*matrix(level), *own):
            if case.id == case_id:
                return case
    raise ValueError(f"{case_id} is not the id of a case" + (" of this backend's domain" if is_own(case_id) else ""))


def level_of(case_id: str) -> str:
    """The lowest level that is run with the case: L1 for its own cases and those of L0."""
    level = case_id.split(".")[0].removesuffix(OWN)
    return level if level in FROZEN_LEVELS else "L1"
