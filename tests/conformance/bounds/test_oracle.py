"""The oracle's own float64 error: never more than is added to the bounds of gradients. [BOUND-GRAD]"""

import mpmath
import numpy as np
import pytest

from attnconform.conformance.bounds import NUMERICS_CLASSES, backward_bounds, forward_bounds
from attnconform.conformance.bounds.oracle import FINER, in_float64, oracle_gradient_error

GRADIENTS = ("dq", "dk", "dv", "dsink")


def exact_gradients(case, digits=60):
    """dq, dk, dv, dsink of one head in so many digits, less the float64 answers: what those are off by."""
    block, got = case.block, case.exact()
    with mpmath.workdps(digits):
        exact = gradients_of(block, case.do)
        return {name: difference(exact[name], got[name]) for name in GRADIENTS}


def gradients_of(block, do):
    keys = range(len(block.k))
    q, k, v, do = (to_mpmath(x) for x in (block.q, block.k, block.v, do))
    found = {"dq": zeros(block.q), "dk": zeros(block.k), "dv": zeros(block.v), "dsink": np.array([mpmath.mpf(0)])}
    for i in range(len(q)):
        seen = [j for j in keys if block.mask[i, j]]
        p = {j: mpmath.exp(block.sm_scale * (q[i] @ k[j])) for j in seen}
        sink = mpmath.exp(block.sink[i])
        total = mpmath.fsum([*p.values(), sink])
        p = {j: x / total for j, x in p.items()}
        dp = {j: do[i] @ v[j] for j in seen}
        row = mpmath.fsum(p[j] * dp[j] for j in seen)
        for j in seen:
            ds = block.sm_scale * p[j] * (dp[j] - row)
            found["dq"][i] += ds * k[j]
            found["dk"][j] += ds * q[i]
            found["dv"][j] += p[j] * do[i]
        found["dsink"][0] -= sink / total * row
    return found


def to_mpmath(x):
    return np.array([[mpmath.mpf(float(y)) for y in row] for row in x], dtype=object)


def zeros(x):
    return np.full(x.shape, mpmath.mpf(0), dtype=object)


def difference(exact, got):
    return np.array([abs(float(a - mpmath.mpf(float(b)))) for a, b in zip(exact.flat, got.flat, strict=True)]).reshape(
        got.shape
    )


def with_sink(case):
    return case.with_block(sink=np.linspace(-1.0, 1.0, len(case.block.q)))


@pytest.mark.parametrize("family", ["normal", "q_times_4", "offset_5e4", "equal_keys", "v_mean_1"])
def test_the_oracles_gradients_are_no_farther_off_than_is_said(make_case, family):
    case = with_sink(make_case(family, 3, rows=4, keys=24, head_dim=8))
    allowed, off = oracle_gradient_error(case.block, case.do), exact_gradients(case)
    for name in GRADIENTS:
        assert (off[name] <= allowed[name]).all(), name
    assert max(float(off[name].max() / allowed[name].max()) for name in GRADIENTS) > 1e-3


def test_with_scores_of_5e4_the_oracle_is_off_by_more_than_half_an_ulp(make_case):
    case = with_sink(make_case("offset_5e4", 3, rows=4, keys=24, head_dim=8))
    off, exact = exact_gradients(case)["dv"], case.exact()["dv"]
    assert (off > 1000 * 2.0**-53 * np.abs(exact)).any()


def test_its_error_is_a_float64_kernels_and_nothing_beside_a_float32_kernels(make_case):
    case = with_sink(make_case("normal", 3))
    own = oracle_gradient_error(case.block, case.do)
    for name, limit in (("float64", 1.0), ("fp32", 2 * FINER)):
        numerics = NUMERICS_CLASSES[name]
        bounds = backward_bounds(case.block, case.do, numerics, forward_bounds(case.block, numerics))
        for output in ("dq", "dk", "dv"):
            assert (own[output] <= limit * getattr(bounds, f"{output}_worst")).all(), output
        assert (own["dsink"] <= limit * bounds.dsink.worst).all()


def test_nothing_is_added_where_nothing_is_seen(make_case):
    case = make_case("normal")
    mask = case.block.mask.copy()
    mask[:, 5] = False
    own = oracle_gradient_error(case.with_block(mask=mask).block, case.do)
    assert not own["dq"][1].any()
    assert not own["dk"][5].any()
    assert not own["dsink"].any()
    nothing = oracle_gradient_error(case.with_block(mask=np.zeros_like(mask)).block, case.do)
    assert not any(error.any() for error in nothing.values())


def test_operands_that_are_made_on_the_way_are_made_in_float64(make_case):
    case = make_case("normal")
    block = in_float64(case.with_block(k_error=np.abs(case.block.k)).block)
    np.testing.assert_array_equal(block.k_error, np.abs(case.block.k) * 2.0**-29)
    assert block.v_error is None
