"""`attnconform spec`: the clauses, and what answers to each."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

import attnconform
from attnconform.conformance.clauses import CLAUSES, coverage, problems
from attnconform.conformance.deviations import DEVIATIONS
from attnconform.conformance.judge import judge  # noqa: F401  importing the judge registers its checks

PACKAGE = Path(attnconform.__file__).parent
CITING_FOLDERS = ("reference", "conformance", "kernels", "traces")


def print_clauses(console: Console) -> int:
    """Every clause with its one sentence."""
    for clause in CLAUSES.values():
        console.print(f"{clause.id}: {clause.title}", highlight=False)
    return 0


def print_coverage(console: Console) -> int:
    """Clause, reference function, checks and deviations; 1 where one is missing or a citation is unknown."""
    by_clause: dict[str, set[str]] = {}
    for deviation in DEVIATIONS.values():
        by_clause.setdefault(deviation.clause, set()).add(deviation.id)
    table = Table(title=f"{len(CLAUSES)} clauses")
    for column in ("clause", "reference", "checks", "deviations"):
        table.add_column(column, overflow="fold")
    for covered in coverage(by_clause):
        reference = (covered.reference or "-").removeprefix("attnconform.reference.")
        names = ", ".join(check.rsplit(".", 1)[-1] for check in covered.checks)
        table.add_row(covered.clause.id, reference, names or "-", ", ".join(covered.deviations) or "-")
    console.print(table)
    owed = problems(by_clause, [PACKAGE / folder for folder in CITING_FOLDERS])
    for problem in owed:
        console.print(f"[red]{problem}[/]", highlight=False)
    return int(bool(owed))
