"""Gradients of slopes, tables, caps and sinks: honest kernels stay within, mistakes do not. [BOUND-RULE]"""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from attnconform.conformance.bounds import NUMERICS_CLASSES, backward_bounds, forward_bounds
from attnconform.conformance.bounds.parameters import STEEPEST_COEFFICIENT, no_bound, rule_bounds
from attnconform.conformance.judge.coefficients import own_factor, row_factors, rule_coefficients
from attnconform.conformance.judge.honest_cases import NUM_HEADS, build_case
from attnconform.conformance.judge.honest_classes import HONEST_CLASSES, HonestClass
from attnconform.conformance.judge.honest_outputs import compute_exact, judge_honest
from attnconform.reference.rule_values import apply_score_rule
from attnconform.reference.rules import Alibi, RelativeBias, SoftCap

FLOAT32 = NUMERICS_CLASSES["fp32"]
RULES = ("slope", "table", "cap")


def draw(feature, family="normal", keys=65, seed=5, dtype="bfloat16"):
    return build_case(dtype, family, feature, keys=keys, rows=32, head_dim=32, seed=seed, kv_dtype=dtype)


def dscore(case, honest):
    return next(judged for judged in judge_honest(case, honest) if judged.output == "dscore")


def bounds_of(case, numerics):
    found = rule_coefficients((case.rule,), case.given, case.block.mask, case.heads, case.q_idx, numerics)
    (bound,) = rule_bounds(case.block, case.do, numerics, found, [len(case.block.q)])
    return found[0], bound


def exact_gradient(case):
    coefficients, _ = bounds_of(case, FLOAT32)
    products = compute_exact(case.block, case.do).ds * coefficients.value
    return np.bincount(coefficients.parameter.ravel(), products.ravel(), coefficients.num_parameters)


@pytest.mark.parametrize("feature", RULES)
@pytest.mark.parametrize("family", ["normal", "peaked", "zero_q", "equal_keys"])
@pytest.mark.parametrize("name", ["any tensor core", "hopper, 8 splits, exp2", "dS scaled, of stored P"])
def test_honest_kernels_stay_within_both_bounds(feature, family, name):
    judged = dscore(draw(feature, family), HONEST_CLASSES["bfloat16"][name])
    assert (judged.error <= judged.probable).all()
    assert (judged.probable <= judged.worst).all()
    assert (judged.error > 0).any() or (family, feature) == ("zero_q", "cap")  # tanh 0 is 0


@pytest.mark.parametrize("feature", RULES)
def test_the_probable_bound_is_far_below_the_worst_case(feature):
    _, bound = bounds_of(draw(feature, keys=257), NUMERICS_CLASSES["bf16-hopper"])
    widest = bound.worst.argmax()
    assert bound.probable[widest] < 0.2 * bound.worst[widest]


@pytest.mark.parametrize("feature", RULES)
def test_a_gradient_stored_in_bfloat16_exceeds_the_probable_bound_of_a_float32_kernel(feature):
    case = draw(feature, dtype="float32")
    exact, (_, bound) = exact_gradient(case), bounds_of(case, FLOAT32)
    rounded = exact.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert (np.abs(rounded - exact) > bound.probable).any()


@pytest.mark.parametrize("feature", RULES)
def test_a_lost_row_exceeds_the_probable_bound(feature):
    case = draw(feature)
    lost = case.block.mask.copy()
    lost[0] = False
    without = replace(case, block=replace(case.block, mask=lost))
    _, bound = bounds_of(case, NUMERICS_CLASSES["bf16"])
    assert (np.abs(exact_gradient(without) - exact_gradient(case)) > bound.probable).any()


def test_a_far_cap_coefficient_errs_by_what_tanh_errs_times_its_argument():
    # 16 roundings of 1 were too few: 1 - tanh² of x = 20 is all rounding, and x multiplies it
    x = np.array([20.0])
    tanh = np.float64(np.float32(1 - 8 * 2.0**-24))
    computed = tanh - x * np.float64(np.float32(1 - np.float32(tanh) ** 2))
    factor = own_factor(SoftCap(1.0), x, 0, np.arange(1), FLOAT32)
    error = np.abs(computed - factor.value)
    assert (error > 16 * FLOAT32.u).all()
    assert (error <= factor.rounding).all()


