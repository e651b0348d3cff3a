"""A candidate trace on disk: a folder with `header.json` and one Parquet table of histograms.

The table is tidy, a bin to a row, so that any dataframe engine reads it; the header names the table by its hash, and is
written last. Reading checks everything and raises ValueError in one line that names file, column, row and value.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from attnconform.traces.anonymize import Histogram
from attnconform.traces.statistics import STATISTICS, Granularity

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from attnconform.traces.statistics import Ints, Key

VERSION = 1
HEADER_NAME = "header.json"
PHASES = ("prefill", "decode")
TEXT_COLUMNS = ("phase", "selector", "statistic")
INT_COLUMNS = ("layer", "kv_head", "given_low", "given_high", "bin_low", "bin_high", "count", "value_sum", "num_rows")
COLUMNS = ("layer", "kv_head", *TEXT_COLUMNS, *INT_COLUMNS[2:])


class Selector(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A selector and what it was set to, for layers that see everything and for layers with a window."""

    name: str
    granularity: Granularity
    parameters: dict[str, dict[str, int]]


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model that was run; windows has one entry per layer, None where a layer sees all earlier tokens."""

    name: str
    package: str
    sha256: str
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    windows: list[int | None]


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The text that was read, its licence, and how well the model predicted it."""

    text: str
    package: str
    licence: str
    sha256: str
    num_tokens: dict[str, int]
    perplexity: dict[str, float]


class TraceHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trace says of itself. k: no bin of the table comes from fewer rows."""

    version: int
    name: str
    source: Source
    model: Model
    selectors: list[Selector]
    block_size: int
    tile_rows: int
    k: int
    statistics: dict[str, str]
    table: str = ""
    table_sha256: str = ""
    table_rows: int = 0

    def selector(self, name: str) -> Selector:
        """The selector of that name."""
        for selector in self.selectors:
            if selector.name == name:
                return selector
        raise ValueError(f"selector is {name!r}, the trace has {[s.name for s in self.selectors]}")


@dataclass(frozen=True)
class GroupKey:
    """Whose distributions: one layer, KV head, phase and selector."""

    layer: int
    kv_head: int
    phase: str
    selector: str


Groups = Mapping[GroupKey, Mapping["Key", Histogram]]


@dataclass(frozen=True)
class Trace:
    """A header and the histograms of every group."""

    header: TraceHeader
    groups: Groups = field(repr=False)

    def group(self, layer: int, kv_head: int, phase: str, selector: str) -> Mapping[Key, Histogram]:
        """The histograms of one layer, KV head, phase and selector."""
        key = GroupKey(layer, kv_head, phase, selector)
        if key not in self.groups:
            raise ValueError(f"the trace {self.header.name!r} has no {key}")
        return self.groups[key]

    def recorded(self, phase: str, selector: str) -> list[GroupKey]:
        """The groups of a phase and selector, in order of layer and KV head."""
        found = [key for key in self.groups if (key.phase, key.selector) == (phase, selector)]
        if not found:
            raise ValueError(f"the trace {self.header.name!r} has no phase {phase!r} with selector {selector!r}")
        return sorted(found, key=lambda key: (key.layer, key.kv_head))

    @cached_property
    def num_bins(self) -> int:
        """Rows of the table."""
        return sum(len(h.count) for group in self.groups.values() for h in group.values())


def write_trace(
    path: str | os.PathLike[str], header: TraceHeader, groups: Mapping[GroupKey, Mapping[Key, Histogram]]
) -> Trace:
    """The trace as written to the folder. A reader sees the old trace or the new one, never a mixture.

    The table goes first, under a name that holds its hash; renaming the header over the old one is the commit; tables
    that no header names are removed last.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    data = _table_bytes(groups)
    digest = hashlib.sha256(data).hexdigest()
    table = f"histograms-{digest[:12]}.parquet"
    rows = sum(len(h.count) for group in groups.values() for h in group.values())
    full = msgspec.structs.replace(header, version=VERSION, table=table, table_sha256=digest, table_rows=rows)
    # What would be refused when read must not replace a good trace.
    trace = _decode(str(folder / table), full, data)
    _replace(folder / table, data)
    _replace(folder / HEADER_NAME, msgspec.json.format(msgspec.json.encode(full), indent=2) + b"\n")
    for other in folder.glob("histograms-*.parquet"):
        if other.name != table:
            other.unlink()
    return trace


