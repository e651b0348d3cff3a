"""Splash attention under judgement: whole tiles around a request change nothing, and its empty rows are named."""

import pytest

pytest.importorskip("jax")

from attnconform.conformance.adapters.jax_splash import JaxSplash
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix_case
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.values import check_values


def case_of(operation: str, **axes: str) -> Case:
    return matrix_case(operation, 17, SMOKE_ROW | axes)


@pytest.mark.parametrize("axes", [{"sink": "logits", "heads": "6/2"}, {"score": "softcap", "dtype": "bfloat16"}])
def test_rows_that_see_a_key_conform(axes: dict[str, str]) -> None:
    case = case_of("forward", granularity="token", sharing="query_head", phase="chunk", mask="causal", **axes)
    assert judge_case(case, JaxSplash(), checks=[check_values]).state == "PASS"


def test_gradients_of_every_input_conform() -> None:
    axes = {"sink": "logits", "score": "softcap", "granularity": "block", "sharing": "kv_head"}
    assert judge_case(case_of("backward", phase="chunk", **axes), JaxSplash()).state == "PASS"


def test_what_a_row_without_keys_gives_is_named() -> None:
    case = case_of("forward", granularity="token", empty="first", phase="chunk")
    result = judge_case(case, JaxSplash(), checks=[check_values])
    assert any("EMPTY-OUT" in finding.clauses for finding in result.findings)
