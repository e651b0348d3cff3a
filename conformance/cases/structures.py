"""Cases about structures alone: problems of the matrix, asked for their index structures instead of attention."""

from collections.abc import Sequence
from typing import cast

import msgspec

from attnconform.conformance.cases.structure import Case, Operation, named

NUM_CASES = 24
STRUCTURE = cast(Operation, "structure")
GRANULARITIES = ("dense", "token", "block")
# what decides a structure; dtypes, head dims and numbers do not
AXES = ("heads", "page_size", "phase", "lengths", "sharing", "q_block", "listing", "local", "pages", "mask")


def structure_cases(forward: Sequence[Case], clauses: tuple[str, ...]) -> tuple[Case, ...]:
    """Structure cases from forward ones: dense, token and block lists in turn, each the one with most that is new.

    Raises ValueError where there are no forward cases to take problems from.
    """
    pools = [[c for c in forward if c.axes.get("granularity") == kind] for kind in GRANULARITIES]
    if not all(pools):
        raise ValueError(f"there is no forward case of each of {GRANULARITIES} to take problems from")
    seen: set[tuple[str, str, str]] = set()
    chosen = []
    for i in range(NUM_CASES):
        case = max(pools[i % len(pools)], key=lambda c: (len(traits(c) - seen), c.id))
        pools[i % len(pools)].remove(case)
        seen |= traits(case)
        chosen.append(as_structure_case(case, clauses))
    return tuple(chosen)


def traits(case: Case) -> set[tuple[str, str, str]]:
    """What a case shows: its axis values, each together with the granularity of its lists."""
    return {(case.axes["granularity"], axis, case.axes[axis]) for axis in AXES}


def as_structure_case(case: Case, clauses: tuple[str, ...]) -> Case:
    """The problem of a forward case, to be asked for structures."""
    changed = msgspec.structs.replace(case, operation=STRUCTURE, clauses=clauses)
    return named(changed, case.id.split(".")[2])