def read_trace(path: str | os.PathLike[str] | Traversable) -> Trace:
    """The trace in a folder, which may be a package resource.

    Raises ValueError where a file is missing, truncated, edited or of another version, or a value cannot be.
    """
    folder = Path(path) if isinstance(path, (str, os.PathLike)) else path
    header = _read_header(folder)
    name = f"{folder}/{header.table}"
    data = _read(folder, header.table)
    digest = hashlib.sha256(data).hexdigest()
    if digest != header.table_sha256:
        want = header.table_sha256
        raise ValueError(f"{name}: truncated or edited: sha256 is {digest}, but {HEADER_NAME} says {want}")
    return _decode(name, header, data)


def _read(folder: Traversable, name: str) -> bytes:
    try:
        return folder.joinpath(name).read_bytes()
    except OSError as error:
        raise ValueError(f"{folder}/{name}: cannot be read: {error.strerror or error}") from error


def _read_header(folder: Traversable) -> TraceHeader:
    name = f"{folder}/{HEADER_NAME}"
    data = _read(folder, HEADER_NAME)
    try:
        version = msgspec.json.decode(data, type=dict[str, Any]).get("version")
        if version != VERSION:
            raise ValueError(f"{name}: version is {version!r}, this package reads {VERSION}")
        header = msgspec.json.decode(data, type=TraceHeader)
    except msgspec.DecodeError as error:
        raise ValueError(f"{name}: {error}") from error
    _check_header(name, header)
    return header


def _check_header(name: str, header: TraceHeader) -> None:
    numbers = {part: getattr(header, part) for part in ("block_size", "tile_rows", "k")}
    numbers |= {f"model.{part}": getattr(header.model, part) for part in ("num_qo_heads", "num_kv_heads", "head_dim")}
    for what, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}: {what} is {number}, want at least 1")
    for layer, window in enumerate(header.model.windows):
        if window is not None and window < 1:
            raise ValueError(f"{name}: model.windows[{layer}] is {window}, want at least 1 or null")
    # The table lies beside its header, whatever the header says.
    if Path(header.table).name != header.table or header.table in ("", ".."):
        raise ValueError(f"{name}: table is {header.table!r}, want the name of a file beside it")


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _table_bytes(groups: Groups) -> bytes:
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for group in sorted(groups, key=lambda g: (g.selector, g.phase, g.kv_head, g.layer)):
        for statistic, given_low, given_high in sorted(groups[group]):
            h = groups[group][statistic, given_low, given_high]
            n = len(h.count)
            same = (group.layer, group.kv_head, group.phase, group.selector, statistic, given_low, given_high)
            for name, value in zip(COLUMNS, same, strict=False):
                columns[name] += [value] * n
            for name in ("bin_low", "bin_high", "count", "value_sum", "num_rows"):
                columns[name] += getattr(h, name).tolist()
    types = {name: pa.string() if name in TEXT_COLUMNS else pa.int64() for name in COLUMNS}
    table = pa.table({name: pa.array(columns[name], types[name]) for name in COLUMNS})
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", compression_level=19, write_statistics=False)
    return sink.getvalue()


def _decode(name: str, header: TraceHeader, data: bytes) -> Trace:
    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{name}: not a Parquet table: {str(error).splitlines()[0]}") from error
    columns = _columns(name, table)
    if not table.num_rows:
        raise ValueError(f"{name}: has no rows")
    if table.num_rows != header.table_rows:
        raise ValueError(f"{name}: has {table.num_rows} rows, but {HEADER_NAME} says {header.table_rows}")
    _check_values(name, header, columns)
    starts = _group_starts(columns)
    _check_bins(name, columns, starts)
    return Trace(header, _histograms(name, columns, starts))


def _columns(name: str, table: pa.Table) -> dict[str, Any]:
    if tuple(table.column_names) != COLUMNS:
        raise ValueError(f"{name}: columns are {table.column_names}, want {list(COLUMNS)}")
    out: dict[str, Any] = {}
    for column in COLUMNS:
        values = table.column(column)
        if values.null_count:
            row = values.is_null().to_pylist().index(True)
            raise ValueError(f"{name}: column {column}, row {row} is null")
        want = pa.string() if column in TEXT_COLUMNS else pa.int64()
        if values.type != want:
            row, value = _first_misfit(values.to_pylist())
            raise ValueError(f"{name}: column {column}, row {row} is {value!r}, want {want}, got {values.type}")
        out[column] = np.array(values.to_pylist(), dtype=object if column in TEXT_COLUMNS else np.int64)
    return out


