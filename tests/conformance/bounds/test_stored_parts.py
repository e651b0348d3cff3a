"""Out and lse of splits that are stored before the merge: covered where declared, caught where not. [BOUND-OUT]"""

from itertools import product

import msgspec
import numpy as np
import pytest

from attnconform.conformance.bounds import NUMERICS_CLASSES
from attnconform.conformance.bounds.emulate import Schedule, emulate_backward, emulate_forward
from attnconform.conformance.bounds.forward_worst import WorstForward
from attnconform.conformance.bounds.softmax import compute_operands, compute_softmax

pytestmark = pytest.mark.filterwarnings("error")
STORED = (
    {"partial_storage": "bfloat16"},
    {"partial_storage": "float16"},
    {"partial_lse_storage": "bfloat16"},
    {"partial_lse_storage": "float16"},
    {"partial_storage": "bfloat16", "partial_lse_storage": "bfloat16"},
)


def declared(name, splits=3, **fields):
    return msgspec.structs.replace(NUMERICS_CLASSES[name], num_splits=splits, **fields)


def emulate(case, numerics, schedule):
    """Outputs by name; no gradients where a stored lse leaves the exponent unknown, for those have no bound."""
    forward = emulate_forward(case.block, numerics, schedule)
    outputs = {"out": forward.out, "lse": forward.lse}
    if np.isinf(case.bounds(numerics)["dq_worst"]).any():
        return outputs
    backward = emulate_backward(case.block, case.do, numerics, schedule, forward)
    return outputs | {"dq": backward.dq, "dk": backward.dk, "dv": backward.dv}


def worst_of(case, numerics):
    x = compute_softmax(case.block)
    return WorstForward(x, compute_operands(x, numerics), numerics)


@pytest.mark.parametrize("name", sorted(NUMERICS_CLASSES))
def test_nothing_is_added_where_parts_are_not_stored(make_case, family, name):
    case = make_case(family, 2, keys=33)
    worst = worst_of(case, declared(name))
    for term in (worst.part_rounding, worst.part_lse_rounding, worst.part_overflow, worst.part_lse_overflow):
        assert not term.any()
    wide = "float64" if name == "float64" else "float32"
    plain, stored = (
        case.bounds(declared(name, **fields)) for fields in ({}, {"partial_storage": wide, "partial_lse_storage": wide})
    )
    assert all(np.array_equal(stored[bound], plain[bound]) for bound in plain)


@pytest.mark.parametrize("fields", STORED, ids=str)
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16-hopper"])
def test_an_honest_kernel_that_stores_parts_stays_within_both_bounds(make_case, family, name, fields):
    for splits, tile in ((2, 64), (5, 16)):
        numerics = declared(name, splits, **fields)
        case = make_case(family, splits, keys=61)
        got = emulate(case, numerics, Schedule(tile=tile, splits=splits, exp2=True))
        exact, bounds, oracle = case.exact(), case.bounds(numerics), case.oracle()
        for output, form in product(got, ("worst", "prob")):
            bound = bounds[f"{output}_{form}"]
            judged = np.isfinite(bound) & (got[output] != exact[output])
            error = np.abs(got[output][judged] - exact[output][judged])
            assert (error <= (bound + oracle[output])[judged]).all(), (output, form)


@pytest.mark.parametrize(("fields", "output"), [(STORED[0], "out"), (STORED[2], "lse"), (STORED[2], "out")])
def test_parts_that_are_stored_without_leave_are_caught(make_case, fields, output):
    case = make_case("normal", 4)
    got = emulate(case, declared("fp32", **fields), Schedule(tile=16, splits=3))
    assert case.ratios(declared("fp32"), got)[f"{output}_worst"] > 10


def test_stored_out_costs_one_rounding_of_the_values_size(make_case):
    case = make_case("q_zero", 1)
    plain, stored = (worst_of(case, declared("fp32", **f)) for f in ({}, {"partial_storage": "bfloat16"}))
    added = stored.before_storage - plain.before_storage
    np.testing.assert_allclose(added, 2.0**-8 * plain.softmax.value_size, rtol=0.01)
    assert np.array_equal(stored.lse, plain.lse)


def test_stored_lse_moves_lse_by_half_a_step_of_its_format(make_case):
    case = make_case("q_zero", 1)  # lse is ln n, between 2 and 4.2
    plain, stored = (worst_of(case, declared("fp32", **f)) for f in ({}, {"partial_lse_storage": "bfloat16"}))
    half_step = 2.0**-8 * 2.0 ** np.floor(np.log2(plain.softmax.lse))
    np.testing.assert_allclose(stored.lse - plain.lse, half_step, rtol=0.03)


def test_a_part_that_may_overflow_has_no_bound(make_case):
    case = make_case("normal")
    v = case.block.v.copy()
    v[:, 0] = 1e5
    bounds = case.with_block(v=v).bounds(declared("fp32", partial_storage="float16"))
    seen = case.block.mask.any(1)
    assert np.isinf(bounds["out_worst"][seen, 0]).all()
    assert np.isfinite(bounds["out_worst"][:, 1:]).all()
    assert np.isinf(bounds["dq_worst"][seen]).all()


def test_a_part_whose_lse_may_overflow_has_no_bound(make_case):
    case = make_case("one_key_at_minus_524288")
    bounds = case.bounds(declared("fp32", partial_lse_storage="float16"))
    sees_it = case.block.mask[:, 3]
    assert np.isinf(bounds["lse_worst"][sees_it]).all()
    assert np.isinf(bounds["out_worst"][sees_it]).all()
    assert np.isfinite(bounds["lse_worst"][~sees_it]).all()


@pytest.mark.parametrize("field", ["partial_storage", "partial_lse_storage"])
def test_parts_need_splits(field):
    with pytest.raises(ValueError, match=f"{field} is 'bfloat16', but num_splits is 1: no parts"):
        declared("fp32", 1, **{field: "bfloat16"})
