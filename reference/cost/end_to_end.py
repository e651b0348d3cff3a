"""What a faster attention kernel is worth once everything around it is counted."""

from dataclasses import astuple, dataclass

from attnconform.reference.cost.positive import check_counts, check_positive


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Parts of one sparse attention step, in one unit of time (article 1, formula 10)."""

    route: float = 0.0
    topk: float = 0.0
    index: float = 0.0
    attention: float = 0.0
    reduce: float = 0.0
    launch: float = 0.0


def total_time(times: StepTimes) -> float:
    """Time of a step: the sum of its parts. [COST-END-TO-END]

    >>> total_time(StepTimes(route=12, topk=10, index=8, attention=25, reduce=5, launch=6))
    66
    """
    check_counts("COST-END-TO-END", **{name: getattr(times, name) for name in StepTimes.__dataclass_fields__})
    return sum(astuple(times))


def end_to_end_speedup(dense: float, times: StepTimes) -> float:
    """How much faster the whole sparse step is than dense attention. [COST-END-TO-END]

    A kernel that takes 25 µs where dense takes 100 is 4 times as fast; the step is not.

    >>> times = StepTimes(route=12, topk=10, index=8, attention=25, reduce=5, launch=6)
    >>> round(end_to_end_speedup(100, times), 2), 100 / times.attention
    (1.52, 4.0)
    """
    check_positive("COST-END-TO-END", dense=dense, total_time=total_time(times))
    return dense / total_time(times)
