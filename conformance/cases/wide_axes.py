"""The axes of L2 and L3: those of L1 with more values, and a few more axes; what they exclude of one another."""

from attnconform.conformance.backend import OPTIONAL_AXES
from attnconform.conformance.cases.axes import BACKWARD_AXES, EXCLUSIONS, FORWARD_AXES, Row

# axes that L1 does not vary, and the value that all of its cases have
USUAL = {"counts": "half", "scale": "usual", "base": "aligned"}
MORE_AXES: dict[str, tuple[str, ...]] = {
    "counts": ("half", "one", "all", "none", "hot"),  # ids that a list names; hot: the same one in every list
    "scale": ("usual", "near_ties"),  # near ties: scores so close that nearly every weight is the same
    "base": ("aligned", "misaligned"),  # misaligned: pages an odd number of elements apart
}
MORE_FORWARD: dict[str, tuple[str, ...]] = {
    "heads": ("8/1", "28/4", "48/2"),
    "page_size": ("64", "128"),
    "lengths": ("block_edge", "one_and_many"),
}
MORE_BACKWARD: dict[str, tuple[str, ...]] = {"heads": ("8/1",), "page_size": ("64",), "lengths": ("block_edge",)}
LARGE_HEADS, SMALL_DIMS = ("28/4", "48/2"), ("64/64", "64/32", "80/80")  # not both many and large: a case stays small

MORE_EXCLUSIONS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("granularity", "dense", "counts", ("half",)),
    # a list of nothing but what a window adds, which holds the query's own position; nothing cannot be repeated
    ("counts", "none", "local", ("window", "window_and_sinks")),
    ("counts", "none", "empty", ("none",)),
    ("counts", "none", "listing", ("sorted", "holes")),
    ("counts", "none", "form", ("set",)),
    # the position that every list names is the first: a window would not reach it
    ("counts", "hot", "mask", ("none", "causal", "prefix")),
    *(("heads", heads, "head_dim", SMALL_DIMS) for heads in LARGE_HEADS),
    ("lengths", "one_and_many", "phase", ("decode", "mixed")),
    # scores that are set by hand are set through the scale
    ("scale", "near_ties", "values", ("normal", "peaked", "zero_q", "equal_keys", "v_mean", "code_edges")),
)
WIDE_EXCLUSIONS = (*EXCLUSIONS, *MORE_EXCLUSIONS)


def wide_axes(operation: str) -> dict[str, tuple[str, ...]]:
    """Every axis of an operation's L2 and L3 with all of its values."""
    base, more = (FORWARD_AXES, MORE_FORWARD) if operation == "forward" else (BACKWARD_AXES, MORE_BACKWARD)
    return {axis: (*values, *more.get(axis, ())) for axis, values in base.items()} | MORE_AXES


def core_axes(operation: str) -> dict[str, tuple[str, ...]]:
    """The axes that every backend has, whose triples L3 covers."""
    axes = wide_axes(operation)
    core = {axis: values for axis, values in axes.items() if axis not in OPTIONAL_AXES}
    return core | {"values": tuple(value for value in core["values"] if value != "code_edges")}


def is_possible_wide(row: Row) -> bool:
    """Whether the values of a row of L2 or L3, which may be incomplete, can stand together."""
    return not any(
        row.get(axis) == value and other in row and row[other] not in allowed
        for axis, value, other, allowed in WIDE_EXCLUSIONS
    )
