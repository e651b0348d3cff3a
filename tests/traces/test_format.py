"""A trace is read whole and right, or refused in one line."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnconform.traces import Histogram, Trace, bundled_traces, read_trace, write_trace

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def folder(trace: Trace, tmp_path: Path) -> Path:
    """A folder of its own with the small trace."""
    write_trace(tmp_path / "small", trace.header, trace.groups)
    return tmp_path / "small"


def table_of(folder: Path) -> Path:
    return next(folder.glob("histograms-*.parquet"))


def edit_header(folder: Path, **changes: object) -> None:
    header = json.loads((folder / "header.json").read_text())
    (folder / "header.json").write_text(json.dumps(header | changes))


def edit_table(folder: Path, edit: Callable[[dict[str, list[Any]]], None]) -> None:
    """Change columns and let the header vouch for the result, as a writer of false tables would."""
    path = table_of(folder)
    columns = pq.read_table(path).to_pydict()
    edit(columns)
    pq.write_table(pa.table(columns), path)
    rows = len(columns["count"])
    edit_header(folder, table_sha256=hashlib.sha256(path.read_bytes()).hexdigest(), table_rows=rows)


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        read_trace(folder)
    return str(caught.value)


def test_a_trace_read_back_is_the_trace_written(trace: Trace, folder: Path) -> None:
    again = read_trace(folder)
    assert again.header == trace.header
    assert again.groups.keys() == trace.groups.keys()
    for key, group in trace.groups.items():
        assert again.groups[key].keys() == group.keys()
        for name, histogram in group.items():
            for part in ("bin_low", "bin_high", "count", "value_sum", "num_rows"):
                assert np.array_equal(getattr(again.groups[key][name], part), getattr(histogram, part))


def test_writing_twice_gives_the_same_bytes(trace: Trace, folder: Path, tmp_path: Path) -> None:
    write_trace(tmp_path / "again", trace.header, trace.groups)
    assert table_of(folder).read_bytes() == table_of(tmp_path / "again").read_bytes()


def test_a_missing_file_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    table = table_of(folder)
    table.unlink()
    assert table.name in refusal(folder)
    assert "header.json" in refusal(tmp_path / "nowhere")


def test_a_truncated_table_is_refused(folder: Path) -> None:
    table = table_of(folder)
    table.write_bytes(table.read_bytes()[:-1])
    assert f"{table}: truncated or edited" in refusal(folder)


def test_one_flipped_bit_of_the_table_is_refused(folder: Path) -> None:
    data = bytearray(table_of(folder).read_bytes())
    data[len(data) // 2] ^= 1
    table_of(folder).write_bytes(bytes(data))
    assert "truncated or edited" in refusal(folder)


def test_a_truncated_header_is_refused(folder: Path) -> None:
    header = folder / "header.json"
    header.write_text(header.read_text()[:-20])
    assert str(header) in refusal(folder)


def test_an_unknown_version_is_refused_with_its_value(folder: Path) -> None:
    edit_header(folder, version=2)
    assert "version is 2" in refusal(folder)


def test_an_unknown_header_field_is_refused(folder: Path) -> None:
    edit_header(folder, tokens=[1, 2, 3])
    assert "tokens" in refusal(folder)


@pytest.mark.parametrize("name", ["../small/x.parquet", "/etc/passwd", "", ".."])
def test_a_header_cannot_point_out_of_its_folder(folder: Path, name: str) -> None:
    edit_header(folder, table=name)
    assert "table is" in refusal(folder)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("count", -1),
        ("num_rows", 19),
        ("bin_low", -1),
        ("bin_high", -5),
        ("value_sum", -1),
        ("given_low", -1),
        ("layer", 2),
        ("kv_head", 1),
        ("phase", "train"),
        ("selector", "none"),
        ("statistic", "token_ids"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_column_row_and_value(folder: Path, column: str, value: object) -> None:
    edit_table(folder, lambda columns: columns[column].__setitem__(3, value))
    message = refusal(folder)
    assert message.startswith(str(table_of(folder)))
    assert f"column {column}, row 3 is {value}" in message


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.5])
def test_a_count_that_is_no_integer_is_named(folder: Path, value: float) -> None:
    def edit(columns: dict[str, list[Any]]) -> None:
        columns["count"] = [float(count) for count in columns["count"]]
        columns["count"][5] = value

    edit_table(folder, edit)
    assert f"column count, row 5 is {value}" in refusal(folder)


def test_a_null_is_named(folder: Path) -> None:
    edit_table(folder, lambda columns: columns["bin_low"].__setitem__(4, None))
    assert "column bin_low, row 4 is null" in refusal(folder)


def test_overlapping_bins_are_refused(folder: Path) -> None:
    def edit(columns: dict[str, list[Any]]) -> None:
        row = next(i for i in range(1, 500) if columns["statistic"][i] == columns["statistic"][i - 1] == "gap")
        columns["bin_low"][row] = columns["bin_low"][row - 1]

    edit_table(folder, edit)
    assert "column bin_low" in refusal(folder)


def test_a_statistic_listed_twice_is_refused(folder: Path) -> None:
    def edit(columns: dict[str, list[Any]]) -> None:
        for values in columns.values():
            values.append(values[0])

    edit_table(folder, edit)
    assert "listed twice" in refusal(folder)


def test_missing_columns_and_empty_tables_are_refused(folder: Path) -> None:
    edit_table(folder, lambda columns: [values.clear() for values in columns.values()] and None)
    assert refusal(folder)
    edit_table(folder, lambda columns: columns.pop("num_rows") and None)
    assert "columns are" in refusal(folder)


def test_a_bad_histogram_never_replaces_a_good_trace(trace: Trace, folder: Path) -> None:
    key = next(iter(trace.groups))
    bad = Histogram(*(np.array([value]) for value in (0, 0, -7, 0, 20)))
    with pytest.raises(ValueError, match="count"):
        write_trace(folder, trace.header, {key: {("gap", 0, 0): bad}})
    assert read_trace(folder).header == trace.header


def test_a_crash_while_writing_leaves_the_old_trace(
    trace: Trace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def fail_on_header(source: Path, target: Path) -> None:
        if Path(target).name == "header.json":
            raise OSError("power cut")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_on_header)
    fewer = dict(list(trace.groups.items())[:1])
    with pytest.raises(OSError, match="power cut"):
        write_trace(folder, trace.header, fewer)
    monkeypatch.undo()
    assert read_trace(folder).groups.keys() == trace.groups.keys()
    write_trace(folder, trace.header, fewer)
    assert read_trace(folder).groups.keys() == fewer.keys()
    assert len(list(folder.iterdir())) == 2


def test_bundled_traces_are_read_through_the_package(tmp_path: Path) -> None:
    traces = bundled_traces()
    assert "gemma3_270m" in traces
    trace = read_trace(traces["gemma3_270m"])
    assert trace.header.source.num_tokens["prefill"] >= 8192
    assert {key.selector for key in trace.groups} == {"block_topk", "token_topk", "window_sink"}
    assert {key.phase for key in trace.groups} == {"prefill", "decode"}
    assert {key.layer for key in trace.groups} == set(range(18))
    # Read from elsewhere, it is the same: nothing depends on where the package lies.
    shutil.copytree(str(traces["gemma3_270m"]), tmp_path / "copy")
    assert read_trace(tmp_path / "copy").header == trace.header
