"""Covering arrays of strength 3 over axes of which some values exclude one another. [a development tool]

Greedy, row by row: an uncovered triple first, then axis by axis the value that covers most with what the row has. For
the backward axes that takes 16 seconds and 266 rows; the library that makes the arrays of strength 2 took 74 and 273.
"""

import random
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from attnconform.conformance.cases.axes import Row

Bools = npt.NDArray[np.bool_]
CANDIDATES = 3  # rows tried for each row taken
SEED = 3


class Triples:
    """Which triples of values still need a row. Values are numbers here, each the place in its axis."""

    def __init__(self, axes: dict[str, tuple[str, ...]], is_possible: Callable[[Row], bool]) -> None:
        self.names, self.sizes = list(axes), [len(values) for values in axes.values()]
        self.agree = {
            (a, b): np.array(
                [
                    [is_possible({self.names[a]: x, self.names[b]: y}) for y in axes[self.names[b]]]
                    for x in axes[self.names[a]]
                ]
            )
            for a in range(len(axes))
            for b in range(len(axes))
            if a != b
        }
        self.needed = {abc: self.possible(*abc) for abc in combinations(range(len(axes)), 3)}

    def possible(self, a: int, b: int, c: int) -> Bools:
        """Triples of three axes whose values agree two by two."""
        ab, ac, bc = self.agree[a, b], self.agree[a, c], self.agree[b, c]
        return ab[:, :, None] & ac[:, None, :] & bc[None, :, :]

    @property
    def remaining(self) -> int:
        return sum(int(table.sum()) for table in self.needed.values())

    def gains(self, row: dict[int, int], axis: int) -> npt.NDArray[np.int64]:
        """For each value of an axis how many triples it would cover with two values that the row has."""
        gained = np.zeros(self.sizes[axis], dtype=np.int64)
        for pair in combinations(sorted(row), 2):
            abc = tuple(sorted((*pair, axis)))
            gained += self.needed[abc][tuple(row.get(a, slice(None)) for a in abc)]  # type: ignore[index]
        return gained

    def allowed(self, row: dict[int, int], axis: int) -> Bools:
        """Values of an axis that agree with every value that the row has."""
        allowed = np.ones(self.sizes[axis], dtype=bool)
        for other, value in row.items():
            allowed &= self.agree[other, axis][value]
        return allowed

    def cover(self, row: Sequence[int]) -> None:
        """Counts a row's triples as covered."""
        for (a, b, c), table in self.needed.items():
            table[row[a], row[b], row[c]] = False

    def num_new(self, row: Sequence[int]) -> int:
        """How many needed triples a row holds."""
        return sum(bool(table[row[a], row[b], row[c]]) for (a, b, c), table in self.needed.items())


def grow(triples: Triples, start: dict[int, int], order: list[int], chance: random.Random) -> list[int] | None:
    """A row that holds the start; None where the values left for some axis agree with nothing."""
    row = dict(start)
    for axis in order:
        if axis in row:
            continue
        allowed = triples.allowed(row, axis)
        if not allowed.any():
            return None
        gained = np.where(allowed, triples.gains(row, axis), -1)
        row[axis] = chance.choice(np.flatnonzero(gained == gained.max()).tolist())
    return [row[axis] for axis in range(len(triples.names))]


def next_row(triples: Triples, chance: random.Random) -> list[int]:
    """The best of a few rows, each grown around a triple that is still needed.

    Raises ValueError for a triple that agrees two by two and stands in no row: an exclusion is missing.
    """
    abc = max(triples.needed, key=lambda key: int(triples.needed[key].sum()))
    start = dict(zip(abc, chance.choice(np.argwhere(triples.needed[abc]).tolist()), strict=True))
    orders = [chance.sample(range(len(triples.names)), len(triples.names)) for _ in range(CANDIDATES)]
    rows = [row for row in (grow(triples, start, order, chance) for order in orders) if row is not None]
    if not rows:
        named = ", ".join(f"{triples.names[axis]} number {value}" for axis, value in start.items())
        raise ValueError(f"no row holds {named}, though no two of them exclude one another")
    return max(rows, key=triples.num_new)


def rows_of_strength_three(
    axes: dict[str, tuple[str, ...]], is_possible: Callable[[Row], bool]
) -> list[dict[str, str]]:
    """Rows that hold every triple of values that can stand together."""
    triples, chance = Triples(axes, is_possible), random.Random(SEED)
    rows = []
    while triples.remaining:
        row = next_row(triples, chance)
        triples.cover(row)
        rows.append({name: values[row[i]] for i, (name, values) in enumerate(axes.items())})
    return rows
