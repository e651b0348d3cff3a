"""Covering arrays over axes of which some values exclude one another, greedily: rows until nothing wanted is left.

A row begins with a combination that is still wanted; axis by axis it then takes the value that covers most with what
it has. Every choice among equals comes from a seed, so that the same axes give the same rows everywhere.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from attnconform.conformance.cases.axes import Row
from attnconform.conformance.cases.draw import Draw

Bools = npt.NDArray[np.bool_]
Partial = dict[int, int]  # axis -> value, both by their places
CANDIDATES = 3  # rows tried for each row taken


class Wanted:
    """Which combinations of values still need a row. Values are numbers here, each the place in its axis."""

    def __init__(
        self, axes: dict[str, tuple[str, ...]], is_possible: Callable[[Row], bool], met: Iterable[Sequence[str]]
    ) -> None:
        self.axes, self.names = axes, list(axes)
        self.sizes = [len(values) for values in axes.values()]
        self.agree: dict[tuple[int, int], Bools] = {}
        for (a, (left, xs)), (b, (right, ys)) in combinations(enumerate(axes.items()), 2):
            self.agree[a, b] = np.array([[is_possible({left: x, right: y}) for y in ys] for x in xs])
            self.agree[b, a] = self.agree[a, b].T
        keys = [tuple(sorted(self.names.index(axis) for axis in combined)) for combined in met]
        self.needed = {key: self.agreeing(key) for key in keys}
        self.of_axis: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for key in self.needed:
            for axis in key:
                self.of_axis[axis].append(key)

    def agreeing(self, key: tuple[int, ...]) -> Bools:
        """Combinations of some axes whose values agree two by two."""
        table = np.ones([self.sizes[axis] for axis in key], dtype=np.bool_)
        for i, j in combinations(range(len(key)), 2):
            shape = [self.sizes[axis] if place in (i, j) else 1 for place, axis in enumerate(key)]
            table &= self.agree[key[i], key[j]].reshape(shape)
        return table

    @property
    def remaining(self) -> int:
        return sum(int(table.sum()) for table in self.needed.values())

    def places(self, row: Row) -> list[int] | None:
        """A row by the places of its values; None where some value is none of its axis here."""
        if any(row.get(axis) not in values for axis, values in self.axes.items()):
            return None
        return [values.index(row[axis]) for axis, values in self.axes.items()]

    def named(self, row: Sequence[int]) -> dict[str, str]:
        """A row's values by axis."""
        return {axis: values[row[i]] for i, (axis, values) in enumerate(self.axes.items())}

    def gains(self, row: Partial, axis: int) -> npt.NDArray[np.int64]:
        """For each value of an axis how many combinations it would cover with values that the row has."""
        gained = np.zeros(self.sizes[axis], dtype=np.int64)
        for key in self.of_axis[axis]:
            if all(other in row or other == axis for other in key):
                gained += self.needed[key][tuple(slice(None) if a == axis else row[a] for a in key)]
        return gained

    def allowed(self, row: Partial, axis: int) -> Bools:
        """Values of an axis that agree with every value that the row has."""
        allowed = np.ones(self.sizes[axis], dtype=np.bool_)
        for other, value in row.items():
            allowed &= self.agree[other, axis][value]
        return allowed

    def cover(self, row: Sequence[int]) -> None:
        """Counts a row's combinations as covered."""
        for key, table in self.needed.items():
            table[tuple(row[axis] for axis in key)] = False

    def drop(self, start: Partial) -> None:
        """Wants one combination no longer."""
        self.needed[tuple(start)][tuple(start.values())] = False

    def num_new(self, row: Sequence[int]) -> int:
        """How many needed combinations a row holds."""
        return sum(bool(table[tuple(row[axis] for axis in key)]) for key, table in self.needed.items())


def grow(wanted: Wanted, start: Partial, order: Sequence[int], draw: Draw) -> list[int] | None:
    """A row that holds the start; None where the values left for some axis agree with nothing."""
    row = dict(start)
    for axis in order:
        if axis in row:
            continue
        allowed = wanted.allowed(row, axis)
        if not allowed.any():
            return None
        gained = np.where(allowed, wanted.gains(row, axis), -1)
        row[axis] = draw.choice(np.flatnonzero(gained == gained.max()).tolist())
    return [row[axis] for axis in range(len(wanted.names))]


def complete(wanted: Wanted, row: Partial) -> list[int] | None:
    """Some row that holds these values, found by search; None where there is none."""
    left = {axis: wanted.allowed(row, axis) for axis in range(len(wanted.names)) if axis not in row}
    if not left:
        return [row[axis] for axis in range(len(wanted.names))]
    narrowest = min(left, key=lambda axis: int(left[axis].sum()))
    found = (complete(wanted, {**row, narrowest: int(value)}) for value in np.flatnonzero(left[narrowest]))
    return next((whole for whole in found if whole is not None), None)


def next_row(wanted: Wanted, draw: Draw) -> tuple[Partial, list[int] | None]:
    """A combination that still needs a row, and the best of a few rows grown around it; None where none can hold it."""
    key = max(wanted.needed, key=lambda key: int(wanted.needed[key].sum()))
    start = dict(zip(key, draw.choice(np.argwhere(wanted.needed[key]).tolist()), strict=True))
    axes = range(len(wanted.names))
    grown = [grow(wanted, start, draw.shuffled(axes), draw) for _ in range(CANDIDATES)]
    rows = [row for row in grown if row is not None]
    return start, max(rows, key=wanted.num_new) if rows else complete(wanted, start)
