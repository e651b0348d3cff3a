"""Rounding float64 to a narrower format in one step; a library's cast may go by way of float32 and round twice."""

import numpy as np

from attnconform.reference.coordinates import FloatArray


def nearest(numbers: FloatArray, *, fraction_bits: int, least_exponent: int) -> FloatArray:
    """The nearest numbers with so many bits behind the leading one, ties to even; nothing is too large.

    Below 2^least_exponent, numbers are subnormal and lie 2^(least_exponent - fraction_bits) apart.

    >>> nearest(np.array([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-40]), fraction_bits=7, least_exponent=-126)
    array([1.       , 1.0078125])
    """
    exponents = np.maximum(np.frexp(numbers)[1] - 1, least_exponent)
    step = np.ldexp(1.0, exponents - fraction_bits)
    return np.asarray(np.rint(numbers / step) * step)
