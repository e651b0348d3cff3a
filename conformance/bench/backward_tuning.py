"""Suite backward-tuning: where hot pages begin, and which tiles are fastest, each beside the others in one process.

A threshold row's `kernels` are the curves of the choice: what adding costs over dQ alone, what gathering and reducing
cost, and the workspace is in its figures. The curves of a report of this suite:

    python -m attnconform.conformance.bench.backward_tuning REPORT.json OUT.png
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.backward import backward_figures
from attnconform.conformance.bench.backward_parts import OurBackward, sum_of, time_parts, time_whole
from attnconform.conformance.bench.backward_subjects import (
    TINY_HOT,
    HotShape,
    Subject,
    blocks_per_token,
    hot_pages,
    prompt,
)
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.nsa_work import shapes
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.prefill_work import works
from attnconform.conformance.bench.row import BenchReport, BenchRow
from attnconform.conformance.bench.targets import Line

SUITE = "backward-tuning"
THRESHOLDS, TINY_THRESHOLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1_024, 4_096, 1 << 20), (1, 3, 1 << 20)
THRESHOLD = "backward r0 "
# dQ: rows times heads, keys, warps, stages
QUERY_SHAPES = ((128, 64, 8, 2), (128, 64, 8, 3), (128, 32, 8, 2), (128, 32, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2))
# dK and dV: keys, rows times heads, warps, stages
KEY_SHAPES = (
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (64, 64, 4, 2),
    (64, 64, 8, 2),
    (64, 128, 8, 2),
    (64, 32, 4, 2),
    (64, 32, 4, 3),
    (128, 32, 8, 2),
)
TINY_SHAPES = ((16, 16, 4, 1), (16, 32, 4, 1))
ADDING, GATHERING = "adding", "gathering and reducing"
SWEPT_SECONDS = 0.1


def tuning_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Thresholds over the hot page, then tiles over the first prompt and over blocks per token."""
    yield from threshold_rows(hot_pages(machine, HotShape() if machine.is_real else TINY_HOT), machine, options)
    machine.release()
    yield from shape_rows(prompt(works(machine)[0], machine), machine, options)
    machine.release()
    yield from shape_rows(blocks_per_token(shapes(machine)[0], machine), machine, options)


