"""FlashAttention 3's adapters before a stand-in of the call that computes what the package documents."""

from types import SimpleNamespace

import pytest
import torch

from attnconform.conformance.adapters import flash_attention3
from attnconform.conformance.adapters.flash_attention3 import FlashAttention3Pages, FlashAttention3Tokens
from attnconform.conformance.backend import Unavailable
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix_case
from attnconform.conformance.judge.judge import judge_case, undeclared
from attnconform.conformance.judge.values import check_values


def attend(q, k, v, scale, causal, window):
    """out and lse of one sequence, bottom-right aligned; an empty row is 0 and -inf."""
    rows, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    ahead = torch.arange(keys)[None] - (torch.arange(rows)[:, None] + keys - rows)
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal or window[1] >= 0:
        hidden |= ahead > max(window[1], 0)
    if window[0] >= 0:
        hidden |= ahead < -window[0]
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(2)
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", p, v).to(q.dtype), lse


def flash_attn_with_kvcache(
    q, k, v, *, cache_seqlens, page_table, softmax_scale, num_splits, return_softmax_lse,
    cu_seqlens_q=None, max_seqlen_q=None, causal=False, window_size=(-1, -1),
):  # fmt: skip
    """(batch, rows, heads, dim), or (total, heads, dim) with cu_seqlens_q; pages of any size."""
    assert {x.dtype for x in (cache_seqlens, page_table)} == {torch.int32}
    assert return_softmax_lse
    assert 1 <= num_splits <= 256
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert page_table.min() >= 0
    assert page_table.shape[1] * k.shape[1] >= cache_seqlens.max()
    parts = list(q) if cu_seqlens_q is None else q.split(cu_seqlens_q.diff().tolist())
    assert cu_seqlens_q is None or max(len(part) for part in parts) == max_seqlen_q
    found = []
    for part, table, length in zip(parts, page_table, cache_seqlens.tolist(), strict=True):
        keys, values = (x[table.long()].flatten(0, 1)[:length] for x in (k, v))
        found.append(attend(part, keys, values, softmax_scale, causal, window_size))
    outs, lses = zip(*found, strict=True)
    if cu_seqlens_q is None:
        return torch.stack(outs), torch.stack(lses), None, None
    return torch.cat(outs), torch.cat(lses, dim=1), None, None


@pytest.fixture
def stand_in(monkeypatch):
    package = SimpleNamespace(flash_attn_with_kvcache=flash_attn_with_kvcache)
    monkeypatch.setattr(flash_attention3, "load_gpu_package", lambda *_: package)


ROW = SMOKE_ROW | {"dtype": "bfloat16", "phase": "chunk", "lengths": "tile_edge"}
TOKENS = [
    {"granularity": "token", "sharing": "query_head", "listing": "shuffled", "splits": "3"},
    {"granularity": "block", "sharing": "kv_head", "heads": "6/2", "local": "window_and_sinks", "dtype": "float16"},
    {"granularity": "token", "sharing": "shared", "empty": "middle", "page_size": "8", "mask": "document"},
    {"mask": "head_window", "lengths": "empty_request", "pages": "high", "head_dim": "256/256"},
]
PAGES = [
    {"mask": "causal", "layout": "HND", "strides": "interleaved"},
    {"mask": "causal_window", "phase": "prefill", "heads": "6/2", "page_size": "1"},
    {"mask": "none", "lengths": "empty_request", "pages": "aliased", "head_dim": "80/80"},
    {"mask": "causal", "phase": "mixed", "lengths": "long_and_short", "dtype": "float16", "splits": "8"},
]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("backend", "axes"),
    [(FlashAttention3Tokens, row) for row in TOKENS] + [(FlashAttention3Pages, row) for row in PAGES],
)
def test_what_an_adapter_declares_conforms(backend, axes):
    judged, case = backend("cpu"), matrix_case("forward", 17, ROW | axes)
    assert undeclared(case, judged) is None
    assert judge_case(case, judged, checks=[check_values]).state == "PASS"


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "axes", [{"sink": "logits"}, {"score": "softcap"}, {"listing": "holes", "granularity": "token"}, {"layout": "HND"}]
)
def test_what_the_package_lacks_is_not_declared(axes):
    assert undeclared(matrix_case("forward", 17, ROW | axes), FlashAttention3Tokens("cpu")) is not None


@pytest.mark.parametrize("backend", [FlashAttention3Tokens, FlashAttention3Pages])
def test_without_the_package_one_line_says_what_to_install(backend):
    with pytest.raises(Unavailable, match=r"needs the package tokenspeed-fa3: pip install 'attnconform\[fa3\]'"):
        backend("cuda")
