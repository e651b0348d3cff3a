"""Deviations and faithful variants: what a deliberate mistake is, and the registries that hold them.

A deviation breaks one clause by one idea, written as a variation of the reference and never of a kernel. A faithful
variant is another right way to compute the same thing. The suite must catch the first and accept the second.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar, cast

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backend
from attnconform.reference.steps import Steps

FaultClass = Literal["E", "P", "U", "S", "L", "M", "O", "T", "B", "K", "G", "D", "R", "C", "Z", "Q", "A", "N"]
Mistake = type[Steps] | type[StepsBackend]
M = TypeVar("M", bound=Mistake)

# one letter a class of real bug reports
FAULT_CLASSES: dict[FaultClass, str] = {
    "E": "empty domain: a row, tile, split or request with nothing to attend",
    "P": "unowned memory is read: tails, padding, recycled memory",
    "U": "output that nobody writes",
    "S": "splits and the merge of their states",
    "L": "unit or value of lse",
    "M": "alignment of masks: causal, window, query offset",
    "O": "integer width in address arithmetic",
    "T": "page table, strides, layout, aliasing",
    "B": "block-sparse metadata",
    "K": "token candidate lists",
    "G": "head map of grouped queries",
    "D": "geometry of the head dimension",
    "R": "other faults of gradients",
    "C": "what is kept from call to call: plans, caches, workspace",
    "Z": "sentinels and extreme logits",
    "Q": "arithmetic of a lower precision than declared",
    "A": "an argument is accepted and ignored, or never checked",
    "N": "race, nondeterminism",
}


@dataclass(frozen=True)
class Deviation:
    """A deliberate break of one clause."""

    id: str  # says the mistake, e.g. counts-a-duplicate-twice
    clause: str
    idea: str  # one sentence
    report: (
        str  # the real bug it stands for (BR-n: a row of the survey of reports), else who names the mistake, else none
    )
    fault_class: FaultClass
    build: Callable[[], Backend]  # a fresh backend that makes the mistake


@dataclass(frozen=True)
class Variant:
    """A faithful variant: other arithmetic, order or declaration, and the right answer."""

    id: str
    idea: str
    build: Callable[[], Backend]


DEVIATIONS: dict[str, Deviation] = {}
VARIANTS: dict[str, Variant] = {}


def deviates(clause: str, *, fault_class: FaultClass, report: str) -> Callable[[M], M]:
    """Registers a variation of the reference as a deviation; its name is the id, its docstring the idea."""

    def register(mistake: M) -> M:
        deviation_id = kebab_case(mistake.__name__)
        build = partial(build_backend, mistake)
        add(DEVIATIONS, Deviation(deviation_id, clause, idea_of(mistake), report, fault_class, build))
        return mistake

    return register


def faithful(variant: M) -> M:
    """Registers a variation of the reference as a faithful variant."""
    variant_id = kebab_case(variant.__name__)
    add(VARIANTS, Variant(variant_id, idea_of(variant), partial(build_backend, variant)))
    return variant


R = TypeVar("R", Deviation, Variant)


def add(registry: dict[str, R], entry: R) -> None:
    """Raises ValueError where the id is taken."""
    if entry.id in registry:
        raise ValueError(f"{entry.id} is registered twice")
    registry[entry.id] = entry


def build_backend(mistake: Mistake) -> Backend:
    """A fresh backend for a varied Steps or StepsBackend; what it keeps between calls is its own."""
    if issubclass(mistake, StepsBackend):
        return mistake()
    backend = type(mistake.__name__, (StepsBackend,), {"steps": mistake(), "name": kebab_case(mistake.__name__)})
    return cast(Backend, backend())


def kebab_case(name: str) -> str:
    """CountsADuplicateTwice as counts-a-duplicate-twice."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", name).lower()


def idea_of(mistake: type) -> str:
    """The first paragraph of a docstring, on one line. Raises ValueError where there is none."""
    if not mistake.__doc__:
        raise ValueError(f"{mistake.__name__} has no docstring to say its idea")
    return " ".join(mistake.__doc__.split("\n\n")[0].split())
