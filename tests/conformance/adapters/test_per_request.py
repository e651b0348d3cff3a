"""Backends that attend one request at a time: requests without keys or rows, and what one of them did to all."""

from typing import ClassVar

import msgspec
import pytest
import torch

from attnconform.conformance.adapters.flex import FlexEager
from attnconform.conformance.adapters.per_request import Attended, PerRequest
from attnconform.conformance.adapters.sdpa import Sdpa, SdpaFlashCpu
from attnconform.conformance.backend import Capabilities
from attnconform.conformance.cases.refusals import SOUND
from attnconform.conformance.cases.structure import Case, named
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.views import ProblemView


def case_of(operation: str, **changes: object) -> Case:
    """Two requests of a dense problem, with some fields changed."""
    structure = msgspec.structs.replace(SOUND, candidates=None, **changes)
    case = Case(
        id="",
        level="L1",
        operation=operation,
        structure=structure,
        values="normal",
        seed=3,
        clauses=("EMPTY-LSE", "EMPTY-OUT"),
    )
    return named(case, "test")


KEYLESS = {"seqlens_q": (2, 2), "seqlens_kv": (0, 9), "page_table": ((), (1, 4))}


@pytest.mark.parametrize("backend", [Sdpa(), FlexEager()], ids=lambda b: b.name)
def test_rows_of_a_request_without_keys_are_empty(backend: PerRequest) -> None:
    assert judge_case(case_of("forward", **KEYLESS), backend).state == "PASS"


def test_a_request_without_keys_has_no_gradient() -> None:
    assert judge_case(case_of("backward", **KEYLESS), Sdpa()).state == "PASS"


def test_a_request_without_keys_does_not_end_the_process_of_the_flash_kernel() -> None:
    """It divides by the number of keys; what is left is the lse of an empty row."""
    result = judge_case(case_of("forward", **KEYLESS), SdpaFlashCpu())
    assert {clause for finding in result.findings for clause in finding.clauses} >= {"EMPTY-LSE"}
    assert result.state == "FAIL_value"


def test_a_request_without_rows_is_passed_over() -> None:
    assert judge_case(case_of("forward", seqlens_q=(0, 2)), Sdpa()).state == "PASS"


class FallsBackOnce(PerRequest):
    """Sdpa whose first request says that it ran elsewhere."""

    capabilities = Capabilities(returns_lse=False)
    paths: ClassVar[tuple[str, ...]] = ("fallback: elsewhere", "native")

    def attend(self, problem: ProblemView, request: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attended:
        return Attended(Sdpa().attend(problem, request, q, k, v).out, None, self.paths[request])


def test_a_fallback_of_one_request_is_the_calls() -> None:
    assert Trial(case_of("forward"), FallsBackOnce()).base.path == "fallback: elsewhere"
