"""The one thing that every cost model asks of its numbers."""

from math import isfinite

from attnconform.reference.errors import RefusedInput


def check_counts(clause: str, **counts: float) -> None:
    """Refuses numbers that are negative or not finite, by name."""
    for name, count in counts.items():
        if not (isfinite(count) and count >= 0):
            raise RefusedInput(clause, name, count, "must be finite and at least 0")


def check_positive(clause: str, **sizes: float) -> None:
    """Refuses numbers that are not finite and above 0, by name."""
    for name, size in sizes.items():
        if not (isfinite(size) and size > 0):
            raise RefusedInput(clause, name, size, "must be finite and above 0")
