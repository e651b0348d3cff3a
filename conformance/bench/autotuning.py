"""What tuning a batch costs and gains: choices of tiles, warps and stages measured for a few seconds, beside none."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from attnconform.conformance.bench.bundled import PlanRun
from attnconform.conformance.bench.decode_work import DecodeWork
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.timing import measure

TUNE_SECONDS, TRIAL_SECONDS = 6.0, 0.02


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """Apart from every timing: no other row uses the choice."""

    seconds: float  # compiling and measuring the choices
    tried: int  # choices, as many as the time allowed
    offered: int
    choice: str  # the best of them
    safe_us: float  # without a choice
    best_us: float


@dataclass
class Until:
    """Items as long as there is time."""

    items: Iterable[Any]
    seconds: float
    taken: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Any]:
        deadline = time.monotonic() + self.seconds
        for item in self.items:
            if time.monotonic() > deadline:
                return
            self.taken += 1
            yield item


def autotune(
    work: DecodeWork, machine: Machine, choices: tuple[Any, ...] | None = None, *, seconds: float = TUNE_SECONDS
) -> Tuned:
    """Tunes one batch as a caller would, with as many choices as the time allows."""
    from attnconform.kernels.sparse_attention.autotune import AutotuneCache, Traffic, decode_choices

    offered = decode_choices() if choices is None else choices
    within, cache, started = Until(offered, seconds), AutotuneCache(), time.perf_counter()
    entry = cache.tune(key_of(work, machine), [Traffic(weight=1.0, seconds=lambda c: trial(work, c, machine))], within)
    return Tuned(
        seconds=time.perf_counter() - started,
        tried=within.taken,
        offered=len(offered),
        choice=str(entry.choice),
        safe_us=1e6 * entry.safe_seconds,
        best_us=1e6 * entry.seconds,
    )


def trial(work: DecodeWork, choice: Any, machine: Machine) -> float:
    """Seconds of a run planned with a choice, by the device's clock."""
    taken = measure(PlanRun.sparse(work, choice=choice), machine, seconds=TRIAL_SECONDS, host_events=1)
    return 1e-6 * taken.timing.median


def key_of(work: DecodeWork, machine: Machine) -> Any:
    """What the choice is kept under."""
    from attnconform.kernels.sparse_attention.autotune import tune_key
    from attnconform.kernels.sparse_attention.tuning import Geometry

    s = work.shape
    geometry = Geometry(
        num_qo_heads=s.num_qo_heads, num_kv_heads=s.num_kv_heads, head_dim_qk=s.head_dim, head_dim_vo=s.head_dim,
        element_size=s.dtype.itemsize, sharing="kv_head", tile_kv=None, num_kv_splits=None,
        num_processors=machine.processors,
    )  # fmt: skip
    return tune_key(
        geometry, dtype=s.dtype, page_size=s.page_size, num_rows=s.batch, lengths=work.list_lengths.tolist(),
        device=work.q.device,
    )  # fmt: skip
