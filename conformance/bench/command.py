"""`attnconform bench`: runs suites, prints a table, writes JSON."""

import platform
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from attnconform.conformance.bench.decode import decode_rows, index_rows
from attnconform.conformance.bench.prefill import prefill_rows
from attnconform.conformance.bench.row import BenchReport, BenchRow
from attnconform.conformance.bench.timing import measure_ceilings
from attnconform.conformance.gate import write_text

SUITES: dict[str, Callable[[str | None], Iterator[BenchRow]]] = {
    "seed64k": decode_rows,
    "index": index_rows,
    "prefill": prefill_rows,
}
PACKAGES = ("torch", "triton", "numpy", "flashinfer-python", "fla-core")


def bench_command(console: Console, *, suites: tuple[str, ...], peer: str | None, json_path: Path | None) -> int:
    """Runs suites on this machine's GPU. Raises ValueError where there is none."""
    if not torch.cuda.is_available():
        raise ValueError("bench needs a GPU, and torch sees none: times from an interpreter would mean nothing")
    ceilings = measure_ceilings()
    rows: list[BenchRow] = []
    for suite in suites:
        for row in SUITES[suite](peer):
            rows.append(row)
            console.print(line_of(row), highlight=False)
    report = BenchReport(
        date=datetime.now(UTC).date().isoformat(),
        device=torch.cuda.get_device_name(),
        driver=driver_version(),
        versions={"python": platform.python_version()} | installed_versions(),
        ceilings=ceilings,
        rows=rows,
    )
    console.print(table_of(report))
    if json_path is not None:
        write_text(json_path, msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    return 0


def line_of(row: BenchRow) -> str:
    """A row while the suite runs."""
    peer = (
        f", {row.peer_name} {row.peer.median:.1f} us" if row.peer else (f", {row.peer_error}" if row.peer_error else "")
    )
    return f"{row.suite}: {row.work}: {row.stage}: {row.ours.median:.1f} us{peer} {row.check}"


def table_of(report: BenchReport) -> Table:
    """All rows, with ratios and shares of the ceilings."""
    c = report.ceilings
    title = (
        f"{report.device}: copy {c.copy_bytes_per_second / 1e12:.2f} TB/s, bf16 matmul "
        f"{c.matmul_flops_per_second / 1e12:.0f} TFLOP/s"
    )
    table = Table(title=title)
    for column in ("work", "stage", "ours us", "P99", "host us", "peer", "peer us", "x faster", "% copy", "% matmul"):
        table.add_column(column, justify="left" if column in ("work", "stage", "peer") else "right")
    for r in report.rows:
        attention = r.stage.startswith("attention")
        table.add_row(
            r.work, r.stage, f"{r.ours.median:.1f}", f"{r.ours.p99:.1f}", f"{r.ours.host_median:.1f}", r.peer_name,
            f"{r.peer.median:.1f}" if r.peer else "-", f"{r.speedup:.2f}" if r.speedup else "-",
            f"{r.copy_share(c):.0%}" if attention else "", f"{r.matmul_share(c):.0%}" if attention else "",
        )  # fmt: skip
    return table


def installed_versions() -> dict[str, str]:
    """Versions of what is timed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def driver_version() -> str:
    """The driver, as the system's tool names it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
