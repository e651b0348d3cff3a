"""Cases about structures alone: problems of the matrix, asked for their index structures instead of attention."""

from collections.abc import Sequence

import msgspec

from attnconform.conformance.cases.structure import Case, Operation, named

NUM_CASES = 24
STRUCTURE: Operation = "structure"
GRANULARITIES = ("dense", "token", "block")
STRUCTURE_CLAUSES = (
    "BLOCK-ADMIT", "BLOCK-BROADCAST-BATCH", "BLOCK-BROADCAST-HEADS", "BLOCK-CANDIDATES", "BLOCK-COMPLETE",
    "BLOCK-CONSERVATIVE", "BLOCK-CROP", "BLOCK-DECODE", "BLOCK-EXCLUSIVE", "BLOCK-EXPAND", "BLOCK-EXTENT",
    "BLOCK-FULL", "BLOCK-INTERSECT", "BLOCK-INTERVAL", "BLOCK-OFFSET", "BLOCK-PHYSICAL", "BLOCK-RAGGED",
    "BLOCK-SLICE", "BLOCK-STATISTICS", "BLOCK-TRANSPOSE", "BLOCK-UNITE", "BLOCK-UNTOUCHED", "COORD-COPY-ON-WRITE",
    "COORD-FORK", "COORD-FREE", "COORD-GENERATION", "COORD-RENUMBER", "COORD-SLOT", "COST-AMPLIFICATION",
    "COST-ATOMICS", "COST-BYTES", "COST-END-TO-END", "COST-FLOPS", "COST-GATHER", "COST-GRADIENTS", "COST-GRID",
    "COST-INDEX-BYTES", "COST-INDEX-USE", "COST-INTENSITY", "COST-PARTIALS", "COST-SCALES", "COST-TILES",
    "COST-TIME", "COST-TRANSACTION", "COST-USE-BOUND", "COST-UTILIZATION", "FALLBACK-COUNT", "FALLBACK-EMPTY",
    "FALLBACK-HYSTERESIS", "FALLBACK-REASON", "FALLBACK-RECORD", "FALLBACK-SECURITY", "FORMAT-COVER", "FORMAT-CSR",
    "FORMAT-DENSE", "FORMAT-FIXED-WIDTH", "FORMAT-GENERATION", "FORMAT-MEMBERS", "FORMAT-ROUND-TRIP",
    "FORMAT-ROW-IDENTITY", "FORMAT-TABLE", "FORMAT-TASK-BALANCE", "FORMAT-TASK-EMPTY", "FORMAT-TASK-SHORT",
    "FORMAT-TASK-TABLE", "FORMAT-TIER", "FORMAT-TIER-LIMIT", "FORMAT-TIER-OPTIMAL", "FORMAT-WIDTH", "GQA-LISTS",
    "GQA-MERGE-MAX", "GQA-MERGE-PRIVATE", "GQA-MERGE-SUM", "GQA-MERGE-TIE", "MASK-LEAK", "PLAN-CAPACITY",
    "PLAN-COUNT", "PLAN-KEY", "PLAN-LAYER", "PLAN-MASK-KEY", "PLAN-REPLAN", "PLAN-STORAGE", "PLAN-VALUES",
    "SET-ALIAS", "SET-BRANCH-COVER", "SET-BRANCH-GATES", "SET-BRANCH-LARGER", "SET-BRANCH-SOFTMAX", "SET-CANONICAL",
    "SET-DUPLICATE", "SET-HOLE", "SET-IDENTITY", "SET-ORDER", "SET-UNION", "SET-VALIDATE",
)  # fmt: skip
# what the problem's own lists have to hold for a mistake to show; all else is asked with inputs that every case draws
OF_THE_PROBLEM = frozenset({
    "SET-IDENTITY", "SET-DUPLICATE", "SET-ORDER", "SET-HOLE", "SET-UNION", "SET-ALIAS", "COORD-SLOT", "COORD-RENUMBER",
    "BLOCK-EXPAND", "GQA-LISTS",
})  # fmt: skip
# what decides a structure; dtypes, head dims and numbers do not
AXES = ("heads", "page_size", "phase", "lengths", "sharing", "q_block", "listing", "local", "pages", "mask")


def structure_cases(forward: Sequence[Case]) -> tuple[Case, ...]:
    """Structure cases from forward ones: dense, token and block lists in turn, each the one with most that is new.

    Raises ValueError where there are no forward cases to take problems from.
    """
    given = [case for case in forward if case.operation == "forward"]
    pools = [[case for case in given if case.axes.get("granularity") == kind] for kind in GRANULARITIES]
    if not all(pools):
        raise ValueError(f"there is no forward case of each of {GRANULARITIES} to take problems from")
    seen: set[tuple[str, str, str]] = set()
    chosen = []
    for i in range(NUM_CASES):
        case = max(pools[i % len(pools)], key=lambda c: (len(traits(c) - seen), c.id))
        pools[i % len(pools)].remove(case)
        seen |= traits(case)
        chosen.append(as_structure_case(case))
    return tuple(chosen)


def traits(case: Case) -> set[tuple[str, str, str]]:
    """What a case shows: its axis values, each together with the granularity of its lists."""
    return {(case.axes["granularity"], axis, case.axes[axis]) for axis in AXES}


def as_structure_case(case: Case) -> Case:
    """The problem of a forward case, to be asked for structures."""
    clauses = tuple(c for c in STRUCTURE_CLAUSES if c not in OF_THE_PROBLEM or c in case.clauses)
    changed = msgspec.structs.replace(case, operation=STRUCTURE, clauses=clauses)
    return named(changed, case.id.split(".")[2])
