"""The L1 matrix: a covering array over the axes, frozen as data, turned into cases."""

import json
from collections.abc import Iterator
from functools import cache
from importlib import resources
from itertools import combinations, product

import msgspec

from attnconform.conformance.cases.axes import BACKWARD_AXES, EXCLUSIONS, FORWARD_AXES, Row, is_possible
from attnconform.conformance.cases.clauses_of import clauses_of
from attnconform.conformance.cases.generate import build_structure
from attnconform.conformance.cases.refusals import refusal_cases
from attnconform.conformance.cases.structure import CandidateStructure, Case, build_problem, named
from attnconform.conformance.cases.structures import structure_cases

AXES = {"forward": FORWARD_AXES, "backward": BACKWARD_AXES}
# axes whose triples are covered as well: which keys a row sees is decided by them together
TRIPLES = {
    "forward": (("phase", "granularity", "mask"), ("lengths", "granularity", "mask"), ("sharing", "listing", "mask")),
    "backward": (
        ("granularity", "sharing", "mask"),
        ("lengths", "granularity", "mask"),
        ("score", "sink", "granularity"),
    ),
}
FIRST_SEED = 0x5EED_0000


def covering_rows(operation: str) -> list[dict[str, str]]:
    """A new covering array: all pairs, and all triples of TRIPLES.

    The frozen one is what the matrix uses: a library's version must not change ids.
    """
    from covertable.main import make  # a development tool: needed to freeze an array, never to run one

    factors = {axis: list(values) for axis, values in AXES[operation].items()}
    sub_models = [{"fields": list(fields), "strength": 3} for fields in TRIPLES[operation]]
    rows = make(factors, strength=2, sub_models=sub_models, constraints=list(constraints(operation)))
    return [{axis: row[axis] for axis in factors} for row in rows]


def constraints(operation: str) -> Iterator[dict[str, object]]:
    """EXCLUSIONS in the covering library's own words."""
    axes = AXES[operation]
    for axis, value, other, allowed in EXCLUSIONS:
        if value not in axes[axis]:
            continue
        not_it = {"operator": "not", "condition": {"operator": "eq", "left": axis, "value": value}}
        kept = [{"operator": "eq", "left": other, "value": v} for v in allowed if v in axes[other]]
        yield {"operator": "or", "conditions": [not_it, *kept]}


@cache
def frozen_rows(operation: str) -> list[dict[str, str]]:
    """The covering array shipped with the package."""
    text = resources.files("attnconform.conformance.cases").joinpath(f"l1_{operation}.json").read_text()
    rows: list[dict[str, str]] = json.loads(text)
    return rows


def uncovered(operation: str, rows: list[dict[str, str]]) -> list[Row]:
    """Pairs, and triples of TRIPLES, that can stand together and that no possible row holds."""
    axes, rows = AXES[operation], [row for row in rows if is_possible(row)]
    combined = [*combinations(axes, 2), *TRIPLES[operation]]
    return [
        dict(wanted)
        for names in combined
        for values in product(*(axes[a] for a in names))
        if is_possible(wanted := dict(zip(names, values, strict=True)))
        and not any(wanted.items() <= row.items() for row in rows)
    ]


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
    return named(case, f"{row['phase']}-{row['granularity']}-{row['mask']}-{row['values']}")


@cache
def matrix(level: str) -> tuple[Case, ...]:
    """All cases of a level; a level holds the cases of the levels below it.

    Raises ValueError for a level that has no cases.
    """
    if level == "L0":
        return smoke_cases()
    if level != "L1":
        raise ValueError(f"level is {level}, but the levels are L0 and L1")
    generated = [matrix_case(op, i, row) for op in AXES for i, row in enumerate(frozen_rows(op))]
    return (*smoke_cases(), *generated, wide_case(), *structure_cases(generated), *refusal_cases())


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
    return named(msgspec.structs.replace(case, structure=structure), "decode-token-none-wide-pool")


SMOKE_ROW = {
    "dtype": "float32", "heads": "4/2", "head_dim": "64/64", "page_size": "16", "phase": "decode",
    "lengths": "page_edge", "granularity": "dense", "sharing": "shared", "q_block": "1", "listing": "sorted",
    "local": "none", "empty": "none", "pages": "shuffled", "layout": "NHD", "strides": "dense", "mask": "none",
    "score": "none", "sink": "none", "splits": "1", "values": "normal",
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
