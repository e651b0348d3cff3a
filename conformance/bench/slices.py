"""Tails by cause: the events of a measurement grouped by what their input set was like."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from attnconform.conformance.bench.timing import Samples

MAX_GROUPS = 4
NO_FALLBACK = "none"


class SetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What may explain that one input set is slower than another."""

    candidate_blocks: int
    pages_touched: int
    longest_row: int  # tokens
    fallback: str = NO_FALLBACK


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Events whose input sets are alike in one fact."""

    by: str
    group: str
    events: int
    median: float
    p99: float


def slice_events(samples: Samples, facts: list[SetFacts]) -> list[Slice]:
    """P99 by candidate blocks, pages touched, longest row and fallback reason; a fact all sets share has one group."""
    slices = []
    for by in ("candidate_blocks", "pages_touched", "longest_row"):
        values = np.array([getattr(fact, by) for fact in facts])
        groups = rank_groups(values)
        for g in range(int(groups.max()) + 1):
            inside = values[groups == g]
            slices.append(_slice(samples, by, f"{inside.min()} to {inside.max()}", groups == g))
    reasons = np.array([fact.fallback for fact in facts])
    slices += [_slice(samples, "fallback", str(reason), reasons == reason) for reason in sorted(set(reasons))]
    return slices


def rank_groups(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Groups of about equal size, equal values together, numbered by value."""
    distinct, inverse = np.unique(values, return_inverse=True)
    counts = np.bincount(inverse)
    before = np.cumsum(counts) - counts
    groups = before * MAX_GROUPS // len(values)
    _, numbered = np.unique(groups, return_inverse=True)
    return np.asarray(numbered[inverse] if len(distinct) > 1 else np.zeros(len(values), dtype=np.int64))


def _slice(samples: Samples, by: str, group: str, members: NDArray[np.bool_]) -> Slice:
    times = samples.device[members[samples.sets]]
    if not len(times):  # fewer events than sets
        return Slice(by=by, group=group, events=0, median=0.0, p99=0.0)
    return Slice(
        by=by,
        group=group,
        events=len(times),
        median=float(np.median(times)),
        p99=float(np.quantile(times, 0.99)),
    )
