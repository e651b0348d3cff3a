"""Hopper's union tiles give what the oracle and rows apart give, whatever foreign blocks hold, and write nothing else.

On a GPU of that kind only: what decides without one is in test_hopper_union_choice.
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

from attnconform.kernels.sparse_attention import CandidateLists, plan, run
from attnconform.kernels.sparse_attention.hopper_choice import why_not_here
from attnconform.kernels.sparse_attention.rules import And, Causal, Window
from attnconform.kernels.sparse_attention.tuning import Choice

pytestmark = pytest.mark.skipif(why_not_here(DEVICE) is not None, reason="needs a Hopper GPU")

HOPPER, APART = {"choice": Choice(forward="hopper")}, {"choice": Choice(forward="plain"), "rows_per_union": 1}
# several tiles of rows, and of keys; a request without rows, and one of more rows than keys
BASE = {
    "seqlen_q": (70, 0, 1, 40),
    "seqlen_kv": (300, 0, 18, 3),
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim_qk": 128,
    "head_dim_vo": 128,
    "page_size": 16,
    "dtype": torch.bfloat16,
    "sharing": "kv_head",
    "block_size": 16,
}


def check_union(case: Case) -> None:
    made = build_plan(case, **HOPPER)
    assert made.union is not None
    assert made.union.shape.box
    assert_near_oracle(case, *run_case(case, **HOPPER))


@pytest.mark.parametrize("rule", sorted(RAGGED_RULES))
@pytest.mark.parametrize("block_size", [16, 64])
def test_rules_over_ragged_requests_and_shuffled_pages(rule, block_size):
    check_union(Case(**BASE | {"block_size": block_size}, mask_rule=RAGGED_RULES[rule], seed=71))


@pytest.mark.parametrize(
    ("block_size", "page_size"),
    [(16, 256), (32, 48), (48, 64), (64, 48), (64, 64), (80, 16), (128, 64), (128, 256), (192, 16)],
)
def test_blocks_and_pages_of_every_size(block_size, page_size):
    sizes = {"block_size": block_size, "page_size": page_size}
    check_union(Case(**BASE | sizes, mask_rule=And((Causal(), Window(left=90))), seed=72))


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 64)])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1), (8, 1), (32, 2), (48, 1), (64, 1), (96, 1)])
def test_dtypes_head_dims_and_groups(dtype, head_dim, heads):
    shape = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim_qk": head_dim, "head_dim_vo": head_dim}
    check_union(Case(**BASE | shape | {"dtype": dtype, "block_size": 64}, mask_rule=Causal(), seed=73))


@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_lists_of_every_sharing_and_caches_of_every_layout(sharing, layout):
    check_union(Case(**BASE | {"sharing": sharing, "layout": layout}, mask_rule=Causal(), seed=74))


@pytest.mark.parametrize(
    "changes",
    [
        {"sink_logits": (0.5, -1.0, 0.0, 2.0)},
        {"q_offset": (10, 0, 3, -60)},
        {"mask_rule": Window(left=9, right=0), "q_offset": (10, 0, 3, -60), "sink_logits": (0.5, -1.0, 0.0, 2.0)},
        {"seqlen_q": (1, 2, 11, 12, 13), "seqlen_kv": (64, 65, 11, 128, 13), "q_offset": None},
    ],
)
def test_sinks_offsets_and_tiles_of_few_rows(changes):
    check_union(Case(**BASE | {"mask_rule": Causal()} | changes, seed=75))


def test_keys_that_no_row_of_a_tile_admits_may_hold_anything():
    """They share blocks, pages and tiles with keys that rows admit."""
    lengths = {"seqlen_q": (24,), "seqlen_kv": (300,), "num_qo_heads": 2, "num_kv_heads": 1}
    case = Case(**BASE | lengths, q_offset=(100,), mask_rule=Window(left=21, right=3), seed=76)
    want = run_case(case, **HOPPER)
    seen = np.unique(np.concatenate([case.selected(0, row, 0) for row in range(24)]))
    unseen = case.slots(0)[np.setdiff1d(np.arange(300), seen)]
    case.k[unseen], case.v[unseen] = math.nan, math.inf
    for got, expected in zip(run_case(case, **HOPPER), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks_of_other_rows_of_a_tile_do_not_move_a_row_by_a_bit(block_size):
    """A row's own tokens stay as they are; all others become as large as numbers are."""
    case = Case(**BASE | {"seqlen_q": (12,), "seqlen_kv": (300,), "block_size": block_size}, seed=77)
    want = run_case(case, **HOPPER)
    for row in range(12):
        for kv_head in range(2):
            changed = replace(case)
            changed.k, changed.v = case.k.clone(), case.v.clone()
            others = np.setdiff1d(np.arange(300), case.selected(0, row, 2 * kv_head))
            changed.k[case.slots(0)[others], kv_head] = 3e38
            changed.v[case.slots(0)[others], kv_head] = -3e38
            for got, expected in zip(run_case(changed, **HOPPER), want, strict=True):
                assert torch.equal(
                    got[row, 2 * kv_head : 2 * kv_head + 2], expected[row, 2 * kv_head : 2 * kv_head + 2]
                )


LONG = {"seqlen_q": (2000, 3, 700), "seqlen_kv": (2000, 900, 1500), "num_qo_heads": 32, "num_kv_heads": 2}


