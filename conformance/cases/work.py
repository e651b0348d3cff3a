"""How much work a case is for kernels that run in an interpreter: tile steps, about 3 ms each."""

import numpy as np

from attnconform.conformance.cases.structure import Case, Structure, build_problem
from attnconform.reference.attention import effective_sets

MAX_TILE_STEPS_L1 = 256  # of one forward call, or a backward, on a case of L1: under a second in the interpreter
BACKWARD_CALLS = 3  # a backward walks the keys for dq, and again for dk and dv, after its forward
DEFAULT_TILE = 64  # keys of a tile where a case asks for none


def tile_steps(case: Case) -> int:
    """Tiles of keys that a kernel without any sharing between query rows walks in one call on a case.

    One program a query row and KV head, its keys those that any head of the group attends, at least one step a split.
    """
    return steps_of(case.structure, case.operation)


def steps_of(structure: Structure, operation: str) -> int:
    """Tile steps of one call of an operation on a structure."""
    tile, splits = structure.hints.tile_kv or DEFAULT_TILE, structure.hints.num_kv_splits or 1
    steps = int(np.maximum(-(-keys_by_program(structure) // tile), splits).sum())
    return steps * (BACKWARD_CALLS if operation == "backward" else 1)


def keys_by_program(structure: Structure) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]]":
    """(total_q, num_kv_heads) most keys that a head of the group attends."""
    counts = effective_sets(build_problem(structure)).counts()
    grouped = counts.reshape(len(counts), structure.num_kv_heads, -1)
    return np.asarray(grouped.max(axis=2, initial=0), dtype=np.int64)
