"""Which lists go to Hopper's union tiles, and what those tiles hold: decided without a GPU."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_case import DEVICE, Case, assert_near_oracle, build_plan, paged, plan_arguments, poison_unowned

from attnconform.kernels.sparse_attention import CandidateLists, hopper_choice, hopper_union_choice, plan, run
from attnconform.kernels.sparse_attention.hopper_choice import Call
from attnconform.kernels.sparse_attention.hopper_union_choice import (
    choose_union_box,
    union_box_size,
    why_not_union,
)
from attnconform.kernels.sparse_attention.rules import Alibi, Causal, SoftCap
from attnconform.kernels.sparse_attention.tasks import order_tasks
from attnconform.kernels.sparse_attention.tuning import (
    HOPPER_UNION_GROUPS,
    HOPPER_UNION_LANES,
    HOPPER_UNION_ROWS,
    Choice,
    Geometry,
    hopper_union_cost,
    hopper_union_rows,
    rows_of_group,
    union_cost,
    union_unit,
)
from attnconform.kernels.sparse_attention.union import UNION_FIELDS, UnionLists

ON_GPU = torch.device("cuda", 0)
GEOMETRY = Geometry(64, 4, 128, 128, 2, "kv_head", None, None, 132)
HOPPER = Choice(forward="hopper")


def blocks(size: int = 64, *, granularity: str = "block", q_block_size: int = 1) -> CandidateLists:
    nothing = torch.zeros(1, dtype=torch.int32)
    return CandidateLists(
        granularity=granularity, sharing="kv_head", indptr=nothing, indices=nothing, block_size=size,
        q_block_size=q_block_size,
    )  # fmt: skip


CALL = Call(
    page_size=64, sm_scale=0.1, has_custom_mask=False, has_dropout=False, score_rules=(), candidates=blocks(),
    has_local=False, order="position",
)  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_size": 16},
        {"page_size": 256},
        {"candidates": blocks(16)},
        {"candidates": blocks(48)},
        {"candidates": blocks(128)},
    ],
)
def test_lists_that_the_kernel_can_say(changes):
    assert why_not_union(GEOMETRY, replace(CALL, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"candidates": None}, "lists of their own"),
        ({"candidates": blocks(q_block_size=64)}, "lists of their own"),
        ({"score_rules": (Alibi((0.5,) * 64),)}, "no score rule"),
        ({"score_rules": (SoftCap(20.0),)}, "no score rule"),
        ({"candidates": blocks(1, granularity="token")}, "lists of blocks"),
        ({"candidates": blocks(8)}, "16 keys"),
        ({"page_size": 8}, "16 keys"),
        ({"has_local": True}, "beside a list"),
        ({"order": "slot"}, "by position"),
        ({"has_custom_mask": True}, "Custom"),
        ({"has_dropout": True}, "drops"),
        ({"sm_scale": 0.0}, "above 0"),
    ],
)
def test_lists_that_the_kernel_cannot_say(changes, limit):
    assert limit in (why_not_union(GEOMETRY, replace(CALL, **changes)) or "")


@pytest.mark.parametrize(
    "changes", [{"element_size": 4}, {"head_dim_qk": 96, "head_dim_vo": 96}, {"is_quantized": True}]
)
def test_a_geometry_that_the_kernel_does_not_have(changes):
    assert why_not_union(replace(GEOMETRY, **changes), CALL) is not None


@pytest.fixture
def on_hopper(monkeypatch):
    """As on a machine with the GPU."""
    for module in (hopper_choice, hopper_union_choice):
        monkeypatch.setattr(module, "why_not_here", lambda device: None)


def test_the_kernel_is_left_alone_by_hints_and_on_other_devices(on_hopper):
    assert choose_union_box(GEOMETRY, CALL, None, ON_GPU) == 64
    assert choose_union_box(GEOMETRY, CALL, 4, ON_GPU) == 0
    assert choose_union_box(GEOMETRY, CALL, 1, ON_GPU) == 0
    assert choose_union_box(replace(GEOMETRY, choice=Choice(forward="plain")), CALL, None, ON_GPU) == 0
    assert choose_union_box(replace(GEOMETRY, tile_kv=64), CALL, None, ON_GPU) == 0
    assert choose_union_box(replace(GEOMETRY, tile_kv=64, choice=HOPPER), CALL, None, ON_GPU) == 64
    assert choose_union_box(GEOMETRY, replace(CALL, has_dropout=True), None, ON_GPU) == 0


def test_another_device_has_no_box():
    assert choose_union_box(GEOMETRY, CALL, None, torch.device("cpu")) == 0


@pytest.mark.parametrize(
    ("page_size", "block_size", "box", "unit"),
    [(64, 64, 64, 64), (16, 64, 16, 64), (256, 16, 16, 16), (48, 128, 16, 64), (64, 48, 16, 16), (32, 96, 32, 32)],
)
def test_a_box_lies_in_one_page_and_one_unit_and_a_unit_in_one_block(page_size, block_size, box, unit):
    assert union_box_size(replace(CALL, page_size=page_size, candidates=blocks(block_size))) == box
    assert union_unit(block_size) == unit


@pytest.mark.parametrize("heads", [1, 2, 4, 5, 7, 8, 16, 48, 64])
def test_groups_have_every_row_of_a_tile_and_a_row_at_most_its_own_lanes(heads):
    rows = hopper_union_rows(heads)
    assert 3 <= rows <= HOPPER_UNION_ROWS
    assert rows * heads <= HOPPER_UNION_GROUPS * HOPPER_UNION_LANES
    for group in range(HOPPER_UNION_GROUPS):
        lanes = range(group * HOPPER_UNION_LANES, (group + 1) * HOPPER_UNION_LANES)
        assert list(rows_of_group(group, heads, rows)) == sorted({lane // heads for lane in lanes} & set(range(rows)))


CASE = {
    "seqlen_q": (30, 0, 1, 13), "seqlen_kv": (300, 0, 18, 3), "page_size": 16, "dtype": torch.bfloat16,
    "block_size": 16, "mask_rule": Causal(),
}  # fmt: skip


def decode(union: UnionLists, seqlen_kv: dict[int, int]) -> dict[tuple[int, int], set[int]]:
    """Tokens below a request's length of every (row, query head), by the bits of the tasks' entries."""
    found: dict[tuple[int, int], set[int]] = {}
    for values in union.tasks.tolist():
        task = dict(zip(UNION_FIELDS, values, strict=True))
        for row in range(task["q_count"]):
            tokens = set()
            for entry in range(task["entry_start"], task["entry_end"]):
                if int(union.members[entry]) >> row & 1:
                    first = int(union.blocks[entry]) * union.block_size
                    tokens |= set(range(first, min(first + union.block_size, seqlen_kv[task["request"]])))
            for head in range(task["head_count"]):
                assert found.setdefault((task["q_start"] + row, task["head_start"] + head), tokens) is tokens
    return found


@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
@pytest.mark.parametrize("heads", [(4, 2), (16, 1), (96, 1)])
def test_every_row_of_a_tile_has_its_own_blocks_and_no_others(on_hopper, sharing, heads):
    case = Case(**CASE, sharing=sharing, num_qo_heads=heads[0], num_kv_heads=heads[1], seed=91)
    union = build_plan(case, choice=HOPPER).union
    assert union is not None
    assert union.shape.box == 16
    found = decode(union, dict(enumerate(case.seqlen_kv)))
    rows = [(n, row) for n, count in enumerate(case.seqlen_q) for row in range(count)]
    assert len(found) == len(rows) * heads[0]
    unmasked = replace(case, mask_rule=None)
    for at, (n, row) in enumerate(rows):
        for head in range(heads[0]):
            own = set(unmasked.selected(n, row, head).tolist())
            tile_end = max(case.offsets[n] + r for r in range(case.seqlen_q[n]))
            kept = {t for t in own if t // 16 * 16 <= tile_end}
            assert found[at, head] <= own
            assert set(case.selected(n, row, head).tolist()) <= found[at, head] <= kept


def test_caches_that_tma_cannot_read_are_attended_row_by_row(on_hopper):
    case = Case(**CASE | {"seqlen_q": (14, 1), "seqlen_kv": (40, 18), "mask_rule": None}, sharing="kv_head", seed=92)
    made = plan(**plan_arguments(case, choice=HOPPER))
    assert made.union is not None
    assert made.union.shape.box
    k, v = (paged(case, poison_unowned(case, rows)) for rows in (case.k, case.v))
    odd = torch.full((k.numel() + 1,), math.nan, dtype=k.dtype, device=DEVICE)[1:].view(k.shape)
    odd.copy_(k)
    out, lse = run(made, case.q.to(DEVICE), odd, v)
    assert "hopper" not in made.union.prepared
    assert_near_oracle(case, out.cpu(), lse.cpu())


# of 12 rows of 16 blocks each: entries of the union, and those of every four rows, as they were counted on prompts of
# 32,768 tokens, and seconds measured there over the seconds of rows apart
@pytest.mark.parametrize(
    ("united", "grouped", "ratio"), [(9.77 * 12, 3 * 12.88 * 4, 7.07 / 8.28), (4.06 * 12, 3 * 6.32 * 4, 3.45 / 8.38)]
)
def test_costs_are_as_measured_to_a_tenth(united, grouped, ratio):
    apart = union_cost(round(15.77 * 12), 1, 16, GEOMETRY)
    assert math.isclose(hopper_union_cost(round(united), round(grouped), GEOMETRY) / apart, ratio, rel_tol=0.1)


def test_lists_without_a_common_block_stay_apart(on_hopper):
    rows, width = 48, 4
    arguments = {
        "qo_indptr": [0, rows], "seqlen_kv": [rows * width * 64],
        "page_table": torch.arange(rows * width)[None].int(), "page_size": 64, "num_pages": rows * width,
        "num_qo_heads": 16, "num_kv_heads": 1, "head_dim_qk": 128, "head_dim_vo": 128, "sm_scale": 0.1,
        "dtype": torch.bfloat16, "device": "cpu",
    }  # fmt: skip
    own = CandidateLists(
        granularity="block", sharing="shared", block_size=64, indptr=torch.arange(0, rows * width + 1, width),
        indices=torch.arange(rows * width).int(),
    )  # fmt: skip
    assert plan(**arguments, candidates=own).union is None
    assert plan(**arguments, candidates=own, choice=HOPPER).union is not None
    same = replace(own, indices=torch.arange(width).repeat(rows).int())
    assert plan(**arguments, candidates=same).union is not None


def test_rows_of_many_short_tasks_stay_in_order_head_by_head_and_others_are_longest_first():
    request = torch.arange(2).repeat_interleave(640)
    kv_head, length = torch.arange(2).repeat(640), torch.arange(1280) % 3 + 1
    order = order_tasks(request, kv_head, length, 20)
    assert torch.equal(request[order], request)
    assert torch.equal(kv_head[order], torch.arange(2).repeat_interleave(320).repeat(2))
    assert bool((order.view(4, 320).diff(dim=1) > 0).all())
    for lengths, processors in ((length, 41), (length, 0), (torch.where(torch.arange(1280) == 7, 100, length), 20)):
        assert np.array_equal(lengths[order_tasks(request, kv_head, lengths, processors)], np.sort(lengths)[::-1])
    assert order_tasks(request[:0], kv_head[:0], length[:0], 20).numel() == 0
