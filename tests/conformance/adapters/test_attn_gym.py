"""attn-gym's gather_attn under judgement: it conforms on sets, and counts a repeated key again, as it documents."""

import pytest

pytest.importorskip("attn_gym")

from attnconform.conformance.adapters.attn_gym import Gather, GatherRepeats
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix, matrix_case
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.judge import judge_case

LISTS = {"granularity": "token", "sharing": "query_head", "phase": "chunk"}


def case_of(operation: str, **axes: str) -> Case:
    return matrix_case(operation, 13, SMOKE_ROW | LISTS | axes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_token_lists_with_holes_conform(dtype: str) -> None:
    assert judge_case(case_of("forward", dtype=dtype, listing="holes"), Gather()).state == "PASS"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_over_lists_with_holes_conform(dtype: str) -> None:
    assert judge_case(case_of("backward", dtype=dtype, listing="holes"), Gather()).state == "PASS"


def test_float16_gradients_that_unlisted_values_reach_are_reported() -> None:
    """Values of 1e4 make a product with dout inf, and inf times a weight of 0 is NaN."""
    result = judge_case(case_of("backward", dtype="float16", listing="holes"), Gather())
    assert [(f.state, f.clauses[0]) for f in result.findings] == [("FAIL_interference", "MASK-INTERFERE")]


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_sinks_and_their_gradient_conform(operation: str) -> None:
    assert judge_case(case_of(operation, sink="logits"), Gather()).state == "PASS"


def test_blocks_under_a_causal_mask_conform() -> None:
    assert judge_case(case_of("forward", granularity="block", mask="causal"), Gather()).state == "PASS"


def test_an_empty_row_conforms() -> None:
    assert judge_case(case_of("forward", empty="first"), Gather()).state == "PASS"


def test_lists_that_repeat_a_key_are_declared_only_where_they_are_asked_for() -> None:
    assert judge_case(case_of("forward", listing="duplicates"), Gather()).state == "UNSUPPORTED"
    result = judge_case(case_of("forward", listing="duplicates"), GatherRepeats())
    assert result.state == "FAIL_membership"
    assert result.findings[0].clauses[0] == "SET-DUPLICATE"


@pytest.mark.parametrize("slug", ["designed-a-scale-of-zero", "designed-gradients-of-a-group-of-eight"])
def test_a_scale_of_zero_and_the_gradients_of_a_large_group_conform(slug: str) -> None:
    case = next(case for case in matrix("L1") if slug in case.id)
    assert judge_case(case, Gather()).state == "PASS"
