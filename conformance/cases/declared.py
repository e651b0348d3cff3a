"""Cases of a backend's own domain: what the common matrix promises over all values, over those that it declares.

The arrays of the matrix cover pairs of all values, and a backend that declares few sees few of their rows. Here the
same arrays are spanned over the declared values alone; combinations that the declared common cases hold are covered
already, and new rows are grown for the others. L1 has the pairs, as `L1d`; L3 the triples of core axes and the pairs
of all its axes, as `L3d`, unless the common cases hold ENOUGH of them; `L0d` are the smoke cases with declared values.
A backend that declares all gets none.

The same declaration gives the same cases everywhere: choices come from a counter-based generator, a case's seed from
its own axis values. As at freezing, a case has to be sound, its tile steps (of L0d and L1d) are bounded, and some
deviation of its clauses has to move it by twice its bound, at about a tenth of a second a case.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import combinations

import msgspec

from attnconform.conformance.backend import Capabilities
from attnconform.conformance.cases.axes import Row
from attnconform.conformance.cases.coverage import undeclared_axes
from attnconform.conformance.cases.covering import AXES, Array, arrays, without_features
from attnconform.conformance.cases.domain import Axes, declared_axes, is_possible_in
from attnconform.conformance.cases.draw import Draw
from attnconform.conformance.cases.edges import build_wide_structure
from attnconform.conformance.cases.freeze import TRIES, TRY_BITS, case_of_structure, fault_of, structure_seed
from attnconform.conformance.cases.generate import Lengths
from attnconform.conformance.cases.greedy import Wanted, next_row
from attnconform.conformance.cases.matrix import SMOKE_CHANGES, SMOKE_ROW, matrix
from attnconform.conformance.cases.structure import Case, Structure
from attnconform.conformance.cases.wide_axes import USUAL
from attnconform.conformance.cases.work import MAX_TILE_STEPS_L1, steps_of

ROW_SEED = 0xDEC
SEED_BYTES = TRY_BITS // 8  # of a row's hash: the try stands above it
MAX_STRIKES = 3  # rows that a combination gets before it is given up
# share of an array whose rest is left out where the common cases hold it: drawing thousands of triples takes minutes
ENOUGH = {"L1d": 1.0, "L3d": 0.95}


@dataclass
class Tally:
    """Combinations of declared values that some row can hold, summed over the arrays."""

    possible: int = 0
    common: int = 0  # that the common cases hold
    given_up: int = 0  # few beside those of the common cases, or of which no row is a sound case that can fail


@dataclass
class OwnDomain:
    """The cases that a level's common ones lack for a declaration."""

    cases: list[Case] = field(default_factory=list)
    tally: dict[str, Tally] = field(default_factory=dict)  # by level, such as L1d


def declared_cases(level: str, capabilities: Capabilities | None) -> tuple[Case, ...]:
    """The cases of a backend's own domain that a run of a level takes beside the common ones."""
    return () if capabilities is None else tuple(own_domain(level, capabilities).cases)


def own_domain(level: str, capabilities: Capabilities) -> OwnDomain:
    """The cases with their tally; once a process. Raises ValueError for a declared number that is none."""
    content = {name: getattr(capabilities, name) for name in ("supported", "fallback")}
    flags = {name: getattr(capabilities, name) for name in ("has_backward", "quantized_backward", "checks_owner")}
    return generated(level, msgspec.json.encode({**content, **flags}, order="deterministic"))


@cache
def generated(level: str, declaration: bytes) -> OwnDomain:
    """As own_domain, of what a declaration says of axes, as JSON."""
    capabilities = msgspec.json.decode(declaration, type=Capabilities)
    found = OwnDomain()
    common = [case for case in matrix(level) if case.operation in AXES and not undeclared_axes(case, capabilities)]
    found.cases += smoke_cases_of(capabilities, common)
    if level != "L0":
        span(found, "L1d", capabilities, common)
    if level == "L3":
        span(found, "L3d", capabilities, common)
    return found


def span(found: OwnDomain, level: str, capabilities: Capabilities, common: Sequence[Case]) -> None:
    """Adds what the common cases, and those found before, lack of the arrays of a level."""
    tally = found.tally[level] = Tally()
    for operation in AXES if capabilities.has_backward else ("forward",):
        axes = declared_axes(operation, capabilities, wide=level == "L3d")
        held = [{**USUAL, **case.axes} for case in (*common, *found.cases) if case.operation == operation]
        for array in own_arrays(level, operation, axes):
            for case in fill(array, held, partial(able_case, level, operation), tally, ENOUGH[level]):
                held.append(case.axes)
                found.cases.append(case)


