"""FlexAttention's adapters for a GPU, called without compiling: their block masks and page tables mean the same."""

import pytest
import torch

from attnconform.conformance.adapters import flex_decode, flex_paged
from attnconform.conformance.adapters.flex import call_flex
from attnconform.conformance.adapters.flex_decode import FlexDecode
from attnconform.conformance.adapters.flex_paged import FlexPaged, FlexPagedCleared, page_table_of
from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.backend import Unavailable
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix_case
from attnconform.conformance.judge.judge import judge_case, undeclared
from attnconform.conformance.judge.trial import Trial

ADAPTERS = (FlexDecode, FlexPaged)
ROW = SMOKE_ROW | {"phase": "chunk", "lengths": "tile_edge", "heads": "4/2"}
FALLS_BACK = "FALLBACK_UNDECLARED"  # what a call that was not compiled is, and nothing else may be found


def uncompiled(adapter, monkeypatch):
    """The adapter on a CPU, its calls as they are; options are the GPU kernels' alone.

    Without compiling, scores of the whole pool are computed, and its NaN would be multiplied by 0.
    """
    for module in (flex_decode, flex_paged):
        monkeypatch.setattr(module, "require_gpu", lambda name, device: None)
    backend = adapter("cpu")
    backend.call = call_without_nan
    return backend


def call_without_nan(q, k, v, *arguments):
    return call_flex(q, k.nan_to_num(0.0), v.nan_to_num(0.0), *arguments[:4])


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(
    "axes",
    [
        {"mask": "causal_window", "score": "alibi_softcap"},
        {
            "granularity": "token",
            "sharing": "query_head",
            "listing": "holes_and_duplicates",
            "local": "window_and_sinks",
        },
        {"granularity": "block", "sharing": "kv_head", "pages": "shared_prefix", "phase": "mixed"},
        {"granularity": "token", "empty": "middle", "lengths": "page_edge", "mask": "document"},
        {"mask": "head_window", "lengths": "empty_request", "strides": "interleaved", "score": "relative"},
        {"granularity": "block", "sharing": "shared", "lengths": "one", "phase": "decode", "page_size": "32"},
    ],
)
def test_problems_conform_but_for_the_path(adapter, axes, monkeypatch):
    backend, case = uncompiled(adapter, monkeypatch), matrix_case("forward", 5, ROW | axes)
    assert undeclared(case, backend) is None
    found = {finding.state for finding in judge_case(case, backend).findings}
    assert found <= {FALLS_BACK}, found
    assert FALLS_BACK in found


def test_a_page_table_that_is_off_by_one_page_is_seen(monkeypatch):
    backend = uncompiled(FlexPaged, monkeypatch)

    def turned(problem, requests):
        paged = page_table_of(problem, requests)
        paged.physical_to_logical = paged.physical_to_logical.roll(1, dims=1)
        return paged

    monkeypatch.setattr(flex_paged, "page_table_of", turned)
    found = {finding.state for finding in judge_case(matrix_case("forward", 5, ROW), backend).findings}
    assert "FAIL_value" in found


def test_nan_past_a_requests_end_is_seen_where_a_call_lets_it_in(monkeypatch):
    backend = uncompiled(FlexPaged, monkeypatch)
    backend.call = lambda *arguments: call_flex(*arguments[:7])
    found = judge_case(matrix_case("forward", 5, ROW), backend).findings
    assert "FAIL_nonfinite" in {finding.state for finding in found}


def test_nothing_of_it_is_let_in_where_the_pool_is_cleared(monkeypatch):
    backend = uncompiled(FlexPagedCleared, monkeypatch)
    backend.call = lambda *arguments: call_flex(*arguments[:7])
    axes = {"mask": "causal", "pages": "high", "lengths": "page_edge"}
    found = {finding.state for finding in judge_case(matrix_case("forward", 5, ROW | axes), backend).findings}
    assert found == {FALLS_BACK}


def test_rows_past_those_of_a_call_conform_in_calls_of_their_own(monkeypatch):
    backend, sizes = uncompiled(FlexDecode, monkeypatch), set()
    monkeypatch.setattr(flex_decode, "ROWS", 2)

    def noted(q, *arguments):
        sizes.add(q.shape[2])
        return call_without_nan(q, *arguments)

    backend.call = noted
    axes = {"phase": "prefill", "mask": "causal_window", "score": "alibi", "granularity": "token", "local": "none"}
    found = {finding.state for finding in judge_case(matrix_case("forward", 5, ROW | axes), backend).findings}
    assert found == {FALLS_BACK}
    assert max(sizes) == 5  # 2 rows, filled up


def test_one_block_list_of_all_heads_holds_every_heads_blocks(monkeypatch):
    backend = uncompiled(FlexDecode, monkeypatch)
    axes = {"granularity": "block", "sharing": "query_head", "lengths": "long_and_short", "phase": "decode"}
    view = Trial(matrix_case("forward", 5, ROW | axes), backend).view
    by_head = super(FlexDecode, backend).block_mask(view, 0, 1, 101)
    listed = backend.block_mask(view, 0, 1, 101)
    assert listed.shape[1] == 1
    assert torch.equal(listed.to_dense()[:, 0], by_head.to_dense().amax(1))
    assert listed.full_kv_num_blocks is None
    assert not torch.equal(by_head.to_dense()[:, 0], by_head.to_dense().amax(1))


@pytest.mark.parametrize("name", ["flex-decode", "flex-paged", "flex-paged-cleared"])
def test_without_a_gpu_they_are_unavailable(name):
    with pytest.raises(Unavailable, match=f"{name} is a kernel of the GPU, but device is 'cpu'"):
        load_backend(name, "cpu")


def test_groups_that_the_decode_kernel_cannot_pack_are_not_declared(monkeypatch):
    case = matrix_case("forward", 5, ROW | {"heads": "6/2"})
    assert undeclared(case, uncompiled(FlexDecode, monkeypatch)) is not None
