"""Honest comparisons for a terminal and as JSON."""

from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from attnconform.conformance.cases.structure import Dtype
from attnconform.conformance.judge.honest import COVERED_BY, SLACK, Honesty, Usage, Usages, compare_honest
from attnconform.conformance.judge.honest_outputs import OUTPUTS
from attnconform.conformance.judge.ratio import ratio_text


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
    """Largest error / bound of every output by number of keys, by class, and by family; the verdict; what is slack."""
    console.print(outputs_table(f"{found.dtype}: largest error / bound, worst case | probable", "keys", found.by_keys))
    for name, by_keys in found.by_class.items():
        console.print(outputs_table(f"{found.dtype}, {name}", "keys", by_keys))
    by_family = usage_table(f"{found.dtype}: by family of inputs")
    for family, usage in found.by_family.items():
        add_usage(by_family, family, usage)
    console.print(by_family)
    console.print(
        f"{found.dtype}: {found.total.false_fails} false FAILs and {found.total.past_probable} past the probable bound "
        f"in {found.total.comparisons} comparisons; largest error / bound "
        f"{ratio_text(found.total.worst)} worst-case, {ratio_text(found.total.probable)} probable",
        highlight=False,
    )
    for line in slack_lines(found):
        console.print(line, highlight=False)


def outputs_table(title: str, first: str, rows: dict[int, Usages]) -> Table:
    """A row per number of keys, a column per output."""
    table = Table(title=title)
    for column in (first, *OUTPUTS):
        table.add_column(column, justify="right")
    for keys, usages in rows.items():
        of_outputs = (usages[name] for name in OUTPUTS)
        table.add_row(str(keys), *(f"{ratio_text(used.worst)}|{ratio_text(used.probable)}" for used in of_outputs))
    return table


def slack_lines(found: Honesty) -> list[str]:
    """Which outputs stay under a tenth of their probable bound, where, and what else sees mistakes there."""
    return [
        f"{found.dtype}: {name} stays under {SLACK} of its probable bound at "
        + (f"{', '.join(map(str, lengths))} keys, where {COVERED_BY[name]}" if lengths else "no number of keys")
        for name, lengths in found.slack.items()
    ]


def usage_table(title: str) -> Table:
    """An empty table of usages."""
    table = Table(title=title)
    for column in ("family", "comparisons", "worst-case form", "probable form", "past probable", "false FAILs"):
        table.add_column(column, justify="left" if column == "family" else "right")
    return table


def add_usage(table: Table, name: str, usage: Usage) -> None:
    """One line."""
    ratios = (ratio_text(usage.worst), ratio_text(usage.probable))
    table.add_row(name, str(usage.comparisons), *ratios, str(usage.past_probable), str(usage.false_fails))
