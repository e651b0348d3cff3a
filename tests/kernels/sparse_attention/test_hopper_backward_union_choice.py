"""Which backwards sum dQ over union tiles, and whose blocks those tiles hold: decided without a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from test_backward import Case, check_gradients, draw_lists, draw_numbers, make_plan, to_tensors

from attnconform.conformance.bench.nsa_work import NsaShape, make_nsa, nsa_plan
from attnconform.kernels.sparse_attention import (
    BackwardHints,
    CandidateLists,
    Plan,
    PlanError,
    backward,
    hopper_backward_choice,
    plan,
    plan_backward,
    run,
)
from attnconform.kernels.sparse_attention.backward_hints import KeyShape
from attnconform.kernels.sparse_attention.dropout import Dropout
from attnconform.kernels.sparse_attention.hopper_backward_union_choice import (
    FLOPS_PER_SECOND,
    choose_union,
    cost_apart,
    cost_united,
    find_blocks,
    unite_rows,
)
from attnconform.kernels.sparse_attention.rules import Alibi, Causal, Document, HeadWindow, MaskRule, Window
from attnconform.kernels.sparse_attention.union import UNION_FIELDS, UnionLists

HOPPER = BackwardHints(kernels="hopper")
CASE = draw_lists(
    Case(
        seqlen_q=(41, 0, 1, 20),
        seqlen_kv=(330, 9, 70, 3),
        num_qo_heads=16,
        head_dim_qk=64,
        head_dim_vo=64,
        page_size=64,
        block_size=64,
        dtype=torch.bfloat16,
        mask_rule=Causal(),
        seed=3,
    )
)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with the GPU."""
    monkeypatch.setattr(hopper_backward_choice, "why_not_here", lambda device: None)


def edges_of(case: Case) -> Counter[tuple[int, int, int]]:
    """(row, query head, position) of every edge, by the contract's words."""
    return Counter((row, h, int(j)) for _n, row, _i, h, keys in case.edges() for j in keys)


def edges_of_lists(the_plan: Plan, lists: UnionLists) -> Counter[tuple[int, int, int]]:
    """As the kernel walks them: tokens of entries with a row's bit, within what the row may see."""
    starts, ends = the_plan.mask_starts[0].tolist(), the_plan.mask_ends[0].tolist()
    blocks, members, size = lists.blocks.tolist(), lists.members.tolist(), lists.block_size
    edges: Counter[tuple[int, int, int]] = Counter()
    for task in (dict(zip(UNION_FIELDS, row, strict=True)) for row in lists.tasks.tolist()):
        for entry in range(task["entry_start"], task["entry_end"]):
            is_whole = task["full_start"] <= entry < task["full_end"]
            for r in range(task["q_count"]):
                row = task["q_start"] + r
                tokens = range(blocks[entry] * size, (blocks[entry] + 1) * size)
                seen = tokens if is_whole else [j for j in tokens if starts[row] <= j < ends[row]]
                heads = range(task["head_start"], task["head_start"] + task["head_count"])
                if members[entry] >> r & 1:
                    edges.update((row, h, j) for h in heads for j in seen)
    return edges


@pytest.mark.parametrize(
    "rule", [None, Causal(), Window(left=90, right=2), Document(((0, 9, 240), (0,), (0, 10), (1,)))]
)
@pytest.mark.parametrize(("block_size", "page_size"), [(16, 16), (32, 64), (64, 48), (64, 64), (128, 64), (80, 16)])
def test_union_tiles_have_every_edge_of_the_lists_once(rule: MaskRule | None, block_size: int, page_size: int) -> None:
    case = draw_lists(replace(CASE, mask_rule=rule, block_size=block_size, page_size=page_size))
    found = choose_union(make_plan(case), HOPPER)
    assert not isinstance(found, str)
    assert found.lists.shape.box >= 16
    assert edges_of_lists(make_plan(case), found.lists) == edges_of(case)


@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (7, 1), (48, 1), (128, 1)])
def test_rows_of_every_group_and_sharing_fit_the_lanes_of_two_groups(sharing: str, heads: tuple[int, int]) -> None:
    case = replace(CASE, num_qo_heads=heads[0], num_kv_heads=heads[1], sharing=sharing, seqlen_q=(5, 0, 1, 3))
    case = draw_lists(case)
    found = choose_union(make_plan(case), HOPPER)
    assert not isinstance(found, str)
    assert found.lists.shape.tile_q * found.lists.shape.heads_per_tile <= 128
    assert edges_of_lists(make_plan(case), found.lists) == edges_of(case)


