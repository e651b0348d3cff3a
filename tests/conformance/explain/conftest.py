"""Small cases and backends that the tests of explain share."""

import msgspec
import pytest

from attnconform.conformance.cases.structure import Case, named
from attnconform.conformance.explain.smoke_cases import Sizes, tiny_structure


@pytest.fixture
def small_case():
    """Builds a case from the arguments of a tiny structure, and what is to differ in it."""

    def build(operation="forward", values="normal", changes=None, **arguments):
        structure = msgspec.structs.replace(tiny_structure(sizes=Sizes(), **arguments), **(changes or {}))
        case = Case(
            id="", level="L1", operation=operation, structure=structure, values=values, seed=7, clauses=("SCORE-SCALE",)
        )
        return named(case, "small")

    return build
