"""What a layer pays for a plan, an index or a block mask that several layers share."""

from collections.abc import Iterator

from attnconform.conformance.bench.row import BenchReport, BenchRow

LAYERS = (1, 32)  # a structure made for every layer, and one that a whole step shares
PREPARED = {"index": "attention of a tier", "one-off plan": "attention", "plan": "attention"}


def per_layer(prepare: float, attention: float, layers: int) -> float:
    """Microseconds of a layer whose preparation serves this many.

    >>> per_layer(6400.0, 50.0, 1), per_layer(6400.0, 50.0, 32)
    (6450.0, 250.0)
    """
    return prepare / layers + attention


def reuse_lines(report: BenchReport) -> Iterator[str]:
    """A line for every preparation, by the host's clock, with the attention that it serves, ours and the peer's."""
    rows = {(row.suite, row.work, row.stage): row for row in report.rows}
    for row in report.rows:
        attention = rows.get((row.suite, row.work, PREPARED.get(row.stage, "")))
        if attention is not None:
            yield f"{row.key}: " + "; ".join(_layers(row, attention, layers) for layers in LAYERS)


def _layers(row: BenchRow, attention: BenchRow, layers: int) -> str:
    ours = per_layer(row.ours.host.median, attention.ours.device.median, layers)
    text = f"shared by {layers}, {ours:.0f} us a layer"
    if row.peer is None or attention.peer is None or row.peer.timing is None or attention.peer.timing is None:
        return text
    theirs = per_layer(row.peer.timing.host.median, attention.peer.timing.device.median, layers)
    return f"{text} ({row.peer.name} {theirs:.0f})"
