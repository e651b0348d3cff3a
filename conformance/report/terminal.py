"""The matrix on a terminal: clause areas by dtype, then what failed, then the verdict."""

from collections import Counter, defaultdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from attnconform.conformance.cases.structure import Case, Dtype
from attnconform.conformance.judge.ratio import ratio_text
from attnconform.conformance.judge.verdict import NOT_RUN, CaseResult
from attnconform.conformance.report.html import largest_usage
from attnconform.conformance.report.text import expected_text, finding_text, repro_command, state_text
from attnconform.conformance.results import Verdict

DTYPES: tuple[Dtype, ...] = ("float32", "bfloat16", "float16")
MAX_FAILURES = 20


def make_progress(console: Console) -> Progress:
    """A progress bar that says what fails as it fails."""
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
    )


def print_matrix(console: Console, cases: dict[str, Case], results: list[CaseResult]) -> None:
    """Conforming / judged for every clause area and dtype; a dot where nothing was judged.

    A failing case counts in the areas of the clauses that it names, and in no other: of those it shows nothing.
    """
    ran: dict[str, Counter[str]] = defaultdict(Counter)
    good: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        if result.state in NOT_RUN:
            continue
        dtype = cases[result.case_id].structure.dtype
        clauses = result.clauses if result.is_conforming else result.named_clauses
        for area in {clause.split("-")[0] for clause in clauses}:
            ran[area][dtype] += 1
            good[area][dtype] += result.is_conforming
    table = Table(title="conforming / judged, by clause area and dtype")
    table.add_column("area")
    for dtype in DTYPES:
        table.add_column(dtype, justify="right")
    for area in sorted(ran):
        table.add_row(area, *(cell(good[area][d], ran[area][d]) for d in DTYPES))
    console.print(table)


def cell(good: int, ran: int) -> str:
    """One cell of the matrix."""
    if not ran:
        return "[dim]·[/]"
    colour = "green" if good == ran else "red"
    return f"[{colour}]{good}/{ran}[/]"


def print_failures(console: Console, results: list[CaseResult], backend: str, folder: Path | None = None) -> None:
    """The first failures in full, and how many more there are; what was expected to fail apart from them.

    `folder`: where results.jsonl lies. What is there to be copied stays on one line, whatever the terminal's width.
    """
    failing = [r for r in results if r.is_failing]
    for result in failing[:MAX_FAILURES]:
        console.print(f"[red]{state_text(result)}[/] {result.case_id}", highlight=False)
        for finding in result.findings[:3]:
            console.print(f"  {finding_text(finding)}", highlight=False, markup=False)
        again = repro_command(result.case_id, backend, folder)
        console.print(f"  reproduce: {again}", highlight=False, markup=False, soft_wrap=True)
    if len(failing) > MAX_FAILURES:
        console.print(f"... and {len(failing) - MAX_FAILURES} more, in results.jsonl and report.html")
    print_expected(console, [r for r in results if r.is_expected_failure])


def print_expected(console: Console, results: list[CaseResult]) -> None:
    """Expected failures, a line each."""
    if results:
        console.print(f"expected failures ({len(results)})")
    for result in results[:MAX_FAILURES]:
        console.print(f"  {expected_text(result)}", highlight=False, markup=False)
    if len(results) > MAX_FAILURES:
        console.print(f"  ... and {len(results) - MAX_FAILURES} more, in results.jsonl and report.html")


def print_verdict(console: Console, verdict: Verdict, results: list[CaseResult], backend: str) -> None:
    """One line of verdict, with the declared share beside it, and one of counts."""
    colour = {"CONFORMING": "green", "NOT CONFORMING": "red"}.get(verdict.words, "yellow")
    console.print(
        f"[bold {colour}]{backend}: {verdict.words}[/] on {verdict.ran} cases; "
        f"declares {verdict.declared_text}" + (f"; {verdict.expected} fail as expected" if verdict.expected else ""),
        highlight=False,
    )
    counts = Counter(result.state for result in results)
    console.print("  " + ", ".join(f"{state} {n}" for state, n in counts.most_common()), highlight=False)
    usage = largest_usage(results)
    for i, form in enumerate(("worst-case", "probabilistic") if usage else ()):
        text = ", ".join(f"{name} {ratio_text(pair[i])}" for name, pair in usage.items())
        console.print(f"  max error / {form} bound: {text}", highlight=False)
