"""Scaled dot product attention under judgement: the composite conforms, the CPU's flash kernel has one known fault."""

import pytest

from attnconform.conformance.adapters.sdpa import Sdpa, SdpaFlashCpu
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.judge import judge_case


def first_case(operation: str, **axes: str) -> Case:
    """The matrix' first case with these axis values."""
    return next(c for c in matrix("L1") if c.operation == operation and axes.items() <= c.axes.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("backend", [Sdpa(), SdpaFlashCpu()], ids=lambda b: b.name)
def test_rows_that_see_a_key_conform_forward_and_backward(backend: Backend, dtype: str) -> None:
    for operation in ("forward", "backward"):
        case = first_case(operation, dtype=dtype, score="alibi", sink="none", head_dim="64/64")
        assert judge_case(case, backend).state == "PASS", case.id


def test_a_page_shared_by_two_requests_takes_both_gradients() -> None:
    case = first_case("backward", pages="shared_prefix", sink="none", score="none")
    assert judge_case(case, Sdpa()).state == "PASS"


def test_an_aliased_page_counts_at_both_its_places() -> None:
    case = first_case("backward", pages="aliased", sink="none", score="none")
    assert judge_case(case, Sdpa()).state == "PASS"


def empty_row_case() -> Case:
    """A case with empty rows whose head dims the flash kernel takes."""
    return next(
        c
        for c in matrix("L1")
        if c.operation == "forward"
        and "EMPTY-LSE" in c.clauses
        and c.axes["sink"] == "none"
        and c.axes["score"] in ("none", "alibi")
        and c.axes["head_dim"] != "64/32"
    )


def test_the_flash_kernels_lse_of_an_empty_row_is_reported() -> None:
    """It is 0.0 where it must be -inf, in torch 2.13 and before."""
    result = judge_case(empty_row_case(), SdpaFlashCpu())
    assert result.state == "FAIL_value"
    assert all("EMPTY-LSE" in finding.clauses for finding in result.findings)


def test_the_composite_gives_an_empty_row_zero() -> None:
    assert judge_case(empty_row_case(), Sdpa()).state == "PASS"


@pytest.mark.parametrize("axes", [{"score": "softcap"}, {"sink": "logits"}])
def test_what_a_mask_cannot_say_is_unsupported(axes: dict[str, str]) -> None:
    assert judge_case(first_case("forward", **axes), Sdpa()).state == "UNSUPPORTED"


def test_refusals_of_the_suites_own_views_are_not_claimed() -> None:
    assert {judge_case(c, Sdpa()).state for c in matrix("L1") if c.operation == "refusal"} == {"UNSUPPORTED"}
