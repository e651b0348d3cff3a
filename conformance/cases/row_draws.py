"""Hypothesis strategies of cases that a backend declares: rows of axis values, turned into cases like the matrix' own.

Where `strategies` draws structures freely, this draws every feature of the contract, and only values that a backend
names as its own, so that a hunt asks nothing that the backend does not promise.
"""

from collections.abc import Sequence

from hypothesis import strategies as st

from attnconform.conformance.backend import Capabilities
from attnconform.conformance.cases.clauses_of import clauses_of
from attnconform.conformance.cases.edges import build_wide_structure
from attnconform.conformance.cases.strategies import HEAD_DIMS, HEADS, PAGE_SIZES, cases
from attnconform.conformance.cases.structure import Case, Operation, build_problem, named
from attnconform.conformance.cases.wide_axes import is_possible_wide, wide_axes

Row = dict[str, str]
ROW_SEEDS = st.integers(0, 2**56 - 1)  # a structure's other seeds are a little larger, and fit 64 bits too
# what `strategies.structures` draws that the axes have no value for
FREE: dict[str, tuple[str, ...]] = {
    "heads": tuple(f"{qo}/{kv}" for qo, kv in HEADS),
    "head_dim": tuple(f"{qk}/{vo}" for qk, vo in HEAD_DIMS),
    "page_size": tuple(str(size) for size in PAGE_SIZES),
    "mask": ("Document", "And", "Or"),
    "score": ("SoftCap_Alibi",),
}
# drawn first: what they leave to others is much, what others leave to them little
FIRST = ("granularity", "form", "counts", "rope", "quant", "scale")


@st.composite
def declared_rows(draw: st.DrawFn, operation: Operation, capabilities: Capabilities) -> Row:
    """Axis values that can stand together, each declared wherever a declared one can stand beside the others."""
    axes = wide_axes(operation)
    row: Row = {}
    for axis in sorted(axes, key=lambda axis: axis not in FIRST):
        possible = [value for value in axes[axis] if is_possible_wide({**row, axis: value})]
        declared = [value for value in possible if capabilities.declares(axis, value)]
        row[axis] = draw(st.sampled_from(declared or possible), label=axis)
    return row


@st.composite
def declared_cases(draw: st.DrawFn, capabilities: Capabilities, operations: Sequence[Operation]) -> Case:
    """Cases of declared rows, with every feature of the contract."""
    operation = draw(st.sampled_from(operations), label="operation")
    row = draw(declared_rows(operation, capabilities), label="row")
    seed = draw(ROW_SEEDS, label="seed")
    structure = build_wide_structure(row, seed)
    case = Case(
        id="",
        level="L3",
        operation=operation,
        structure=structure,
        values=row["values"],  # type: ignore[arg-type]  # the axis holds the literal's values
        seed=seed,
        clauses=clauses_of(operation, row, build_problem(structure)),
        axes=row,
    )
    return named(case, "hunted")


def hunted_cases(capabilities: Capabilities, operations: Sequence[Operation]) -> st.SearchStrategy[Case]:
    """Cases of declared rows, and freely drawn ones beside them where a backend declares all that these may hold."""
    rows = declared_cases(capabilities, operations)
    takes_all = all(capabilities.declares(axis, value) for axis, values in FREE.items() for value in values)
    return st.one_of(rows, cases(operations=operations)) if takes_all else rows
