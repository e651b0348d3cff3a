"""Hopper's kernels of the backward give what float64 formulas give, and what the kernels of any GPU give.

On a GPU of that kind only: what decides without one is in test_hopper_backward_choice.
"""

import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from test_backward import Case, Numbers, Tensors, check_gradients, draw_lists, draw_numbers, make_plan, to_tensors

from attnconform.kernels.sparse_attention import BackwardHints, Gradients, Plan, backward, plan_backward, run
from attnconform.kernels.sparse_attention.hopper_backward_choice import TASK_LANES
from attnconform.kernels.sparse_attention.hopper_choice import why_not_here
from attnconform.kernels.sparse_attention.rules import Alibi, And, Causal, Document, HeadWindow, SoftCap, Window

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(why_not_here(DEVICE) is not None, reason="needs a Hopper GPU")

HOPPER, PLAIN = BackwardHints(kernels="hopper"), BackwardHints(kernels="plain")
# so gentle that float32 holds every probability: where one is 0, so is what the bounds allow for
SLOPES = (0.125, 0.0625, 0.03125, 0.015625)
# what gradients of float16 are scaled by: an element below 2^-14 would be rounded by more than the bounds allow for
LOSS_SCALE = 2.0**8
SINKS = (0.5, -1.0, 0.0, 2.0)
# more than one tile of rows, of keys, and of both; a request without rows, and one of more rows than keys
BASE = Case(
    seqlen_q=(70, 0, 1, 40),
    seqlen_kv=(300, 0, 18, 3),
    head_dim_qk=128,
    head_dim_vo=128,
    page_size=16,
    dtype=torch.bfloat16,
    mask_rule=Causal(),
)


@pytest.fixture
def only_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a plan gives a launch to Hopper's kernels, no other kernel may run it."""
    module = import_module("attnconform.kernels.sparse_attention.backward")
    queries = module.launch_query_gradients

    def small_tasks_only(plan, launch, *arguments):
        assert launch.shape.tile_m != TASK_LANES
        queries(plan, launch, *arguments)

    monkeypatch.setattr(module, "launch_query_gradients", small_tasks_only)
    monkeypatch.setattr(module, "launch_key_gradients", lambda *_: pytest.fail("dK, dV by another kernel"))


def draw_scaled(case: Case) -> Numbers:
    numbers = draw_numbers(case)
    scale = LOSS_SCALE if case.dtype == torch.float16 else 1.0
    return numbers._replace(dout=numbers.dout * scale, dlse=numbers.dlse * scale)


def poisoned(case: Case) -> Tensors:
    """NaN in slots of nobody, and in dout of rows without a key or a sink, which no gradient may come near."""
    q, k, v, dout, dlse = to_tensors(case, draw_scaled(case))
    pages = torch.from_numpy(case.pages())
    owned = torch.zeros(case.num_pages * case.page_size, dtype=torch.bool)
    for n, length in enumerate(case.seqlen_kv):
        t = torch.arange(length)
        owned[pages[n, t // case.page_size].long() * case.page_size + t % case.page_size] = True
    nobody = (~owned).reshape(case.num_pages, case.page_size).to(DEVICE)
    for cache in (k, v):
        by_token = cache if case.layout == "NHD" else cache.transpose(1, 2)
        by_token[nobody] = math.nan
    for _n, row, _i, h, keys in case.edges():
        if keys.size == 0 and case.sink_logits is None:
            dout[row, h] = math.nan
    return Tensors(q, k, v, dout, dlse)


def differentiate(the_plan: Plan, tensors: Tensors, hints: BackwardHints) -> Gradients:
    q, k, v, dout, dlse = tensors
    out, lse = run(the_plan, q, k, v)
    return backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=plan_backward(the_plan, hints))


def check_hopper(case: Case) -> None:
    """Against float64; dK and dV of other slots are 0, which check_gradients holds them to."""
    the_plan = make_plan(case)
    work = plan_backward(the_plan, HOPPER)
    assert work.hopper_keys is not None
    assert work.hopper_queries is not None
    check_gradients(case, draw_scaled(case), differentiate(the_plan, poisoned(case), HOPPER))


def rules_of(name: str) -> object:
    return {
        "none": None,
        "causal": Causal(),
        "window": Window(left=60, right=2),
        "document": Document(((0, 9, 240, 260), (0,), (0, 10), (1, 2))),
        "causal document": And((Causal(), Document(((0, 9, 240, 260), (0,), (0, 10), (1, 2))))),
        "head windows": HeadWindow((3, 40, None, 200), (0, None, 5, 0)),
    }[name]


@pytest.mark.usefixtures("only_hopper")
@pytest.mark.parametrize("rule", ["none", "causal", "window", "document", "causal document", "head windows"])
def test_rules_over_ragged_requests_and_shuffled_pages(rule: str) -> None:
    check_hopper(replace(BASE, mask_rule=rules_of(rule), seed=41))


@pytest.mark.usefixtures("only_hopper")
@pytest.mark.parametrize(("page_size", "layout"), [(8, "NHD"), (16, "HND"), (48, "HND"), (256, "NHD")])
def test_pages_of_every_size_and_layout(page_size: int, layout: str) -> None:
    check_hopper(replace(BASE, page_size=page_size, layout=layout, mask_rule=Window(left=90, right=0), seed=42))


@pytest.mark.usefixtures("only_hopper")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "heads"),
    [(torch.float16, 64, (8, 1)), (torch.float16, 128, (2, 2)), (torch.bfloat16, 64, (4, 1))],
    ids=["float16 64 of 8", "float16 128 of 1", "bfloat16 64 of 4"],
)
def test_dtypes_head_dims_and_groups(dtype: torch.dtype, head_dim: int, heads: tuple[int, int]) -> None:
    shape = {"num_qo_heads": heads[0], "num_kv_heads": heads[1], "head_dim_qk": head_dim, "head_dim_vo": head_dim}
    check_hopper(replace(BASE, **shape, dtype=dtype, seed=43))


