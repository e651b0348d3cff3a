"""The forward kernels against a float64 oracle written from the contract, interpreted or on a GPU."""

import math
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl
from attention_case import (
    DEVICE,
    LARGE,
    RAGGED_RULES,
    SCALE,
    Case,
    assert_near_oracle,
    build_plan,
    check,
    paged,
    poison_scales,
    poison_unowned,
    refuse_thirds,
    run_case,
    to_lists,
)

from attnconform.kernels.sparse_attention import (
    Dropout,
    KVQuantization,
    PlanError,
    check_scale_values,
    merge_states,
    run,
)
from attnconform.kernels.sparse_attention.arguments import cut_dim
from attnconform.kernels.sparse_attention.quantization import CODE_DTYPES, decode_codes, decode_pairs, pair_assembly
from attnconform.kernels.sparse_attention.rules import (
    Alibi,
    And,
    Causal,
    Custom,
    Document,
    HeadWindow,
    Or,
    RelativeBias,
    SoftCap,
    Window,
)


@pytest.mark.parametrize("rule", RAGGED_RULES.values(), ids=RAGGED_RULES.keys())
def test_dense_rows_follow_every_mask_rule(rule):
    check(Case(mask_rule=rule))


@pytest.mark.parametrize("rule", ["causal", "document", "window_or_prefix", "sink_and_window"])
@pytest.mark.parametrize("q_block_size", [1, 4])
def test_listed_rows_follow_the_mask_rule(rule, q_block_size):
    check(Case(mask_rule=RAGGED_RULES[rule], sharing="kv_head", q_block_size=q_block_size, seed=3))