def _first_misfit(values: list[Any]) -> tuple[int, Any]:
    """The first value that no integer column could hold; else the first of all: then the type alone is wrong."""
    for row, value in enumerate(values):
        if not isinstance(value, int) and not (isinstance(value, float) and value.is_integer()):
            return row, value
    return 0, values[0] if values else None


def _check_values(name: str, header: TraceHeader, columns: dict[str, Any]) -> None:
    selectors = [s.name for s in header.selectors]
    ranges = (
        ("layer", (columns["layer"] >= 0) & (columns["layer"] < len(header.model.windows)), "a layer of the model"),
        (
            "kv_head",
            (columns["kv_head"] >= 0) & (columns["kv_head"] < header.model.num_kv_heads),
            "a KV head of the model",
        ),
        ("phase", np.isin(columns["phase"], PHASES), f"one of {list(PHASES)}"),
        ("selector", np.isin(columns["selector"], selectors), f"one of {selectors}"),
        ("statistic", np.isin(columns["statistic"], list(STATISTICS)), "a known statistic"),
        ("given_low", columns["given_low"] >= 0, "at least 0"),
        ("given_high", columns["given_high"] >= columns["given_low"], "at least given_low"),
        ("bin_low", columns["bin_low"] >= 0, "at least 0"),
        ("bin_high", columns["bin_high"] >= columns["bin_low"], "at least bin_low"),
        ("count", columns["count"] >= columns["num_rows"], "at least num_rows"),
        ("value_sum", _between(columns), "count times bin_low to count times bin_high"),
        ("num_rows", columns["num_rows"] >= header.k, f"at least k = {header.k}"),
    )
    for column, good, want in ranges:
        if not good.all():
            row = int(np.argmin(good))
            raise ValueError(f"{name}: column {column}, row {row} is {columns[column][row]}, want {want}")


def _within(values: Ints, stop: int) -> NDArray[np.bool_]:
    return (values >= 0) & (values < stop)


def _between(columns: dict[str, Any]) -> NDArray[np.bool_]:
    mean = columns["value_sum"] / np.maximum(columns["count"], 1)
    return np.asarray((mean >= columns["bin_low"]) & (mean <= columns["bin_high"]))


def _group_starts(columns: dict[str, Any]) -> Ints:
    """Rows where another histogram starts; the last entry is the number of rows."""
    same = [columns[c][1:] == columns[c][:-1] for c in COLUMNS[:7]]
    return np.concatenate([[0], np.flatnonzero(~np.logical_and.reduce(same)) + 1, [len(columns["layer"])]]).astype(
        np.int64
    )


def _check_bins(name: str, columns: dict[str, Any], starts: Ints) -> None:
    inside = np.ones(len(columns["layer"]), bool)
    inside[starts[:-1]] = False
    overlaps = np.flatnonzero(inside[1:] & (columns["bin_low"][1:] <= columns["bin_high"][:-1])) + 1
    if len(overlaps):
        row = int(overlaps[0])
        value, before = columns["bin_low"][row], columns["bin_high"][row - 1]
        raise ValueError(
            f"{name}: column bin_low, row {row} is {value}, want above {before}, where the bin before ends"
        )


def _histograms(name: str, columns: dict[str, Any], starts: Ints) -> dict[GroupKey, dict[Key, Histogram]]:
    groups: dict[GroupKey, dict[Key, Histogram]] = {}
    for low, high in itertools.pairwise(starts):
        layer, kv_head, phase, selector, statistic, given_low, given_high = (columns[c][low] for c in COLUMNS[:7])
        bins = (columns[c][low:high] for c in ("bin_low", "bin_high", "count", "value_sum", "num_rows"))
        group = groups.setdefault(GroupKey(int(layer), int(kv_head), phase, selector), {})
        key = (cast("str", statistic), int(given_low), int(given_high))
        if key in group:
            raise ValueError(f"{name}: column statistic, row {low} is {statistic!r} of {key[1:]}, listed twice")
        group[key] = Histogram(*bins)
    return groups
