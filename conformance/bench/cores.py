"""Which processor core a measurement runs on: a host's times differ by core, and a process starts on any of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_core(number: int | None) -> Iterator[None]:
    """Keeps this thread on one of its cores, another for every number; None, or an unable system, leaves it free."""
    if number is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core_of(sorted(allowed), number)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def core_of(allowed: list[int], number: int) -> int:
    """Numbers go round the cores in large steps, since neighbours may share one processor's caches.

    >>> [core_of(list(range(16)), n) for n in range(6)]
    [0, 6, 12, 2, 8, 14]
    """
    step = 1 + len(allowed) // 3
    return allowed[number * step % len(allowed)]
