"""Do two runs of one version agree? Their blocks must overlap: no stage of one is faster in all of them."""

from attnconform.conformance.bench.row import BenchReport
from attnconform.conformance.bench.timing import Quantiles


def check_comparable(earlier: BenchReport, now: BenchReport) -> None:
    """Refuses reports of another format, device or meaning."""
    for name, before, after in (
        ("format", earlier.format, now.format),
        ("device", earlier.environment.device, now.environment.device),
    ):
        if before != after:
            raise ValueError(f"the earlier report's {name} is {before}, but this run's is {after}; measure it again")


def disagreements(earlier: BenchReport, now: BenchReport) -> list[str]:
    """A line for every row that both have and whose blocks lie apart."""
    check_comparable(earlier, now)
    before = {row.key: row for row in earlier.rows}
    lines = []
    for row in now.rows:
        old = before.get(row.key)
        if old is not None and not row.time.agrees_with(old.time):
            lines.append(f"{row.key}: {told(old.time)}, now {told(row.time)} by the {row.clock}'s clock")
    return lines


def told(time: Quantiles) -> str:
    """A median with the medians of its fastest and its slowest block."""
    return f"{time.median:.1f} us ({time.low:.1f} to {time.high:.1f})"
