"""FlexAttention under judgement, and the two traps that its adapters respect."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from attnconform.conformance.adapters.flex import FlexCompiled, FlexEager, call_flex, round_up
from attnconform.conformance.adapters.negative import FlexEagerTrustsBlocks
from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.judge.judge import judge_case


def first_case(**axes: str) -> Case:
    """The first forward case with these axis values; FlexAttention has no sink logits."""
    wanted = {"sink": "none", **axes}
    return next(c for c in matrix("L1") if c.operation == "forward" and wanted.items() <= c.axes.items())


@pytest.mark.parametrize(
    "axes",
    [
        {"score": "alibi_softcap"},
        {"mask": "causal_or_document"},
        {"mask": "prefix"},
        {"granularity": "token"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
    ],
    ids=str,
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


def smoke_case() -> Case:
    """A small case in float32."""
    return next(c for c in matrix("L0") if c.axes["granularity"] == "token")


@pytest.fixture
def dynamo_forgets() -> Iterator[None]:
    """What Dynamo learns of call_flex in one test is gone in the next."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo_forgets")
def test_a_compiled_kernel_conforms_and_says_that_it_ran() -> None:
    result = judge_case(smoke_case(), FlexCompiled())
    assert (result.state, result.path) == ("PASS", "compiled")


@pytest.mark.usefixtures("dynamo_forgets")
def test_a_call_that_silently_runs_eager_is_an_undeclared_fallback() -> None:
    """One compile that raises makes Dynamo run the plain function from then on; fullgraph, which forbids it, is off."""
    backend = FlexCompiled()
    backend.call = torch.compile(call_flex, dynamic=False)
    q, k, v = (torch.zeros(1, 2, n, 64, requires_grad=True) for n in (5, 101, 101))
    block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx >= 0, 1, 2, 5, 101, device="cpu")
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        backend.call(q, k, v, None, block_mask, 0.125, False)
    result = judge_case(smoke_case(), backend)
    assert (result.state, result.path) == ("FALLBACK_UNDECLARED", "fallback: eager")