@pytest.mark.parametrize(
    ("named", "size"), [((0, 16, 80), 16), ((0, 64), 64), ((64, 0), 64), ((32,), 32), ((96, 32), 32), ((320,), 64)]
)
def test_blocks_are_as_large_as_all_lists_let_them_be(named: tuple[int, ...], size: int) -> None:
    """Tokens of lists from these positions on, each so many or to the end of 330."""
    tokens = [j for start in named for j in range(start, min(start + size, 330))]
    the_plan = make_plan(replace(CASE, seqlen_q=(2,), seqlen_kv=(330,), block_size=1, lists=(tuple(tokens),) * 4))
    found = choose_union(the_plan, HOPPER)
    assert not isinstance(found, str)
    assert found.lists.block_size == size


@pytest.mark.parametrize("missing", [0, 1, 31, 63, 64, 127])
def test_a_list_without_a_token_is_not_whole_blocks(missing: int) -> None:
    whole = tuple(range(128))
    lists = (whole, whole, whole, tuple(j for j in whole if j != missing))
    the_plan = make_plan(replace(CASE, seqlen_q=(2,), seqlen_kv=(330,), block_size=1, lists=lists))
    assert all(find_blocks(the_plan, size) is None for size in (64, 32, 16))
    assert "whole blocks" in str(choose_union(the_plan, HOPPER))


def test_lists_that_name_nothing_are_united_to_tasks_without_keys() -> None:
    the_plan = make_plan(replace(CASE, seqlen_q=(2,), seqlen_kv=(330,), lists=((),) * 4))
    found = choose_union(the_plan, HOPPER)
    assert not isinstance(found, str)
    assert sorted(found.lists.tasks[:, 1:3].tolist()) == [[0, 2], [0, 2]]
    assert edges_of_lists(the_plan, found.lists) == Counter()


def lists_of(indices: torch.Tensor, num_blocks: int, **changes: object) -> Plan:
    """Rows of 16 heads at the end of a request of blocks of 64, all of which they may see."""
    rows, per_row = indices.shape
    candidates = CandidateLists(
        granularity="block", sharing="shared", block_size=64, indptr=torch.arange(0, rows * per_row + 1, per_row),
        indices=indices.flatten(),
    )  # fmt: skip
    options = {
        "qo_indptr": [0, rows], "seqlen_kv": [64 * num_blocks], "page_table": torch.arange(num_blocks).int()[None],
        "page_size": 64, "num_pages": num_blocks, "num_qo_heads": 16, "num_kv_heads": 1, "head_dim_qk": 128,
        "head_dim_vo": 128, "sm_scale": 0.1, "dtype": torch.bfloat16, "device": "cpu", "candidates": candidates,
    }  # fmt: skip
    return plan(**options | changes)


def test_lists_by_slot_are_united_by_position() -> None:
    indices = torch.tensor([[0, 3, 5], [1, 3, 4], [0, 2, 5]])
    shuffled = {"page_table": torch.tensor([[4, 2, 0, 5, 1, 3]]).int()}
    by_slot, by_position = (lists_of(indices, 6, **shuffled, order=order) for order in ("slot", "position"))
    assert by_slot.list_positions.tolist() != by_position.list_positions.tolist()
    got, want = (unite_rows(p, find_blocks(p, 64), 64) for p in (by_slot, by_position))
    for name in ("tasks", "blocks", "members"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name


def test_neighbours_that_share_blocks_are_united_and_others_are_not() -> None:
    torch.manual_seed(5)
    apart = torch.stack([torch.randperm(512)[:16] for _ in range(64)]).sort(-1).values
    clustered = apart[::16].repeat_interleave(16, 0)
    hints = BackwardHints()
    assert not isinstance(choose_union(lists_of(clustered, 512), hints), str)
    assert choose_union(lists_of(apart, 512), hints) == "lists overlap too little"
    assert not isinstance(choose_union(lists_of(apart, 512), HOPPER), str)


@pytest.mark.parametrize(("block_size", "products"), [(64, 11), (32, 6), (16, 4)])
def test_costs_count_what_is_multiplied_and_what_rows_apart_read(block_size: int, products: int) -> None:
    """Ten entries of 8 rows in two groups: the first group lists 0 to 7, the second 7 to 9."""
    the_plan = lists_of(torch.tensor([[*range(8)]] * 8), 16)
    tasks = torch.tensor([[0, 0, 8, 0, 16, 0, 0, 10, 0, 10]], dtype=torch.int32)
    members = torch.tensor([0b1111] * 7 + [0b1000001, 0b10000, 0b110000], dtype=torch.int32)
    lists = UnionLists(block_size, unite_rows(the_plan, find_blocks(the_plan, 64), 64).shape, tasks, tasks[0], members)
    # entries of a tile that a group lists are one product of 64 lanes and 64 keys: S, dP and dS K of 128 numbers
    seconds = products * 3 * 2 * 64 * 64 * 128 / FLOPS_PER_SECOND
    assert cost_united(the_plan, lists) == pytest.approx(seconds)
    twice = replace(lists, block_size=block_size, members=members | 0b1)
    assert cost_apart(the_plan, twice) > cost_apart(the_plan, lists)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lists": None}, "lists of their own"),
        ({"q_block_size": 4}, "lists of their own"),
        ({"score_rules": (Alibi((0.5,) * 16),)}, "no score rule"),
        ({"mask_rule": HeadWindow((3,) * 16, (0,) * 16)}, "head's own"),
        ({"window": 5}, "no window"),
        ({"page_size": 8}, "whole blocks of 16"),
        ({"block_size": 8}, "whole blocks of 16"),
        ({"seqlen_q": (1, 1, 1, 1)}, "several rows"),
    ],
)
def test_others_are_told_why(changes: dict[str, object], reason: str) -> None:
    case = replace(CASE, **changes)
    the_plan = make_plan(case if "lists" in changes else draw_lists(case))
    assert reason in str(choose_union(the_plan, HOPPER))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    "changes",
    [
        {"head_dim_qk": 96, "head_dim_vo": 96},
        {"head_dim_vo": 128},
        {"dtype": torch.float32},
        {"dropout": Dropout(rate=0.3, seed=1)},
        {"score_rules": (Alibi((0.5,) * 16),)},
        {"num_sink_tokens": 3},
        {"block_size": 8},
    ],
)
def test_what_the_kernel_cannot_say_goes_by_tasks(changes: dict[str, object]) -> None:
    the_plan = make_plan(draw_lists(replace(CASE, **changes)))
    assert plan_backward(the_plan).hopper_union is None


