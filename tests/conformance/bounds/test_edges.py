"""Rows that see nothing, sinks, bytes outside the mask, and what no bound exists for. [BOUND-VOID]"""

import msgspec
import numpy as np
import pytest

from attnconform.conformance.bounds import NUMERICS_CLASSES, backward_bounds, forward_bounds

pytestmark = pytest.mark.filterwarnings("error")
EMPTY_ROW = 1


@pytest.mark.parametrize("name", sorted(NUMERICS_CLASSES))
def test_no_bound_is_nan_or_negative_and_prob_never_exceeds_worst(make_case, family, name):
    bounds = make_case(family, 1, keys=33).bounds(NUMERICS_CLASSES[name])
    for bound, values in bounds.items():
        assert not np.isnan(values).any(), bound
        assert (values >= 0).all(), bound
        assert (values <= bounds[bound.replace("prob", "worst")]).all(), bound


@pytest.mark.parametrize("name", sorted(NUMERICS_CLASSES))
@pytest.mark.parametrize("scale", [0.0, -0.125])
def test_a_scale_of_0_or_below_has_bounds_like_any_other(make_case, name, scale):
    case = make_case("normal", keys=33)
    scores = scale * case.block.q @ case.block.k.T
    bounds = case.with_block(sm_scale=scale, scores=scores).bounds(NUMERICS_CLASSES[name])
    for bound, values in bounds.items():
        assert not np.isnan(values).any(), bound
        assert (values >= 0).all(), bound
    assert bounds["out_worst"][0].all()


def test_a_scale_and_its_opposite_have_the_same_worst_case(make_case):
    case = make_case("normal", keys=33)
    turned = case.with_block(sm_scale=-case.block.sm_scale, q=-case.block.q)
    for name, values in case.bounds(NUMERICS_CLASSES["bf16"]).items():
        if name.endswith("worst"):
            np.testing.assert_allclose(turned.bounds(NUMERICS_CLASSES["bf16"])[name], values, rtol=1e-12)


def test_a_row_that_sees_nothing_has_bounds_of_zero(make_case):
    bounds = make_case("normal").bounds(NUMERICS_CLASSES["bf16"])
    for name in ("out", "lse", "dq"):
        assert not bounds[f"{name}_worst"][EMPTY_ROW].any()
        assert bounds[f"{name}_prob"][0].all()


def test_a_block_whose_rows_all_see_nothing_has_bounds_of_zero(make_case):
    case = make_case("normal")
    bounds = case.with_block(mask=np.zeros_like(case.block.mask)).bounds(NUMERICS_CLASSES["bf16"])
    assert not any(values.any() for values in bounds.values())


def test_a_key_that_no_row_sees_has_gradient_bounds_of_zero(make_case):
    case = make_case("normal")
    mask = case.block.mask.copy()
    mask[:, 5] = False
    bounds = case.with_block(mask=mask).bounds(NUMERICS_CLASSES["fp16"])
    for name in ("dk_worst", "dk_prob", "dv_worst", "dv_prob"):
        assert not bounds[name][5].any()
        assert bounds[name][6].all()


def test_a_row_that_sees_only_its_sink_has_an_exact_out_and_a_bounded_lse(make_case):
    case = make_case("normal")
    bounds = case.with_block(sink=np.full(len(case.block.q), 2.5)).bounds(NUMERICS_CLASSES["bf16"])
    assert not bounds["out_worst"][EMPTY_ROW].any()
    assert not bounds["dq_worst"][EMPTY_ROW].any()
    assert 0 < bounds["lse_worst"][EMPTY_ROW] < 1e-5


def test_a_sink_of_minus_infinity_is_no_sink(make_case):
    case = make_case("normal")
    without = case.bounds(NUMERICS_CLASSES["bf16"])
    sunk = case.with_block(sink=np.full(len(case.block.q), -np.inf)).bounds(NUMERICS_CLASSES["bf16"])
    for name in ("out_worst", "lse_worst", "dv_worst"):
        np.testing.assert_allclose(sunk[name], without[name], rtol=1e-12)


def test_bytes_that_no_row_attends_have_no_influence(make_case):
    case = make_case("normal")
    mask = case.block.mask.copy()
    mask[:, 5] = False
    case = case.with_block(mask=mask)
    poisoned = {name: getattr(case.block, name).copy() for name in ("q", "k", "v", "scores")}
    poisoned["k"][5] = poisoned["v"][5] = np.nan
    poisoned["q"][EMPTY_ROW] = np.inf
    poisoned["scores"][~mask] = np.nan
    want, got = case.bounds(NUMERICS_CLASSES["bf16"]), case.with_block(**poisoned).bounds(NUMERICS_CLASSES["bf16"])
    for name, values in want.items():
        np.testing.assert_array_equal(got[name], values, err_msg=name)


