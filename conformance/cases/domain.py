"""The values of every axis that a backend declares: those of the matrix, and those that it lists besides."""

import re
from collections.abc import Iterable

from attnconform.conformance.backend import Capabilities, OneOf, Span
from attnconform.conformance.cases.axes import BACKWARD_AXES, EXCLUSIONS, FORWARD_AXES, Row
from attnconform.conformance.cases.covering import AXES
from attnconform.conformance.cases.wide_axes import MORE_EXCLUSIONS, SMALL_DIMS, wide_axes

Axes = dict[str, tuple[str, ...]]
# axes whose values are numbers, so that one the matrix has not can be generated like any other
NUMBERS = {"heads": "QUERY_HEADS/KV_HEADS", "head_dim": "OF_QK/OF_VO", "page_size": "N", "q_block": "N", "splits": "N"}


def declared_axes(operation: str, capabilities: Capabilities, *, wide: bool = False) -> Axes:
    """The declared values of an operation's axes; `wide`: of L2's and L3's. No axes where one has no declared value.

    Raises ValueError for a listed number that is none.
    """
    common = [wide_axes(op) for op in AXES] if wide else [FORWARD_AXES, BACKWARD_AXES]
    axes = {}
    for axis, values in (wide_axes(operation) if wide else AXES[operation]).items():
        kept = tuple(value for value in values if capabilities.declares(axis, value))
        known = {value for each in common for value in each[axis]}
        listed = listed_values(axis, capabilities)
        axes[axis] = (*kept, *(value for value in listed if value not in known)) or listed
    if operation == "backward" and not capabilities.quantized_backward:
        axes["quant"] = tuple(value for value in axes["quant"] if value == "none")
    return axes if all(axes.values()) else {}


def listed_values(axis: str, capabilities: Capabilities) -> tuple[str, ...]:
    """What a declaration lists of an axis, in an order of its own: a span stands for its two ends.

    A name that no level has is left out: there is no telling what it means. Raises ValueError as above.
    """
    domains = [domains.get(axis) for domains in (capabilities.supported, capabilities.fallback)]
    listed: set[str] = set()
    for domain in domains:
        if isinstance(domain, OneOf):
            listed |= {str(value) for value in domain.values}
        if isinstance(domain, Span):
            listed |= {str(domain.low), str(domain.high - (domain.high - domain.low) % domain.step)}
    if axis in NUMBERS:
        return tuple(sorted(listed, key=lambda value: numbers(axis, value)))
    return tuple(value for value in every_name(axis) if value in listed)


def every_name(axis: str) -> Iterable[str]:
    """The values of an axis at any level, each once."""
    return dict.fromkeys(value for operation in AXES for value in wide_axes(operation)[axis])


def numbers(axis: str, value: str) -> tuple[int, ...]:
    """The numbers that a value consists of. Raises ValueError, with axis and value, where it is of another form."""
    parts = value.split("/")
    is_pair = "/" in NUMBERS[axis]
    if len(parts) != 1 + is_pair or not all(re.fullmatch(r"[1-9]\d*", part, re.ASCII) for part in parts):
        raise ValueError(f"the backend declares {axis} = {value!r}, but the form is {NUMBERS[axis]}, each at least 1")
    found = tuple(map(int, parts))
    if axis == "heads" and found[0] % found[1]:
        raise ValueError(f"the backend declares heads = {value!r}, but {found[1]} does not divide {found[0]}")
    return found


def is_possible_in(axes: Axes, row: Row) -> bool:
    """Whether values that a backend declares can stand together.

    Many heads keep their small head dims where the backend has some; without any they keep its own.
    """
    has_small = bool(set(SMALL_DIMS) & set(axes["head_dim"]))
    exclusions = (*EXCLUSIONS, *(e for e in MORE_EXCLUSIONS if e[0] != "heads" or has_small))
    return not any(
        row.get(axis) == value and other in row and row[other] not in allowed
        for axis, value, other, allowed in exclusions
    )
