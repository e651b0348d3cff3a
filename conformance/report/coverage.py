"""The coverage of a level for a terminal and as JSON."""

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.backend import OPTIONAL_AXES, Capabilities
from attnconform.conformance.cases.coverage import (
    Coverage,
    Covered,
    LeftOut,
    OperationCoverage,
    Spanned,
    measure,
    total,
)
from attnconform.conformance.cases.declared import own_domain
from attnconform.conformance.cases.matrix import matrix

MAX_VALUES = 8  # of an axis that a declaration leaves out
MAX_GAPS = 12  # pairs of axes with something uncovered that are shown


def cases_command(console: Console, *, level: str, backend: str | None, device: str, json_path: Path | None) -> int:
    """Prints what a level covers and what a backend leaves out of it; 0. Raises ValueError for an unknown level."""
    cases = matrix(level)
    capabilities = None
    if backend is not None:
        loaded = load_backend(backend, device)
        capabilities = loaded.capabilities
        loaded.close()
    coverage = measure(level, cases, capabilities, backend or "")
    if capabilities is not None:
        coverage = msgspec.structs.replace(coverage, own=spanned(level, capabilities))
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(coverage, order="deterministic")))
    print_coverage(console, coverage)
    return 0


def print_coverage(console: Console, coverage: Coverage) -> None:
    """Values, combinations and gaps of every operation; then what the backend leaves out."""
    for operation in coverage.operations:
        console.print(values_table(coverage.level, operation), combinations_table(operation))
        gaps = gaps_table(operation)
        if gaps.row_count:
            console.print(gaps)
    console.print(f"{coverage.level}: {coverage.cases} cases", highlight=False)
    if coverage.backend is not None:
        console.print(left_out_table(coverage.left_out))
        declared = coverage.cases - coverage.undeclared
        console.print(f"{coverage.backend} declares {declared} of {coverage.cases} cases", highlight=False)
    for own in coverage.own:
        console.print(own_text(own), highlight=False, soft_wrap=True)


def spanned(level: str, capabilities: Capabilities) -> tuple[Spanned, ...]:
    """What the cases of the backend's own domain add at each level."""
    domain = own_domain(level, capabilities)
    return tuple(
        Spanned(
            level=own,
            combinations=tally.possible,
            common=tally.common,
            given_up=tally.given_up,
            cases=sum(case.level == own for case in domain.cases),
        )
        for own, tally in domain.tally.items()
    )


def own_text(own: Spanned) -> str:
    """One level of the own domain in a sentence."""
    held = own.combinations - own.given_up
    return (
        f"{own.level}: of {own.combinations} combinations of declared values {own.common} are held by common cases, "
        f"{held - own.common} more by {own.cases} cases of its own domain"
        + (f", {own.given_up} by none" if own.given_up else "")
    )


def values_table(level: str, operation: OperationCoverage) -> Table:
    """Cases per axis value."""
    table = Table(title=f"{level}, {operation.operation}: {operation.cases} cases by axis value")
    table.add_column("axis")
    table.add_column("cases", overflow="fold")
    for axis, values in operation.values.items():
        table.add_row(axis, ", ".join(f"{value} {count}" for value, count in values.items()))
    return table


def combinations_table(operation: OperationCoverage) -> Table:
    """How many pairs and triples are covered."""
    core = [entry for entry in operation.pairs if not OPTIONAL_AXES.keys() & set(entry.axes)]
    with_features = [entry for entry in operation.pairs if OPTIONAL_AXES.keys() & set(entry.axes)]
    table = Table(title=f"{operation.operation}: combinations of values")
    for column in ("of", "covered", "possible", "share"):
        table.add_column(column, justify="left" if column == "of" else "right")
    for name, entries in (
        ("pairs of core axes", core),
        ("pairs with an optional feature", with_features),
        ("triples of core axes", operation.triples),
    ):
        whole = total(entries)
        table.add_row(name, str(whole.covered), str(whole.possible), share(whole))
    return table


def share(entry: Covered) -> str:
    """Covered of possible, in percent, never rounded up to all."""
    if not entry.possible:
        return ""
    return f"{int(1000 * entry.covered / entry.possible) / 10:.1f} %"


def gaps_table(operation: OperationCoverage) -> Table:
    """Pairs of axes with the most uncovered combinations."""
    table = Table(title=f"{operation.operation}: pairs of axes with gaps")
    for column in ("axes", "covered", "possible"):
        table.add_column(column, justify="left" if column == "axes" else "right")
    gaps = sorted((e for e in operation.pairs if e.covered < e.possible), key=lambda e: e.covered - e.possible)
    for entry in gaps[:MAX_GAPS]:
        table.add_row(" × ".join(entry.axes), str(entry.covered), str(entry.possible))
    return table


def left_out_table(left_out: tuple[LeftOut, ...]) -> Table:
    """Cases that each axis of a declaration leaves out."""
    table = Table(title="left out by the declaration")
    table.add_column("axis")
    table.add_column("cases", justify="right")
    table.add_column("by this axis alone", justify="right")
    table.add_column("undeclared values", overflow="fold")
    for entry in sorted(left_out, key=lambda e: -e.cases):
        shown = [f"{value} {count}" for value, count in entry.values.items()]
        more = [f"and {len(shown) - MAX_VALUES} more"] if len(shown) > MAX_VALUES else []
        table.add_row(entry.axis, str(entry.cases), str(entry.alone), ", ".join([*shown[:MAX_VALUES], *more]))
    return table