@pytest.mark.usefixtures("only_hopper")
@pytest.mark.parametrize(
    "changes",
    [
        {"score_rules": (Alibi(SLOPES),)},
        {"score_rules": (Alibi((-0.05, 0.0, 2.0, 0.01)),), "mask_rule": Window(left=37, right=3)},
        {"score_rules": (SoftCap(3.0),)},
        {"score_rules": (SoftCap(0.25),), "sink_logits": SINKS},
        {"sink_logits": SINKS},
    ],
    ids=["alibi", "alibi in a window", "cap", "cap and sinks", "sinks"],
)
def test_scores_and_sinks(changes: dict[str, object]) -> None:
    check_hopper(replace(BASE, **changes, seed=44))


@pytest.mark.usefixtures("only_hopper")
@pytest.mark.parametrize(
    ("sharing", "rules"),
    [("query_head", (Alibi(SLOPES),)), ("kv_head", (SoftCap(3.0),)), ("shared", ())],
    ids=["alibi by query head", "cap by kv head", "plain of all heads"],
)
def test_lists_of_blocks(sharing: str, rules: tuple[object, ...]) -> None:
    lengths = {"seqlen_q": (128, 0, 200), "seqlen_kv": (512, 0, 384)}
    case = replace(BASE, **lengths, page_size=64, block_size=128, q_block_size=128, sharing=sharing, score_rules=rules)
    case = replace(case, page_table=((6, 7, 2, 3, 8, 9, 4, 5), (), (0, 1, 10, 11, 12, 13)), seed=45)
    check_hopper(draw_lists(case))


LARGE = replace(BASE, seqlen_q=(2000, 3, 700), seqlen_kv=(2000, 900, 1500), num_qo_heads=8, num_kv_heads=4)
RULES = {
    "causal": {},
    "window": {"mask_rule": Window(left=500, right=0)},
    "cap": {"score_rules": (SoftCap(20.0),)},
    # windows begin between two keys that share a reciprocal
    "capped window": {"mask_rule": Window(left=499, right=0), "score_rules": (SoftCap(20.0),)},
    "alibi": {"score_rules": (Alibi(tuple(2.0 ** (-h / 2) for h in range(1, 9))),)},
}


