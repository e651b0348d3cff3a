"""Hopper's dQ over union tiles gives what float64 formulas give, and what the kernels of any GPU give.

On a GPU of that kind only: what decides without one is in test_hopper_backward_union_choice.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from test_backward import Case, check_gradients, draw_lists, draw_numbers, make_plan, to_tensors
from test_hopper_backward import differentiate, draw_scaled, poisoned

from attnconform.conformance.bench.nsa_work import NsaShape, make_nsa, nsa_plan
from attnconform.kernels.sparse_attention import BackwardHints, backward, plan_backward, run
from attnconform.kernels.sparse_attention.dropout import Dropout
from attnconform.kernels.sparse_attention.hopper_choice import why_not_here
from attnconform.kernels.sparse_attention.rules import And, Causal, Document, MaskRule, SoftCap, Window

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(why_not_here(DEVICE) is not None, reason="needs a Hopper GPU")

HOPPER, PLAIN = BackwardHints(kernels="hopper"), BackwardHints(kernels="plain")
# a request without rows, one without keys for most of its rows, and rows that list nothing
BASE = draw_lists(
    Case(
        seqlen_q=(90, 0, 1, 20),
        seqlen_kv=(500, 9, 70, 3),
        num_qo_heads=16,
        num_kv_heads=1,
        head_dim_qk=128,
        head_dim_vo=128,
        page_size=64,
        block_size=64,
        dtype=torch.bfloat16,
        mask_rule=Causal(),
        seed=90,
    )
)
SINKS = tuple(0.25 * h - 2.0 for h in range(16))
DOCUMENTS = Document(((0, 9, 240, 260), (0,), (0, 10), (1, 2)))


@pytest.fixture
def only_unions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan gives dQ to the kernel of unions, no other kernel may run it."""
    module = import_module("attnconform.kernels.sparse_attention.backward")
    monkeypatch.setattr(module, "launch_query_gradients", lambda *_: pytest.fail("dQ by another kernel"))


def check_unions(case: Case) -> None:
    """Against float64, with NaN where nobody looks."""
    the_plan = make_plan(case)
    assert plan_backward(the_plan, HOPPER).hopper_union is not None
    check_gradients(case, draw_scaled(case), differentiate(the_plan, poisoned(case), HOPPER))


@pytest.mark.usefixtures("only_unions")
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize(
    "rule",
    [None, Causal(), Window(left=90, right=2), DOCUMENTS, And((Causal(), DOCUMENTS))],
    ids=["none", "causal", "window", "document", "causal document"],
)
def test_rules_over_ragged_requests_and_shuffled_pages(rule: MaskRule | None, block_size: int) -> None:
    check_unions(draw_lists(replace(BASE, mask_rule=rule, block_size=block_size)))


@pytest.mark.usefixtures("only_unions")
@pytest.mark.parametrize(
    "heads", [(16, 1), (32, 2), (64, 4), (2, 2), (6, 2), (7, 1), (8, 1), (48, 1), (64, 1), (128, 1)], ids=str
)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 128), (torch.float16, 64)], ids=str)
def test_dtypes_head_dims_and_groups(dtype: torch.dtype, head_dim: int, heads: tuple[int, int]) -> None:
    shape = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim_qk": head_dim, "head_dim_vo": head_dim}
    lengths = {"seqlen_q": (40, 0, 1, 20)}
    check_unions(draw_lists(replace(BASE, **shape, **lengths, dtype=dtype, seed=91)))


@pytest.mark.usefixtures("only_unions")
@pytest.mark.parametrize(
    ("block_size", "page_size", "layout"),
    [(16, 16, "NHD"), (16, 256, "HND"), (32, 48, "NHD"), (48, 64, "HND"), (64, 48, "NHD"), (80, 16, "HND"),
     (128, 64, "NHD"), (192, 32, "HND")],
)  # fmt: skip
def test_blocks_and_pages_of_every_size_and_layout(block_size: int, page_size: int, layout: str) -> None:
    check_unions(draw_lists(replace(BASE, block_size=block_size, page_size=page_size, layout=layout, seed=92)))


@pytest.mark.usefixtures("only_unions")
@pytest.mark.parametrize(
    "changes",
    [{"sharing": "shared", "num_kv_heads": 2}, {"sharing": "query_head"}, {"sink_logits": SINKS}],
    ids=["lists of all heads", "lists of a head", "sinks"],
)
def test_sharing_and_sinks(changes: dict[str, object]) -> None:
    check_unions(draw_lists(replace(BASE, **changes, seqlen_q=(40, 0, 1, 20), seed=93)))


