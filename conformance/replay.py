"""`attnconform replay`: a backend judged on candidates synthesized from a trace, and what those candidates cost."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.cases.from_trace import TILE_KV, touched, trace_cases
from attnconform.conformance.cases.structure import REPLAYED, Case
from attnconform.conformance.gate import write_text
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.verdict import CaseResult
from attnconform.conformance.report.html import write_html
from attnconform.conformance.report.terminal import make_progress, print_failures, print_verdict
from attnconform.conformance.results import (
    Footer,
    Header,
    ResultLine,
    Run,
    encode_run,
    make_header,
    read_run,
    verdict_of,
)
from attnconform.traces import GroupKey, Trace, bundled_traces, compare, compare_uniform, read_trace


def open_trace(name: Path) -> Trace:
    """A trace by path, or a bundled one by name. Raises ValueError where it cannot be read."""
    bundled = bundled_traces()
    return read_trace(bundled[name.name] if not name.exists() and name.name in bundled else name)


def replay_trace(
    console: Console, name: Path, *, backend: str, device: str, seed: int, max_cases: int, out: Path
) -> int:
    """Judges, prints fidelity, cost and verdict, writes results.jsonl and report.html; returns the exit code."""
    trace = open_trace(name)
    cases = trace_cases(trace, seed=seed, max_cases=max_cases)
    subject = load_backend(backend, device)
    print_fidelity(console, trace, seed)
    print_cost(console, cases)
    results = []
    with make_progress(console) as bar:
        for case in bar.track(cases, description=f"judging {backend}"):
            results.append(judge_case(case, subject))
    write_results(out, make_header(subject, REPLAYED, cases, len(cases)), cases, results)
    verdict = verdict_of(results)
    print_failures(console, results, backend, out)
    print_verdict(console, verdict, results, backend)
    return verdict.exit_code


def write_results(out: Path, header: Header, cases: list[Case], results: list[CaseResult]) -> None:
    """results.jsonl, whole or not at all, and the page made from it."""
    counts: dict[str, int] = {}
    for result in results:
        counts[result.state] = counts.get(result.state, 0) + 1
    footer = Footer(counts=counts, seconds=sum(r.seconds for r in results))
    lines = [ResultLine(case=c, result=r) for c, r in zip(cases, results, strict=True)]
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "results.jsonl", encode_run(Run(header, tuple(lines), footer)).decode())
    write_html(read_run(out / "results.jsonl"), out / "report.html")


def print_fidelity(console: Console, trace: Trace, seed: int) -> None:
    """How near the synthesized rows come to the recorded ones, beside uniformly random rows of the same counts."""
    table = Table(title=f"{trace.header.name}: largest distance of a statistic, 0 to 1")
    for column in ("phase", "selector", "synthesized", "", "uniform", ""):
        table.add_column(column)
    shown: dict[tuple[str, str], GroupKey] = {}
    for group in sorted(trace.groups, key=lambda g: (g.phase, g.selector, g.layer, g.kv_head)):
        shown.setdefault((group.phase, group.selector), group)
    for (phase, selector), group in shown.items():
        ours, uniform = compare(trace, group, seed=seed).worst, compare_uniform(trace, group, seed=seed).worst
        table.add_row(phase, selector, f"{ours[1]:.3f}", ours[0], f"{uniform[1]:.3f}", uniform[0])
    console.print(table)


def print_cost(console: Console, cases: list[Case]) -> None:
    """What the candidates make a kernel touch, by selector: keys, pages, bytes, and how full its tiles are."""
    table = Table(title=f"what a list touches (tiles of {TILE_KV} packed keys, or whole pages)")
    for column in ("phase", "granularity", "lists", "keys mean", "keys P95", "pages mean", "KiB mean", "page use"):
        table.add_column(column, justify="right")
    kinds: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        kinds.setdefault((case.axes["phase"], case.axes["granularity"]), []).append(case)
    for (phase, granularity), group in sorted(kinds.items()):
        pairs = np.array([pair for case in group for pair in touched(case)])
        keys, pages = pairs[:, 0], pairs[:, 1]
        structure = group[0].structure
        kib = pages.mean() * structure.page_size * (structure.head_dim_qk + structure.head_dim_vo) * 2 / 1024
        use = keys.sum() / (pages.sum() * structure.page_size)
        table.add_row(
            phase, granularity, str(len(pairs)), f"{keys.mean():.0f}", f"{np.quantile(keys, 0.95):.0f}",
            f"{pages.mean():.1f}", f"{kib:.0f}", f"{use:.0%}",
        )  # fmt: skip
    console.print(table)