@pytest.mark.parametrize("block_size", [16, 64])
def test_many_tasks_a_program_give_what_rows_apart_give_and_the_same_bits_again(block_size):
    case = Case(**BASE | LONG | {"block_size": block_size}, mask_rule=Causal(), seed=78)
    q, k, v = tensors_of(case)
    made = plan(**plan_arguments(case, **HOPPER))
    out, lse = run(made, q, k, v)
    assert "hopper" in made.union.prepared
    want_out, want_lse = run(plan(**plan_arguments(case, **APART, tile_kv=None)), q, k, v)
    is_empty = torch.isneginf(want_lse)
    assert torch.equal(torch.isneginf(lse), is_empty)
    assert float((out.float() - want_out.float()).abs().max()) <= 2.0**-6
    assert float((lse - want_lse)[~is_empty].abs().max()) <= 2e-5
    for _ in range(20):
        again = run(made, q, k, v)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


def tensors_of(case: Case) -> tuple[torch.Tensor, ...]:
    """q, and both caches with NaN where nobody owns."""
    return case.q.to(DEVICE), *(paged(case, poison_unowned(case, rows)) for rows in (case.k, case.v))


@pytest.mark.parametrize("kind", ["spare dims", "odd base"])
def test_strided_pools_are_read_and_what_tma_cannot_read_is_attended_row_by_row(kind):
    case = Case(**BASE, mask_rule=Causal(), seed=79)
    want = run_case(case, **HOPPER)
    q, k, v = tensors_of(case)
    if kind == "spare dims":
        pool = torch.full((*k.shape[:-1], k.shape[-1] + 8), math.nan, dtype=k.dtype, device=DEVICE)
        strided = pool[..., : k.shape[-1]]
    else:
        strided = torch.full((k.numel() + 1,), math.nan, dtype=k.dtype, device=DEVICE)[1:].view(k.shape)
    strided.copy_(k)
    made = plan(**plan_arguments(case, **HOPPER))
    out, lse = run(made, q, strided, v)
    assert ("hopper" in made.union.prepared) == (kind == "spare dims")
    if kind == "spare dims":
        assert torch.equal(out.cpu(), want[0])
        assert torch.equal(lse.cpu(), want[1])
    else:
        assert_near_oracle(case, out.cpu(), lse.cpu())


def test_nothing_but_the_rows_is_written():
    case = Case(**BASE, mask_rule=Causal(), seed=80)
    q, k, v = tensors_of(case)
    want = run(plan(**plan_arguments(case, **HOPPER)), q, k, v)
    rows, heads, dim = q.shape
    guarded = torch.full((rows + 4, heads + 1, dim + 3), 7.25, dtype=q.dtype, device=DEVICE)
    out = guarded[2:-2, :heads, :dim]
    guarded_lse = torch.full((heads + 2, rows + 2), 6.75, device=DEVICE)
    lse = guarded_lse[1:-1, 1:-1].T
    run(plan(**plan_arguments(case, **HOPPER)), q, k, v, out=out, lse=lse)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    out.fill_(7.25)
    lse.fill_(6.75)
    assert bool((guarded == 7.25).all())
    assert bool((guarded_lse == 6.75).all())


def test_a_captured_run_reads_what_its_tensors_hold():
    case = Case(**BASE, mask_rule=Causal(), seed=81)
    made = plan(**plan_arguments(case, **HOPPER))
    q, k, v = tensors_of(case)
    out, lse = run(made, q, k, v)
    want, other_k = out.clone(), k.flip(0).contiguous().nan_to_num()
    other_want = run(made, q, other_k, v.nan_to_num())[0]
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


def test_no_kernel_is_compiled_again_for_other_lengths():
    from attnconform.kernels.sparse_attention.hopper_union_kernel import hopper_union_kernel

    def compiled() -> int:
        return sum(len(entry[0]) for entry in hopper_union_kernel.device_caches.values())

    def attend(**lengths) -> None:
        run_case(Case(**BASE | lengths, mask_rule=Causal(), seed=82), **HOPPER)

    attend(seqlen_q=(70,), seqlen_kv=(300,))
    before = compiled()
    for q, kv in ((2, 16), (64, 64), (257, 511), (17, 1000)):
        attend(seqlen_q=(q,), seqlen_kv=(kv,))
    assert compiled() == before


@pytest.mark.parametrize(("width", "is_united"), [(64, True), (2048, False)])
def test_lists_that_overlap_run_there_unasked(width, is_united):
    """8 blocks of 64 a row, out of as many as `width` says."""
    torch.manual_seed(83)
    rows, heads, block = 384, 16, 64
    indices = torch.stack([torch.randperm(width)[:8] for _ in range(rows)]).sort(-1).values
    lists = CandidateLists(
        granularity="block", block_size=block, sharing="shared", q_block_size=1,
        indptr=torch.arange(0, rows * 8 + 1, 8), indices=indices.flatten().int(),
    )  # fmt: skip
    arguments = {
        "qo_indptr": [0, rows], "seqlen_kv": [width * block], "page_table": torch.randperm(width)[None].int(),
        "page_size": block, "num_pages": width, "num_qo_heads": heads, "num_kv_heads": 1, "head_dim_qk": 128,
        "head_dim_vo": 128, "sm_scale": 0.1, "dtype": torch.bfloat16, "device": DEVICE, "candidates": lists,
    }  # fmt: skip
    q = torch.randn(rows, heads, 128, dtype=torch.bfloat16, device=DEVICE)
    k, v = (torch.randn(width, block, 1, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    made, apart = plan(**arguments), plan(**arguments, **APART)
    assert (made.union is not None) == is_united
    (out, lse), (want, want_lse) = run(made, q, k, v), run(apart, q, k, v)
    assert float((out.float() - want.float()).abs().max()) <= 2.0**-6
    assert float((lse - want_lse).abs().max()) <= 2e-5
