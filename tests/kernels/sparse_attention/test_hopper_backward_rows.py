"""Hopper's kernel for lists per token gives what float64 formulas give, and what the kernels of any GPU give.

On a GPU of that kind only: what decides without one is in test_hopper_backward_rows_choice.
"""

import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from test_backward import Case, check_gradients, draw_lists, draw_numbers, make_plan, to_tensors
from test_hopper_backward import differentiate, draw_scaled, poisoned

from attnconform.kernels.sparse_attention import BackwardHints, backward, plan_backward, run
from attnconform.kernels.sparse_attention.backward_hints import KeyShape
from attnconform.kernels.sparse_attention.hopper_choice import why_not_here
from attnconform.kernels.sparse_attention.rules import Causal, Document, Window

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(why_not_here(DEVICE) is not None, reason="needs a Hopper GPU")

ROWS = BackwardHints(kernels="hopper", key_shape=KeyShape(64, 32, 4, 2))
PLAIN = BackwardHints(kernels="plain")
# a request without rows, one without keys for most of its rows, and rows that list nothing
BASE = draw_lists(
    Case(
        seqlen_q=(90, 0, 1, 20),
        seqlen_kv=(500, 9, 70, 3),
        num_qo_heads=16,
        head_dim_qk=128,
        head_dim_vo=128,
        page_size=64,
        block_size=64,
        dtype=torch.bfloat16,
        mask_rule=Causal(),
        seed=60,
    )
)
SINKS = tuple(0.25 * h - 2.0 for h in range(16))


@pytest.fixture
def only_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan gives dK and dV to the kernel of rows, no other kernel may run them."""
    module = import_module("attnconform.kernels.sparse_attention.backward")
    monkeypatch.setattr(module, "launch_key_gradients", lambda *_: pytest.fail("dK, dV by another kernel"))


def check_rows(case: Case, hints: BackwardHints = ROWS) -> None:
    """Against float64, with NaN where nobody looks."""
    the_plan = make_plan(case)
    assert plan_backward(the_plan, hints).hopper_rows is not None
    check_gradients(case, draw_scaled(case), differentiate(the_plan, poisoned(case), hints))


@pytest.mark.usefixtures("only_rows")
@pytest.mark.parametrize(
    "rule",
    [None, Causal(), Window(left=90, right=2), Document(((0, 9, 240, 260), (0,), (0, 10), (1, 2)))],
    ids=["none", "causal", "window", "document"],
)
def test_rules_over_ragged_requests_and_shuffled_pages(rule: object) -> None:
    check_rows(replace(BASE, mask_rule=rule))


@pytest.mark.usefixtures("only_rows")
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 2), 128), ((32, 1), 64), ((64, 1), 128), ((8, 1), 64)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_groups_head_dims_and_dtypes(heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> None:
    shape = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim_qk": head_dim, "head_dim_vo": head_dim}
    check_rows(draw_lists(replace(BASE, **shape, dtype=dtype, seed=61)))


@pytest.mark.usefixtures("only_rows")
@pytest.mark.parametrize(("page_size", "layout"), [(8, "NHD"), (16, "HND"), (48, "NHD"), (128, "HND")])
def test_pages_of_every_size_and_layout(page_size: int, layout: str) -> None:
    check_rows(draw_lists(replace(BASE, page_size=page_size, block_size=16, layout=layout, seed=62)))


@pytest.mark.usefixtures("only_rows")
@pytest.mark.parametrize(
    "changes", [{"sharing": "shared"}, {"sink_logits": SINKS}], ids=["lists of all heads", "sinks"]
)
def test_shared_lists_and_sinks(changes: dict[str, object]) -> None:
    check_rows(draw_lists(replace(BASE, **changes, seed=63)))


@pytest.mark.usefixtures("only_rows")
def test_parts_of_cut_tiles_add_up() -> None:
    cut = replace(ROWS, rows_per_item=128)
    assert plan_backward(make_plan(BASE), cut).keys.items.num_partials > 0
    check_rows(BASE, cut)


@pytest.mark.usefixtures("only_rows")
def test_a_slot_that_a_list_reaches_twice_counts_twice() -> None:
    """Two of a request's pages are one."""
    case = replace(BASE, seqlen_q=(60,), seqlen_kv=(256,), page_table=((3, 1, 3, 0),), seed=64)
    check_rows(replace(case, lists=((0, 2), (2, 3, 0)) * 60))


LARGE = replace(BASE, seqlen_q=(2000, 3, 700), seqlen_kv=(2000, 900, 1500), seed=65)


@pytest.mark.usefixtures("only_rows")
@pytest.mark.parametrize("rows_per_item", [None, 2048], ids=["whole tiles", "cut tiles"])
def test_long_prompts_give_the_same_bits_again(rows_per_item: int | None) -> None:
    case = draw_lists(LARGE)
    the_plan, (q, k, v, dout, dlse) = make_plan(case), to_tensors(case, draw_numbers(case))
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, replace(ROWS, rows_per_item=rows_per_item))
    assert work.order_spread == 0
    first = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work)
    for _ in range(20):
        again = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work)
        assert all(torch.equal(a, b) for a, b in zip(again[:3], first[:3], strict=True))


def test_long_prompts_give_what_the_other_kernels_give() -> None:
    case = draw_lists(replace(LARGE, seed=66))
    the_plan, tensors = make_plan(case), to_tensors(case, draw_numbers(case))
    got, want = (differentiate(the_plan, tensors, hints) for hints in (ROWS, PLAIN))
    for name in ("dq", "dk", "dv"):
        a, b = getattr(got, name).float(), getattr(want, name).float()
        # both round P, dS and the gradient to bfloat16
        assert float((a - b).norm() / b.norm()) <= 2.0**-8, name


@pytest.mark.parametrize("name", ["q", "k_cache", "dout"])
def test_what_tma_cannot_read_is_left_to_the_other_kernels(name: str) -> None:
    case = replace(BASE, seed=67)
    tensors = poisoned(case)
    x = getattr(tensors, name)
    odd = torch.zeros(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape)
    odd.copy_(x)
    got = differentiate(make_plan(case), tensors._replace(**{name: odd}), ROWS)
    check_gradients(case, draw_numbers(case), got)


@pytest.mark.usefixtures("only_rows")
def test_a_captured_backward_reads_what_its_tensors_hold() -> None:
    case = replace(BASE, seed=68)
    the_plan, (q, k, v, dout, dlse) = make_plan(case), to_tensors(case, draw_numbers(case))
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, ROWS)
    arguments = (the_plan, q, k, v, out, lse, dout)
    want = [x.clone() for x in backward(*arguments, dlse=dlse, work=work)[:3]]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = backward(*arguments, dlse=dlse, work=work)
    for x in got[:3]:
        x.fill_(math.nan)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(got[:3], want, strict=True))
    dout.mul_(2)
    dlse.mul_(2)
    graph.replay()
    assert all(torch.equal(a, 2 * b) for a, b in zip(got[:3], want, strict=True))


@pytest.mark.usefixtures("only_rows")
def test_float32_buffers_receive_the_sums_unrounded() -> None:
    case = replace(BASE, seed=69)
    the_plan, (q, k, v, dout, dlse) = make_plan(case), to_tensors(case, draw_numbers(case))
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, ROWS)
    rounded = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work)
    wide = {f"d{x}": torch.full_like(t, math.nan, dtype=torch.float32) for x, t in (("q", q), ("k", k), ("v", v))}
    backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work, **wide)
    for name, sums in wide.items():
        assert torch.equal(sums.to(case.dtype), getattr(rounded, name)), name
