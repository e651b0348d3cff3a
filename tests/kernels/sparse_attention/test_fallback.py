"""Every reason to leave the sparse path is forced once; the answer is the same, and what is written down is exact."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl
from attention_case import DEVICE, RAGGED_RULES, Case, assert_near_oracle, paged, plan_arguments, refuse_thirds

from attnconform.kernels.sparse_attention import Dropout, KVQuantization, PlanError
from attnconform.kernels.sparse_attention import fallback as module
from attnconform.kernels.sparse_attention.dense import plan_dense, run_dense
from attnconform.kernels.sparse_attention.fallback import Attention, Limits, Record, Thresholds, candidate_rate
from attnconform.kernels.sparse_attention.rules import Alibi, And, Causal, Custom, Or, RelativeBias, SoftCap, Window

NEVER = Thresholds(leave_above=Fraction(1), enter_below=Fraction(1))
SHAPE = {"seqlen_q": (3, 1), "seqlen_kv": (20, 17), "sharing": "kv_head"}


def inputs(case):
    return case.q.to(DEVICE), paged(case, case.k), paged(case, case.v)


def attend(attention, case, **changes):
    scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
    scales = {name: None if scale is None else scale.to(DEVICE) for name, scale in scales.items()}
    return attention(plan_arguments(case, **changes), *inputs(case), **scales)


def ticking():
    """A clock that a call takes 2 seconds by."""
    now = iter(range(0, 1000, 2))
    return lambda: float(next(now))


@triton.jit
def refuse_data(q_idx, kv_idx, request, data):
    return kv_idx != tl.load(data)


@pytest.mark.parametrize(
    "reason", ["architecture", "dtype", "head_dim", "block_size", "rule", "workspace", "dense_rate"]
)
def test_every_reason_is_named_counted_and_timed_and_the_answer_is_the_same(reason, monkeypatch):
    case, limits = Case(**SHAPE, mask_rule=Causal(), seed=41), Limits(thresholds=NEVER)
    if reason == "architecture":
        monkeypatch.setattr(module, "_has_kernels", lambda device: False)
    elif reason == "dtype":
        case = replace(case, dtype=torch.float64)
    elif reason == "head_dim":
        case = replace(case, head_dim_qk=580)
    elif reason == "block_size":
        case, limits = replace(case, block_size=4, entries=[]), replace(limits, block_sizes=frozenset({16, 64}))
    elif reason == "rule":
        custom = Custom(refuse_data, torch.tensor([4], dtype=torch.int32, device=DEVICE))
        case = replace(case, mask_rule=Or((custom, custom)))
    elif reason == "workspace":
        case = replace(case, sharing=None, entries=[], num_kv_splits=2)
        limits = replace(limits, workspace_bytes=16)
    else:
        limits = Limits(thresholds=Thresholds(leave_above=Fraction(1, 50), enter_below=Fraction(1, 100)))
    attention = Attention(limits, clock=ticking())
    got = attend(attention, case)
    assert got.reason == reason
    assert attention.log.records == [Record(reason=reason, seqlens_kv=(20, 17), batch_size=2, seconds=2.0)]
    assert attention.log.counts == {reason: 1}
    assert attention.log.request_share == 1.0
    if reason == "rule":  # an Or of twice the same rule is that rule
        same = replace(case, mask_rule=custom)
        want = attend(Attention(Limits(thresholds=NEVER)), same)
        assert want.reason is None
        torch.testing.assert_close(got.out, want.out, rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(got.lse, want.lse, rtol=2e-6, atol=2e-6)
    else:
        assert_near_oracle(replace(case, dtype=torch.float32), got.out.cpu(), got.lse.cpu())


def test_what_cannot_run_comes_before_what_would_be_slower():
    dense = Limits(thresholds=Thresholds(leave_above=Fraction(0), enter_below=Fraction(0)), workspace_bytes=16)
    every = [[[list(range(20))] * 2] * 3, [[list(range(17))] * 2]]
    case = Case(**SHAPE, num_kv_splits=2, entries=every, seed=42)
    assert attend(Attention(dense), case).reason == "workspace"
    assert attend(Attention(dense), replace(case, dtype=torch.float64)).reason == "dtype"


def test_a_rate_between_the_thresholds_leaves_the_path_as_it_was():
    entries = {rate: [[[list(range(rate))] * 2]] for rate in (3, 5, 7)}
    attention = Attention(Limits(thresholds=Thresholds(leave_above=Fraction(6, 10), enter_below=Fraction(4, 10))))
    reasons = []
    for rate in (5, 7, 5, 3, 5):
        case = Case(seqlen_q=(1,), seqlen_kv=(10,), sharing="kv_head", entries=entries[rate], seed=43)
        assert candidate_rate(plan_arguments(case)) == Fraction(rate, 10)
        reasons.append(attend(attention, case).reason)
    assert reasons == [None, "dense_rate", "dense_rate", None, None]
    assert attention.log.counts == {"dense_rate": 2}
    assert attention.log.request_share == pytest.approx(2 / 5)
    with pytest.raises(PlanError, match=r"^enter_below is 1, but leave_above is 0 \[FALLBACK-HYSTERESIS\]$"):
        Thresholds(leave_above=Fraction(0), enter_below=Fraction(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_requests_page_ends_the_call_on_every_path(dtype):
    case = Case(**SHAPE, dtype=dtype, seed=44)
    owned = torch.zeros(2, case.num_pages, dtype=torch.bool)
    for n, row in enumerate(case.page_table):
        owned[n, row[row >= 0]] = True
    attention = Attention(Limits(thresholds=NEVER))
    attend(attention, case, owned=owned)
    owned[1, case.page_table[1, 0]] = False
    with pytest.raises(PlanError, match=r"^page_table\[1, 0\] is \d+, but request 1 does not own.*\[SAFE-OWNER\]$"):
        attend(attention, case, owned=owned)
    assert attention.log.num_refused == 1
    assert attention.log.num_requests == 2


def test_a_refused_batch_moves_no_state():
    attention = Attention(Limits(thresholds=Thresholds(leave_above=Fraction(0), enter_below=Fraction(0))))
    case = Case(**SHAPE, seed=45)
    with pytest.raises(PlanError, match=r"^sm_scale is nan"):
        attend(attention, case, sm_scale=math.nan)
    assert not attention.is_dense
    assert attention.log.records == []


def test_an_empty_row_is_no_reason():
    case = Case(seqlen_q=(1,), seqlen_kv=(10,), sharing="kv_head", entries=[[[[], [-1]]]], seed=46)
    assert attend(Attention(), case).reason is None


DENSE_CASES = {
    "rules": {"mask_rule": And((Causal(), Custom(refuse_thirds, torch.zeros(1, dtype=torch.int32, device=DEVICE))))},
    "windows": {"window": 3, "num_sink_tokens": 2, "q_block_size": 2, "mask_rule": Causal()},
    "scores": {"score_rules": (Alibi((0.5, 0.25, 0.1, 0.0)), SoftCap(2.0), RelativeBias(((0.1, 0.2, 0.3),) * 4))},
    "sinks": {"sink_logits": (0.5, -1.0, 0.0, 2.0), "layout": "HND"},
    "dropout": {"dropout": Dropout(0.25, 5), "block_size": 4},
    "codes": {"k_quant": KVQuantization("int8", "page"), "v_quant": KVQuantization("float8_e5m2", "channel")},
    "tokens": {"k_quant": KVQuantization("int8", "token"), "v_quant": KVQuantization("float8_e4m3", "head")},
    "dense": {"sharing": None, "mask_rule": RAGGED_RULES["causal_document"]},
}


@pytest.mark.parametrize("name", DENSE_CASES)
def test_the_dense_path_gives_the_contracts_answer(name):
    case = Case(**{"sharing": "kv_head"} | DENSE_CASES[name], seed=47)
    planned = plan_dense(**plan_arguments(case))
    scales = {"k_scale": case.k_scale, "v_scale": case.v_scale}
    scales = {key: None if scale is None else scale.to(DEVICE) for key, scale in scales.items()}
    out, lse = run_dense(planned, *inputs(case), **scales)
    assert_near_oracle(case, out.cpu(), lse.cpu())


def test_the_dense_path_reads_nothing_of_slots_that_no_request_owns():
    case = Case(sharing="query_head", mask_rule=Window(left=9), seed=48)
    planned = plan_dense(**plan_arguments(case))
    q, k, v = inputs(case)
    want = run_dense(planned, q, k, v)
    owned = torch.cat([torch.as_tensor(case.slots(n)) for n in range(case.batch_size)])
    free = torch.ones(case.num_pages * case.page_size, dtype=torch.bool)
    free[owned] = False
    for cache in (k, v):
        cache.view(-1, *cache.shape[2:])[free.to(DEVICE)] = math.nan
    for got, expected in zip(run_dense(planned, q, k, v), want, strict=True):
        assert torch.equal(got, expected)
