"""What a level covers: cases by axis value, pairs and triples of values, and what a declaration leaves out."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations

import msgspec
import numpy as np
import numpy.typing as npt

from attnconform.conformance.backend import OPTIONAL_AXES, Capabilities
from attnconform.conformance.cases.axes import Row, is_possible
from attnconform.conformance.cases.covering import AXES
from attnconform.conformance.cases.frozen import FROZEN_LEVELS
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.cases.wide_axes import USUAL, is_possible_wide, wide_axes

Table = npt.NDArray[np.bool_]


class Covered(msgspec.Struct, frozen=True, kw_only=True):
    """How many of the possible combinations of some axes' values a case holds."""

    axes: tuple[str, ...]
    covered: int
    possible: int


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """What one axis of a backend's declaration leaves out."""

    axis: str
    values: dict[str, int]  # undeclared value -> cases that have it
    cases: int
    alone: int  # cases that this axis alone leaves out


class OperationCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """The cases of one operation."""

    operation: str
    cases: int
    values: dict[str, dict[str, int]]  # axis -> value -> cases
    pairs: tuple[Covered, ...]
    triples: tuple[Covered, ...]


class Spanned(msgspec.Struct, frozen=True, kw_only=True):
    """How the combinations of declared values, those that a level promises of all values, are held."""

    level: str  # of the cases of the backend's own domain, such as L1d
    combinations: int  # that some row can hold
    common: int  # held by a common case
    given_up: int  # held by no case: few beside the others, or of which no row is a sound case that can fail
    cases: int  # of the own domain


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """A level, by operation; and where a backend is named, what it leaves out."""

    level: str
    cases: int
    operations: tuple[OperationCoverage, ...]
    backend: str | None = None
    undeclared: int = 0  # cases
    left_out: tuple[LeftOut, ...] = ()
    own: tuple[Spanned, ...] = ()


def measure(level: str, cases: Sequence[Case], capabilities: Capabilities | None = None, backend: str = "") -> Coverage:
    """The coverage of a level's cases, and what a backend's declaration leaves of them."""
    found = Coverage(
        level=level,
        cases=len(cases),
        operations=tuple(of_operation(level, op, [c for c in cases if c.operation == op]) for op in AXES),
    )
    if capabilities is None:
        return found
    outside = [(case, undeclared_axes(case, capabilities)) for case in cases]
    names = sorted({axis for _, axes in outside for axis in axes})
    return msgspec.structs.replace(
        found,
        backend=backend,
        undeclared=sum(bool(axes) for _, axes in outside),
        left_out=tuple(left_out_by(axis, outside) for axis in names),
    )


def undeclared_axes(case: Case, capabilities: Capabilities) -> dict[str, str]:
    """Axes of a case, and their values, that keep a backend from getting it."""
    outside = {axis: value for axis, value in case.axes.items() if not capabilities.declares(axis, value)}
    if case.operation == "backward" and not capabilities.has_backward:
        outside["operation"] = "backward"
    elif case.operation == "backward" and is_quantized(case) and not capabilities.quantized_backward:
        outside["operation"] = "backward over quantized caches"
    if case.structure.page_owner is not None and not capabilities.checks_owner:
        outside["page_owner"] = "given"
    return outside


def is_quantized(case: Case) -> bool:
    """Whether some cache of a case holds codes."""
    return case.structure.k_quant is not None or case.structure.v_quant is not None


def left_out_by(axis: str, outside: Sequence[tuple[Case, dict[str, str]]]) -> LeftOut:
    """The cases that one axis leaves out."""
    having = [axes for _, axes in outside if axis in axes]
    return LeftOut(
        axis=axis,
        values=dict(Counter(axes[axis] for axes in having).most_common()),
        cases=len(having),
        alone=sum(len(axes) == 1 for axes in having),
    )


def of_operation(level: str, operation: str, cases: Sequence[Case]) -> OperationCoverage:
    """Values, pairs and triples of one operation's cases."""
    axes, possible = domain(level, operation)
    rows = [{**USUAL, **case.axes} for case in cases]
    codes = {axis: np.array([index_of(values, row[axis]) for row in rows], np.int64) for axis, values in axes.items()}
    # what the two axes do not say of a feature is that it is off: codes need a quantized cache
    agree = {
        (a, b): np.array([[possible({**OPTIONAL_AXES, a: x, b: y}) for y in axes[b]] for x in axes[a]])
        for a, b in combinations(axes, 2)
    }
    core = [axis for axis in axes if axis not in OPTIONAL_AXES]
    return OperationCoverage(
        operation=operation,
        cases=len(cases),
        values={axis: count_values(values, [row[axis] for row in rows]) for axis, values in axes.items()},
        pairs=tuple(covered((a, b), agree[a, b], axes, codes) for a, b in combinations(axes, 2)),
        triples=tuple(
            covered(
                (a, b, c),
                agree[a, b][:, :, None] & agree[a, c][:, None, :] & agree[b, c][None, :, :],
                axes,
                codes,
            )
            for a, b, c in combinations(core, 3)
        ),
    )


def domain(level: str, operation: str) -> tuple[dict[str, tuple[str, ...]], Callable[[Row], bool]]:
    """A level's axes with all their values, and which values can stand together."""
    if level in FROZEN_LEVELS:
        return wide_axes(operation), is_possible_wide
    return AXES[operation], is_possible


def count_values(values: tuple[str, ...], met: list[str]) -> dict[str, int]:
    """Cases of every value of an axis, and of those that designed cases alone have."""
    return dict.fromkeys(values, 0) | Counter(met)


def index_of(values: tuple[str, ...], value: str) -> int:
    """The place of a value in its axis; past the end for one that the axis has not."""
    return values.index(value) if value in values else len(values)


def covered(
    names: tuple[str, ...], possible: Table, axes: dict[str, tuple[str, ...]], codes: dict[str, npt.NDArray[np.int64]]
) -> Covered:
    """Possible combinations of the named axes, and how many of them a case holds."""
    held = np.zeros([len(axes[name]) + 1 for name in names], dtype=bool)
    held[tuple(codes[name] for name in names)] = True
    held = held[tuple(slice(-1) for _ in names)]
    return Covered(axes=names, covered=int((held & possible).sum()), possible=int(possible.sum()))


def total(entries: Sequence[Covered]) -> Covered:
    """All of the entries together."""
    return Covered(axes=(), covered=sum(e.covered for e in entries), possible=sum(e.possible for e in entries))
