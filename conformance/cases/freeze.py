"""Freezes L2 and L3: from rows to whole cases, valid and able to fail something. [a development tool]

`python -m attnconform.conformance.cases.freeze --level L3 --out FOLDER` makes every frozen case anew from its own axes
and seed, which is what a change of the case format needs; `--fresh` makes new covering arrays first.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from pathlib import Path

import click
import msgspec

from attnconform.conformance.backend import OPTIONAL_AXES
from attnconform.conformance.cases.axes import Row
from attnconform.conformance.cases.clauses_of import clauses_of
from attnconform.conformance.cases.covering import AXES
from attnconform.conformance.cases.edges import build_wide_structure
from attnconform.conformance.cases.frozen import FROZEN_LEVELS, frozen_cases, write_frozen
from attnconform.conformance.cases.structure import Case, Structure, build_problem, named
from attnconform.conformance.cases.wide_axes import USUAL
from attnconform.conformance.cases.wide_rows import edge_rows, feature_rows, triple_rows
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import check_problem
from attnconform.reference.steps import Steps

FIRST_SEEDS = {"L2": 0x5EED_2000_0000, "L3": 0x5EED_3000_0000}


class Unsound(ValueError):
    """A row that no seed makes a case of."""


Planned = tuple[str, Row, int]  # operation, axes, seed
TRIES = 8  # seeds that a row gets until its case is one
STRUCTURES = 2  # of a row of L3
NUMBERS = 4  # sets of numbers for each of them
NUMBER_BITS, TRY_BITS = 56, 48  # where in a seed the set of numbers and the try stand; below them all is structure's


def structure_seed(seed: int) -> int:
    """The part of a seed that a structure is drawn from; cases that differ above it differ in numbers alone."""
    return seed & ((1 << NUMBER_BITS) - 1)


def wide_case(level: str, operation: str, row: Row, seed: int) -> Case:
    """One row of L2 or L3 as a case."""
    return case_of_structure(level, operation, row, seed, build_wide_structure(row, structure_seed(seed)))


def case_of_structure(level: str, operation: str, row: Row, seed: int, structure: Structure) -> Case:
    """A row's case with the structure that was made of it."""
    clauses = clauses_of(operation, row, build_problem(structure))
    case = Case(
        id="",
        level=level,  # type: ignore[arg-type]  # one of the literal's
        operation=operation,  # type: ignore[arg-type]
        structure=structure,
        values=row["values"],  # type: ignore[arg-type]  # the axis holds the literal's values
        seed=seed,
        clauses=tuple(sorted({*clauses, *(("COORD-STRIDE",) if row["base"] == "misaligned" else ())})),
        axes=dict(row),
    )
    return named(case, slug_of(row))


def slug_of(row: Row) -> str:
    """What a person may tell cases apart by."""
    unusual = [row[axis] for axis, off in {**OPTIONAL_AXES, **USUAL}.items() if row[axis] != off]
    return "-".join((row["phase"], row["granularity"], row["mask"], *unusual, row["values"])).replace("_", "-")


def fault_of(structure: Structure) -> str | None:
    """Why a structure makes no case: what is wrong with its problem, or that no row of it sees a key."""
    problem, steps = build_problem(structure), Steps()
    try:
        check_problem(problem)
    except RefusedInput as error:
        return str(error)
    rows_and_heads = ((where, h) for where in problem.rows() for h in range(problem.num_qo_heads))
    sees = any(len(steps.effective(problem, where, h).values) for where, h in rows_and_heads)
    return None if sees else "no row sees a key"


def sound_case(level: str, operation: str, row: Row, seed: int) -> Case:
    """The row's case under the first of a few seeds that gives one. Raises Unsound where none does."""
    for i in range(TRIES):
        tried = seed + (i << TRY_BITS)
        fault = fault_of(build_wide_structure(row, structure_seed(tried)))
        if fault is None:
            return wide_case(level, operation, row, tried)
    raise Unsound(f"{level}.{operation}.{slug_of(row)}: {fault}, under {TRIES} seeds")


def planned(level: str) -> Iterator[Planned]:
    """Rows of a level from new covering arrays; structures' seeds follow one another from the level's first."""
    numbers = 1 if level == "L2" else NUMBERS
    for seed, (operation, row) in enumerate(fresh_rows(level), start=FIRST_SEEDS[level] + 1):
        yield from ((operation, row, seed + (number << NUMBER_BITS)) for number in range(numbers))


def fresh_rows(level: str) -> Iterator[tuple[str, Row]]:
    """Operation and axes of every new structure of a level."""
    for operation in AXES:
        if level == "L2":
            yield from ((operation, row) for row in edge_rows(operation))
            continue
        rows = [*triple_rows(operation), *feature_rows(operation)]
        yield from ((operation, row) for _ in range(STRUCTURES) for row in rows)


def already_planned(level: str) -> Iterator[Planned]:
    """What the frozen cases of a level were made from."""
    return ((case.operation, case.axes, case.seed) for case in frozen_cases(level))


def make_cases(level: str, plans: Iterable[Planned], say: Callable[[str], None] = lambda _: None) -> list[Case]:
    """The cases of a level; says which row gave none. Raises ValueError for an id that comes twice."""
    cases: dict[str, Case] = {}
    for (operation, row, _), group in groupby(plans, lambda plan: (plan[0], plan[1], structure_seed(plan[2]))):
        seeds = [seed for _, _, seed in group]
        try:
            first = sound_case(level, operation, row, seeds[0])
        except Unsound as error:
            say(f"{error}; left out")
            continue
        for seed in seeds:  # numbers of their own over the structure of the first
            own = structure_seed(first.seed) | (seed >> NUMBER_BITS << NUMBER_BITS)
            case = named(msgspec.structs.replace(first, seed=own), slug_of(row))
            if case.id in cases:
                raise ValueError(f"{case.id} comes twice")
            cases[case.id] = case
        if len(cases) % 500 < len(seeds):
            say(f"{len(cases)} cases")
    return list(cases.values())


@click.command()
@click.option("--level", type=click.Choice(FROZEN_LEVELS), required=True)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False, exists=True), required=True)
@click.option("--fresh", is_flag=True, help="new covering arrays instead of the frozen cases' own axes and seeds")
@click.option("--check", type=click.IntRange(0), default=0, help="of so many cases, name those that nothing can fail")
def freeze(level: str, out: Path, fresh: bool, check: int) -> None:
    """Write a level's frozen cases into a folder; a case that no deviation moves is named and left out."""
    plans = planned(level) if fresh else already_planned(level)
    cases = make_cases(level, plans, click.echo)
    vacuous = set(vacuous_cases(cases, check))
    for case_id in sorted(vacuous):
        click.echo(f"{case_id}: no deviation of its clauses moves it by twice its bound; left out")
    click.echo(str(write_frozen(out, level, tuple(case for case in cases if case.id not in vacuous))))


def vacuous_cases(cases: list[Case], count: int) -> Iterator[str]:
    """Ids of those among `count` cases, evenly taken, that no deviation of their clauses moves."""
    from attnconform.conformance.cases.detectability import is_detectable

    stride = max(len(cases) // count, 1) if count else 1
    for case in islice(cases[::stride], count):
        if not is_detectable(case):
            yield case.id


if __name__ == "__main__":
    freeze()