SHAPE = NsaShape(seqlen=640, num_qo_heads=32, num_kv_heads=2, head_dim=64, blocks_per_row=3, kept=0.75)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("hints", "is_chosen"),
    [
        (BackwardHints(), True),
        (BackwardHints(mode="hybrid", reuse_threshold=1), False),
        (BackwardHints(mode="atomic"), False),
        (BackwardHints(kernels="plain"), False),
        (BackwardHints(key_shape=KeyShape(64, 32, 4, 1)), False),
        (BackwardHints(kernels="hopper", key_shape=KeyShape(64, 32, 4, 1)), True),
    ],
)
def test_lists_per_token_go_over_unions_as_hints_say(hints: BackwardHints, is_chosen: bool) -> None:
    work = plan_backward(nsa_plan(make_nsa(SHAPE, "cpu")), hints)
    assert (work.hopper_union is not None) == is_chosen


@pytest.mark.usefixtures("on_hopper")
def test_the_kernels_may_be_asked_for_where_only_the_one_of_unions_runs() -> None:
    """Groups of 7 heads, which no kernel of dK and dV of Hopper takes."""
    the_plan = make_plan(draw_lists(replace(CASE, num_qo_heads=7, num_kv_heads=1)))
    work = plan_backward(the_plan, HOPPER)
    assert work.hopper_union is not None
    assert work.hopper_rows is None
    assert work.hopper_keys is None
    apart = make_plan(draw_lists(replace(CASE, num_qo_heads=7, num_kv_heads=1, block_size=8)))
    with pytest.raises(PlanError, match="kernels is hopper"):
        plan_backward(apart, HOPPER)


@pytest.mark.usefixtures("on_hopper")
def test_caches_that_tma_cannot_read_go_by_tasks_whole_or_cut() -> None:
    sizes = {"seqlen_q": (5, 0, 3), "seqlen_kv": (200, 9, 70), "num_qo_heads": 4, "num_kv_heads": 1}
    case = draw_lists(replace(CASE, **sizes))
    the_plan, tensors = make_plan(case), to_tensors(case, draw_numbers(case))
    odd = tensors.k_cache.new_zeros(tensors.k_cache.numel() + 1)[1:].view(tensors.k_cache.shape)
    odd.copy_(tensors.k_cache)
    work = plan_backward(the_plan, replace(HOPPER, steps_per_task=1))
    assert work.hopper_union is not None
    assert any(launch.num_partials for launch in work.launches)
    out, lse = run(the_plan, tensors.q, odd, tensors.v_cache)
    arguments = (the_plan, tensors.q, odd, tensors.v_cache, out, lse, tensors.dout)
    check_gradients(case, draw_numbers(case), backward(*arguments, dlse=tensors.dlse, work=work))


def test_other_devices_go_by_tasks() -> None:
    assert plan_backward(nsa_plan(make_nsa(SHAPE, "cpu"))).hopper_union is None
