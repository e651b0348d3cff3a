"""JAX under judgement: dense masks conform, and what it does with empty rows and with a page's tail is named."""

import pytest

pytest.importorskip("jax")

from attnconform.conformance.adapters.jax_attention import JaxPaged, JaxXla
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix_case
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.values import check_values


def case_of(operation: str, **axes: str) -> Case:
    return matrix_case(operation, 17, SMOKE_ROW | axes)


@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_rows_that_see_a_key_conform(operation: str) -> None:
    axes = {"granularity": "token", "sharing": "query_head", "phase": "chunk", "score": "alibi"}
    assert judge_case(case_of(operation, **axes), JaxXla()).state == "PASS"


def test_the_mean_of_v_in_an_empty_row_is_named() -> None:
    result = judge_case(case_of("forward", granularity="token", empty="first", phase="chunk"), JaxXla())
    assert any("EMPTY-OUT" in finding.clauses for finding in result.findings)


def test_an_lse_in_bfloat16_is_past_its_bound() -> None:
    result = judge_case(case_of("forward", dtype="bfloat16"), JaxXla(), checks=[check_values])
    assert [finding.message[:3] for finding in result.findings] == ["lse"]


def test_the_paged_kernel_multiplies_the_tail_of_a_page() -> None:
    result = judge_case(case_of("forward", page_size="8"), JaxPaged())
    assert result.state == "FAIL_interference"
    assert "MASK-TAIL" in result.findings[0].clauses
