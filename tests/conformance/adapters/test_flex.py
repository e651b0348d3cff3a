"""FlexAttention under judgement, and the two traps that its adapters respect."""

from pathlib import Path

import pytest
import torch

from attnconform.conformance.adapters.flex import FlexCompiled, FlexEager, round_up
from attnconform.conformance.adapters.negative import FlexEagerTrustsBlocks
from attnconform.conformance.backend import Unavailable
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import build_values
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.storage import store_inputs
from attnconform.conformance.judge.trial import NAN
from attnconform.conformance.views import ProblemView


def first_case(**axes: str) -> Case:
    """The first forward case with these axis values; FlexAttention has no sink logits."""
    wanted = {"sink": "none", **axes}
    return next(c for c in matrix("L1") if c.operation == "forward" and wanted.items() <= c.axes.items())


@pytest.mark.parametrize(
    "axes",
    [
        {"granularity": "token", "score": "alibi_softcap", "dtype": "bfloat16"},
        {"granularity": "block", "mask": "causal_or_document", "dtype": "float16"},
        {"granularity": "dense", "mask": "prefix", "dtype": "float32"},
    ],
)
def test_eager_conforms_with_membership_in_its_mask(axes: dict[str, str]) -> None:
    assert judge_case(first_case(**axes), FlexEager()).state == "PASS"


def test_an_empty_row_and_an_empty_request_conform_in_eager() -> None:
    for axes in ({"empty": "first"}, {"lengths": "empty_request"}):
        assert judge_case(first_case(**axes), FlexEager()).state == "PASS"


def test_eager_that_trusts_its_blocks_breaks_the_block_clauses() -> None:
    case = next(c for c in matrix("L0") if c.axes["granularity"] == "block")
    result = judge_case(case, FlexEagerTrustsBlocks())
    assert result.state == "FAIL_membership"
    assert set(result.findings[0].clauses) >= {"BLOCK-BIND", "BLOCK-MEMBER"}


def test_neither_form_declares_a_backward_on_a_cpu() -> None:
    assert not FlexEager().capabilities.has_backward
    assert not FlexCompiled().capabilities.has_backward
    assert not FlexCompiled().capabilities.returns_lse


def test_padded_lengths_hold_the_length_and_never_fill_a_block() -> None:
    for length in range(1, 600):
        padded = round_up(length, 128, 27)
        assert padded >= length
        assert padded % 32
    assert FlexCompiled().lengths(1, 102) == (1, 229)


def test_a_compiled_call_says_so_and_a_silent_eager_one_is_a_fallback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compile that raises makes Dynamo run the plain function from then on, without a word."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    case = next(c for c in matrix("L0") if c.axes["granularity"] == "token")
    backend = FlexCompiled()
    assert forward_path(backend, case) == "compiled"