@pytest.mark.parametrize("sharing", [None, "shared"])
def test_custom_rule_joins_the_others(sharing):
    custom = Custom(refuse_thirds, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    check(Case(mask_rule=And((Causal(), custom)), sharing=sharing, q_block_size=4, seqlen_q=(5,), seqlen_kv=(37,)))


@pytest.mark.parametrize("score_rules", [(Alibi((0.5, 0.25, 0.1, 0.0)),), (SoftCap(2.0),), (SoftCap(200.0),)])
def test_score_rules_see_query_heads_and_logical_positions(score_rules):
    check(Case(score_rules=score_rules, mask_rule=Causal()))


def test_score_rules_apply_in_the_order_listed():
    alibi, cap = Alibi((0.5, 0.25, 0.1, 0.0)), SoftCap(1.5)
    for rules in ((alibi, cap), (cap, alibi)):
        check(Case(score_rules=rules, sharing="query_head", q_block_size=4))


@pytest.mark.parametrize(
    "changes", [{"seqlen_q": (5, 1), "seqlen_kv": (37, 20)}, {"seqlen_q": (70,), "seqlen_kv": (70,)}]
)
def test_a_scale_below_0_is_that_of_the_negated_query(changes):
    case = Case(mask_rule=Causal(), **changes)
    below = run_case(case, sm_scale=-SCALE)
    case.q.neg_()
    for got, want in zip(below, run_case(case), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("sm_scale", [0.0, 1e-60, -1e-60])
def test_a_scale_of_0_or_next_to_it_counts_the_keys(sm_scale):
    """A masked score stays masked: 0 times -inf is not a number."""
    _, lse = run_case(Case(seqlen_q=(3,), seqlen_kv=(50,), mask_rule=Causal()), sm_scale=sm_scale)
    assert torch.equal(lse.exp().round().long(), torch.tensor([[48], [49], [50]]).expand(3, 4))


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_whose_scores_all_lie_far_below_zero_are_no_different(splits):
    """Lanes and chunks that hold no key must weigh nothing even beside weights near 2^-400."""
    alibi = Alibi((4.0, 8.0, 4.0, 8.0))
    check(Case(seqlen_q=(3,), seqlen_kv=(40,), q_offset=(70,), score_rules=(alibi,), num_kv_splits=splits))


@pytest.mark.parametrize("sharing", ["query_head", "kv_head", "shared"])
@pytest.mark.parametrize("q_block_size", [1, 4])
@pytest.mark.parametrize("block_size", [None, 4])
def test_lists_of_every_sharing_and_granularity(sharing, q_block_size, block_size):
    check(Case(sharing=sharing, q_block_size=q_block_size, block_size=block_size, seed=1))


@pytest.mark.parametrize("q_block_size", [1, 4])
@pytest.mark.parametrize("window", [1, 6])
def test_window_and_sink_positions_join_the_list_of_each_row_alone(q_block_size, window):
    check(Case(sharing="kv_head", q_block_size=q_block_size, window=window, num_sink_tokens=2, seed=2))
    check(Case(sharing="query_head", q_block_size=q_block_size, window=window, mask_rule=Window(left=30), seed=4))


def test_rows_of_a_block_in_tiles_of_their_own_keep_their_own_windows():
    heads = {"num_qo_heads": 16, "num_kv_heads": 1}
    check(Case(seqlen_q=(3,), seqlen_kv=(30,), sharing="kv_head", q_block_size=4, window=2, **heads))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("changes", [{}, {"window": 4}, {"mask_rule": Window(left=9)}, {"sharing": "query_head"}])
def test_order_of_slots_changes_nothing(changes, splits):
    case = Case(**{"sharing": "kv_head", "num_kv_splits": splits, "seed": 9} | changes)
    planned = build_plan(case, order="slot")
    assert not torch.equal(planned.list_positions, build_plan(case).list_positions)
    assert_near_oracle(case, *run_case(case, order="slot"))


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_split_count_changes_nothing(splits):
    sinks = (0.5, -1.0, 3.0, 0.0)
    check(Case(num_kv_splits=splits, mask_rule=Causal(), sink_logits=sinks))
    check(Case(num_kv_splits=splits, sharing="kv_head", seed=1, seqlen_kv=(50, 0, 18, 3)))


@pytest.mark.parametrize("page_size", [1, 8, 16, 48])
def test_page_size_changes_nothing(page_size):
    check(Case(page_size=page_size, mask_rule=Causal()))
    check(Case(page_size=page_size, sharing="shared", block_size=4))


@pytest.mark.parametrize(
    ("head_dim_qk", "head_dim_vo"), [(64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (96, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_head_dim_and_dtype(head_dim_qk, head_dim_vo, dtype):
    shape = {"head_dim_qk": head_dim_qk, "head_dim_vo": head_dim_vo, "dtype": dtype}
    check(Case(seqlen_q=(3, 1), seqlen_kv=(20, 17), mask_rule=Causal(), num_kv_splits=2, **shape))


@pytest.mark.parametrize("sharing", [None, "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latent_heads_of_576_and_512(sharing, dtype):
    shape = {"head_dim_qk": 576, "head_dim_vo": 512, "num_qo_heads": 4, "num_kv_heads": 1}
    rows = {"seqlen_q": (3, 1), "seqlen_kv": (20, 17), "num_kv_splits": 2, "sink_logits": (0.5, -1.0, 0.0, 2.0)}
    check(Case(mask_rule=Causal(), sharing=sharing, dtype=dtype, **rows, **shape))


def test_latent_heads_of_codes():
    shape = {"head_dim_qk": 576, "head_dim_vo": 512, "num_qo_heads": 4, "num_kv_heads": 1, "num_kv_splits": 2}
    codes = {"k_quant": KVQuantization("float8_e4m3", "channel"), "v_quant": KVQuantization("int8", "token")}
    check(Case(seqlen_q=(1,), seqlen_kv=(20,), dtype=torch.bfloat16, **codes, **shape))


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [(16, (16, 0)), (24, (32, 0)), (64, (64, 0)), (72, (64, 16)), (80, (64, 16)), (96, (64, 32)), (112, (128, 0)),
     (192, (128, 64)), (576, (512, 64))],
)  # fmt: skip
def test_a_head_dim_is_cut_where_that_takes_fewer_lanes(head_dim, parts):
    assert cut_dim(head_dim) == parts
    assert cut_dim(head_dim, is_halved=True) == (max(32, 1 << (head_dim - 1).bit_length()), 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_output_is_rounded_to_nearest_even(dtype):
    """The mean of two neighbours of [1, 2) is exact in float32 and a tie."""
    case, steps = Case(seqlen_q=(1,), seqlen_kv=(2,), dtype=dtype), {torch.bfloat16: 128, torch.float16: 1024}[dtype]
    case.q.zero_()
    slot, rest = torch.arange(len(case.v))[:, None, None], torch.arange(128).reshape(2, 64)
    case.v = (1 + (slot + rest * 5) % steps / steps).to(dtype)
    first, second = case.v[case.slots(0)].float().repeat_interleave(case.group_size, dim=1)
    assert torch.equal(run_case(case)[0][0], ((first + second) / 2).to(dtype))


@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(4, 4), (6, 2), (7, 1), (14, 2)])
def test_query_heads_of_any_group_size_read_their_kv_head(num_qo_heads, num_kv_heads):
    heads = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads}
    check(Case(mask_rule=Causal(), **heads))
    check(Case(sharing="kv_head", q_block_size=4, **heads))


def test_wide_group_is_cut_into_tiles_of_heads():
    check(Case(num_qo_heads=144, num_kv_heads=2, seqlen_q=(2,), seqlen_kv=(20,), mask_rule=Causal()))


@pytest.mark.parametrize("rule", [Causal(), And((Causal(), Window(left=20))), Document(((0, 30, 50), (0,)))])
def test_prefill_in_large_tiles_beside_decode(rule):
    check(Case(seqlen_q=(70, 1), seqlen_kv=(75, 20), mask_rule=rule, dtype=torch.bfloat16))


@pytest.mark.parametrize("changes", [{}, {"mask_rule": Causal(), "block_size": 8, "num_kv_splits": 2}])
def test_large_tiles_of_listed_rows_with_windows(changes):
    shape = {"seqlen_q": (40,), "seqlen_kv": (60,), "sharing": "kv_head", "q_block_size": 32, "dtype": torch.float16}
    check(Case(window=9, seed=5, **shape, **changes))


def test_query_offset_moves_the_rows():
    for offset in ((3, 0, 40, -2), (-6, 5, 0, 0)):
        check(Case(mask_rule=Causal(), q_offset=offset, score_rules=(Alibi((0.1, 0.2, 0.3, 0.4)),)))
        check(Case(sharing="kv_head", window=5, q_offset=offset))


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_empty_row_gives_zero_out_and_minus_inf_lse_and_leaves_its_neighbours(empty):
    entries = [[[[2, 0]], [[5]], [[1, 4]]]]
    full = Case(seqlen_q=(3,), seqlen_kv=(8,), sharing="shared", entries=entries)
    holed = replace(full, entries=[[[[-1, -1]] if r == empty else row for r, row in enumerate(entries[0])]])
    (full_out, full_lse), (out, lse) = run_case(full), run_case(holed)
    others = [r for r in range(3) if r != empty]
    assert (out[empty] == 0).all()
    assert torch.isneginf(lse[empty]).all()
    assert torch.equal(out[others], full_out[others])
    assert torch.equal(lse[others], full_lse[others])


def test_row_that_the_mask_empties_inside_a_tile_is_zero():
    case = Case(seqlen_q=(7,), seqlen_kv=(5,), mask_rule=Causal())
    out, lse = run_case(case)
    assert (out[:2] == 0).all()
    assert torch.isneginf(lse[:2]).all()
    assert_near_oracle(case, out, lse)


@pytest.mark.parametrize("splits", [1, 3])
def test_sink_logit_joins_the_denominator_once(splits):
    sinks = (0.5, -1.0, 30.0, -40.0)
    check(Case(sharing="kv_head", sink_logits=sinks, num_kv_splits=splits, seqlen_kv=(40, 0, 18, 3)))


def test_empty_row_with_a_sink_has_the_sink_logit_as_lse():
    sinks = (0.1, -1.3, 30.7, -40.9)
    out, lse = run_case(Case(seqlen_q=(1,), seqlen_kv=(8,), sharing="shared", entries=[[[[]]]], sink_logits=sinks))
    assert (out == 0).all()
    assert torch.equal(lse[0], torch.tensor(sinks))


def test_duplicates_and_order_and_holes_change_no_bit():
    case = Case(seqlen_q=(1,), seqlen_kv=(20,), sharing="shared", entries=[[[[1, 7, 19, 12]]]])
    shuffled = replace(case, entries=[[[[19, -1, 7, 7, 12, -1, 1, 19, 7, -1]]]])
    for a, b in zip(run_case(case), run_case(shuffled), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("sharing", [None, "query_head"])
@pytest.mark.parametrize("rule", [Window(left=13), "refuse_thirds"])
def test_slots_that_a_row_does_not_select_never_matter_even_nan(sharing, rule):
    """One row per tile, as in decode: nothing outside E is read, owned or not."""
    custom = Custom(refuse_thirds, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    shape = {"seqlen_q": (1, 1), "seqlen_kv": (33, 9), "num_kv_heads": 4, "num_kv_splits": 2}
    case = Case(sharing=sharing, mask_rule=custom if rule == "refuse_thirds" else rule, seed=7, **shape)
    want = run_case(case)
    for n, head in np.ndindex(2, 4):
        unselected = np.setdiff1d(np.arange(case.seqlen_kv[n]), case.selected(n, 0, head))
        case.k[case.slots(n)[unselected], head] = math.nan
        case.v[case.slots(n)[unselected], head] = math.inf
    for got, expected in zip(run_case(case), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("changes", [{}, {"sharing": "kv_head", "q_block_size": 4, "window": 3}])
def test_finite_numbers_outside_the_selection_change_no_bit(changes):
    case = Case(seqlen_q=(6,), seqlen_kv=(33,), mask_rule=And((Causal(), Window(left=9))), seed=8, **changes)
    want = run_case(case)
    row, head = 2, 1
    unselected = np.setdiff1d(np.arange(33), case.selected(0, row, head))
    case.k[case.slots(0)[unselected], head // 2] = LARGE
    case.v[case.slots(0)[unselected], head // 2] = -LARGE
    for got, expected in zip(run_case(case), want, strict=True):
        assert torch.equal(got[row, head], expected[row, head])


def test_hnd_layout_gives_the_same_bits():
    case = Case(sharing="kv_head", mask_rule=Causal())
    for a, b in zip(run_case(case), run_case(replace(case, layout="HND")), strict=True):
        assert torch.equal(a, b)


def test_strides_of_every_tensor_are_honoured():
    """K and V interleaved in one pool, a padded q, an output that is a slice of something larger."""
    case = Case(mask_rule=Causal(), sink_logits=(0.0, 1.0, 2.0, 3.0))
    want_out, want_lse = run_case(case)
    pool = torch.full((case.num_pages, 2, case.page_size, case.num_kv_heads, 64), math.nan, device=DEVICE)
    pool[:, 0], pool[:, 1] = (paged(case, poison_unowned(case, rows)) for rows in (case.k, case.v))
    odd_pool = torch.full((*pool[:, 1].shape[:3], 64, 2), math.nan, device=DEVICE)
    odd_pool[..., 1] = pool[:, 1]
    q = torch.full((4, len(case.q), 200), math.nan, device=DEVICE)[:, :, 100:164].transpose(0, 1)
    q.copy_(case.q)
    out = torch.full((len(case.q), 5, 67), math.nan, device=DEVICE)
    lse = torch.full((6, len(case.q)), math.nan, device=DEVICE)
    for v_cache in (pool[:, 1], odd_pool[..., 1]):
        run(build_plan(case), q, pool[:, 0], v_cache, out=out[:, 1:, 2:66], lse=lse[:4].T)
        assert torch.equal(out[:, 1:, 2:66].cpu(), want_out)
        assert torch.equal(lse[:4].T.cpu(), want_lse)
        assert out[:, 0].isnan().all()
        assert out[:, :, :2].isnan().all()
        assert out[:, :, 66].isnan().all()
        assert lse[4:].isnan().all()


@pytest.mark.parametrize("sharing", [None, "shared"])
def test_slots_and_offsets_past_31_bits_are_reached(sharing):
    """The pool is as long as 2^31 slots of one number each, but only its last page is ever touched."""
    heads = {"num_qo_heads": 1, "num_kv_heads": 1, "head_dim_qk": 1, "head_dim_vo": 1}
    case = Case(seqlen_q=(1,), seqlen_kv=(8,), dtype=torch.float16, sharing=sharing, entries=[[[[1, 3, 6]]]], **heads)
    case.v = case.k
    far = 2**31 // case.page_size
    pool = torch.empty(far + 1, case.page_size, 1, 1, dtype=torch.float16, device=DEVICE)
    pool[far] = paged(case, case.k)[case.page_table[0, 0]]
    prepared = build_plan(case, page_table=torch.tensor([[far]], dtype=torch.int32), num_pages=far + 1)
    assert_near_oracle(case, *(t.cpu() for t in run(prepared, case.q.to(DEVICE), pool, pool)))


def test_batch_without_requests_or_rows_launches_nothing():
    out, lse = run_case(Case(seqlen_q=(0, 0), seqlen_kv=(0, 9)))
    assert out.shape == (0, 4, 64)
    assert lse.shape == (0, 4)


def test_run_again_gives_the_same_bits_and_leaves_its_inputs():
    case = Case(sharing="kv_head", mask_rule=Causal(), num_kv_splits=3)
    prepared = build_plan(case)
    q, k, v = case.q.to(DEVICE), paged(case, case.k), paged(case, case.v)
    copies = [t.clone() for t in (q, k, v)]
    first, second = run(prepared, q, k, v), run(prepared, q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), copies, strict=True))


def test_plan_does_not_read_the_callers_tables_again():
    case = Case(sharing="kv_head")
    tables = {"page_table": torch.from_numpy(case.page_table.copy()).to(DEVICE), "candidates": to_lists(case)}
    want = run_case(case)
    prepared = build_plan(case, **tables)
    tables["page_table"].fill_(10**6)
    tables["candidates"].indices.fill_(10**6)
    k, v = (paged(case, poison_unowned(case, rows)) for rows in (case.k, case.v))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(run(prepared, case.q.to(DEVICE), k, v), want, strict=True))


def test_editing_sink_logits_needs_no_new_plan():
    case = Case(mask_rule=Causal(), seqlen_q=(1,), seqlen_kv=(9,), sink_logits=(9.0, 9.0, 9.0, 9.0))
    sinks = torch.zeros(4, device=DEVICE)
    prepared = build_plan(case, sink_logits=sinks)
    sinks.fill_(9.0)
    assert_near_oracle(
        case, *(t.cpu() for t in run(prepared, case.q.to(DEVICE), paged(case, case.k), paged(case, case.v)))
    )


def test_q_of_zeros_counts_the_keys_exactly():
    """lse is ln of the number of keys, which the membership probe of the suite relies on."""
    case = Case(seqlen_q=(3,), seqlen_kv=(50,), mask_rule=Causal(), num_kv_splits=2)
    case.q.zero_()
    _, lse = run_case(case)
    assert torch.equal(lse.exp().round().long(), torch.tensor([[48], [49], [50]]).expand(3, 4))


@pytest.mark.parametrize(("name", "index"), [("q", 0), ("k_cache", 1), ("v_cache", 2)])
def test_tensor_of_another_shape_or_dtype_than_planned_is_refused(name, index):
    case = Case()
    tensors = [case.q.to(DEVICE), paged(case, case.k), paged(case, case.v)]
    for bad, what in ((tensors[index][:-1], "shape"), (tensors[index].half(), "dtype")):
        with pytest.raises(PlanError, match=rf"^{name}\.{what} is .* \[SAFE-SHAPE\]$"):
            run(build_plan(case), *(bad if i == index else t for i, t in enumerate(tensors)))


def test_outputs_of_another_shape_are_refused_untouched():
    case = Case()
    out = torch.full((len(case.q), 4, 63), 7.0, device=DEVICE)
    with pytest.raises(PlanError, match=r"^out\.shape is "):
        run(build_plan(case), case.q.to(DEVICE), paged(case, case.k), paged(case, case.v), out=out)
    assert (out == 7.0).all()


def test_merging_the_states_of_two_halves_gives_the_whole():
    evens = Case(seqlen_q=(2,), seqlen_kv=(12,), sharing="shared", entries=[[[[0, 2, 4]], [[6]]]])
    odds = replace(evens, entries=[[[[1, 11]], [[3, 5, 7]]]])
    whole = replace(evens, entries=[[[[0, 1, 2, 4, 11]], [[3, 5, 6, 7]]]])
    merged = merge_states(*(t.to(DEVICE) for t in (*run_case(evens), *run_case(odds))))
    assert_near_oracle(whole, *(t.cpu() for t in merged))


def test_empty_state_is_the_identity_of_merging_whatever_its_output_holds():
    out, lse = (t.to(DEVICE) for t in run_case(Case(seqlen_q=(2,), seqlen_kv=(12,))))
    nothing, minus_inf = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    for merged in (merge_states(out, lse, nothing, minus_inf), merge_states(nothing, minus_inf, out, lse)):
        assert torch.equal(merged[0], out)
        assert torch.equal(merged[1], lse)
    both_out, both_lse = merge_states(nothing, minus_inf, nothing, minus_inf)
    assert (both_out == 0).all()
    assert torch.isneginf(both_lse).all()


def test_merging_states_of_other_shapes_is_refused():
    out, lse = torch.zeros(2, 4, 64, device=DEVICE), torch.zeros(2, 4, device=DEVICE)
    with pytest.raises(PlanError, match=r"^lse_b\.shape is \(2, 3\), but out_a\.shape is \(2, 4, 64\) \[SAFE-SHAPE\]$"):
        merge_states(out, lse, out, lse[:, :3])


GRANULARITIES = ("tensor", "head", "page", "token", "channel")
FORMATS = ("int8", "float8_e4m3", "float8_e5m2")


@triton.jit
def decode_kernel(code_ptr, value_ptr, FORMAT: tl.constexpr):
    lane = tl.arange(0, 256)
    value = decode_codes(tl.load(code_ptr + lane), value_ptr.dtype.element_ty, FORMAT)
    tl.store(value_ptr + lane, value)


@triton.jit
def decode_pairs_kernel(pair_ptr, value_ptr, FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr):
    lane = tl.arange(0, 256)
    pairs = tl.load(pair_ptr + lane)
    dtype: tl.constexpr = value_ptr.dtype.element_ty
    tl.store(value_ptr + 2 * lane, decode_pairs(pairs, dtype, FORMAT, ASSEMBLY, 0))
    tl.store(value_ptr + 2 * lane + 1, decode_pairs(pairs, dtype, FORMAT, ASSEMBLY, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("code_format", FORMATS)
def test_every_code_is_decoded_exactly(code_format, dtype):
    """Infinities and NaN too; these two are the dtypes that codes meet products in."""
    codes = torch.arange(256, dtype=torch.uint8).view(CODE_DTYPES[code_format])
    got = torch.zeros(256, dtype=dtype, device=DEVICE)
    decode_kernel[(1,)](codes.view(torch.uint8).to(DEVICE), got, FORMAT=code_format)
    torch.testing.assert_close(got.cpu().float(), codes.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("code_format", FORMATS)
def test_a_quantized_cache_is_read_as_code_times_scale(code_format, granularity, dtype):
    """Prefill and decode rows together; the other cache goes by another granularity and format."""
    k_quant = KVQuantization(code_format, granularity)
    v_quant = KVQuantization("float8_e4m3" if code_format == "int8" else "int8", granularity)
    shape = {"seqlen_q": (3, 1), "seqlen_kv": (19, 18), "head_dim_qk": 32, "head_dim_vo": 16, "dtype": dtype}
    check(Case(k_quant=k_quant, v_quant=v_quant, mask_rule=Causal(), sharing="kv_head", seed=5, **shape))


@pytest.mark.parametrize("cache", ["k_quant", "v_quant"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_one_cache_may_be_quantized_and_the_other_not(granularity, cache):
    quant = {cache: KVQuantization("float8_e5m2", granularity)}
    rules = {"score_rules": (SoftCap(3.0),), "sink_logits": (0.5, -1.0, 3.0, 0.0), "num_kv_splits": 2}
    check(
        Case(
            seqlen_q=(1, 5), seqlen_kv=(35, 20), head_dim_qk=40, head_dim_vo=40, dtype=torch.bfloat16, **quant, **rules
        )
    )


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_quantized_splits_layouts_and_windows(granularity):
    quant = {"k_quant": KVQuantization("int8", granularity), "v_quant": KVQuantization("int8", granularity)}
    shape = {"layout": "HND", "page_size": 4, "head_dim_qk": 16, "head_dim_vo": 32, "num_kv_splits": 3, "seed": 6}
    check(Case(sharing="query_head", q_block_size=4, window=5, num_sink_tokens=2, **quant, **shape))


def test_channel_scales_too_small_for_float16_lose_nothing():
    """q times such a scale would have few bits left; over the scales' common unit it keeps them all."""
    quant = KVQuantization("float8_e5m2", "channel")
    case = Case(seqlen_q=(2,), seqlen_kv=(20,), dtype=torch.float16, k_quant=quant, seed=7)
    case.k = (case.k.float() * 2.0**9).clamp(-57344, 57344).to(quant.dtype)
    case.k_scale *= 2.0**-9
    assert case.k_scale.min() < 2.0**-16
    check(case)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_strides_of_scales_are_honoured(granularity):
    quant = KVQuantization("float8_e4m3", granularity)
    case = Case(seqlen_q=(1,), seqlen_kv=(20,), dtype=torch.bfloat16, k_quant=quant, v_quant=quant, mask_rule=Causal())
    out, lse = run_case(case)
    k, v = (paged(case, poison_unowned(case, rows)) for rows in (case.k, case.v))
    spread = [
        torch.stack([s, torch.full_like(s, math.nan)], -1).to(DEVICE)[..., 0] for s in (case.k_scale, case.v_scale)
    ]
    assert not any(s.is_contiguous() for s in spread if s.numel() > 1)
    again = run(build_plan(case), case.q.to(DEVICE), k, v, k_scale=spread[0], v_scale=spread[1])
    assert torch.equal(again[0].cpu(), out)
    assert torch.equal(again[1].cpu(), lse)


@pytest.mark.parametrize("code_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_that_do_not_lie_in_pairs_are_read_one_by_one(code_format, dtype):
    """A head_dim that is odd, a dimension that is strided, and rows that start at odd addresses."""
    k_quant, v_quant = KVQuantization(code_format, "channel"), KVQuantization(code_format, "token")
    check(
        Case(
            seqlen_q=(2,),
            seqlen_kv=(20,),
            head_dim_qk=15,
            head_dim_vo=33,
            k_quant=k_quant,
            v_quant=v_quant,
            dtype=dtype,
        )
    )
    shape = {"seqlen_q": (2,), "seqlen_kv": (20,), "dtype": dtype, "mask_rule": Causal()}
    case = Case(k_quant=k_quant, v_quant=v_quant, **shape)
    k, v = (paged(case, poison_unowned(case, rows)).view(torch.uint8) for rows in (case.k, case.v))
    strided = torch.zeros((*k.shape, 2), dtype=torch.uint8, device=DEVICE)
    strided[..., 1] = k
    shifted = torch.zeros((*v.shape[:-1], 65), dtype=torch.uint8, device=DEVICE)
    shifted[..., 1:] = v
    caches = strided[..., 1].view(case.k.dtype), shifted[..., 1:].view(case.v.dtype)
    scales = {"k_scale": case.k_scale.to(DEVICE), "v_scale": case.v_scale.to(DEVICE)}
    assert_near_oracle(case, *(t.cpu() for t in run(build_plan(case), case.q.to(DEVICE), *caches, **scales)))


def test_every_pair_of_codes_is_decoded_exactly():
    """As 16-bit numbers, by the instructions of the device where it has some."""
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = torch.stack([codes, codes.flip(0)], -1).to(DEVICE)
    for code_format, dtype in ((f, d) for f in FORMATS for d in (torch.float32, torch.float16)):
        quant = KVQuantization(code_format, "tensor")
        got = torch.zeros(256, 2, dtype=dtype, device=DEVICE)
        decode_pairs_kernel[(1,)](
            pairs.view(torch.uint16), got, FORMAT=code_format, ASSEMBLY=pair_assembly(quant, dtype, DEVICE)
        )
        want = pairs.cpu().view(quant.dtype).float()
        torch.testing.assert_close(got.cpu().float(), want, rtol=0, atol=0, equal_nan=True)


def test_scales_of_keys_that_a_row_does_not_admit_change_no_bit_of_it():
    """Rows of one tile share reads, not units: a huge scale is the business of the rows that see its key."""
    quant = KVQuantization("int8", "token")
    case = Case(seqlen_q=(6,), seqlen_kv=(33,), mask_rule=Causal(), v_quant=quant, dtype=torch.bfloat16, seed=8)
    want = run_case(case)
    row = 2
    unseen = case.slots(0)[case.offsets[0] + row + 1 :]
    case.v_scale[unseen] = 1e30
    for got, expected in zip(run_case(case), want, strict=True):
        assert torch.equal(got[row], expected[row])


def test_scales_that_the_plan_did_not_declare_or_misses_are_refused():
    case = Case(seqlen_q=(1,), seqlen_kv=(9,), k_quant=KVQuantization("int8", "page"), dtype=torch.bfloat16)
    the_plan, v = build_plan(case), paged(case, case.v)
    q, k, scale = case.q.to(DEVICE), paged(case, case.k), case.k_scale.to(DEVICE)
    for wrong, what in (
        ({}, r"k_scale is None, but the plan is for \(5, 2\)"),
        ({"k_scale": scale, "v_scale": scale}, r"v_scale is given"),
        ({"k_scale": scale[:-1]}, r"k_scale\.shape is \(4, 2\)"),
        ({"k_scale": scale.double()}, r"k_scale\.dtype is "),
    ):
        with pytest.raises(PlanError, match=rf"^{what}[^\n]* \[QUANT-SCALE\]$"):
            run(the_plan, q, k, v, **wrong)
    with pytest.raises(PlanError, match=r"^k_cache\.dtype is torch\.bfloat16"):
        run(the_plan, q, v, v, k_scale=scale)
    with pytest.raises(PlanError, match=r"^granularity is row, but must be one of tensor, head"):
        KVQuantization("int8", "row")


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scales_that_are_not_finite_and_above_0_are_refused_where_somebody_owns_them(granularity):
    quant = KVQuantization("int8", granularity)
    case = Case(seqlen_q=(1,), seqlen_kv=(9,), v_quant=quant, dtype=torch.bfloat16)
    the_plan = build_plan(case)
    check_scale_values(the_plan, v_scale=poison_scales(case, case.v_scale, quant))
    owned = {"page": int(case.page_table[0, 1]), "token": int(case.slots(0)[8])}.get(granularity, 0)
    for bad in (0.0, -1.0, math.inf, math.nan):
        case.v_scale[owned] = bad
        with pytest.raises(PlanError, match=rf"^v_scale\[{owned}[^\n]* must be finite and above 0 \[QUANT-SCALE\]$"):
            check_scale_values(the_plan, v_scale=case.v_scale.to(DEVICE))


DROPOUT = Dropout(rate=0.3, seed=0xFEDC_BA98_7654_3210)


@pytest.mark.parametrize("sharing", [None, "query_head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_takes_the_edges_that_the_counter_names(sharing, dtype):
    """Query positions below 0 are counted in 32 bits like all others."""
    check(Case(dropout=DROPOUT, sharing=sharing, dtype=dtype, mask_rule=Window(left=12, right=4), q_block_size=2))


def test_dropout_leaves_lse_alone_to_the_bit():
    case = Case(mask_rule=Causal(), sink_logits=(0.5, -1.0, 3.0, 0.0))
    assert torch.equal(run_case(case)[1], run_case(replace(case, dropout=DROPOUT))[1])
    for a, b in zip(run_case(case), run_case(replace(case, dropout=Dropout(rate=0.0, seed=3))), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("tile_kv", [16, 32])
def test_dropout_asks_neither_tile_nor_split(splits, tile_kv):
    quant = KVQuantization("int8", "token")
    check(Case(dropout=DROPOUT, num_kv_splits=splits, tile_kv=tile_kv, v_quant=quant, seqlen_kv=(50, 0, 18, 3)))


def test_a_new_seed_needs_no_new_plan():
    case = Case(seqlen_q=(2,), seqlen_kv=(20,), dropout=DROPOUT)
    other = replace(case, dropout=Dropout(rate=0.3, seed=77))
    the_plan = build_plan(case)
    the_plan.dropout_words.copy_(other.dropout.words(DEVICE))
    out, lse = run(the_plan, case.q.to(DEVICE), paged(case, case.k), paged(case, case.v))
    assert_near_oracle(other, out.cpu(), lse.cpu())


@pytest.mark.parametrize(("rate", "seed"), [(1.0, 0), (-0.1, 0), (math.nan, 0), (0.5, 2**64), (0.5, -1)])
def test_a_rate_or_seed_outside_its_domain_is_refused(rate, seed):
    with pytest.raises(PlanError, match=r"\[DROPOUT-(RATE|COUNTER)\]$"):
        Dropout(rate=rate, seed=seed)


HEAD_WINDOWS = HeadWindow(left=(2, None, 0, 9), right=(0, 1, None, 3))
HEAD_RULES = {
    "alone": HEAD_WINDOWS,
    "and": And((Causal(), HEAD_WINDOWS)),
    "or": Or((HEAD_WINDOWS, Document(((0, 9, 24, 26), (0,), (0, 20), (1, 2))))),
    "custom": "custom",
}


@pytest.mark.parametrize("rule", HEAD_RULES)
@pytest.mark.parametrize("sharing", [None, "query_head", "kv_head"])
def test_every_query_head_sees_through_its_own_window(rule, sharing):
    if rule == "custom":
        custom = Custom(refuse_thirds, torch.zeros(1, dtype=torch.int32, device=DEVICE))
        mask_rule = And((HEAD_WINDOWS, custom))
    else:
        mask_rule = HEAD_RULES[rule]
    check(Case(mask_rule=mask_rule, sharing=sharing, q_block_size=2, num_kv_splits=2, seed=9))


def test_heads_with_windows_and_lists_of_their_own_and_many_heads_a_tile():
    windows = HeadWindow(left=tuple(range(16)), right=(0,) * 16)
    shape = {"seqlen_q": (3, 1), "seqlen_kv": (30, 17), "num_qo_heads": 16, "num_kv_heads": 2, "head_dim_qk": 16}
    check(Case(mask_rule=windows, sharing="shared", window=2, q_block_size=4, head_dim_vo=16, **shape))


def test_window_sizes_per_head_of_another_count_or_sign_are_refused():
    with pytest.raises(PlanError, match=r"^len\(left\) is 2, but must be 4 \[SAFE-SHAPE\]$"):
        build_plan(Case(mask_rule=HeadWindow(left=(1, 2), right=(None, 0))))
    with pytest.raises(PlanError, match=r"^left\[1\] is -1, but must be None or at least 0 \[MASK-HEAD-WINDOW\]$"):
        HeadWindow(left=(1, -1), right=(0, 0))


def relative_bias(reach: int, seed: int = 0) -> RelativeBias:
    tables = np.random.default_rng(seed).standard_normal((4, 2 * reach + 1))
    return RelativeBias(tuple(tuple(row) for row in tables.tolist()))


@pytest.mark.parametrize("reach", [0, 1, 5, 100])
@pytest.mark.parametrize("sharing", [None, "kv_head"])
def test_relative_biases_go_by_head_and_clipped_distance(reach, sharing):
    check(Case(score_rules=(relative_bias(reach),), sharing=sharing, mask_rule=Window(left=20, right=6)))


def test_relative_biases_stand_anywhere_among_the_rules():
    alibi, cap = Alibi((0.5, 0.25, 0.1, 0.0)), SoftCap(1.5)
    check(
        Case(score_rules=(relative_bias(3), cap, alibi, relative_bias(7, seed=1)), q_block_size=4, sharing="query_head")
    )


def test_tables_that_are_even_ragged_or_not_finite_are_refused():
    for tables, what in (
        (((1.0, 2.0),), r"len\(tables\[0\]\) is 2, but must be odd \[SCORE-RELATIVE\]"),
        (((1.0,), (1.0, 2.0, 3.0)), r"len\(tables\[1\]\) is 3, but must be 1"),
        (((1.0,), (math.inf,)), r"tables\[1, 0\] is inf, but must be finite \[SAFE-FINITE\]"),
    ):
        with pytest.raises(PlanError, match=rf"^{what}"):
            RelativeBias(tables)
    with pytest.raises(PlanError, match=r"^len\(tables\) is 1, but must be 4"):
        build_plan(Case(score_rules=(RelativeBias(((0.0,),)),)))
