"""The kernel of Hopper gives what the oracle and attend_kernel give, and reads and writes nothing else.

On a GPU of that kind only: what decides without one is in test_hopper_choice.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_case import (
    DEVICE,
    RAGGED_RULES,
    Case,
    assert_near_oracle,
    build_plan,
    paged,
    plan_arguments,
    poison_unowned,
    run_case,
)

from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES
from attnconform.kernels.sparse_attention import CandidateLists, plan, replay, run
from attnconform.kernels.sparse_attention.hopper_choice import why_not_here
from attnconform.kernels.sparse_attention.rules import Alibi, And, Causal, HeadWindow, SoftCap, Window
from attnconform.kernels.sparse_attention.tuning import Choice

pytestmark = pytest.mark.skipif(why_not_here(DEVICE) is not None, reason="needs a Hopper GPU")

HOPPER, PLAIN = Choice(forward="hopper"), Choice(forward="plain")
SLOPES = (0.5, 0.25, 0.125, 0.0625)
# more than one tile of rows, of keys, and of both; a request without rows, and one of more rows than keys
BASE = {
    "seqlen_q": (70, 0, 1, 40),
    "seqlen_kv": (300, 0, 18, 3),
    "head_dim_qk": 128,
    "head_dim_vo": 128,
    "page_size": 16,
    "dtype": torch.bfloat16,
}


def check_hopper(case: Case, **changes) -> None:
    made = build_plan(case, choice=HOPPER, **changes)
    assert made.union is None
    assert all(launch.shape.box for launch in made.launches)
    assert_near_oracle(case, *run_case(case, choice=HOPPER, **changes))


@pytest.mark.parametrize("rule", sorted(RAGGED_RULES))
def test_rules_over_ragged_requests_and_shuffled_pages(rule):
    check_hopper(Case(**BASE, mask_rule=RAGGED_RULES[rule], seed=41))


@pytest.mark.parametrize("page_size", [16, 48, 64, 128, 256])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_every_size_and_layout(page_size, layout):
    changes = {"page_size": page_size, "layout": layout, "mask_rule": And((Causal(), Window(left=90)))}
    check_hopper(Case(**BASE | changes, seed=42))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1), (48, 1)])
def test_dtypes_head_dims_and_groups(dtype, head_dim, heads):
    shape = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim_qk": head_dim, "head_dim_vo": head_dim}
    check_hopper(Case(**BASE | shape | {"dtype": dtype}, mask_rule=Causal(), seed=43))


@pytest.mark.parametrize(
    "changes",
    [
        {"score_rules": (Alibi(SLOPES),)},
        {"score_rules": (Alibi((-0.5, 0.0, 2.0, 0.01)),)},
        {"score_rules": (SoftCap(3.0),)},
        {"score_rules": (SoftCap(0.01),), "sink_logits": (0.5, -1.0, 0.0, 2.0)},
        {"sink_logits": (0.5, -1.0, 0.0, 2.0)},
        {"mask_rule": HeadWindow((3, 40, None, 200), (0, None, 5, 0))},
        {"mask_rule": Causal(), "num_kv_splits": 3},
        {"mask_rule": Window(left=37, right=3), "num_kv_splits": 2, "score_rules": (Alibi(SLOPES),)},
        {"mask_rule": Window(left=9, right=0), "q_offset": (10, 0, 3, -60)},
    ],
)
def test_scores_sinks_head_windows_splits_and_offsets(changes):
    check_hopper(Case(**BASE | {"mask_rule": Causal()} | changes, seed=44))


@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
@pytest.mark.parametrize(("block_size", "page_size", "q_block_size"), [(16, 16, 1), (32, 64, 4), (64, 16, 64)])
@pytest.mark.parametrize("rule", ["none", "causal"])
def test_lists_of_blocks(sharing, block_size, page_size, q_block_size, rule):
    lists = {"sharing": sharing, "block_size": block_size, "q_block_size": q_block_size, "page_size": page_size}
    check_hopper(Case(**BASE | lists, mask_rule=RAGGED_RULES[rule], seed=45), rows_per_union=1)


@pytest.mark.parametrize("changes", [{"num_kv_splits": 2}, {"score_rules": (SoftCap(3.0),)}])
def test_lists_of_blocks_split_or_capped(changes):
    lists = {"sharing": "kv_head", "block_size": 16, "q_block_size": 16}
    check_hopper(Case(**BASE | lists | changes, mask_rule=Window(left=101, right=2), seed=46))


def test_keys_that_no_row_of_a_task_admits_may_hold_anything():
    """They share pages with keys that rows admit, at both ends of a run."""
    case = Case(
        **BASE | {"seqlen_q": (32,), "seqlen_kv": (300,)}, q_offset=(100,), mask_rule=Window(left=21, right=3), seed=47
    )
    want = run_case(case, choice=HOPPER)
    seen = np.unique(np.concatenate([case.selected(0, row, 0) for row in range(32)]))
    unseen = case.slots(0)[np.setdiff1d(np.arange(300), seen)]
    case.k[unseen], case.v[unseen] = math.nan, math.inf
    for got, expected in zip(run_case(case, choice=HOPPER), want, strict=True):
        assert torch.equal(got, expected)


LARGE = {"seqlen_q": (2000, 3, 700), "seqlen_kv": (2000, 900, 1500), "num_qo_heads": 16, "num_kv_heads": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"mask_rule": Causal()},
        {"mask_rule": And((Causal(), Window(left=500)))},
        {"mask_rule": Causal(), "score_rules": (SoftCap(20.0),)},
        {"mask_rule": Causal(), "score_rules": (Alibi(tuple(2.0 ** (-h / 2) for h in range(1, 17))),)},
    ],
)
def test_many_tasks_a_program_give_what_attend_kernel_gives_and_the_same_bits_again(changes):
    case = Case(**BASE | LARGE | changes, seed=48)
    q, k, v, _out, _lse = tensors_of(case)
    made = plan(**plan_arguments(case, choice=HOPPER))
    out, lse = run(made, q, k, v)
    assert "hopper" in made.launches[0].prepared
    want_out, want_lse = run(plan(**plan_arguments(case, choice=PLAIN, tile_kv=None)), q, k, v)
    is_empty = torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse), is_empty)
    assert float((out.float() - want_out.float()).abs().max()) <= 2.0**-6
    assert float((lse - want_lse)[~is_empty].abs().max()) <= 2e-5
    for _ in range(20):
        again = run(made, q, k, v)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


def tensors_of(case: Case) -> tuple[torch.Tensor, ...]:
    """q, both caches with NaN where nobody owns, and outputs of NaN."""
    q = case.q.to(DEVICE)
    k, v = (paged(case, poison_unowned(case, rows)) for rows in (case.k, case.v))
    return q, k, v, torch.full_like(q, math.nan), torch.full(q.shape[:2], math.nan, device=DEVICE)


def within(pool_shape: tuple[int, ...], view: tuple[slice | int, ...], cache: torch.Tensor) -> torch.Tensor:
    """A cache as part of a larger pool of NaN."""
    pool = torch.full(pool_shape, math.nan, dtype=cache.dtype, device=DEVICE)
    part = pool[view]
    part.copy_(cache)
    return part


@pytest.mark.parametrize("kind", ["beside V", "spare dims", "spare rows", "odd page stride", "odd base"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_strided_pools_are_read_and_what_tma_cannot_read_is_left_to_attend_kernel(kind, layout):
    case = Case(**BASE | {"layout": layout}, mask_rule=Causal(), seed=49)
    want = run_case(case, choice=HOPPER)
    q, k, v, out, lse = tensors_of(case)
    pages, a, b, dim = k.shape
    every = slice(None)
    shape, view = {
        "beside V": ((pages, a, 2, b, dim), (every, every, 1)),
        "spare dims": ((pages, a, b, dim + 8), (every, every, every, slice(dim))),
        "spare rows": ((pages, a + 1, b, dim), (every, slice(a))),
        "odd page stride": ((pages, a * b * dim + 8), (every, slice(a * b * dim))),
        "odd base": ((pages * a * b * dim + 1,), (slice(1, None),)),
    }[kind]
    flat = k.reshape(pages, -1) if kind == "odd page stride" else k.flatten() if kind == "odd base" else k
    k = within(shape, view, flat).view(pages, a, b, dim)
    made = plan(**plan_arguments(case, choice=HOPPER))
    run(made, q, k, v, out=out, lse=lse)
    assert ("hopper" in made.launches[0].prepared) == (not kind.startswith("odd"))
    if kind.startswith("odd"):
        assert_near_oracle(case, out.cpu(), lse.cpu())
    else:
        assert torch.equal(out.cpu(), want[0])
        assert torch.equal(lse.cpu(), want[1])


@pytest.mark.parametrize("kind", ["odd base", "odd stride", "every other number"])
def test_queries_that_cannot_be_read_by_16_bytes(kind):
    case = Case(**BASE, mask_rule=Causal(), seed=58)
    q, k, v, out, lse = tensors_of(case)
    want, want_lse = run(plan(**plan_arguments(case, choice=HOPPER)), q, k, v)
    rows, heads, dim = q.shape
    shape, view = {
        "odd base": ((rows * heads * dim + 1,), slice(1, None)),
        "odd stride": ((rows, heads, dim + 3), (slice(None), slice(None), slice(dim))),
        "every other number": ((rows, heads, 2 * dim), (slice(None), slice(None), slice(None, None, 2))),
    }[kind]
    made = plan(**plan_arguments(case, choice=HOPPER))
    narrow = within(shape, view, q.flatten() if kind == "odd base" else q).view(rows, heads, dim)
    run(made, narrow, k, v, out=out, lse=lse)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)


def test_keys_beside_a_row_cost_slopes_no_precision():
    """Slopes are large, and what counts are a row's nearest keys, wherever in a tile they lie."""
    slopes = (8.0, 16.0, 31.0, 4.0)
    lengths = {"seqlen_q": (300,), "seqlen_kv": (700,)}
    case = Case(**BASE | lengths, mask_rule=Causal(), score_rules=(Alibi(slopes),), seed=59)
    check_hopper(case)
    q, k, v, _out, _lse = tensors_of(case)
    (_, lse), (_, want) = (run(plan(**plan_arguments(case, choice=choice)), q, k, v) for choice in (HOPPER, PLAIN))
    # a nearest key's bias passes through sums of at most 16 slopes, in base 2, which are rounded four times
    assert float((lse - want).abs().max()) <= 2e-5 + 4 * 2.0**-24 * max(slopes) * 16


