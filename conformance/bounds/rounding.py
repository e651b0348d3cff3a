"""Elementary errors: of a sum, of storing a number, of an operand that a product takes in fewer bits. [BOUND-OUT]"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from collections.abc import Callable

import numpy as np

from attnconform.conformance.bounds.block import Array, Mask
from attnconform.conformance.bounds.numerics import FORMATS, Numerics


def sum_row(x: Array) -> Array:
    """Sums over keys, kept as a column."""
    return np.asarray(x.sum(1, keepdims=True))


def any_in_row(x: Mask) -> Mask:
    """Whether it holds for some key, kept as a column."""
    return np.asarray(x.any(1, keepdims=True))


def any_in_column(x: Mask) -> Mask:
    """Whether it holds for some row, as a column over keys."""
    return np.asarray(x.any(0))[:, None]


def compound(x: Array | float) -> Array:
    """gam(x) = x / (1 - x): what x = n u of single roundings may grow to."""
    return np.asarray(x / (1 - np.minimum(x, 0.5)))


def accumulation_error(numerics: Numerics, terms: Array | float, positions: float) -> Array:
    """acc(n, N): error of a sum of n products spread over N positions, relative to the sum of magnitudes.

    U n for one rounding per product in any order. A tensor core aligns a step of c products and the accumulator to the
    largest exponent, keeps x extra bits, cuts each live term, then cuts the sum: 2U [2^-x n + (1 + 2^-x) steps].
    """
    if numerics.accumulation == "nearest":
        return np.asarray(numerics.u * terms)
    cut = numerics.cut_fraction
    return np.asarray(2 * numerics.u * (cut * terms + (1 + cut) * live_steps(numerics, terms, positions)))


def accumulation_drift(numerics: Numerics, terms: Array | float, positions: float) -> Array:
    """bias(n, N): the part of acc that always errs one way; cuts are half a step on average."""
    if numerics.accumulation == "nearest":
        return np.asarray(0.0 * terms)
    return accumulation_error(numerics, terms, positions) / 2


def accumulation_variance(numerics: Numerics, terms: Array | float, positions: float) -> Array:
    """var(n, N): variance of the remainder, uniform roundings of U (nearest) or of the cuts of a tensor core."""
    roundings = terms
    if numerics.accumulation == "tensor_core":
        cut = numerics.cut_fraction**2
        roundings = cut * terms + (1 + cut) * live_steps(numerics, terms, positions)
    return np.asarray(numerics.u**2 / 3 * roundings)


def live_steps(numerics: Numerics, terms: Array | float, positions: float) -> Array:
    """Steps that hold a live product: one live product costs as much as a full step."""
    return np.minimum(terms, np.ceil(positions / numerics.products_per_step))


def half_ulp(x: Array, u: float, eta: float) -> Array:
    """Half a unit in the last place of x >= 0, at least eta: the error of rounding x to nearest."""
    exponent = np.frexp(np.clip(x, 1e-300, 1e300))[1]
    return np.maximum(u * np.ldexp(1.0, exponent - 1), eta)


def output_rounding(numerics: Numerics, size: Array) -> Array:
    """h(x): half an output ulp at x, infinite where x may overflow the output's dtype."""
    rounding = half_ulp(size, numerics.u_out, numerics.eta_out)
    return np.where(size < numerics.largest_out, rounding, np.inf)


def lse_rounding(numerics: Numerics, lse: Array) -> Array:
    """Half an ulp of the stored lse."""
    stored = FORMATS[numerics.lse_dtype]
    return half_ulp(np.abs(lse), stored.u, stored.eta)


def storage_error(x: Array, u: float, eta: Array | float) -> Array:
    """Error of storing x >= 0: relative u, or where that has run out eta, but never more than x itself."""
    return np.maximum(u * x, np.minimum(eta, x))


def operand_changes(x: Array, bits: int, truncates: bool) -> list[Array]:
    """What bringing x to so many bits may add to it: rounding and, if declared, cutting. One zero if bits is 0."""
    if not bits:
        return [np.zeros_like(x)]
    mantissa, exponent = np.frexp(x)
    ways: tuple[Callable[[Array], Array], ...] = (np.rint, np.trunc) if truncates else (np.rint,)
    return [np.ldexp(way(np.ldexp(mantissa, bits)), exponent - bits) - x for way in ways]


def largest(changes: list[Array]) -> Array:
    """Largest magnitude, element by element."""
    return np.abs(changes).max(0)
