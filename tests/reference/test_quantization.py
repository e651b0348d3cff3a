"""Quantized caches: codes against the casts of ml_dtypes, scales against loops, attention against plain numbers."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from feature_structures import SMALL, featured_cases, with_features
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import dequantized, scale_of

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import Values, build_values
from attnconform.reference.attention import attention, attention_gradients
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.quantization import (
    LARGEST,
    QuantFormat,
    Quantization,
    ScaleGranularity,
    dequantize,
    quantize,
    scale_shape,
)

profiles.load_profile()

DTYPES: dict[QuantFormat, type] = {
    "int8": np.int8,
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
FORMATS = list(DTYPES)
GRANULARITIES: list[ScaleGranularity] = ["tensor", "head", "page", "token", "channel"]
SIZES = {"num_pages": 3, "page_size": 4, "num_kv_heads": 2, "head_dim": 5}


def every_code(code_format: QuantFormat) -> FloatArray:
    """The finite numbers of all 256 bit patterns, ascending."""
    numbers = np.arange(256, dtype=np.uint8).view(DTYPES[code_format]).astype(np.float64)
    return np.unique(numbers[np.isfinite(numbers)])


@pytest.mark.parametrize("code_format", FORMATS)
def test_every_finite_code_is_worth_its_cast_times_its_scale(code_format: QuantFormat) -> None:
    codes, scale = every_code(code_format), float(np.float32(0.1))
    per_tensor = Quantization(format=code_format, granularity="tensor", scale=np.array([scale]))
    got = dequantize(codes[:, None], per_tensor, np.arange(len(codes)), 0, page_size=4)
    assert got[:, 0].tolist() == [float(code) * scale for code in codes]
    # both factors have at most 24 bits, so that float64 holds the product
    assert all(float(np.longdouble(code) * np.longdouble(scale)) == x for code, x in zip(codes, got[:, 0], strict=True))
    assert codes.max() == LARGEST[code_format]


@settings(max_examples=profiles.examples(200))
@given(st.sampled_from(FORMATS), st.floats(-1e5, 1e5), st.floats(2.0**-10, 2.0**10))
def test_quantize_gives_the_nearest_code_saturated(code_format: QuantFormat, number: float, scale: float) -> None:
    scale = float(np.float32(scale))
    code = float(quantize(np.array([number]), np.array(scale), code_format)[0])
    codes = every_code(code_format)
    codes = codes[np.abs(codes) <= LARGEST[code_format]]
    distances = np.abs(codes - number / scale)
    assert code in codes
    assert abs(code - number / scale) == distances.min()


@settings(max_examples=profiles.examples(200))
@given(st.sampled_from(FORMATS), st.integers(0, 253), st.sampled_from((2.0**-40, 0.0, -(2.0**-40))))
def test_quantize_breaks_ties_to_even_and_rounds_once(code_format: QuantFormat, at: int, beside: float) -> None:
    codes = every_code(code_format)[1:] if code_format == "int8" else every_code(code_format)
    low, high = codes[at % (len(codes) - 1)], codes[at % (len(codes) - 1) + 1]
    middle = (low + high) / 2
    number = middle + beside * (high - low)
    got = float(quantize(np.array([number]), np.array(1.0), code_format)[0])
    if beside:
        assert got == (high if beside > 0 else low)
    else:
        even = [c for c in (low, high) if is_even(c, code_format)]
        assert got in even


def is_even(code: float, code_format: QuantFormat) -> bool:
    """Whether the last bit of a code is 0; of int8, whether the number is even."""
    if code_format == "int8":
        return code % 2 == 0
    return int(np.array([code]).astype(DTYPES[code_format]).view(np.uint8)[0]) % 2 == 0


@pytest.mark.parametrize("code_format", FORMATS)
def test_quantize_gives_every_code_back(code_format: QuantFormat) -> None:
    codes = every_code(code_format)
    codes = codes[np.abs(codes) <= LARGEST[code_format]]
    assert np.array_equal(quantize(codes * 0.375, np.array(0.375), code_format), codes)


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_a_scale_is_found_by_physical_place(granularity: ScaleGranularity) -> None:
    shape = scale_shape(granularity, **SIZES)
    quant = Quantization(
        format="int8", granularity=granularity, scale=1.0 + np.arange(np.prod(shape), dtype=float).reshape(shape)
    )
    slots = np.array([11, 0, 4, 7, 4])
    for head in range(2):
        got = np.broadcast_to(quant.scales_at(slots, head, page_size=4), (5, 5))
        want = [[scale_of(quant, slot, head, channel, 4) for channel in range(5)] for slot in slots.tolist()]
        assert got.tolist() == want


QUANTIZED = featured_cases(
    with_features(SMALL, features=("k_quant", "v_quant", "head_pages", "rope", "dropout")),
    values=("normal", "code_edges"),
)


def as_numbers(problem: AttentionProblem, values: Values) -> tuple[AttentionProblem, Values]:
    """The same attention over a cache of plain numbers."""
    size = problem.cache.page_size
    k, v = dequantized(values.k, problem.k_quant, size), dequantized(values.v, problem.v_quant, size)
    return replace(problem, k_quant=None, v_quant=None), replace(values, k=k, v=v)


@settings(max_examples=profiles.examples(60))
@given(QUANTIZED)
def test_attention_and_gradients_are_those_over_the_dequantized_cache(case: Case) -> None:
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    plain, numbers = as_numbers(problem, values)
    got, want = attention(problem, values.q, values.k, values.v), attention(plain, numbers.q, numbers.k, numbers.v)
    assert np.array_equal(got.out, want.out)
    assert np.array_equal(got.lse, want.lse)
    found = attention_gradients(problem, values.q, values.k, values.v, values.dout, values.dlse)
    owed = attention_gradients(plain, numbers.q, numbers.k, numbers.v, values.dout, values.dlse)
    for name in ("dq", "slots", "dk", "dv"):
        assert np.array_equal(getattr(found, name), getattr(owed, name)), name


@settings(max_examples=profiles.examples(40))
@given(QUANTIZED, st.randoms(use_true_random=False))
def test_a_scale_moves_with_its_page(case: Case, random: object) -> None:
    structure = case.structure
    if structure.head_pages is not None:  # parts that lie apart move apart
        structure = type(structure)(
            **{f: getattr(structure, f) for f in structure.__struct_fields__} | {"head_pages": None}
        )
    problem = build_problem(structure)
    values = build_values(case, problem)
    order = np.arange(problem.cache.num_pages)
    random.shuffle(order)  # type: ignore[attr-defined]
    moved, stored = with_pages_moved(problem, values, order)
    got, want = attention(moved, stored.q, stored.k, stored.v), attention(problem, values.q, values.k, values.v)
    assert np.array_equal(got.out, want.out)
    assert np.array_equal(got.lse, want.lse)


def with_pages_moved(problem: AttentionProblem, values: Values, order: np.ndarray) -> tuple[AttentionProblem, Values]:
    """Page p lies at order[p] afterwards, with its codes and its scales."""
    cache, size = problem.cache, problem.cache.page_size
    slots = (order[:, None] * size + np.arange(size)).ravel()
    k, v = np.empty_like(values.k), np.empty_like(values.v)
    k[slots], v[slots] = values.k, values.v
    table = np.where(cache.page_table >= 0, order[cache.page_table], -1)
    owned = None
    if cache.owned is not None:
        owned = np.empty_like(cache.owned)
        owned[:, order] = cache.owned
    quants = {name: scales_moved(getattr(problem, name), order, slots) for name in ("k_quant", "v_quant")}
    moved = replace(problem, cache=replace(cache, page_table=table, owned=owned), **quants)  # type: ignore[arg-type]
    return moved, replace(values, k=k, v=v)


def scales_moved(quant: Quantization | None, order: np.ndarray, slots: np.ndarray) -> Quantization | None:
    if quant is None or quant.granularity not in ("page", "token"):
        return quant
    scale = np.empty_like(quant.scale)
    scale[order if quant.granularity == "page" else slots] = quant.scale
    return replace(quant, scale=scale)
