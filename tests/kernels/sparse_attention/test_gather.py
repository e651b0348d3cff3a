"""A copy of what is listed gives the same answer, serves again under the same key only, and pays by the model."""

import math
from dataclasses import replace

import pytest
import torch
from attention_case import DEVICE, Case, assert_near_oracle, build_plan, paged

from attnconform.kernels.sparse_attention import KVQuantization, PlanError, run
from attnconform.kernels.sparse_attention.gather import (
    Bandwidths,
    ReuseKey,
    break_even_reads,
    direct_time,
    gather_time,
    gathered_bytes,
    is_gather_faster,
    plan_gather,
)
from attnconform.kernels.sparse_attention.rules import Alibi, And, Causal, Window
from attnconform.reference.cost import gather as reference

KEY = ReuseKey(candidates=1, order="position", dtype=torch.float32, position_transform="none", cache_version=1)
RATES = {"direct": 1e11, "gather": 1e11, "write": 1e12, "contiguous": 1e12}


@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_copy_gives_the_answer_of_the_cache(sharing, layout):
    case = Case(
        sharing=sharing, layout=layout, mask_rule=And((Causal(), Window(left=9))), num_kv_splits=2,
        score_rules=(Alibi((0.5, 0.25, 0.1, 0.0)),), head_dim_vo=48, seed=51,
    )  # fmt: skip
    direct = build_plan(case)
    q, k, v = case.q.to(DEVICE), paged(case, case.k), paged(case, case.v)
    got = plan_gather(direct).run(q, k, v, key=KEY)
    for mine, theirs in zip(got, run(direct, q, k, v), strict=True):
        assert torch.equal(mine, theirs)
    assert_near_oracle(case, got[0].cpu(), got[1].cpu())


def test_a_copy_serves_again_under_the_same_key_and_is_made_anew_under_any_other():
    case = Case(sharing="kv_head", seed=52)
    q, k, v = case.q.to(DEVICE), paged(case, case.k), paged(case, case.v)
    gathered = plan_gather(build_plan(case))
    first = gathered.run(q, k, v, key=KEY)[0].clone()
    v += 1.0
    assert torch.equal(gathered.run(q, k, v, key=KEY)[0], first)
    for name, value in (("candidates", 2), ("order", "slot"), ("dtype", torch.float16), ("position_transform", "rope")):
        gathered.run(q, k, v, key=replace(KEY, **{name: value}))
    after = gathered.run(q, k, v, key=replace(KEY, cache_version=2))[0]
    assert (gathered.num_copies, gathered.num_reuses) == (6, 1)
    assert not torch.equal(after, first)


def test_slots_that_nothing_lists_are_not_copied():
    case = Case(seqlen_q=(1,), seqlen_kv=(20,), sharing="kv_head", entries=[[[[3, 7], [7, 19]]]], seed=53)
    gathered = plan_gather(build_plan(case))
    q, k, v = case.q.to(DEVICE), paged(case, case.k), paged(case, case.v)
    want = gathered.run(q, k, v, key=KEY)[0].clone()
    listed = torch.as_tensor(case.slots(0))[[3, 7, 19]]
    free = torch.ones(case.num_pages * case.page_size, dtype=torch.bool)
    free[listed] = False
    for cache in (k, v):
        cache.view(-1, *cache.shape[2:])[free.to(DEVICE)] = math.nan
    assert torch.equal(gathered.run(q, k, v, key=replace(KEY, cache_version=2))[0], want)


@pytest.mark.parametrize("rates", [RATES, RATES | {"direct": 9e11}, RATES | {"contiguous": 1e11}])
@pytest.mark.parametrize("launch", [0.0, 5e-6, 1e-3])
def test_the_model_is_the_references(rates, launch):
    ours, theirs = Bandwidths(**rates), reference.Bandwidths(**rates)
    for num_bytes in (1e3, 1e6, 1e9):
        assert break_even_reads(num_bytes, ours, launch=launch) == reference.break_even_reads(
            num_bytes, theirs, launch=launch
        )
        assert direct_time(num_bytes, ours, num_reads=3) == reference.direct_time(num_bytes, theirs, num_reads=3)
        assert gather_time(num_bytes, ours, num_reads=3, launch=launch) == reference.gather_time(
            num_bytes, theirs, num_reads=3, launch=launch
        )


def test_one_reading_is_direct_and_many_are_from_a_copy():
    planned = build_plan(Case(sharing="shared", seed=54))
    assert gathered_bytes(planned) == planned.list_slots.numel() * 2 * (64 + 64) * 4
    assert not is_gather_faster(planned, Bandwidths(**RATES), num_reads=1)
    assert is_gather_faster(planned, Bandwidths(**RATES), num_reads=2)
    with pytest.raises(PlanError, match=r"^write is 0, but must be above 0 \[COST-GATHER\]$"):
        Bandwidths(**RATES | {"write": 0})


@pytest.mark.parametrize(
    ("changes", "name"), [({"sharing": None}, "candidates"), ({"k_quant": KVQuantization("int8", "page")}, "k_quant")]
)
def test_what_cannot_be_copied_is_refused(changes, name):
    with pytest.raises(PlanError, match=f"^{name} is"):
        plan_gather(build_plan(Case(**{"sharing": "kv_head"} | changes)))
