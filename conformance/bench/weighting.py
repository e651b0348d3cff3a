"""Times per length, weighted by how often real requests have that length."""

import math
from collections.abc import Sequence

from attnconform.conformance.bench.row import Phase, SweepPoint, Weighted
from attnconform.traces import Trace


def length_counts(trace: Trace, phase: Phase) -> dict[float, int]:
    """Rows of a trace by length: the mean of each bin of its histograms, over every layer, head and selector."""
    counts: dict[float, int] = {}
    for key, group in trace.groups.items():
        if key.phase != phase:
            continue
        for (statistic, _, _), histogram in group.items():
            if statistic == "length":
                for count, total in zip(histogram.count.tolist(), histogram.value_sum.tolist(), strict=True):
                    counts[total / count] = counts.get(total / count, 0) + count
    return counts


def weigh(trace_name: str, phase: Phase, counts: dict[float, int], points: Sequence[SweepPoint]) -> Weighted:
    """Every length counts at the swept length nearest to it.

    Raises ValueError where there is nothing to weigh, or where points of another phase are among them.
    """
    others = [p.key for p in points if p.phase != phase]
    if others:
        raise ValueError(f"{phase} is weighed, and {others[0]} is not of it")
    by_length = {p.seqlen_kv: p for p in sorted(points, key=lambda p: p.seqlen_kv)}
    if not by_length or not counts:
        raise ValueError(f"{trace_name} has {len(counts)} lengths of {phase}, the sweep {len(by_length)}")
    total = sum(counts.values())
    shares = dict.fromkeys(by_length, 0.0)
    for length, count in counts.items():
        nearest = min(by_length, key=lambda swept: abs(math.log(swept / max(length, 1))))
        shares[nearest] += count / total
    outside = sum(c for n, c in counts.items() if not min(by_length) <= n <= max(by_length)) / total

    def weighted(time: dict[int, float]) -> float:
        return sum(shares[n] * time[n] for n in by_length)

    sparse, dense = {n: p.total for n, p in by_length.items()}, {n: p.dense for n, p in by_length.items()}
    return Weighted(
        trace=trace_name,
        phase=phase,
        shares=shares,
        outside=outside,
        sparse=weighted(sparse),
        dense=weighted(dense),
        best=weighted({n: min(sparse[n], dense[n]) for n in by_length}),
        sparse_from=sparse_from(sparse, dense),
    )


def sparse_from(sparse: dict[int, float], dense: dict[int, float]) -> int | None:
    """The shortest length from which on sparse is the faster at every swept length."""
    faster_from = None
    for length in sorted(sparse, reverse=True):
        if sparse[length] > dense[length]:
            break
        faster_from = length
    return faster_from
