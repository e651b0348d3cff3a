"""What a measurement of detectability found, for a terminal."""

from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from attnconform.conformance.cases.detectability import Measured, measure_all, read, vacuous
from attnconform.conformance.selection import select_cases


def detectability_command(
    console: Console, *, json_path: Path, select: str = "", shard: str = "1/1", quick: bool = False
) -> int:
    """Measures what the file has not, and prints what it then holds of the selection; 1 where a case is vacuous."""
    cases = [case for case in select_cases("L1", select, shard) if case.operation in ("forward", "backward")]
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("detectability", total=len(cases))
        for case_id, _ in measure_all(cases, json_path, quick=quick):
            bar.update(task, advance=1, description=case_id)
    found = read(json_path)
    found = {case.id: found[case.id] for case in cases}
    console.print(kinds_table(found))
    missed = vacuous(found)
    for case_id in missed:
        console.print(
            f"{case_id}: no deviation of its clauses moves it by twice its bound", style="red", highlight=False
        )
    complete = sum(measured.complete for measured in found.values())
    able = f"{len(found) - len(missed)} of {len(found)} cases can fail something"
    console.print(f"{able}; {complete} measured on all of their clauses", highlight=False)
    return int(bool(missed))


def kinds_table(found: dict[str, Measured]) -> Table:
    """How clauses show on cases."""
    kinds = Counter(
        detection.kind if detection.is_enough else "too little"
        for measured in found.values()
        for detection in measured.clauses.values()
    )
    table = Table(title="what shows most of a clause on a case")
    table.add_column("kind")
    table.add_column("clauses × cases", justify="right")
    for kind, times in kinds.most_common():
        table.add_row(kind, str(times))
    return table
