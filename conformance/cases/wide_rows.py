"""The rows of L2 and L3: L1's with something at an edge, and covering arrays of strength 3. [a development tool]"""

from collections.abc import Iterator
from itertools import cycle, islice

from attnconform.conformance.backend import OPTIONAL_AXES
from attnconform.conformance.cases.axes import Row
from attnconform.conformance.cases.covering import AXES
from attnconform.conformance.cases.matrix import SMOKE_ROW, frozen_rows
from attnconform.conformance.cases.triples import rows_of_strength_three
from attnconform.conformance.cases.wide_axes import USUAL, WIDE_EXCLUSIONS, core_axes, is_possible_wide, wide_axes

Rows = list[dict[str, str]]
VARIATIONS = 4  # cases of L2 for a row of L1
# what L2 changes in L1's rows, in turn
EDGES: tuple[tuple[str, str], ...] = (
    ("lengths", "tile_edge"),
    ("lengths", "page_edge"),
    ("lengths", "block_edge"),
    ("lengths", "one"),
    ("lengths", "one_and_many"),
    ("page_size", "1"),
    ("page_size", "64"),
    ("page_size", "128"),
    ("heads", "8/1"),
    ("heads", "28/4"),
    ("heads", "48/2"),
    ("head_dim", "576/512"),
    ("counts", "one"),
    ("counts", "all"),
    ("counts", "none"),
    ("counts", "hot"),
    ("scale", "near_ties"),
    ("base", "misaligned"),
    ("splits", "8"),
)
FORWARD_ALONE = (("head_dim", "576/512"),)  # beyond the values of the wide axes
THOUSANDS = tuple(
    {"granularity": granularity, "mask": mask, "phase": phase, "values": values}
    for granularity, sharing in (("dense", "shared"), ("token", "kv_head"), ("block", "query_head"))
    for mask, phase in (("none", "decode"), ("causal", "chunk"), ("causal_window", "chunk"))
    for values in ("normal", "half_mass", "far_key")
)


def edge_rows(operation: str) -> Iterator[dict[str, str]]:
    """L2: every row of L1 a few times, each time with another edge and other numbers, and a request of thousands."""
    changes = cycle(EDGES)
    for row in frozen_rows(operation):
        for _ in range(VARIATIONS):
            edges = islice(changes, len(EDGES))
            yield next(
                changed
                for axis, value in edges
                if is_new(operation, row, axis, value) and is_possible_wide(changed := {**USUAL, **row, axis: value})
            )
    if operation == "forward":
        for change, dtype in zip(THOUSANDS, cycle(("bfloat16", "float32", "float16")), strict=False):
            lists = {"sharing": "shared" if change["granularity"] == "dense" else "kv_head"}
            yield {**USUAL, **SMOKE_ROW, **lists, **change, "dtype": dtype, "lengths": "thousands", "splits": "3"}


def is_new(operation: str, row: Row, axis: str, value: str) -> bool:
    """Whether a row would change, and to a value that its operation has."""
    is_known = value in wide_axes(operation)[axis] or (operation == "forward" and (axis, value) in FORWARD_ALONE)
    return is_known and {**USUAL, **row}[axis] != value


def triple_rows(operation: str) -> Rows:
    """A covering array of strength 3 over the core axes, every feature off."""
    off = {axis: value for axis, value in OPTIONAL_AXES.items() if axis in AXES[operation]}
    return [off | row for row in rows_of_strength_three(core_axes(operation), is_possible_wide)]


def feature_rows(operation: str) -> Rows:
    """All pairs of all axes, features and edges together, by the library."""
    from covertable.main import make  # a development tool: needed to freeze an array, never to run one

    axes = wide_axes(operation)
    rows = make({axis: list(values) for axis, values in axes.items()}, strength=2, constraints=list(constraints(axes)))
    return [{axis: row[axis] for axis in axes} for row in rows]


def constraints(axes: dict[str, tuple[str, ...]]) -> Iterator[dict[str, object]]:
    """WIDE_EXCLUSIONS in the covering library's own words."""
    for axis, value, other, allowed in WIDE_EXCLUSIONS:
        if axis not in axes or other not in axes or value not in axes[axis]:
            continue
        not_it = {"operator": "not", "condition": {"operator": "eq", "left": axis, "value": value}}
        kept = [{"operator": "eq", "left": other, "value": v} for v in allowed if v in axes[other]]
        yield {"operator": "or", "conditions": [not_it, *kept]}
