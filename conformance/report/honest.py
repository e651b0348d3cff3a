"""Honest comparisons for a terminal and as JSON."""

from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from attnconform.conformance.cases.structure import Dtype
from attnconform.conformance.judge.honest import SLACK, Honesty, Usage, compare_honest


def honest_command(
    console: Console, *, dtypes: tuple[Dtype, ...], comparisons: int, json_path: Path | None = None
) -> int:
    """Compares, prints and writes; 0 where no honest element is past its worst-case bound, else 1."""
    found = [compare_with_progress(console, dtype, comparisons) for dtype in dtypes]
    for honesty in found:
        print_honesty(console, honesty)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return int(not all(honesty.is_honest for honesty in found))


def compare_with_progress(console: Console, dtype: Dtype, comparisons: int) -> Honesty:
    """The record of one dtype once all of its comparisons are made."""
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"honest {dtype}", total=comparisons)
        for found in compare_honest(dtype, comparisons):
            bar.update(task, completed=min(found.total.comparisons, comparisons))
    return found


def print_honesty(console: Console, found: Honesty) -> None:
    """Largest error / bound by number of keys and by family, and the verdict."""
    by_keys = usage_table(f"{found.dtype}: largest error / bound by number of keys", "keys, output")
    for keys, outputs in found.by_keys.items():
        for name, usage in outputs.items():
            add_usage(by_keys, f"{keys} {name}", usage)
    by_family = usage_table(f"{found.dtype}: by family of inputs", "family")
    for family, usage in found.by_family.items():
        add_usage(by_family, family, usage)
    console.print(by_keys, by_family)
    slack = "; ".join(
        f"{name} stays under {SLACK} of its probable bound at {keys or 'no number of'} keys"
        for name, keys in found.slack.items()
    )
    console.print(
        f"{found.dtype}: {found.total.false_fails} false FAILs and {found.total.past_probable} past the probable bound "
        f"in {found.total.comparisons} comparisons; largest error / bound {found.total.worst:.3f} worst-case, "
        f"{found.total.probable:.3f} probable; {slack}",
        highlight=False,
    )


def usage_table(title: str, first: str) -> Table:
    """An empty table of usages."""
    table = Table(title=title)
    for column in (first, "comparisons", "worst-case form", "probable form", "past probable", "false FAILs"):
        table.add_column(column, justify="left" if column == first else "right")
    return table


def add_usage(table: Table, name: str, usage: Usage) -> None:
    """One line."""
    ratios = (f"{usage.worst:.3f}", f"{usage.probable:.3f}")
    table.add_row(name, str(usage.comparisons), *ratios, str(usage.past_probable), str(usage.false_fails))
