"""SGLang's block-sparse kernels under judgement: lists that repeat nothing conform, those that do are named."""

import importlib.util

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not here", allow_module_level=True)

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix_case
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.values import check_values

BACKENDS = ("sglang-msa-decode", "sglang-msa-prefill")
BLOCKS = {"granularity": "block", "sharing": "kv_head", "phase": "chunk", "lengths": "tile_edge", "dtype": "float16"}


def case_of(**axes: str) -> Case:
    return matrix_case("forward", 17, SMOKE_ROW | BLOCKS | axes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "axes", [{}, {"mask": "causal", "dtype": "bfloat16"}, {"listing": "shuffled", "page_size": "8", "heads": "6/2"}]
)
def test_rows_that_see_a_key_conform(backend: str, axes: dict[str, str]) -> None:
    assert judge_case(case_of(**axes), load_backend(backend, "cpu"), checks=[check_values]).state == "PASS"


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_empty_list_is_named(backend: str) -> None:
    result = judge_case(case_of(empty="first"), load_backend(backend, "cpu"), checks=[check_values])
    assert any("EMPTY-OUT" in finding.clauses for finding in result.findings)
