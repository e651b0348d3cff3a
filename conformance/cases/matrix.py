"""The matrix: L1 a covering array over the axes, frozen as data and turned into cases; L2 and L3 frozen whole."""

import json
from functools import cache
from importlib import resources

import msgspec

from attnconform.conformance.backend import OPTIONAL_AXES
from attnconform.conformance.cases.clauses_of import clauses_of
from attnconform.conformance.cases.covering import AXES
from attnconform.conformance.cases.designed import designed_cases
from attnconform.conformance.cases.designed_beyond import cases_beyond
from attnconform.conformance.cases.designed_paths import cases_of_paths
from attnconform.conformance.cases.designed_sizes import cases_of_sizes
from attnconform.conformance.cases.frozen import FROZEN_LEVELS, frozen_cases
from attnconform.conformance.cases.generate import build_structure
from attnconform.conformance.cases.refusals import refusal_cases
from attnconform.conformance.cases.structure import CandidateStructure, Case, build_problem, named
from attnconform.conformance.cases.structures import structure_cases

FIRST_SEED = 0x5EED_0000
LEVELS = ("L0", "L1", *FROZEN_LEVELS)


@cache
def frozen_rows(operation: str) -> list[dict[str, str]]:
    """The covering array shipped with the package."""
    text = resources.files("attnconform.conformance.cases").joinpath(f"l1_{operation}.json").read_text()
    rows: list[dict[str, str]] = json.loads(text)
    return rows


def matrix_case(operation: str, index: int, row: dict[str, str]) -> Case:
    """One row of the array as a case."""
    seed = FIRST_SEED + index + (1 << 16 if operation == "backward" else 0)
    structure = build_structure(row, seed)
    case = Case(
        id="",
        level="L1",
        operation=operation,  # type: ignore[arg-type]  # "forward" or "backward" here
        structure=structure,
        values=row["values"],  # type: ignore[arg-type]
        seed=seed,
        clauses=clauses_of(operation, row, build_problem(structure)),
        axes=row,
    )
    features = [row[axis] for axis, off in OPTIONAL_AXES.items() if row[axis] != off]
    return named(case, "-".join((row["phase"], row["granularity"], row["mask"], *features, row["values"])))


@cache
def matrix(level: str) -> tuple[Case, ...]:
    """All cases of a level; a level holds the cases of the levels below it.

    Raises ValueError for a level that has no cases.
    """
    if level == "L0":
        return smoke_cases()
    if level not in LEVELS:
        raise ValueError(f"level is {level}, but the levels are {', '.join(LEVELS)}")
    if level in FROZEN_LEVELS:
        return (*matrix(LEVELS[LEVELS.index(level) - 1]), *frozen_cases(level))
    generated = [matrix_case(op, i, row) for op in AXES for i, row in enumerate(frozen_rows(op))]
    own = (
        wide_case(),
        *designed_cases(SMOKE_ROW),
        *cases_beyond(SMOKE_ROW),
        *cases_of_sizes(SMOKE_ROW),
        *cases_of_paths(SMOKE_ROW),
    )
    return (*smoke_cases(), *generated, *own, *structure_cases(generated), *refusal_cases())


WIDE_PAGE_STRIDE = 2**29  # of five pages the last one starts at element 2^31


def wide_case() -> Case:
    """A pool whose last page lies past element 2^31. [COORD-WIDE]"""
    row = SMOKE_ROW | {"dtype": "float16", "lengths": "page_edge", "page_size": "16", "granularity": "token"}
    case = matrix_case("forward", 1 << 21, row | {"sharing": "kv_head"})
    structure = msgspec.structs.replace(
        case.structure,
        seqlens_q=(1,),
        seqlens_kv=(49,),
        num_pages=5,
        page_table=((4, 1, 3, 2),),
        candidates=CandidateStructure(lists=((0, 17, 48), (5, 30, 47)), sharing="kv_head"),
        page_stride=WIDE_PAGE_STRIDE,
    )
    clauses = tuple(sorted({*case.clauses, "COORD-WIDE"}))
    return named(msgspec.structs.replace(case, structure=structure, clauses=clauses), "decode-token-none-wide-pool")


SMOKE_ROW = {
    "dtype": "float32", "heads": "4/2", "head_dim": "64/64", "page_size": "16", "phase": "decode",
    "lengths": "page_edge", "granularity": "dense", "sharing": "shared", "q_block": "1", "listing": "sorted",
    "local": "none", "empty": "none", "pages": "shuffled", "layout": "NHD", "strides": "dense", "mask": "none",
    "score": "none", "sink": "none", "splits": "1", "values": "normal", **OPTIONAL_AXES,
}  # fmt: skip
SMOKE_CHANGES: tuple[dict[str, str], ...] = (
    {},
    {"values": "zero_q"},
    {"phase": "chunk", "mask": "causal"},
    {"granularity": "token", "sharing": "query_head"},
    {"granularity": "block", "sharing": "kv_head"},
    {"phase": "prefill", "mask": "causal_window", "values": "half_mass"},
)


@cache
def smoke_cases() -> tuple[Case, ...]:
    """L0: is the adapter right? One plain idea a case."""
    cases = []
    for i, change in enumerate(SMOKE_CHANGES):
        case = matrix_case("forward", i + (1 << 20), SMOKE_ROW | change)
        slug = "-".join(change.values()) or "plain"
        cases.append(named(msgspec.structs.replace(case, level="L0"), slug.replace("_", "-")))
    return tuple(cases)
