"""Rescale factors: exactly 1 where the maximum stays, unless a kernel says otherwise. [BOUND-LSE] [BOUND-OUT]"""

import msgspec
import numpy as np
import pytest

from attnconform.conformance.bounds import NUMERICS_CLASSES
from attnconform.conformance.bounds.correlation import count_later_rises
from attnconform.conformance.bounds.emulate import Schedule, emulate_backward, emulate_forward

PLAIN = NUMERICS_CLASSES["fp32"]
FUSED = msgspec.structs.replace(PLAIN, fused_rescale=True)


def far_from_zero(make_case, keys):
    """Scores near -5e4: fl(m log2 e) is off by up to 2e-3, in every tile that does not raise the maximum."""
    case = make_case("offset_5e4", 9, rows=4, keys=keys, head_dim=16)
    k = case.block.k.copy()
    k[:, 0] *= -1
    return case.with_block(k=k, scores=case.block.sm_scale * (case.block.q @ k.T))


def run(case, numerics, schedule):
    forward = emulate_forward(case.block, numerics, schedule)
    backward = emulate_backward(case.block, case.do, numerics, schedule, forward)
    return {name: getattr(forward, name, getattr(backward, name, None)) for name in ("out", "lse", "dq", "dk", "dv")}


def test_a_fused_rescale_of_long_rows_is_past_the_worst_case_unless_declared(make_case):
    case, schedule = far_from_zero(make_case, 4096), Schedule(tile=16, exp2=True)
    got = run(case, FUSED, schedule)
    undeclared, declared = case.ratios(PLAIN, got), case.ratios(FUSED, got)
    assert undeclared["lse_worst"] > 1
    assert undeclared["lse_prob"] > 1
    assert max(declared.values()) <= 1
    assert declared["lse_worst"] > 0.1


def test_a_rescale_of_differences_needs_no_declaration(make_case):
    case = far_from_zero(make_case, 4096)
    assert max(case.ratios(PLAIN, run(case, PLAIN, Schedule(tile=16, exp2=True))).values()) <= 1


def test_declaring_it_widens_nothing_where_every_logit_is_0(make_case):
    case = make_case("q_zero", 9, keys=256)
    plain, fused = case.bounds(PLAIN), case.bounds(FUSED)
    for name in ("out_worst", "out_prob", "lse_worst", "lse_prob"):
        np.testing.assert_array_equal(plain[name], fused[name])


@pytest.mark.parametrize(
    ("row", "later"),
    [([1, 2, 3], [2, 1, 0]), ([3, 2, 1], [0, 0, 0]), ([1, 1, 2, 0, 5], [2, 2, 1, 1, 0]), ([7], [0])],
)
def test_rises_after_a_key_are_counted(row, later):
    np.testing.assert_array_equal(count_later_rises(np.array([row], dtype=float)), [later])
