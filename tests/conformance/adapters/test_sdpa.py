"""Scaled dot product attention under judgement: the composite conforms, the CPU's flash kernel has one known fault."""

import pytest

from attnconform.conformance.adapters.sdpa import Sdpa, SdpaFlashCpu
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix, matrix_case
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.judge import judge_case


def first_case(operation: str, *, has_empty_row: bool = False, **axes: str) -> Case:
    """A plain case that SDPA declares, with some axes changed."""
    lists = {"granularity": "token", "sharing": "query_head", "phase": "chunk", "values": "normal"}
    row = SMOKE_ROW | lists | {"empty": "first" if has_empty_row else "none"} | axes
    case = matrix_case(operation, 7, row)
    assert ("EMPTY-LSE" in case.clauses) == has_empty_row
    return case


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", [Sdpa(), SdpaFlashCpu()], ids=lambda b: b.name)
@pytest.mark.parametrize("operation", ["forward", "backward"])
def test_rows_that_see_a_key_conform(operation: str, backend: Backend, dtype: str) -> None:
    assert judge_case(first_case(operation, dtype=dtype), backend).state == "PASS"


@pytest.mark.parametrize("backend", [Sdpa(), SdpaFlashCpu()], ids=lambda b: b.name)
def test_alibi_as_an_additive_mask_conforms(backend: Backend) -> None:
    assert judge_case(first_case("forward", score="alibi"), backend).state == "PASS"


def test_a_page_shared_by_two_requests_takes_both_gradients() -> None:
    case = first_case("backward", pages="shared_prefix")
    assert judge_case(case, Sdpa()).state == "PASS"


def test_an_aliased_page_counts_at_both_its_places() -> None:
    case = first_case("backward", pages="aliased")
    assert judge_case(case, Sdpa()).state == "PASS"


def test_the_flash_kernels_lse_of_an_empty_row_is_reported() -> None:
    """It is 0.0 where it must be -inf, in torch 2.13 and before."""
    result = judge_case(first_case("forward", has_empty_row=True), SdpaFlashCpu())
    assert result.state == "FAIL_value"
    assert any("EMPTY-LSE" in finding.clauses for finding in result.findings)
    assert all("lse" in finding.message for finding in result.findings)


def test_the_composite_gives_an_empty_row_zero() -> None:
    assert judge_case(first_case("forward", has_empty_row=True), Sdpa()).state == "PASS"


@pytest.mark.parametrize("axes", [{"score": "softcap"}, {"sink": "logits"}])
def test_what_a_mask_cannot_say_is_unsupported(axes: dict[str, str]) -> None:
    assert judge_case(first_case("forward", **axes), Sdpa()).state == "UNSUPPORTED"


def test_refusals_of_the_suites_own_views_are_not_claimed() -> None:
    assert {judge_case(c, Sdpa()).state for c in matrix("L1") if c.operation == "refusal"} == {"UNSUPPORTED"}
