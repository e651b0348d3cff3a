"""FlashMLA's adapter before a stand-in of the call that computes what the package documents."""

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace

from attnconform.conformance.adapters import flash_mla
from attnconform.conformance.adapters.flash_mla import FlashMla
from attnconform.conformance.adapters.latent_keys import slot_lists
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Unavailable
from attnconform.conformance.cases.matrix import SMOKE_ROW, matrix_case
from attnconform.conformance.judge.judge import judge_case, undeclared
from attnconform.conformance.judge.trial import Trial
from attnconform.conformance.judge.values import check_values

ROW = SMOKE_ROW | {"dtype": "bfloat16", "phase": "chunk", "granularity": "token"}


def sparse_fwd(empty_lse):
    """flash_mla_sparse_fwd with an lse of its own for empty rows."""

    def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, *, use_legacy):
        assert use_legacy
        assert q.dtype == kv.dtype == torch.bfloat16
        assert q.shape[1] in (64, 128)
        assert q.shape[2] == kv.shape[2] == 576
        assert kv.shape[1] == 1
        assert indices.dtype == torch.int32
        assert indices.shape[1] == 1
        assert indices.shape[2] % 64 == 0
        assert kv.is_contiguous()
        assert indices.is_contiguous()
        outs, lses = [], []
        for row, slots in zip(q.float(), indices[:, 0].long(), strict=True):
            keys = kv[slots[(slots >= 0) & (slots < len(kv))], 0].float()
            scores = row @ keys.T * sm_scale
            outs.append((scores.softmax(dim=1) @ keys[:, :d_v]).bfloat16())
            lses.append(scores.logsumexp(dim=1) if len(keys) else torch.full((len(row),), empty_lse))
        return torch.stack(outs), None, torch.stack(lses)

    return flash_mla_sparse_fwd


@pytest.fixture
def stand_in(monkeypatch):
    def install(empty_lse=-torch.inf):
        package = SimpleNamespace(flash_mla_sparse_fwd=sparse_fwd(empty_lse))
        monkeypatch.setattr(flash_mla, "load_gpu_package", lambda *_: package)
        return FlashMla("cpu")

    return install


@pytest.mark.parametrize(
    "axes",
    [
        {"sharing": "query_head", "listing": "shuffled", "heads": "6/2"},
        {"sharing": "kv_head", "listing": "holes", "mask": "causal", "head_dim": "64/32"},
        {
            "granularity": "dense",
            "sharing": "shared",
            "mask": "head_window",
            "layout": "HND",
            "lengths": "empty_request",
        },
        {"granularity": "block", "sharing": "shared", "pages": "aliased", "page_size": "8", "empty": "first"},
    ],
)
def test_what_it_declares_conforms(stand_in, axes):
    backend, case = stand_in(), matrix_case("forward", 17, ROW | axes)
    assert undeclared(case, backend) is None
    assert judge_case(case, backend, checks=[check_values]).state == "PASS"


def test_an_infinite_lse_of_an_empty_row_is_named(stand_in):
    result = judge_case(
        matrix_case("forward", 17, ROW | {"empty": "first"}), stand_in(torch.inf), checks=[check_values]
    )
    assert any("EMPTY-LSE" in finding.clauses for finding in result.findings)


def test_without_the_package_one_line_says_what_to_install():
    with pytest.raises(Unavailable, match=r"needs the package sgl-flash-mla: pip install 'attnconform\[flash-mla\]'"):
        FlashMla("cuda")


def test_a_request_that_ended_lists_nothing():
    case = matrix_case("forward", 3, ROW | {"listing": "shuffled", "sharing": "shared"})
    candidates = case.structure.candidates
    lists = [(-1, -1) if i < case.structure.seqlens_q[0] else row for i, row in enumerate(candidates.lists)]
    ended = replace(
        case.structure,
        seqlens_kv=(0, *case.structure.seqlens_kv[1:]),
        candidates=replace(candidates, lists=tuple(lists)),
    )
    view = Trial(replace(case, structure=ended), StepsBackend()).view
    lists, rows = slot_lists(view, 0, 4), view.q_rows(0)
    assert (lists[rows] == -1).all()
    assert (lists[rows.stop :] >= 0).any(dim=2).all()
