"""Union tiles give what rows apart give: rows with lists of their own share reads and nothing else."""

import math

import numpy as np
import pytest
import torch
from attention_case import (
    DEVICE,
    RAGGED_RULES,
    Case,
    assert_near_oracle,
    build_plan,
    check,
    refuse_thirds,
    run_case,
)

from attnconform.kernels.sparse_attention import Dropout, KVQuantization
from attnconform.kernels.sparse_attention.rules import Alibi, And, Causal, Custom, HeadWindow, SoftCap, Window
from attnconform.kernels.sparse_attention.tuning import Geometry, union_cost

SHAPE = {"seqlen_q": (7, 0, 1, 5), "seqlen_kv": (45, 0, 18, 30), "sharing": "kv_head", "block_size": 4}


def check_union(case: Case, rows_per_union: int) -> None:
    assert build_plan(case, rows_per_union=rows_per_union).union is not None
    assert_near_oracle(case, *run_case(case, rows_per_union=rows_per_union))


@pytest.mark.parametrize("rows_per_union", [2, 4, 8])
@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
@pytest.mark.parametrize("block_size", [None, 4])
def test_rows_of_a_union_tile_keep_their_own_lists(rows_per_union, sharing, block_size):
    check_union(Case(**SHAPE | {"sharing": sharing, "block_size": block_size}, seed=31), rows_per_union)


@pytest.mark.parametrize("rule", ["causal", "window", "prefix", "causal_document", "sink_and_window"])
def test_union_tiles_follow_the_mask_rule(rule):
    case = Case(seqlen_q=(9, 0, 1, 6), seqlen_kv=(27, 0, 18, 3), sharing="kv_head", mask_rule=RAGGED_RULES[rule])
    check_union(case, 4)


def test_union_tiles_take_custom_rules_scores_sinks_dropout_and_codes():
    custom = Custom(refuse_thirds, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    options = {
        "mask_rule": And((Causal(), custom)),
        "score_rules": (Alibi((0.5, 0.25, 0.125, 0.0625)), SoftCap(3.0)),
        "sink_logits": (0.5, -1.0, 0.0, 2.0),
        "dropout": Dropout(0.25, 7),
        "k_quant": KVQuantization("int8", "channel"),
        "v_quant": KVQuantization("float8_e4m3", "token"),
    }
    check_union(Case(**SHAPE, **options, seed=32), 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_union_tiles_of_every_dtype_and_layout(dtype):
    check_union(Case(**SHAPE, dtype=dtype, layout="HND", page_size=1, seed=33), 8)


def test_blocks_that_straddle_pages_and_the_last_ragged_one_are_read_by_position():
    check_union(Case(**SHAPE | {"block_size": 11}, page_size=3, seed=34), 2)


def test_a_slot_that_no_row_of_a_tile_admits_is_never_read():
    """A listed block may lie past the mask of every row, in part or whole."""
    lists = [[[[0, 2], [2, 5]] for _ in range(4)]]
    case = Case(
        seqlen_q=(4,), seqlen_kv=(30,), sharing="kv_head", block_size=5, mask_rule=Window(left=9, right=0),
        q_offset=(10,), entries=lists, seed=35,
    )  # fmt: skip
    want = run_case(case, rows_per_union=4)
    for head in range(2):
        read = [case.selected(0, row, 2 * head + h) for row in range(4) for h in range(2)]
        unread = np.setdiff1d(np.arange(30), np.concatenate(read))
        case.k[case.slots(0)[unread], head] = math.nan
        case.v[case.slots(0)[unread], head] = math.inf
    for got, expected in zip(run_case(case, rows_per_union=4), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "changes",
    [{"window": 3}, {"num_sink_tokens": 2}, {"q_block_size": 4}, {"mask_rule": HeadWindow((3,) * 4, (0,) * 4)}],
)
def test_lists_that_a_bit_per_row_does_not_describe_are_attended_row_by_row(changes):
    case = Case(**SHAPE | changes, seed=36)
    assert build_plan(case, rows_per_union=4).union is None
    check(case)


def test_lists_that_overlap_are_united_and_others_are_not():
    geometry = Geometry(64, 4, 128, 128, 2, "kv_head", None, None, 132)
    clustered = {1: 16 * 8, 2: 20 * 4, 4: 28 * 2, 8: 44}  # blocks of 8 rows whose neighbours share 3 of 4
    apart = dict.fromkeys((1, 2, 4, 8), 16 * 8)
    best = {
        name: min(sizes, key=lambda rows: union_cost(sizes[rows], rows, 16, geometry))
        for name, sizes in (("clustered", clustered), ("apart", apart))
    }
    assert best["clustered"] > 1
    assert best["apart"] == 1
