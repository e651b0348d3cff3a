"""A bound that nothing exceeds is worth nothing: single faults do. [BOUND-OUT] [BOUND-LSE] [BOUND-GRAD]"""

import numpy as np
import pytest

from attnconform.conformance.bounds import NUMERICS_CLASSES
from attnconform.conformance.bounds.emulate import Schedule, emulate_forward

FUSED = ("fp32", "bf16", "fp16", "bf16-hopper", "fp16-hopper")
LOST_KEY = 17


def lose_key(case):
    """The exact answers of row 0 without one of its 64 keys."""
    mask = case.block.mask.copy()
    mask[0, LOST_KEY] = False
    return case.with_block(mask=mask).exact()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("seed", range(3))
def test_a_key_lost_among_64_exceeds_the_lse_bound(make_case, name, seed):
    case = make_case("normal", 10 + seed, head_dim=64)
    ratios = case.ratios(NUMERICS_CLASSES[name], {"lse": lose_key(case)["lse"]})
    assert ratios["lse_worst"] > 1


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("seed", range(3))
def test_a_key_lost_in_the_backward_alone_exceeds_the_dv_bound(make_case, name, seed):
    case = make_case("normal", 20 + seed, head_dim=64)
    got = case.exact()["dv"]
    got[LOST_KEY] = lose_key(case)["dv"][LOST_KEY]
    assert case.ratios(NUMERICS_CLASSES[name], {"dv": got})["dv_worst"] > 1


@pytest.mark.parametrize("name", FUSED)
def test_a_scale_that_is_off_by_half_a_percent_exceeds_the_lse_bound(make_case, name):
    case = make_case("normal", 30, head_dim=64)
    wrong = case.with_block(scores=case.block.scores * 1.005).exact()
    assert case.ratios(NUMERICS_CLASSES[name], {"lse": wrong["lse"]})["lse_worst"] > 1


def test_a_key_lost_among_512_equal_ones_exceeds_every_lse_bound(make_case):
    case = make_case("q_zero", 31, rows=2, keys=512)
    for name, numerics in NUMERICS_CLASSES.items():
        assert case.ratios(numerics, {"lse": lose_key(case)["lse"]})["lse_worst"] > 1, name


def test_a_kernel_with_bfloat16_p_is_rejected_as_a_float32_kernel(make_case):
    case = make_case("normal", 32)
    got = emulate_forward(case.block, NUMERICS_CLASSES["bf16"], Schedule())
    assert case.ratios(NUMERICS_CLASSES["fp32"], {"out": got.out})["out_worst"] > 1


def test_a_float32_kernel_is_rejected_as_a_float64_one(make_case):
    case = make_case("normal", 33)
    got = emulate_forward(case.block, NUMERICS_CLASSES["fp32"], Schedule())
    ratios = case.ratios(NUMERICS_CLASSES["float64"], {"out": got.out, "lse": got.lse})
    assert ratios["out_worst"] > 1
    assert ratios["lse_worst"] > 1


def test_the_probable_bound_of_out_is_sharper_where_rows_are_long(make_case):
    bounds = make_case("normal", 34, keys=512).bounds(NUMERICS_CLASSES["bf16-hopper"])
    visible = bounds["out_worst"] > 0
    assert np.median(bounds["out_prob"][visible] / bounds["out_worst"][visible]) < 0.6
