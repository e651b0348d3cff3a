"""Where one curve crosses another: the point from which on sparse attention is worth it, or no longer is."""

import math
from collections.abc import Sequence


def crossing(xs: Sequence[float], sparse: Sequence[float], dense: Sequence[float]) -> float | None:
    """The last x at which the two curves meet, straight between measured points on doubly logarithmic axes.

    None where one of them is faster everywhere.

    >>> round(crossing([1, 2, 4], [10, 20, 40], [20, 20, 20]), 6)
    2.0
    >>> round(crossing([0.25, 0.5], [88, 133], [118, 118]), 3)
    0.409
    >>> crossing([1, 2], [1, 1], [2, 2])
    """
    gaps = [math.log(s / d) for s, d in zip(sparse, dense, strict=True)]
    for n in range(len(xs) - 1, 0, -1):
        before, after = gaps[n - 1], gaps[n]
        if after == 0:
            return float(xs[n])
        if before * after < 0 or before == 0:
            share = before / (before - after)
            return math.exp(math.log(xs[n - 1]) + share * (math.log(xs[n]) - math.log(xs[n - 1])))
    return None
