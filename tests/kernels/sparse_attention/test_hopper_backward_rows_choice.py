"""Which lists the kernel of rows takes, and in which order it walks their pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnconform.conformance.bench.nsa_work import NsaShape, make_nsa, nsa_plan
from attnconform.kernels.sparse_attention import BackwardHints, Plan, PlanError, hopper_backward_choice, plan_backward
from attnconform.kernels.sparse_attention.backward_hints import KeyShape
from attnconform.kernels.sparse_attention.backward_transpose import TransposedPlan, transpose_plan
from attnconform.kernels.sparse_attention.hopper_backward_rows_choice import choose_rows, order_pairs, why_not_rows

SHAPE = NsaShape(seqlen=320, num_qo_heads=16, num_kv_heads=2, head_dim=64, blocks_per_row=3)
HINTS = BackwardHints(key_shape=KeyShape(64, 32, 4, 1), rows_per_item=512)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with the GPU."""
    monkeypatch.setattr(hopper_backward_choice, "why_not_here", lambda device: None)


def transpose(shape: NsaShape, hints: BackwardHints = HINTS) -> tuple[Plan, TransposedPlan]:
    plan = nsa_plan(make_nsa(shape, "cpu"))
    return plan, transpose_plan(plan, hints)


def pairs_of(item: int, pairs: torch.Tensor, begin: torch.Tensor, end: torch.Tensor) -> set:
    return {tuple(pair) for pair in pairs[begin[item] : end[item]].tolist()}


def test_full_pairs_come_first_and_no_pair_leaves_its_tile() -> None:
    _, keys = transpose(SHAPE)
    (pairs, full_end), items, tiles = order_pairs(keys), keys.items, keys.tiles
    assert items.num_partials > 0  # tiles that are cut are among them
    assert torch.any(items.item_full_begin > items.item_begin)
    assert torch.any(items.item_end > items.item_full_begin)
    masked = {
        tuple(pair)
        for begin, end in zip(items.item_begin.tolist(), items.item_full_begin.tolist(), strict=True)
        for pair in keys.pairs[begin:end].tolist()
    }
    for tile in range(tiles.tile_slot.numel()):
        before = pairs_of(tile, keys.pairs, tiles.tile_indptr[:-1], tiles.tile_indptr[1:])
        assert pairs_of(tile, pairs, tiles.tile_indptr[:-1], tiles.tile_indptr[1:]) == before
    for item in range(items.item_tile.numel()):
        assert not pairs_of(item, pairs, items.item_begin, full_end) & masked
        assert pairs_of(item, pairs, full_end, items.item_end) <= masked


@pytest.mark.parametrize("num_qo_heads", [16, 32, 64, 128])
def test_groups_that_fill_boxes_are_taken(num_qo_heads: int) -> None:
    shape = replace(SHAPE, num_qo_heads=num_qo_heads)
    group = shape.group_size
    hints = BackwardHints(key_shape=KeyShape(64, max(32, group), 4, 1))
    plan, keys = transpose(shape, hints)
    assert why_not_rows(plan, hints, keys) is None


@pytest.mark.parametrize(
    ("change", "hints", "reason"),
    [
        ({"num_qo_heads": 8}, HINTS, "groups of"),
        ({"num_qo_heads": 24}, HINTS, "groups of"),
        ({}, BackwardHints(key_shape=KeyShape(32, 32, 4, 1)), "64 slots"),
        ({"block_size": 4, "blocks_per_row": 2}, HINTS, "whole boxes"),
        ({"seqlen": 16, "blocks_per_row": 2, "block_size": 8}, HINTS, "too few"),
    ],
)
def test_others_are_told_why(change: dict, hints: BackwardHints, reason: str) -> None:
    plan, keys = transpose(replace(SHAPE, **change), hints)
    assert reason in str(choose_rows(plan, hints, keys))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("hints", "is_chosen"),
    [
        (BackwardHints(), True),
        (BackwardHints(mode="hybrid", reuse_threshold=1), True),
        (BackwardHints(mode="atomic"), False),
        (BackwardHints(kernels="plain"), False),
        (BackwardHints(key_shape=KeyShape(64, 32, 4, 1)), False),
        (BackwardHints(kernels="hopper", key_shape=KeyShape(64, 32, 4, 1)), True),
    ],
)
def test_lists_per_token_go_to_the_kernel_of_rows_as_hints_say(hints: BackwardHints, is_chosen: bool) -> None:
    work = plan_backward(nsa_plan(make_nsa(SHAPE, "cpu")), hints)
    assert (work.hopper_rows is not None) == is_chosen
    assert work.hopper_keys is None


@pytest.mark.usefixtures("on_hopper")
def test_score_rules_are_left_to_other_kernels() -> None:
    from attnconform.kernels.sparse_attention.rules import SoftCap

    work = make_nsa(SHAPE, "cpu")
    plan = nsa_plan(work, score_rules=[SoftCap(3.0)])
    assert plan_backward(plan, BackwardHints()).hopper_rows is None
    with pytest.raises(PlanError, match="kernels is hopper"):
        plan_backward(plan, BackwardHints(kernels="hopper"))


def test_other_devices_run_the_other_kernels() -> None:
    assert plan_backward(nsa_plan(make_nsa(SHAPE, "cpu")), BackwardHints()).hopper_rows is None