def test_a_gradient_is_void_where_the_exponent_is_unknown_and_out_is_bounded_by_the_values(make_case):
    case = make_case("normal")
    case = case.with_block(q=case.block.q * 4000, scores=case.block.scores * 4000)
    bounds = case.bounds(NUMERICS_CLASSES["bf16-unfused"])
    assert np.isinf(bounds["dq_worst"][0]).all()
    assert np.isinf(bounds["dk_worst"]).any()
    spread = case.block.v.max() - case.block.v.min()
    assert (bounds["out_worst"] < 2 * spread).all()


def test_a_void_row_voids_its_own_keys_only(make_case):
    case = make_case("normal")
    q, scores, mask = case.block.q.copy(), case.block.scores.copy(), case.block.mask.copy()
    mask[:, :3], mask[3], mask[3, :3] = False, False, True
    q[3], scores[3] = q[3] * 4000, scores[3] * 4000
    bounds = case.with_block(q=q, scores=scores, mask=mask).bounds(NUMERICS_CLASSES["bf16-unfused"])
    assert np.isinf(bounds["dv_worst"][:3]).any()
    assert np.isfinite(bounds["dv_worst"][3:]).all()
    assert np.isfinite(np.delete(bounds["dq_worst"], 3, axis=0)).all()


def test_a_key_that_vanishes_in_any_arithmetic_voids_nothing(make_case):
    bounds = make_case("one_key_at_minus_524288").bounds(NUMERICS_CLASSES["bf16-unfused"])
    assert all(np.isfinite(values).all() for values in bounds.values())


def test_float16_has_no_bound_past_its_largest_number(make_case):
    case = make_case("normal")
    large = case.with_block(v=case.block.v * 1e6)
    assert np.isinf(large.bounds(NUMERICS_CLASSES["fp16"])["out_worst"]).any()
    assert np.isfinite(large.bounds(NUMERICS_CLASSES["bf16"])["out_worst"]).all()


def test_listing_rows_in_another_order_changes_no_worst_case(make_case):
    case = make_case("normal")
    order = np.arange(len(case.block.q))[::-1]
    parts = {name: getattr(case.block, name)[order] for name in ("q", "mask", "scores")}
    numerics = NUMERICS_CLASSES["bf16-hopper"]
    want = forward_bounds(case.block, numerics)
    turned = case.with_block(**parts)
    np.testing.assert_allclose(forward_bounds(turned.block, numerics).out_worst, want.out_worst[order], rtol=1e-12)


def test_more_splits_never_tighten_a_bound(make_case):
    case = make_case("normal")
    one = case.bounds(NUMERICS_CLASSES["bf16"])
    four = case.bounds(msgspec.structs.replace(NUMERICS_CLASSES["bf16"], num_splits=4))
    for name in one:
        if name.endswith("worst"):
            assert (four[name] >= one[name]).all(), name


def test_a_soft_cap_needs_its_slope_for_gradients(make_case):
    case = make_case("normal").with_block(cap=30.0)
    with pytest.raises(ValueError, match=r"cap is 30.0, but slope is None"):
        case.bounds(NUMERICS_CLASSES["bf16"])


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("k", np.zeros((3, 32)), "k has 3 rows, but mask is 8 by 64"),
        ("q", np.zeros((8, 16)), "q has head_dim 16, k has 32"),
        ("added", np.zeros((8, 3)), r"added has shape \(8, 3\)"),
        ("sink", np.zeros(3), r"sink has shape \(3,\)"),
        ("num_heads", 3, "8 rows do not divide into 3 heads"),
        ("cap", -1.0, "cap is -1.0, not positive"),
        ("scores", np.full((8, 64), np.nan), "scores has a non-finite value inside the mask"),
    ],
)
def test_data_that_do_not_fit_are_refused(make_case, name, value, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_case("normal").with_block(**{name: value})


def test_a_nan_that_some_row_attends_is_refused(make_case):
    case = make_case("normal")
    v = case.block.v.copy()
    v[0, 0] = np.nan
    with pytest.raises(ValueError, match="v has a non-finite value that some row attends"):
        forward_bounds(case.with_block(v=v).block, NUMERICS_CLASSES["bf16"])


def test_an_upstream_gradient_of_another_shape_is_refused(make_case):
    case, numerics = make_case("normal"), NUMERICS_CLASSES["bf16"]
    with pytest.raises(ValueError, match=r"do has shape \(2, 2\), not \(8, 32\)"):
        backward_bounds(case.block, np.zeros((2, 2)), numerics, forward_bounds(case.block, numerics))