def test_a_cap_after_a_slope_carries_its_own_error_into_the_slopes_coefficient():
    rules, scores = (Alibi((0.1,)), SoftCap(2.0)), np.linspace(-3, 3, 9)
    alone, capped = (row_factors(r, scores, 0, 8, np.arange(9), FLOAT32)[0] for r in (rules[:1], rules))
    assert not alone.steepness.any()
    assert (capped.steepness[:8] > 0).all()
    assert (capped.rounding > alone.rounding)[:8].all()


@pytest.mark.parametrize("cap", [0.5, 2.0, 30.0])
def test_no_coefficient_is_steeper_than_is_said(cap):
    scores, step = np.linspace(-20, 20, 4001), 1e-6
    for rules in ((SoftCap(cap),), (RelativeBias(((0.0,),)), SoftCap(cap))):
        near, at = (row_factors(rules, s, 0, 0, np.arange(4001), FLOAT32)[0] for s in (scores + step, scores))
        assert (np.abs(near.value - at.value) / step <= at.steepness + 1e-6).all()
    assert at.steepness.max() == STEEPEST_COEFFICIENT / cap


@pytest.mark.parametrize(
    "rules", [(Alibi((0.5, 0.25)), SoftCap(3.0)), (SoftCap(3.0), RelativeBias(((0.1, 0.2, 0.3),) * 2))]
)
def test_coefficients_are_derivatives_of_the_final_score(rules):
    scores, kv_idx, step = np.linspace(-4, 4, 5), np.arange(5), 1e-6
    factors = row_factors(rules, scores, 1, 3, kv_idx, FLOAT32)
    for i, factor in enumerate(factors):
        moved = tuple(nudged(rule, step) if i == j else rule for j, rule in enumerate(rules))
        slope = (final_score(moved, scores, kv_idx) - final_score(rules, scores, kv_idx)) / step
        np.testing.assert_allclose(factor.value, slope, atol=1e-4)


def nudged(rule, step):
    match rule:
        case Alibi(slopes):
            return Alibi(tuple(s + step for s in slopes))
        case RelativeBias(tables):
            return RelativeBias(tuple(tuple(x + step for x in table) for table in tables))
        case SoftCap(cap):
            return SoftCap(cap + step)


def final_score(rules, scores, kv_idx):
    for rule in rules:
        scores = apply_score_rule(rule, scores, 1, 3, kv_idx)
    return scores


def test_sinks_add_up_over_rows_in_squares():
    case = draw("sink", keys=64)
    numerics = NUMERICS_CLASSES["bf16-hopper"]
    whole = backward_bounds(case.block, case.do, numerics, forward_bounds(case.block, numerics)).dsink
    assert whole.worst.shape == (NUM_HEADS,)
    assert (whole.probable < whole.worst / 4).all()


def test_rows_that_see_nothing_bound_nothing():
    case = draw("slope")
    nothing = replace(case, block=replace(case.block, mask=np.zeros_like(case.block.mask)))
    _, bound = bounds_of(nothing, FLOAT32)
    assert not bound.worst.any()
    assert not bound.probable.any()


def test_a_void_row_voids_the_parameters_that_it_has_a_part_in():
    case = draw("slope")
    q = case.block.q.copy()
    q[0] *= 1e5
    far = replace(case, block=replace(case.block, q=q, scores=case.block.sm_scale * (q @ case.block.k.T)))
    _, bound = bounds_of(far, NUMERICS_CLASSES["bf16-unfused"])
    assert np.isinf(bound.worst[0])
    assert np.isfinite(bound.worst[1:]).all()


def test_parts_of_blocks_add_up():
    part = bounds_of(draw("slope"), FLOAT32)[1]
    both = part + part
    np.testing.assert_allclose(both.worst, 2 * part.worst)
    np.testing.assert_allclose(both.variance, 2 * part.variance)
    padded = part.among(NUM_HEADS + 3, 2)
    np.testing.assert_array_equal(padded.worst, [0, 0, *part.worst, 0])
    np.testing.assert_array_equal((no_bound(4) + part).drift, part.drift)


def test_a_kernel_that_forgets_the_chain_rule_is_far_outside():
    case = draw("cap")
    bound = dscore(case, HonestClass("bf16"))
    wrong = np.sum(compute_exact(case.block, case.do).ds * np.tanh(case.given / case.rule.cap))
    assert abs(wrong - exact_gradient(case)[0]) > 10 * bound.worst[0]
