"""Do two runs of one version agree? Their medians may differ by no more than the events of one run do."""

from attnconform.conformance.bench.row import BenchReport


def check_comparable(earlier: BenchReport, now: BenchReport) -> None:
    """Refuses reports of another format, device or meaning."""
    for name, before, after in (
        ("format", earlier.format, now.format),
        ("device", earlier.environment.device, now.environment.device),
    ):
        if before != after:
            raise ValueError(f"the earlier report's {name} is {before}, but this run's is {after}; measure it again")


def disagreements(earlier: BenchReport, now: BenchReport) -> list[str]:
    """A line for every row that both have and that moved farther than its spread."""
    check_comparable(earlier, now)
    before = {row.key: row for row in earlier.rows}
    lines = []
    for row in now.rows:
        old = before.get(row.key)
        if old is not None and not row.time.agrees_with(old.time):
            lines.append(
                f"{row.key}: {old.time.median:.1f} us, now {row.time.median:.1f} us by the {row.clock}'s clock, spread "
                f"{old.time.spread:.0%} and {row.time.spread:.0%}"
            )
    return lines