@pytest.mark.usefixtures("only_hopper")
@pytest.mark.parametrize("rule", sorted(RULES))
def test_long_prompts_give_the_same_bits_again(rule: str) -> None:
    case = replace(LARGE, **RULES[rule], seed=46)
    the_plan, tensors = make_plan(case), to_tensors(case, draw_numbers(case))
    q, k, v, dout, dlse = tensors
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, HOPPER)
    first = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work)
    for _ in range(19):
        again = backward(the_plan, q, k, v, out, lse, dout, dlse=dlse, work=work)
        assert all(torch.equal(a, b) for a, b in zip(again[:3], first[:3], strict=True))


@pytest.mark.parametrize("rule", sorted(RULES))
def test_long_prompts_give_what_the_other_kernels_give(rule: str) -> None:
    case = replace(LARGE, **RULES[rule], seed=47)
    the_plan, tensors = make_plan(case), to_tensors(case, draw_numbers(case))
    got, want = (differentiate(the_plan, tensors, hints) for hints in (HOPPER, PLAIN))
    for name in ("dq", "dk", "dv"):
        a, b = getattr(got, name).float(), getattr(want, name).float()
        # both round P, dS and the gradient to bfloat16
        assert float((a - b).norm() / b.norm()) <= 2.0**-8, name


@pytest.mark.usefixtures("only_hopper")
def test_parts_of_cut_tiles_add_up() -> None:
    case = replace(BASE, seqlen_q=(300,), seqlen_kv=(300,), seed=48)
    the_plan, tensors = make_plan(case), to_tensors(case, draw_numbers(case))
    cut = replace(HOPPER, rows_per_item=128, steps_per_task=1)
    assert plan_backward(the_plan, cut).keys.items.num_partials > 0
    got, want = (differentiate(the_plan, tensors, hints) for hints in (cut, HOPPER))
    for a, b in zip(got[:3], want[:3], strict=True):
        assert float((a.float() - b.float()).norm() / b.float().norm()) <= 2.0**-8


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "dout"])
def test_what_tma_cannot_read_is_left_to_the_other_kernels(name: str) -> None:
    case = replace(BASE, seed=49)
    the_plan, tensors = make_plan(case), poisoned(case)
    x = getattr(tensors, name)
    odd = torch.zeros(x.numel() + 1, dtype=x.dtype, device=DEVICE)[1:].view(x.shape)
    odd.copy_(x)
    got = differentiate(the_plan, tensors._replace(**{name: odd}), HOPPER)
    check_gradients(case, draw_numbers(case), got)


@pytest.mark.usefixtures("only_hopper")
def test_an_infinite_dout_of_the_first_rows_stays_infinite() -> None:
    """A sum begins with the first pair: its rows are not multiplied by weights of 0 before."""
    case = replace(BASE, seqlen_q=(40,), seqlen_kv=(128,), page_table=(tuple(range(8)),), mask_rule=None, seed=52)
    tensors = to_tensors(case, draw_numbers(case))
    tensors.dout[(0, -1), 0, 3] = math.inf
    dv = differentiate(make_plan(case), tensors, HOPPER).dv[:8]
    by_token = dv if case.layout == "NHD" else dv.transpose(1, 2)
    assert torch.isposinf(by_token[:, :, 0, 3]).all()
    by_token[:, :, 0, 3] = 0.0
    assert torch.isfinite(by_token).all()


@pytest.mark.parametrize("kind", ["expanded", "strided"])
def test_dout_of_any_strides(kind: str) -> None:
    case = replace(BASE, seed=50)
    numbers, the_plan, tensors = draw_numbers(case), make_plan(case), to_tensors(case, draw_numbers(case))
    if kind == "expanded":
        dout = tensors.dout[:1, :1].expand_as(tensors.dout)
    else:
        rows, heads, dim = tensors.dout.shape
        dout = torch.empty(heads, rows, dim + 8, dtype=case.dtype, device=DEVICE)[..., :dim].transpose(0, 1)
        dout.copy_(tensors.dout)
    got = differentiate(the_plan, tensors._replace(dout=dout), HOPPER)
    check_gradients(case, numbers._replace(dout=dout.double().cpu().numpy()), got)


@pytest.mark.usefixtures("only_hopper")
def test_a_captured_backward_reads_what_its_tensors_hold() -> None:
    case = replace(BASE, seed=51)
    the_plan, (q, k, v, dout, dlse) = make_plan(case), to_tensors(case, draw_numbers(case))
    out, lse = run(the_plan, q, k, v)
    work = plan_backward(the_plan, HOPPER)
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