def own_arrays(level: str, operation: str, axes: Axes) -> Iterator[Array]:
    """The arrays of a level over declared values; none over no values."""
    if not axes:
        return
    if level == "L1d":
        yield from arrays(operation, axes)
        return
    core = without_features(axes)
    yield Array(core, tuple(combinations([axis for axis in core if len(core[axis]) > 1], 3)))
    yield Array(axes, tuple(combinations([axis for axis in axes if len(axes[axis]) > 1], 2)))


def fill(
    array: Array, held: Sequence[Row], make: Callable[[Row], Case | None], tally: Tally, enough: float
) -> Iterator[Case]:
    """Cases for the combinations of an array that no held row has; none where held rows have enough of them."""
    wanted, draw = Wanted(array.axes, partial(is_possible_in, array.axes), array.met), Draw(ROW_SEED)
    every = wanted.remaining
    for row in held:
        places = wanted.places(row)
        if places is not None:
            wanted.cover(places)
    common, impossible, strikes = every - wanted.remaining, 0, Counter[tuple[tuple[int, int], ...]]()
    if enough < 1 and common >= enough * every:
        tally.given_up += wanted.remaining
        wanted.needed.clear()
    while wanted.remaining:
        start, places = next_row(wanted, draw)
        case = None if places is None else make(wanted.named(places))
        if case is not None and places is not None:
            wanted.cover(places)
            yield case
            continue
        strikes[tuple(start.items())] += 1
        if places is None or strikes[tuple(start.items())] == MAX_STRIKES:
            wanted.drop(start)
            impossible += places is None
            tally.given_up += places is not None
    tally.possible += every - impossible
    tally.common += common


def able_case(level: str, operation: str, row: Row) -> Case | None:
    """The row's case under the first of a few seeds that gives a sound one; None where nothing can fail it."""
    from attnconform.conformance.cases.detectability import is_detectable, one_thread  # needs the judge, and time

    full = {**USUAL, **row}
    for i in range(TRIES):
        seed = row_seed(operation, full) + (i << TRY_BITS)
        structure = bounded_structure(level, operation, full, structure_seed(seed))
        if fault_of(structure) is None:
            case = case_of_structure(level, operation, full, seed, structure)
            with one_thread():
                return case if is_detectable(case) else None
    return None


def row_seed(operation: str, row: Row) -> int:
    """A seed of a row's own: the same row is the same case in every declaration."""
    content = ";".join(f"{axis}={value}" for axis, value in sorted(row.items()))
    return int.from_bytes(hashlib.sha256(f"{operation};{content}".encode()).digest()[:SEED_BYTES])


def bounded_structure(level: str, operation: str, row: Row, seed: int) -> Structure:
    """The structure of a row; below L3 with fewer query rows, then fewer requests, where it has too many tile steps.

    One row of one request is the least, however many KV heads it has.
    """
    structure = build_wide_structure(row, seed)
    while level != "L3d" and steps_of(structure, operation) > MAX_TILE_STEPS_L1:
        fewer = fewer_lengths(structure)
        if fewer is None:
            break
        structure = build_wide_structure(row, seed, lengths=fewer)
    return structure


def fewer_lengths(structure: Structure) -> Lengths | None:
    """Half of the rows of every request that has several; then one request less; None where there is no less."""
    q, kv = structure.seqlens_q, structure.seqlens_kv
    if max(q) > 1:
        return Lengths(tuple(-(-rows // 2) for rows in q), kv)
    return Lengths(q[:-1], kv[:-1]) if any(q[:-1]) else None


def smoke_cases_of(capabilities: Capabilities, common: Sequence[Case]) -> Iterator[Case]:
    """The smoke cases with the nearest declared values, where the common ones are not declared."""
    axes = declared_axes("forward", capabilities)
    declared = [case.axes for case in common if case.level == "L0"]
    for change in SMOKE_CHANGES if axes else ():
        usual = SMOKE_ROW | change
        if usual in declared or any(value not in axes[axis] for axis, value in change.items()):
            continue
        row = {axis: usual[axis] if usual[axis] in values else values[0] for axis, values in axes.items()}
        case = able_case("L0d", "forward", row) if is_possible_in(axes, row) else None
        if case is not None:
            yield case