@pytest.mark.usefixtures("only_unions")
@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks_of_other_rows_of_a_tile_do_not_move_a_row_by_a_bit(block_size: int) -> None:
    """A row's own tokens stay as they are; all others become as large as numbers are."""
    sizes = {"seqlen_q": (8,), "seqlen_kv": (300,), "block_size": block_size}
    case = draw_lists(replace(BASE, **sizes, mask_rule=None, seed=94))
    the_plan, (q, k, v, dout, dlse) = make_plan(case), to_tensors(case, draw_numbers(case))
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, HOPPER)
    want = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work).dq
    page_of, size = torch.from_numpy(case.pages())[0].long(), case.page_size
    for _n, row, _i, h, keys in case.edges():
        if h == 0:
            others = torch.from_numpy(np.setdiff1d(np.arange(300), keys))
            changed_k, changed_v = k.clone(), v.clone()
            changed_k[page_of[others // size], others % size] = 3e38
            changed_v[page_of[others // size], others % size] = -3e38
            got = backward(the_plan, q, changed_k, changed_v, out, lse, dout, dlse=dlse, work=work).dq
            assert torch.equal(got[row], want[row])


@pytest.mark.usefixtures("only_unions")
def test_keys_that_no_row_of_a_tile_admits_may_hold_anything() -> None:
    """They share blocks, pages and tiles with keys that rows admit."""
    sizes = {"seqlen_q": (8,), "seqlen_kv": (300,), "block_size": 32, "mask_rule": Window(left=21, right=3)}
    case = replace(BASE, **sizes, lists=((8, 9), (7, 8, 9), (9,), (2, 8), (), (8, 9), (5,), (7, 9)), seed=95)
    the_plan, tensors = make_plan(case), to_tensors(case, draw_numbers(case))
    want = differentiate(the_plan, tensors, HOPPER)
    seen = np.unique(np.concatenate([keys for *_, keys in case.edges()]))
    unseen = torch.from_numpy(np.setdiff1d(np.arange(300), seen))
    page = torch.from_numpy(case.pages())[0].long()[unseen // case.page_size]
    tensors.k_cache[page, unseen % case.page_size] = math.nan
    tensors.v_cache[page, unseen % case.page_size] = math.inf
    got = differentiate(the_plan, tensors, HOPPER)
    assert torch.equal(got.dq, want.dq)


@pytest.mark.usefixtures("only_unions")
@pytest.mark.parametrize("name", ["q", "dout"])
def test_a_row_that_is_no_number_moves_no_other_row(name: str) -> None:
    case = replace(BASE, seed=96)
    the_plan, tensors = make_plan(case), to_tensors(case, draw_numbers(case))
    q, k, v, dout, dlse = tensors
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, HOPPER)
    want = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work).dq
    row = next(row for _n, row, _i, _h, keys in case.edges() if row > 8 and keys.size)
    getattr(tensors, name)[row] = math.nan
    got = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work).dq
    assert bool(got[row].isnan().all())
    got[row] = want[row]
    assert torch.equal(got, want)


@pytest.mark.usefixtures("only_unions")
def test_rows_without_keys_get_zero_whatever_their_dout_holds() -> None:
    """Of a tile whose other rows list blocks, and of one where nobody does."""
    case = replace(BASE, seqlen_q=(24,), seqlen_kv=(500,), mask_rule=None, seed=97)
    lists = [() if row % 3 == 0 or row >= 16 else (row % 8, 2) for row in range(24)]
    case = replace(case, lists=tuple(lists))
    got = differentiate(make_plan(case), poisoned(case), HOPPER)
    is_empty = torch.tensor([not named for named in lists], device=DEVICE)
    assert bool((got.dq[is_empty] == 0).all())
    check_gradients(case, draw_scaled(case), got)


LARGE = replace(
    BASE, seqlen_q=(2000, 3, 700), seqlen_kv=(2000, 900, 1500), num_qo_heads=32, num_kv_heads=2, block_size=64, seed=98
)


@pytest.mark.usefixtures("only_unions")
@pytest.mark.parametrize("block_size", [16, 64])
def test_many_tasks_a_program_give_the_same_bits_again(block_size: int) -> None:
    case = draw_lists(replace(LARGE, block_size=block_size))
    the_plan, (q, k, v, dout, dlse) = make_plan(case), to_tensors(case, draw_numbers(case))
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, HOPPER)
    first = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work).dq
    for _ in range(20):
        assert torch.equal(backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work).dq, first)


@pytest.mark.parametrize("block_size", [16, 64])
def test_long_prompts_give_what_the_other_kernels_give(block_size: int) -> None:
    case = draw_lists(replace(LARGE, block_size=block_size, seed=99))
    the_plan, tensors = make_plan(case), to_tensors(case, draw_numbers(case))
    got, want = (differentiate(the_plan, tensors, hints).dq.float() for hints in (HOPPER, PLAIN))
    # both round P, dS and the gradient to bfloat16
    assert float((got - want).norm() / want.norm()) <= 2.0**-8


