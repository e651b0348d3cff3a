"""Measured choices of tiles, warps, stages and splits: kept per machine, compiler, geometry and candidates.

A choice that was the fastest on one architecture, under one compiler, for one distribution of lists, says nothing about
another, so that all of this is in its key, and an entry of another architecture or compiler is refused where a file is
read. While nothing is measured for a key, a safe configuration is served, `NO_CHOICE`, which leaves everything to
`tuning`; what was asked for is remembered, and measured when the caller has time. A choice is the one that takes least
over traffic, each call weighted by how often it occurs. [PLAN-KEY]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import ceil, inf, sqrt
from pathlib import Path

import torch
import triton

from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.tuning import NO_CHOICE, Choice, Geometry, power_of_two_from

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """Lengths of the lists of a call, coarsely: powers of two, so that like calls share a choice."""

    mean: int
    p95: int
    longest: int
    dispersion: int  # standard deviation over mean, in quarters

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Distribution:
        """Of the lists of one call; of no list, all 0."""
        if not lengths:
            return cls(mean=0, p95=0, longest=0, dispersion=0)
        ordered = sorted(lengths)
        mean = sum(ordered) / len(ordered)
        spread = sqrt(sum((n - mean) ** 2 for n in ordered) / len(ordered))
        return cls(
            mean=power_of_two_from(round(mean)),
            p95=power_of_two_from(ordered[ceil(0.95 * len(ordered)) - 1]),
            longest=power_of_two_from(ordered[-1]),
            dispersion=round(4 * spread / mean) if mean else 0,
        )


@dataclass(frozen=True, kw_only=True)
class TuneKey:
    """What a choice depends on."""

    architecture: str  # such as sm_90
    compiler: str  # such as triton 3.6.0
    dtype: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    page_size: int
    sharing: str
    is_quantized: bool
    has_score_rules: bool
    num_rows: int  # a power of two
    lists: Distribution


def tune_key(
    geometry: Geometry, *, dtype: torch.dtype, page_size: int, num_rows: int, lengths: Sequence[int],
    device: torch.device,
) -> TuneKey:  # fmt: skip
    """The key of a call on this machine."""
    return TuneKey(
        architecture=architecture_of(device),
        compiler=compiler_version(),
        dtype=str(dtype).removeprefix("torch."),
        num_qo_heads=geometry.num_qo_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim_qk=geometry.head_dim_qk,
        head_dim_vo=geometry.head_dim_vo,
        page_size=page_size,
        sharing=geometry.sharing or "dense",
        is_quantized=geometry.is_quantized,
        has_score_rules=geometry.has_score_rules,
        num_rows=power_of_two_from(num_rows),
        lists=Distribution.of(lengths),
    )


def architecture_of(device: torch.device) -> str:
    """What code is generated for: sm_90, gfx942, or the name of a device without a compiler."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "gcnArchName", "") or f"sm_{properties.major}{properties.minor}"


def compiler_version() -> str:
    return f"triton {triton.__version__}"


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One call of a workload, and how often it occurs."""

    weight: float
    seconds: Callable[[Choice], float]  # plans with a choice, runs, and says how long a run takes


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The best choice for a key, and what it and the safe configuration take, weighted."""

    choice: Choice
    seconds: float
    safe_seconds: float


@dataclass
class AutotuneCache:
    """Choices measured so far, and keys that were asked for without one."""

    entries: dict[TuneKey, Entry] = field(default_factory=dict)
    pending: dict[TuneKey, int] = field(default_factory=dict)  # how often each was asked for

    def serve(self, key: TuneKey) -> Choice:
        """What to plan with now: the measured choice, or the safe one while there is none."""
        if key in self.entries:
            return self.entries[key].choice
        self.pending[key] = self.pending.get(key, 0) + 1
        return NO_CHOICE

    def tune(self, key: TuneKey, traffic: Sequence[Traffic], choices: Iterable[Choice]) -> Entry:
        """Measures the choices over the traffic and keeps the best. The safe one is among them, and wins a tie.

        A choice that a compiler or a launch refuses is left out. Raises PlanError for traffic without weight.
        """
        if not sum(call.weight for call in traffic) > 0:
            raise PlanError("PLAN-KEY", "traffic", len(traffic), "there must be a call of a weight above 0")
        safe = weighted_seconds(traffic, NO_CHOICE)
        best, least = NO_CHOICE, safe
        for choice in choices:
            taken = _try(traffic, choice)
            if taken < least:
                best, least = choice, taken
        self.entries[key] = Entry(choice=best, seconds=least, safe_seconds=safe)
        self.pending.pop(key, None)
        return self.entries[key]

    def save(self, path: Path) -> None:
        """All entries as JSON."""
        rows = [{"key": asdict(key), "entry": asdict(entry)} for key, entry in self.entries.items()]
        path.write_text(json.dumps({"format": FORMAT, "entries": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path, *, device: torch.device) -> AutotuneCache:
        """Entries of a file. Raises PlanError for the first one of another architecture or compiler. [PLAN-KEY]"""
        document = json.loads(path.read_text())
        if document.get("format") != FORMAT:
            raise PlanError("PLAN-KEY", "format", document.get("format"), f"{path.name} must have format {FORMAT}")
        entries = [_read(row) for row in document["entries"]]
        here = {"architecture": architecture_of(device), "compiler": compiler_version()}
        for at, (key, _) in enumerate(entries):
            for name, value in here.items():
                if getattr(key, name) != value:
                    raise PlanError("PLAN-KEY", f"entries.{name}", getattr(key, name), f"this is {value}", (at,))
        return cls(dict(entries))


def seconds_of(make: Callable[[Choice], Callable[[], object]]) -> Callable[[Choice], float]:
    """What a run takes on a GPU, by its events: `make` plans with a choice and gives the run. For Traffic.seconds."""
    return lambda choice: float(triton.testing.do_bench(make(choice), return_mode="median")) / 1000


def weighted_seconds(traffic: Sequence[Traffic], choice: Choice) -> float:
    """Mean seconds of a call under a choice."""
    total = sum(call.weight for call in traffic)
    return sum(call.weight * call.seconds(choice) for call in traffic) / total


def _try(traffic: Sequence[Traffic], choice: Choice) -> float:
    """Infinite where the choice asks for more than the device has, or for what a plan refuses."""
    try:
        return weighted_seconds(traffic, choice)
    except (triton.runtime.errors.OutOfResources, triton.CompilationError, PlanError):
        return inf


def _read(row: dict[str, dict[str, object]]) -> tuple[TuneKey, Entry]:
    """A key and an entry as they were saved."""
    key, entry = dict(row["key"]), dict(row["entry"])
    for cls, got in ((TuneKey, key), (Entry, entry)):
        missing = [f.name for f in fields(cls) if f.name not in got]
        if missing:
            raise PlanError("PLAN-KEY", missing[0], None, f"an entry has no {missing[0]}")
    lists, choice = key.pop("lists"), entry.pop("choice")
    assert isinstance(lists, dict)
    assert isinstance(choice, dict)
    return TuneKey(**key, lists=Distribution(**lists)), Entry(**entry, choice=Choice(**choice))  # type: ignore[arg-type]


def decode_choices() -> tuple[Choice, ...]:
    """Configurations of a decode tile that are worth measuring."""
    return tuple(
        Choice(tile_kv=tile_kv, num_warps=num_warps, num_stages=num_stages)
        for tile_kv in (32, 64, 128)
        for num_warps in (2, 4, 8)
        for num_stages in (2, 3, 4, 5)
    )
