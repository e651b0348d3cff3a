"""Words of a declaration that mean nothing: misspelled, they would leave a backend judged by what it never declared."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any, get_args

import msgspec

from attnconform.conformance.backend import Capabilities, Domain, OneOf, Span
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.cases.domain import NUMBERS, every_name, numbers
from attnconform.conformance.cases.refusals import REFUSALS
from attnconform.conformance.cases.structure import Dtype, ValueKind
from attnconform.conformance.cases.wide_axes import wide_axes

REFUSAL_AXIS = "refusal"
DOMAINS, NUMERICS = ("supported", "fallback"), "numerics"
AXES = tuple(dict.fromkeys((*wide_axes("forward"), *wide_axes("backward"), REFUSAL_AXIS)))
# values that cases have beside those of the arrays
FURTHER_VALUES = {REFUSAL_AXIS: tuple(REFUSALS), "values": get_args(ValueKind), "lengths": ("thousands",)}
OF_ONE_NUMBER = tuple(axis for axis, form in NUMBERS.items() if form == "N")
NUMERICS_KEYS = tuple(f"{dtype}{suffix}" for dtype in get_args(Dtype) for suffix in ("", "/codes"))


def check_declaration(capabilities: Capabilities) -> None:
    """Raises ValueError, in one line, for the first word of a declaration that no case has and no bound looks up."""
    for fault in faults_of(capabilities):
        raise ValueError(fault)


def faults_of(capabilities: Capabilities) -> Iterator[str]:
    """What is wrong with a declaration's words."""
    for field in DOMAINS:
        for axis, domain in getattr(capabilities, field).items():
            if axis not in AXES:
                yield f"{field} names {unknown('the axis', axis, AXES)}"
            else:
                yield from faults_of_domain(f"{field}[{axis!r}]", axis, domain)
    for key, declared in getattr(capabilities, NUMERICS).items():
        if key not in NUMERICS_KEYS:
            yield f"numerics names {unknown('the dtype', key, NUMERICS_KEYS)}"
        if not isinstance(declared, Numerics):
            yield f"numerics[{key!r}] is {declared!r}, but must be a Numerics"
    yield from faults_of_choices(capabilities)


def faults_of_domain(where: str, axis: str, domain: object) -> Iterator[str]:
    """What is wrong with the values of one axis; an axis of numbers may have any in its form."""
    if not isinstance(domain, get_args(Domain)):
        yield f"{where} is {domain!r}, but must be a OneOf, a Span or Whole()"
    if isinstance(domain, Span) and axis not in OF_ONE_NUMBER:
        yield f"{where} is a Span, but only the values of {', '.join(OF_ONE_NUMBER)} are single numbers"
    if isinstance(domain, OneOf) and isinstance(domain.values, str):
        yield f"{where} is OneOf({domain.values!r}), but must hold a tuple: OneOf(({domain.values!r},))"
    elif isinstance(domain, OneOf):
        yield from faults_of_values(where, axis, map(str, domain.values))


def faults_of_values(where: str, axis: str, values: Iterable[str]) -> Iterator[str]:
    """What is wrong with the values that a domain lists."""
    known = values_of(axis)
    for value in values:
        if value in known:
            continue
        if axis not in NUMBERS:
            yield f"{where} lists {unknown('the value', value, known)}"
            continue
        try:
            numbers(axis, value)
        except ValueError as error:
            yield f"{where}: {error}"


def values_of(axis: str) -> tuple[str, ...]:
    """Every value of an axis that some case of some level has."""
    further = FURTHER_VALUES.get(axis, ())
    return further if axis == REFUSAL_AXIS else (*every_name(axis), *further)


def faults_of_choices(capabilities: Capabilities) -> Iterator[str]:
    """What is wrong with the fields that are one of a few words, or yes or no."""
    for field in msgspec.structs.fields(Capabilities):
        choices: tuple[Any, ...] = (True, False) if field.type is bool else get_args(field.type)
        value = getattr(capabilities, field.name)
        if field.name not in (*DOMAINS, NUMERICS) and value not in choices:
            yield f"{field.name} is {value!r}, but must be {' or '.join(map(repr, choices))}"


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """A word that nothing has, and the nearest that there is."""
    known = tuple(known)
    near = get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"{what} {word!r}, which nothing has; {hint}"
