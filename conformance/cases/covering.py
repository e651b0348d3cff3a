"""Covering arrays over the axes: made once by a library, balanced, and frozen as data. [a development tool]

One array holds the core axes, with every optional feature off. One array a feature meets each of its values with
every value of every core axis, the other features off, so that a backend with that feature alone can be judged on it.
One last array puts features together, pair by pair.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from attnconform.conformance.backend import OPTIONAL_AXES
from attnconform.conformance.cases.axes import BACKWARD_AXES, EXCLUSIONS, FORWARD_AXES, Row, is_possible

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


@dataclass(frozen=True)
class Array:
    """What one array covers: the values of every axis, and the tuples of axes that are met in all combinations."""

    axes: dict[str, tuple[str, ...]]
    met: tuple[tuple[str, ...], ...]

    def wanted(self) -> Iterator[Row]:
        """Every combination of values that some row must hold."""
        for names in self.met:
            for values in product(*(self.axes[axis] for axis in names)):
                combined = dict(zip(names, values, strict=True))
                if is_possible({**combined, **self.fixed}):
                    yield combined

    @property
    def fixed(self) -> Row:
        """Axes of one value."""
        return {axis: values[0] for axis, values in self.axes.items() if len(values) == 1}


def arrays(operation: str, axes: dict[str, tuple[str, ...]] | None = None) -> Iterator[Array]:
    """The arrays of an operation: core, one a feature, features together; over all axis values or over those given."""
    axes = AXES[operation] if axes is None else axes
    off, core = features_off(axes), without_features(axes)
    free = [axis for axis, values in core.items() if len(values) > 1]
    triples = [names for names in TRIPLES[operation] if set(names) <= set(free)]
    yield Array(core, (*combinations(free, 2), *triples) if len(free) > 1 else tuple((axis,) for axis in core))
    features = [axis for axis in off if len(axes[axis]) > 1]
    for feature in features:
        on = tuple(value for value in axes[feature] if value != OPTIONAL_AXES[feature])
        values = axes if feature == "quant" else core
        of_feature = axes | off | {"values": values["values"], feature: on}
        yield Array(of_feature, tuple((feature, axis) for axis in free) or ((feature,),))
    yield Array(axes, tuple(combinations(features, 2)))


def without_features(axes: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The axes with features off that may be, and without numbers that only codes can show."""
    off = features_off(axes)
    values = axes["values"] if "quant" not in off else tuple(v for v in axes["values"] if v != "code_edges")
    return axes | off | {"values": values}


def features_off(axes: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The features that may be off among these values, each with that value alone."""
    return {axis: (value,) for axis, value in OPTIONAL_AXES.items() if value in axes.get(axis, ())}


def covering_rows(operation: str) -> list[dict[str, str]]:
    """New rows for an operation, balanced."""
    return [row for array in arrays(operation) for row in balanced(array, make_rows(array))]


def make_rows(array: Array) -> list[dict[str, str]]:
    """A covering array by the library."""
    from covertable.main import make  # a development tool: needed to freeze an array, never to run one

    pairs = {names for names in array.met if len(names) == 2}
    everything = set(combinations([axis for axis in array.axes if len(array.axes[axis]) > 1], 2))
    strength = 2 if everything <= pairs else 1
    factors = {axis: list(values) for axis, values in array.axes.items()}
    sub_models = [{"fields": list(names), "strength": len(names)} for names in array.met if len(names) > strength]
    rows = make(factors, strength=strength, sub_models=sub_models, constraints=list(constraints(array.axes)))
    return [{axis: row[axis] for axis in factors} for row in rows]


def constraints(axes: dict[str, tuple[str, ...]]) -> Iterator[dict[str, object]]:
    """EXCLUSIONS in the covering library's own words."""
    for axis, value, other, allowed in EXCLUSIONS:
        if axis not in axes or other not in axes or value not in axes[axis]:
            continue
        not_it = {"operator": "not", "condition": {"operator": "eq", "left": axis, "value": value}}
        kept = [{"operator": "eq", "left": other, "value": v} for v in allowed if v in axes[other]]
        yield {"operator": "or", "conditions": [not_it, *kept]}


def balanced(array: Array, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows with values that nothing needs exchanged for the rarest; all that was covered stays covered.

    A library fills what no combination asks for with an axis's first value: three rows of four were float32.
    """
    rows = [dict(row) for row in rows]
    times = Counter(combination for row in rows for combination in combinations_of(array, row))
    uses = {axis: Counter(row[axis] for row in rows) for axis in array.axes}
    for row in rows:
        for axis, values in array.axes.items():
            for rarer in sorted(values, key=lambda value: uses[axis][value]):
                if uses[axis][rarer] + 1 >= uses[axis][row[axis]]:
                    break
                if exchange(array, row, axis, rarer, times):
                    uses[axis].subtract([row[axis]])
                    row[axis] = rarer
                    uses[axis][rarer] += 1
                    break
    return rows


def exchange(array: Array, row: dict[str, str], axis: str, value: str, times: Counter[tuple[str, ...]]) -> bool:
    """Whether a row may take another value; counts what it then covers."""
    changed = row | {axis: value}
    if not is_possible(changed):
        return False
    lost, gained = ([c for c in combinations_of(array, r) if axis in c[::2]] for r in (row, changed))
    if any(times[combination] < 2 for combination in lost):
        return False
    times.subtract(lost)
    times.update(gained)
    return True


def combinations_of(array: Array, row: Row) -> list[tuple[str, ...]]:
    """The combinations that a row covers, each as axis, value, axis, value, .."""
    return [tuple(part for axis in names for part in (axis, row[axis])) for names in array.met]


def uncovered(operation: str, rows: Sequence[Row]) -> list[Row]:
    """Combinations of every array of an operation that no possible row of that array holds."""
    possible = [row for row in rows if is_possible(row)]
    missing: list[Row] = []
    for array in arrays(operation):
        own = [row for row in possible if all(row[axis] in values for axis, values in array.axes.items())]
        missing += [wanted for wanted in array.wanted() if not any(wanted.items() <= row.items() for row in own)]
    return missing
