"""A run as a person sees it: progress, matrix, failures, verdict, report."""

import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.bundles import RESULTS, compare_states, faults_of_bundle, merge_runs
from attnconform.conformance.engine import RunOptions, run_matrix
from attnconform.conformance.expectations import load_expectations
from attnconform.conformance.gate import MARGIN, compare_runs, gate_markdown, write_text
from attnconform.conformance.judge.verdict import CaseResult
from attnconform.conformance.report.html import write_html
from attnconform.conformance.report.summary import badge, summary_markdown
from attnconform.conformance.report.terminal import make_progress, print_failures, print_matrix, print_verdict
from attnconform.conformance.report.text import state_text
from attnconform.conformance.results import encode_run, read_run, verdict_of
from attnconform.conformance.selection import own_cases, select_cases


def judge_and_report(
    console: Console,
    *,
    backend: str,
    device: str,
    out: Path,
    level: str,
    workers: int | None,
    select: str = "",
    shard: str = "1/1",
    case_timeout: float = 300.0,
    resume: bool = False,
    expectations: Path | None = None,
) -> int:
    """Runs the matrix, prints it, and writes results.jsonl, junit.xml and report.html; returns the exit code."""
    options = RunOptions(
        backend=backend,
        device=device,
        out=out,
        level=level,
        workers=workers or default_workers(device),
        select=select,
        shard=shard,
        case_timeout=case_timeout,
        resume=resume,
        expectations=expectations,
    )
    loaded = load_backend(backend, device)  # a backend that does not load is said before anything is shown
    loaded.close()
    with console.status("cases of the backend's own domain"):
        own = own_cases(level, select, loaded.capabilities)
    cases = {c.id: c for c in select_cases(level, select, shard, own)}
    if expectations is not None:
        load_expectations(expectations, level=level, backend=backend, device=device, own=own)
    if resume and not (out / "results.jsonl").exists():
        console.print(f"{out} has no results to go on from: every case is judged", highlight=False)
    with make_progress(console) as bar:
        task = bar.add_task(f"judging {backend}", total=len(cases))

        def advance(result: CaseResult, done: int, total: int) -> None:
            bar.update(task, completed=done)
            if result.is_failing:
                bar.console.print(f"{state_text(result)} {result.case_id}", highlight=False)

        verdict, results = run_matrix(options, advance)
    print_matrix(console, cases, results)
    print_failures(console, results, backend)
    run = read_run(out / "results.jsonl")
    write_html(run, out / "report.html")
    write_text(out / "badge.json", badge(run))
    write_text(out / "summary.md", summary_markdown(run))
    print_verdict(console, verdict, results, backend)
    console.print(f"  {out / 'report.html'}", highlight=False)
    return verdict.exit_code


def default_workers(device: str) -> int:
    """One process a core; one in all on a GPU, which the processes would only share."""
    return 1 if device.startswith("cuda") else (os.cpu_count() or 1)


def run_gate(
    console: Console,
    *,
    baseline: Path,
    margin: float | None,
    write_baseline: bool,
    backend: str,
    device: str,
    out: Path,
    level: str,
    workers: int | None,
    select: str,
) -> int:
    """Runs, compares with the baseline, writes gate.md; 0 where nothing got worse."""
    before = None if write_baseline else read_run(baseline)
    code = judge_and_report(
        console, backend=backend, device=device, out=out, level=level, workers=workers, select=select
    )
    now = read_run(out / "results.jsonl")
    if before is None:
        baseline.parent.mkdir(parents=True, exist_ok=True)
        write_text(baseline, (out / "results.jsonl").read_text(encoding="utf-8"))
        console.print(f"baseline written to {baseline}", highlight=False)
        return 3 if code == 3 else 0
    report = compare_runs(before, now, MARGIN if margin is None else margin)
    text = gate_markdown(report, now)
    write_text(out / "gate.md", text)
    console.print(text, highlight=False, markup=False)
    return 3 if code == 3 else int(not report.is_open)


def merge_command(console: Console, folders: list[Path], out: Path) -> int:
    """Writes the joined run and its page; the exit code is its verdict's."""
    run = merge_runs(folders)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RESULTS, encode_run(run).decode())
    write_html(run, out / "report.html")
    verdict = verdict_of(run.results)
    print_verdict(console, verdict, run.results, run.header.backend)
    return verdict.exit_code


def compare_command(console: Console, first: Path, second: Path) -> int:
    """Prints the disagreements of two runs."""
    a, b = read_run(first / RESULTS), read_run(second / RESULTS)
    table = Table(title=f"{a.header.backend} against {b.header.backend}")
    for column in ("case", a.header.backend, f"{b.header.backend} (second)"):
        table.add_column(column, overflow="fold")
    found = compare_states(a, b)
    for entry in found:
        table.add_row(entry.case_id, entry.first, entry.second)
    console.print(table if found else "no case has another state")
    return int(bool(found))


def verify_command(console: Console, folder: Path) -> int:
    """Prints what is wrong with a bundle."""
    faults = faults_of_bundle(folder)
    for fault in faults:
        console.print(fault, style="red", highlight=False)
    console.print("not a whole run of this suite" if faults else "a whole run of this suite")
    return int(bool(faults))


def exec_check_command(console: Console, command: str, *, device: str) -> int:
    """Prints how a program fails to speak the exec protocol."""
    from attnconform.conformance.exec.check import check_program  # needs the extra `exec`

    faults = check_program(command, device=device)
    for fault in faults:
        console.print(fault, style="red", highlight=False, markup=False)
    console.print("does not speak the protocol" if faults else "speaks the protocol")
    return int(bool(faults))
