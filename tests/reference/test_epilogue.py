"""What is done to a complete row: each step against scalars and casts, its slope, and that it comes after the merge."""

from dataclasses import replace

import ml_dtypes
import mpmath
import numpy as np
import pytest
from feature_structures import FEATURES, SMALL, featured_cases, with_features
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import MANTISSA_BITS, rounded, stepped

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import build_values
from attnconform.reference.attention import attention
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.epilogue import Activation, Cast, EpilogueStep, Gate, apply_epilogue, epilogue_slope
from attnconform.reference.steps import Steps

profiles.load_profile()

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
GATE = Gate((0.5, -1.25))
SMOOTH: list[EpilogueStep] = [Activation("silu"), GATE]
STEPS = st.sampled_from([*SMOOTH, Activation("relu"), Cast("float32"), Cast("bfloat16"), Cast("float16")])
NUMBERS = st.floats(-20, 20).filter(lambda x: x == 0 or abs(x) > 1e-3)  # float16 rounds smaller ones to fewer bits


@settings(max_examples=profiles.examples(200))
@given(st.lists(STEPS, max_size=4), st.lists(NUMBERS, min_size=1, max_size=5), st.integers(0, 1))
def test_steps_follow_one_another_component_by_component(
    steps: list[EpilogueStep], out: list[float], qo_head: int
) -> None:
    got = apply_epilogue(tuple(steps), np.array(out), qo_head)
    for i, x in enumerate(out):
        for step in steps:
            x = stepped(step, x, qo_head) if not isinstance(step, Cast) else cast(x, step.dtype)
        # exp of a rounded argument errs by |x| roundings, and x is up to 20 before each of a few steps
        np.testing.assert_allclose(got[i], x, rtol=1e-13, atol=0)


def cast(x: float, dtype: str) -> float:
    return float(np.array(x).astype(DTYPES[dtype]))


@settings(max_examples=profiles.examples(200))
@given(st.sampled_from(sorted(DTYPES)), NUMBERS)
def test_a_cast_is_the_nearest_number_with_ties_to_even(dtype: str, x: float) -> None:
    assert apply_epilogue((Cast(dtype),), np.array([x]), 0).tolist() == [rounded(x, dtype)]


@settings(max_examples=profiles.examples(200))
@given(st.sampled_from(sorted(DTYPES)), st.integers(1, 2**23 - 1), st.sampled_from((0.0, 2.0**-50, -(2.0**-50))))
def test_a_cast_rounds_once(dtype: str, pattern: int, beside: float) -> None:
    bits = MANTISSA_BITS[dtype] - 1
    low = 1 + (pattern % 2**bits) / 2**bits
    tie = low + 2.0 ** -(bits + 1) + beside
    assert apply_epilogue((Cast(dtype),), np.array([tie]), 0).tolist() == [rounded(tie, dtype)]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_cast_past_the_largest_number_is_infinite(dtype: str) -> None:
    largest = float(ml_dtypes.finfo(DTYPES[dtype]).max)  # type: ignore[no-untyped-call]
    with np.errstate(over="ignore"):
        got = apply_epilogue((Cast(dtype),), np.array([largest, -2 * largest, 2.0**1000]), 0)
    assert got.tolist() == [largest, -np.inf, np.inf]


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_cast_keeps_every_number_of_its_dtype(dtype: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint32)
    if dtype == "float32":
        numbers = (patterns << 16 | 0x1234).astype(np.uint32).view(np.float32)
    else:
        numbers = patterns.astype(np.uint16).view(DTYPES[dtype])
    with np.errstate(invalid="ignore"):
        numbers = numbers.astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    assert np.array_equal(apply_epilogue((Cast(dtype),), numbers, 0), numbers)


def exact_steps(steps: list[EpilogueStep], x: mpmath.mpf, qo_head: int) -> mpmath.mpf:
    for step in steps:
        x = x / (1 + mpmath.exp(-x)) if isinstance(step, Activation) else x / (1 + mpmath.exp(-GATE.logits[qo_head]))
    return x


@settings(max_examples=profiles.examples(100))
@given(st.lists(st.sampled_from(SMOOTH), max_size=4), st.floats(-30, 30), st.integers(0, 1))
def test_a_slope_is_the_derivative_in_mpmath(steps: list[EpilogueStep], x: float, qo_head: int) -> None:
    with mpmath.workdps(60):
        want = float(mpmath.diff(lambda y: exact_steps(steps, y, qo_head), mpmath.mpf(x)))
    got = epilogue_slope(tuple(steps), np.array([x]), qo_head)[0]
    np.testing.assert_allclose(got, want, rtol=1e-13, atol=1e-15)


def test_relu_has_slope_one_above_zero_and_none_at_or_below_it_and_a_cast_passes_gradients_on() -> None:
    x = np.array([-1.0, -0.0, 0.0, 2.0**-1074, 3.0])
    assert epilogue_slope((Activation("relu"),), x, 0).tolist() == [0, 0, 0, 1, 1]
    assert epilogue_slope((Cast("bfloat16"),), x, 0).tolist() == [1] * 5


def test_a_later_step_takes_its_slope_at_what_the_earlier_ones_give() -> None:
    x = 1.00390625 + 2.0**-20  # bfloat16 rounds it to 1.0078125
    both, after = (Cast("bfloat16"), Activation("silu")), (Activation("silu"),)
    assert epilogue_slope(both, np.array([x]), 0)[0] == epilogue_slope(after, np.array([1.0078125]), 0)[0]


OTHERS = tuple(name for name in FEATURES if name != "epilogue")


class InPieces(Steps):
    """Splits a row's keys before the merge, as kernels do."""

    def splits(self, num_keys: int) -> list[slice]:
        return [slice(i, i + 2) for i in range(0, num_keys, 2)]


@settings(max_examples=profiles.examples(60))
@given(featured_cases(with_features(SMALL, features=OTHERS)), st.lists(STEPS, min_size=1, max_size=3))
def test_an_epilogue_is_done_once_to_merged_rows_and_never_moves_lse(case: Case, steps: list[EpilogueStep]) -> None:
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    steps = [Gate((0.5,) * problem.num_qo_heads) if isinstance(step, Gate) else step for step in steps]
    want = attention(problem, values.q, values.k, values.v)
    ended = replace(problem, epilogue=tuple(steps))
    got = attention(ended, values.q, values.k, values.v)
    assert np.array_equal(got.lse, want.lse)
    assert np.array_equal(got.before_epilogue, want.out)
    assert np.array_equal(got.out, apply_to_all(tuple(steps), want.out))
    pieces = InPieces().forward(ended, values.q, values.k, values.v)
    assert np.array_equal(pieces.out, apply_to_all(tuple(steps), pieces.before_epilogue))
    np.testing.assert_allclose(pieces.before_epilogue, want.out, rtol=0, atol=1e-12)


def apply_to_all(steps: tuple[EpilogueStep, ...], out: FloatArray) -> FloatArray:
    done = np.empty_like(out)
    for row, h in np.ndindex(*out.shape[:2]):
        done[row, h] = apply_epilogue(steps, out[row, h], h)
    return done


def test_an_activation_of_each_piece_is_another_answer() -> None:
    pieces = np.array([[-1.0, 2.0], [3.0, -1.0]])  # two halves of one row, of equal weight
    relu = (Activation("relu"),)
    after, before = apply_epilogue(relu, pieces.mean(axis=0), 0), apply_to_all(relu, pieces[:, None])[:, 0].mean(axis=0)
    assert after.tolist() == [1.0, 0.5]
    assert before.tolist() == [1.5, 1.0]