@pytest.mark.parametrize("size", [0.05, 1.0, 4.0, 30.0])
def test_a_cap_errs_by_no_more_than_is_declared(size):
    """Of numbers of every size beside each other, which share a reciprocal."""
    from hopper_tanh import tanh_kernel

    factor = float(np.float32(2 / math.log(2)))
    x = torch.randn(1 << 22, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(60)) * size
    x[::7] *= 100
    tanh = torch.empty_like(x)
    tanh_kernel[(x.numel() // 1024,)](x, tanh, factor, SIZE=1024, num_warps=4)
    want = torch.tanh((x * factor).double() / factor)  # what rounding x * factor costs is the score's own
    assert float((tanh - want).abs().max()) <= NUMERICS_CLASSES["bf16-hopper"].tanh_eps * 2.0**-24


@pytest.mark.parametrize("is_strided", [False, True])
def test_nothing_but_the_rows_is_written(is_strided):
    case = Case(**BASE, mask_rule=Causal(), seed=50)
    q, k, v, _out, _lse = tensors_of(case)
    want = run(plan(**plan_arguments(case, choice=HOPPER)), q, k, v)
    rows, heads, dim = q.shape
    if is_strided:
        guarded = torch.full((rows + 4, heads + 1, dim + 3), 7.25, dtype=q.dtype, device=DEVICE)
        out = guarded[2:-2, :heads, :dim]
    else:
        guarded = torch.full((rows + 4, heads, dim), 7.25, dtype=q.dtype, device=DEVICE)
        out = guarded[2:-2]
    guarded_lse = torch.full((heads + 2, rows + 2), 6.75, device=DEVICE)
    lse = guarded_lse[1:-1, 1:-1].T
    run(plan(**plan_arguments(case, choice=HOPPER)), q, k, v, out=out, lse=lse)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    out.fill_(7.25)
    lse.fill_(6.75)
    assert bool((guarded == 7.25).all())
    assert bool((guarded_lse == 6.75).all())


def test_a_captured_run_reads_what_its_tensors_hold_and_another_one_its_own():
    case = Case(**BASE, mask_rule=Causal(), seed=51)
    made = plan(**plan_arguments(case, choice=HOPPER))
    q, k, v, out, lse = tensors_of(case)
    run(made, q, k, v, out=out, lse=lse)
    want = out.clone()
    other_k = k.flip(0).contiguous().nan_to_num()
    other_want = run(made, q, other_k, v.nan_to_num())[0].clone()
    assert not torch.equal(want, other_want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(made, q, k, v, out=out, lse=lse)
    out.fill_(math.nan)
    graph.replay()
    assert torch.equal(out, want)
    k.copy_(other_k)
    v.nan_to_num_()
    graph.replay()
    assert torch.equal(out, other_want)


def test_a_replayed_plan_and_one_that_alternates_between_caches():
    case = Case(**BASE, mask_rule=Causal(), seed=52)
    made = plan(**plan_arguments(case, choice=HOPPER))
    q, k, v, out, lse = tensors_of(case)
    other = tensors_of(replace(case, seed=53))
    want, other_want = run(made, q, k, v)[0], run(made, q, other[1].nan_to_num(), other[2].nan_to_num())[0]
    for _ in range(4):
        replay(made, q, k, v, out=out, lse=lse)
        assert torch.equal(out, want)
        assert torch.equal(run(made, q, other[1].nan_to_num(), other[2].nan_to_num())[0], other_want)


def test_a_run_allocates_nothing_and_keeps_nothing():
    case = Case(**BASE, mask_rule=Causal(), seed=54)
    made = plan(**plan_arguments(case, choice=HOPPER))
    tensors = tensors_of(case)
    q, k, v, out, lse = tensors
    run(made, q, k, v, out=out, lse=lse)
    before = torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"]
    for _ in range(3):
        run(made, q, k, v, out=out, lse=lse)
    assert torch.cuda.memory_stats(DEVICE)["allocation.all.allocated"] == before
    used = torch.cuda.memory_allocated(DEVICE)
    del tensors, q, k, v
    assert torch.cuda.memory_allocated(DEVICE) < used


def test_no_kernel_is_compiled_again_for_other_lengths():
    from attnconform.kernels.sparse_attention.hopper_kernel import hopper_kernel

    def compiled() -> int:
        return sum(len(entry[0]) for entry in hopper_kernel.device_caches.values())

    def attend(**lengths) -> None:
        case = Case(**BASE | lengths, mask_rule=Causal(), seed=55)
        run_case(case, choice=HOPPER)

    attend(seqlen_q=(70,), seqlen_kv=(300,))
    before = compiled()
    for q, kv in ((1, 16), (64, 64), (257, 511), (17, 1000)):
        attend(seqlen_q=(q,), seqlen_kv=(kv,))
    assert compiled() == before


def test_a_plan_of_many_rows_runs_there_unasked():
    case = Case(**BASE | {"seqlen_q": (200, 1), "seqlen_kv": (300, 40)}, mask_rule=Causal(), seed=56)
    boxes = {launch.shape.tile_m: launch.shape.box for launch in build_plan(case, tile_kv=None).launches}
    assert boxes == {16: 0, 128: 16}
    assert_near_oracle(case, *run_case(case, tile_kv=None))


def test_random_blocks_of_pages_as_large():
    """Every row block has blocks of its own; pages of a tile of keys, boxes of a whole page."""
    torch.manual_seed(57)
    num_blocks, heads = 12, 8
    chosen = torch.rand(num_blocks, num_blocks) < 0.4
    counts = chosen.sum(-1)
    lists = CandidateLists(
        granularity="block", block_size=128, sharing="shared", q_block_size=128,
        indptr=torch.cat([counts.new_zeros(1), counts.cumsum(0)]), indices=chosen.nonzero()[:, 1].int(),
    )  # fmt: skip
    tokens = num_blocks * 128
    q = torch.randn(tokens, heads, 128, dtype=torch.bfloat16, device=DEVICE)
    k, v = (torch.randn(num_blocks, 128, 2, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    made, plain = (
        plan(
            qo_indptr=[0, tokens], seqlen_kv=[tokens], page_table=torch.randperm(num_blocks)[None].int(),
            page_size=128, num_pages=num_blocks, num_qo_heads=heads, num_kv_heads=2, head_dim_qk=128, head_dim_vo=128,
            sm_scale=0.1, dtype=torch.bfloat16, device=DEVICE, candidates=lists, choice=choice,
        )
        for choice in (HOPPER, PLAIN)
    )  # fmt: skip
    plain = replace(plain, page_table=made.page_table, list_slots=made.list_slots)
    (out, lse), (want_out, want_lse) = run(made, q, k, v), run(plain, q, k, v)
    assert float((out.float() - want_out.float()).abs().max()) <= 2.0**-6
    is_empty = torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse), is_empty)
    assert float((lse - want_lse)[~is_empty].abs().max()) <= 2e-5
