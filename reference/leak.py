"""What a finite mask value lets through. (article 2, 6.3)"""

from math import exp, inf, log

from attnconform.reference.cost.positive import check_counts
from attnconform.reference.errors import RefusedInput


def leaked_mass(num_masked: int, c: float, z: float) -> float:
    """m e^-C / (Z + m e^-C): the weight that m masked keys keep under a bias of -C. [MASK-LEAK]

    z is the denominator of the keys that count, in the same unit as e^-C: both relative to score 0. Where no key
    counts, all weight leaks. Computed from logarithms, so that no e^-C over- or underflows on the way.

    >>> round(leaked_mass(65536, 10.0, 1.0), 3), leaked_mass(0, 10.0, 1.0), leaked_mass(1, 1e4, 0.0)
    (0.748, 0.0, 1.0)
    """
    check_counts("MASK-LEAK", num_masked=num_masked, z=z)
    if c != c:
        raise RefusedInput("MASK-LEAK", "c", c, "must be a number, or infinite")
    if not num_masked or c == inf:
        return 0.0
    if not z or c == -inf:
        return 1.0
    return _logistic(log(num_masked) - c - log(z))


def least_bias(num_masked: int, z: float, *, tolerance: float) -> float:
    """The C at which m masked keys keep `tolerance` of the weight: it grows with ln m, so no constant serves all rows.

    [MASK-LEAK]

    >>> round(least_bias(65536, 1.0, tolerance=2**-8), 2), round(least_bias(2**20, 1.0, tolerance=2**-8), 2)
    (16.63, 19.4)
    """
    check_counts("MASK-LEAK", num_masked=num_masked, z=z)
    if not 0 < tolerance < 1:
        raise RefusedInput("MASK-LEAK", "tolerance", tolerance, "must lie between 0 and 1")
    if not num_masked:
        return -inf
    if not z:
        return inf
    return log(num_masked) - log(z) - log(tolerance) + log(1 - tolerance)


def _logistic(x: float) -> float:
    return 1 / (1 + exp(-x)) if x >= 0 else exp(x) / (1 + exp(x))
