"""Parts of a row whose outputs are stored in the inputs' dtype are held to a bound that says so, and to no other."""

import pytest

from attnconform.conformance.adapters.minimax_numerics import merged_in_parts
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix_case
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.values import check_values

CASE = matrix_case("forward", 5, SMOKE_ROW | {"dtype": "bfloat16", "values": "zero_q", "phase": "chunk"})


def declared(numerics: object) -> StepsBackend:
    """The deviation that stores the outputs of parts low, with what it declares of it."""
    backend = DEVIATIONS["stores-out-of-parts-in-bf16"].build()
    assert isinstance(backend, StepsBackend)
    backend.capabilities = backend.capabilities.__class__(numerics=numerics)  # type: ignore[arg-type]
    return backend


@pytest.mark.parametrize("is_declared", [False, True])
def test_parts_stored_low_are_within_the_bound_where_that_is_declared(is_declared: bool) -> None:
    plain = {"bfloat16": NUMERICS_CLASSES["bf16"]}
    backend = declared(merged_in_parts(plain) if is_declared else plain)
    found = {finding.state for finding in judge_case(CASE, backend, checks=[check_values]).findings}
    assert found == (set() if is_declared else {"FAIL_value"})


def test_the_rest_of_the_arithmetic_is_kept() -> None:
    (parts,) = merged_in_parts({"float16": NUMERICS_CLASSES["fp16-hopper"]}).values()
    assert (parts.partial_storage, parts.p_storage, parts.extra_bits) == ("float16", "float16", 2)
    assert parts.partial_lse_storage == "none"