def threshold_rows(subject: Subject, machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """From everything gathered to everything added."""
    from attnconform.kernels.sparse_attention import BackwardHints

    gathered = OurBackward(subject, BackwardHints())
    alone = time_parts(gathered, machine, options.seconds)["dq"]
    for threshold in THRESHOLDS if machine.is_real else TINY_THRESHOLDS:
        machine.check_time()
        ours = OurBackward(subject, BackwardHints(mode="hybrid", reuse_threshold=threshold))
        row = tuned_row(ours, f"{THRESHOLD}{threshold}", machine, options)
        adding = max(0.0, sum_of(row.kernels, "dq and cold dk, dv") - alone) + sum_of(row.kernels, "round dk, dv")
        gathering = sum_of(row.kernels, "dk, dv", "reduce dk, dv")
        yield replaced(row, kernels=row.kernels | {ADDING: adding, GATHERING: gathering})


def shape_rows(subject: Subject, machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Tiles of either direction, the other's left as they are; one that does not fit here is told instead."""
    for stage, hints in choices(machine):
        machine.check_time()
        try:
            yield tuned_row(OurBackward(subject, hints), stage, machine, options)
        except Exception as failure:  # a shape that this device has no room for says so, and the next is tried
            options.tell(f"{subject.name}, {stage}: {type(failure).__name__}: {' '.join(str(failure).split())[:200]}")


def choices(machine: Machine) -> Iterator[tuple[str, Any]]:
    """Stage and hints of every tile of either direction."""
    from attnconform.kernels.sparse_attention import BackwardHints
    from attnconform.kernels.sparse_attention.backward_hints import KeyShape, QueryShape

    for shape in QUERY_SHAPES if machine.is_real else TINY_SHAPES:
        yield f"backward dq {label(shape)}", BackwardHints(query_shape=QueryShape(*shape))
    for shape in KEY_SHAPES if machine.is_real else TINY_SHAPES:
        yield f"backward dk, dv {label(shape)}", BackwardHints(key_shape=KeyShape(*shape))


def lines(machine: Machine) -> Iterator[Line]:
    """The same in parts, for processes side by side: all thresholds, then every tile by itself."""
    hot = HotShape() if machine.is_real else TINY_HOT

    def thresholds(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
        yield from threshold_rows(hot_pages(machine, hot), machine, options)

    yield Line(f"tuning: thresholds, {hot.name}", None, thresholds, ())
    work, shape = works(machine)[0], shapes(machine)[0]
    for name, make in (
        (work.name, partial(prompt, work)),
        (shape.name, partial(blocks_per_token, shape)),
    ):
        for stage, hints in choices(machine):
            yield Line(f"tuning: {stage}, {name}", None, partial(choice_rows, make, stage, hints), ())


def choice_rows(
    make: Callable[[Machine], Subject], stage: str, hints: Any, machine: Machine, options: BenchOptions
) -> Iterator[BenchRow]:
    """One tile over one subject."""
    machine.check_time()
    yield tuned_row(OurBackward(make(machine), hints), stage, machine, options)


def label(shape: tuple[int, ...]) -> str:
    return "{}x{} warps {} stages {}".format(*shape)


def tuned_row(ours: OurBackward, stage: str, machine: Machine, options: BenchOptions) -> BenchRow:
    """One choice, whole and in parts."""
    seconds = min(SWEPT_SECONDS, options.seconds)
    return BenchRow(
        suite=SUITE,
        phase="prefill",
        work=ours.subject.name,
        stage=stage,
        ours=time_whole(ours, machine, seconds).timing,
        figures=backward_figures(ours, machine),
        path=ours.path,
        kernels=time_parts(ours, machine, seconds),
    )


def thresholds_of(report: BenchReport) -> list[tuple[int, BenchRow]]:
    """The threshold rows of a report, ascending. Raises ValueError where it has none."""
    rows = [r for r in report.rows if r.suite == SUITE and r.stage.startswith(THRESHOLD)]
    if not rows:
        raise ValueError(f"the report has {len(report.rows)} rows, but none of suite {SUITE} with a threshold")
    return sorted(((int(row.stage.removeprefix(THRESHOLD)), row) for row in rows), key=lambda pair: pair[0])


def crossing_threshold(report: BenchReport) -> int:
    """The threshold whose backward is fastest."""
    return min(thresholds_of(report), key=lambda pair: pair[1].time.median)[0]


def draw_thresholds(report: BenchReport, path: Path) -> None:
    """Adding, gathering, the whole and the workspace over r0, the fastest marked. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pairs = thresholds_of(report)
    labels = ["all added" if r0 == pairs[-1][0] else str(r0) for r0, _ in pairs]
    figure, (times, memory) = plt.subplots(
        2, 1, figsize=(8, 7), sharex=True, layout="constrained", height_ratios=(3, 1)
    )
    curves = {
        "whole backward": [row.time.median for _, row in pairs],
        ADDING: [row.kernels[ADDING] for _, row in pairs],
        GATHERING: [row.kernels[GATHERING] for _, row in pairs],
    }
    for (name, values), marker in zip(curves.items(), "os^", strict=True):
        times.plot(labels, values, marker=marker, label=name)
    best = [r0 for r0, _ in pairs].index(crossing_threshold(report))
    times.axvline(best, color="#9a9a9a", linewidth=1, label=f"fastest: {labels[best]}")
    times.set_yscale("log")
    times.set_ylabel("time of a backward (µs)")
    times.legend(frameon=False)
    times.set_title(title_of(report, pairs[0][1].work), fontsize=10, loc="left")
    memory.bar(labels, [row.figures.workspace_used / 2**20 for _, row in pairs], color="#4269d0")
    memory.set_ylabel("workspace (MiB)")
    memory.set_xlabel("adds that may meet at a page before it is gathered (r0)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def title_of(report: BenchReport, work: str) -> str:
    where = report.environment.device
    warning = " (interpreter: times mean nothing)" if report.environment.is_interpreted else ""
    return f"{work}\n{where}, {report.date}{warning}"


@click.command()
@click.argument("report", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
def main(report: Path, out: Path) -> None:
    """Draws the thresholds of a report that `bench --suite backward-tuning --json` wrote."""
    try:
        read = msgspec.json.decode(report.read_bytes(), type=BenchReport)
        draw_thresholds(read, out)
    except (msgspec.MsgspecError, ValueError) as error:
        raise click.ClickException(f"{report}: {error}") from error
    click.echo(f"{out}: fastest at {crossing_threshold(read)}")


if __name__ == "__main__":
    main()
