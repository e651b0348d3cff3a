"""The suite's own power: every deviation must be caught by a check of its clause, every faithful variant accepted."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import msgspec
import torch
from rich.console import Console
from rich.progress import Progress

from attnconform.conformance.cases.matrix import matrix
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.deviations import DEVIATIONS, VARIANTS, Deviation, Variant
from attnconform.conformance.deviations.judging import score_policies
from attnconform.conformance.deviations.records import DeviationScore, KillMatrix, VariantScore
from attnconform.conformance.deviations.seeds import score_under_seeds
from attnconform.conformance.deviations.tables import render
from attnconform.conformance.report.kill_html import write_kill_html

Progressing = Callable[[str, int, int], None]  # id of what is finished, how many are, of how many
WORKER_CASES: list[Case] = []  # a worker process's own copy, so that cases travel once


def run(
    deviations: Sequence[Deviation],
    variants: Sequence[Variant],
    cases: Sequence[Case],
    *,
    seeds: int = 1,
    processes: int = 1,
    progress: Progressing | None = None,
) -> KillMatrix:
    """Judges every deviation on cases of its clause until a check of the clause kills it, and every variant.

    With several seeds every deviation has to be killed under each, first of all on the cases that killed it under the
    first; a variant sees another sample of the cases under each. Raises ValueError without cases.
    """
    if not cases:
        raise ValueError("cases is empty: nothing can be caught")
    entries: list[Deviation | Variant] = [*deviations, *variants]
    scores = score_all(entries, cases, seeds, processes, progress or (lambda *_: None))
    of_deviations = tuple(s for s in scores if isinstance(s, DeviationScore))
    of_variants = tuple(s for s in scores if isinstance(s, VariantScore))
    return KillMatrix(
        deviations=of_deviations,
        variants=of_variants,
        survivors=tuple(s.id for s in of_deviations if s.outcome == "survived"),
        unrelated_only=tuple(s.id for s in of_deviations if s.outcome == "unrelated_only"),
        rejected_variants=tuple(s.id for s in of_variants if s.rejections),
        harness_errors=tuple(error for s in of_deviations for error in s.harness_errors),
        policies=score_policies(of_deviations, of_variants),
        seeds=seeds,
        escaped=tuple(s.id for s in of_deviations if s.outcome == "killed" and s.escaped_seeds),
    )


def score_all(
    entries: Sequence[Deviation | Variant], cases: Sequence[Case], seeds: int, processes: int, progress: Progressing
) -> list[DeviationScore | VariantScore]:
    """Scores in the order of the entries."""
    scores: dict[int, DeviationScore | VariantScore] = {}
    if processes == 1:
        for i, entry in enumerate(entries):
            scores[i] = score_under_seeds(entry, cases, seeds)
            progress(entry.id, len(scores), len(entries))
        return list(scores.values())
    # spawned, not forked: torch's threads do not survive a fork
    pool = ProcessPoolExecutor(processes, get_context("spawn"), start_worker, (list(cases),))
    with pool:
        waiting = {pool.submit(score_in_worker, entry, seeds): i for i, entry in enumerate(entries)}
        for future in as_completed(waiting):
            i = waiting[future]
            scores[i] = future.result()
            progress(entries[i].id, len(scores), len(entries))
    return [scores[i] for i in range(len(entries))]


def start_worker(cases: list[Case]) -> None:
    """Prepares a worker process; one thread each, or they would take each other's cores."""
    torch.set_num_threads(1)
    WORKER_CASES[:] = cases


def score_in_worker(entry: Deviation | Variant, seeds: int) -> DeviationScore | VariantScore:
    return score_under_seeds(entry, WORKER_CASES, seeds)


def kill_matrix_command(
    json_path: Path | None = None,
    *,
    html_path: Path | None = None,
    level: str = "L1",
    select: str = "",
    seeds: int = 1,
    processes: int = 2,
    console: Console | None = None,
) -> int:
    """Runs the whole matrix, prints and writes it; the exit code: 0 where all is as it must be, else 1.

    `select` keeps deviations and variants whose id or clause holds it. Raises ValueError where nothing is left.
    """
    console = console or Console()
    deviations = [d for d in DEVIATIONS.values() if select in d.id or select in d.clause]
    variants = [v for v in VARIANTS.values() if select in v.id]
    if not deviations and not variants:
        raise ValueError(f"select is {select!r}, and no deviation or variant has that in its id or clause")
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("kill matrix", total=len(deviations) + len(variants))

        def show(name: str, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=name)

        result = run(deviations, variants, matrix(level), seeds=seeds, processes=processes, progress=show)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(result, order="deterministic")))
    if html_path is not None:
        write_kill_html(result, html_path)
    console.print(render(result))
    return 0 if result.is_ok else 1