def test_clustered_lists_go_there_unasked() -> None:
    torch.manual_seed(100)
    work = make_nsa(NsaShape(seqlen=4096, kept=0.75), str(DEVICE))
    the_plan = nsa_plan(work)
    out, lse = run(the_plan, work.q, work.k, work.v)
    planned = plan_backward(the_plan)
    assert planned.hopper_union is not None
    arguments = (the_plan, work.q, work.k, work.v, out, lse, torch.randn_like(out))
    got, want = (backward(*arguments, work=w).dq.float() for w in (planned, plan_backward(the_plan, PLAIN)))
    assert float((got - want).norm() / want.norm()) <= 2.0**-8


@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim_qk": 96, "head_dim_vo": 96},
        {"dropout": Dropout(rate=0.3, seed=1)},
        {"score_rules": (SoftCap(3.0),)},
        {"num_sink_tokens": 3},
        {"window": 5},
        {"block_size": 8},
        {"page_size": 8},
        {"dtype": torch.float32},
    ],
    ids=str,
)
def test_what_the_kernel_cannot_say_goes_by_tasks(changes: dict[str, object]) -> None:
    case = draw_lists(replace(BASE, seqlen_q=(20, 0, 1, 5), **changes, seed=101))
    the_plan = make_plan(case)
    assert plan_backward(the_plan).hopper_union is None
    check_gradients(case, draw_scaled(case), differentiate(the_plan, poisoned(case), BackwardHints()))


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_what_tma_cannot_read_goes_by_tasks(name: str) -> None:
    case = replace(BASE, seed=102)
    tensors = poisoned(case)
    x = getattr(tensors, name)
    odd = torch.zeros(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape)
    odd.copy_(x)
    got = differentiate(make_plan(case), tensors._replace(**{name: odd}), HOPPER)
    check_gradients(case, draw_numbers(case), got)


@pytest.mark.usefixtures("only_unions")
@pytest.mark.parametrize("kind", ["expanded", "transposed", "odd"])
def test_q_dout_and_dq_of_any_strides(kind: str) -> None:
    case = replace(BASE, seed=103)
    the_plan, (q, k, v, dout, dlse) = make_plan(case), to_tensors(case, draw_numbers(case))
    dout = dout[:1].expand_as(dout) if kind == "expanded" else dout
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, HOPPER)
    want = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work).dq
    guarded = torch.full((q.shape[1] + 2, q.shape[0] + 2, q.shape[2] + 3), 7.25, dtype=q.dtype, device=DEVICE)
    dq = guarded[1:-1, 1:-1, 1:-2].transpose(0, 1)
    if kind == "transposed":
        q, dout = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, dout))
    elif kind == "odd":
        q, dout = (torch.nn.functional.pad(x, (1, 2))[..., 1:-2] for x in (q, dout))
    backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, dq=dq, work=work)
    assert torch.equal(dq, want)
    dq.fill_(7.25)
    assert bool((guarded == 7.25).all())


@pytest.mark.usefixtures("only_unions")
def test_a_captured_backward_reads_what_its_tensors_hold() -> None:
    case = replace(BASE, seed=104)
    the_plan, (q, k, v, dout, dlse) = make_plan(case), to_tensors(case, draw_numbers(case))
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, HOPPER)
    arguments = (the_plan, q, k, v, out, lse, dout)
    want = backward(*arguments, dlse=dlse, work=work).dq.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = backward(*arguments, dlse=dlse, work=work).dq
    got.fill_(math.nan)
    graph.replay()
    assert torch.equal(got, want)
    dout.mul_(2)
    dlse.mul_(2)
    graph.replay()
    assert torch.equal(got, 2 * want)


@pytest.mark.usefixtures("only_unions")
def test_float32_buffers_receive_the_sums_unrounded() -> None:
    case = replace(BASE, seed=105)
    the_plan, (q, k, v, dout, dlse) = make_plan(case), to_tensors(case, draw_numbers(case))
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, HOPPER)
    rounded = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work).dq
    sums = torch.full_like(q, math.nan, dtype=torch.float32)
    backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, dq=sums, work=work)
    assert torch.equal(sums.to(case.dtype), rounded)


def test_no_kernel_is_compiled_again_for_other_lengths() -> None:
    from attnconform.kernels.sparse_attention.hopper_backward_union import hopper_union_query_kernel

    def compiled() -> int:
        return sum(len(entry[0]) for entry in hopper_union_query_kernel.device_caches.values())

    def check(seqlen_q: int, seqlen_kv: int) -> None:
        check_unions(draw_lists(replace(BASE, seqlen_q=(seqlen_q,), seqlen_kv=(seqlen_kv,), seed=106)))

    check(70, 300)
    before = compiled()
    for seqlen_q, seqlen_kv in ((2, 16), (64, 64), (100, 511), (17, 1000)):
        check(seqlen_q, seqlen_kv)
    assert compiled() == before
