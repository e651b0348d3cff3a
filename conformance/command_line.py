"""`attnconform`: judge a backend, replay a trace, gate a change, and look after the spec, deviations and fixtures."""

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

import attnconform

F = TypeVar("F", bound=Callable[..., Any])
console = Console()
USAGE = 2
backend_option = click.option(
    "-b", "--backend", default="triton", show_default=True, help="bundled name, MODULE:CLASS or exec:COMMAND"
)
device_option = click.option("--device", default=None, help="cpu or cuda [default: cuda where there is a GPU]")
out_option = click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("attnconform-results"), show_default=True
)


def one_line_errors(command: F) -> F:
    """Bad input ends in one line and exit code 2, not in a traceback."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        from attnconform.conformance.backend import Unavailable

        try:
            return command(*args, **kwargs)
        except (ValueError, OSError, Unavailable) as error:
            click.echo(f"attnconform: {' '.join(str(error).split())}", err=True)
            sys.exit(USAGE)

    return wrapped  # type: ignore[return-value]


def default_device(device: str | None) -> str:
    """The device asked for, or the GPU where there is one."""
    import torch

    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device is {chosen}, but torch sees no GPU")
    return chosen


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(attnconform.__version__)
def main() -> None:
    """Decides whether a sparse attention kernel is right."""


@main.command()
@backend_option
@device_option
@out_option
@click.option("--level", default="L1", show_default=True)
@click.option("-n", "--workers", type=click.IntRange(1), default=None, help="processes [default: cores, 1 on a GPU]")
@click.option("--select", default="", help="keep cases whose id contains this, or that exercise this clause")
@click.option("--shard", default="1/1", show_default=True, metavar="I/N")
@click.option("--case-timeout", type=float, default=300.0, show_default=True, help="seconds until a case is a HANG")
@click.option("--resume", is_flag=True, help="go on from the results that an interrupted run left in --out")
@click.option(
    "--expectations", type=click.Path(path_type=Path, dir_okay=False), default=None,
    help="TOML file of failures that are known and tracked",
)  # fmt: skip
@one_line_errors
def run(
    backend: str,
    device: str | None,
    out: Path,
    level: str,
    workers: int | None,
    select: str,
    shard: str,
    case_timeout: float,
    resume: bool,
    expectations: Path | None,
) -> None:
    """Judge a backend on the conformance matrix."""
    from attnconform.conformance.running import judge_and_report

    sys.exit(
        judge_and_report(
            console,
            backend=backend,
            device=default_device(device),
            out=out,
            level=level,
            workers=workers,
            select=select,
            shard=shard,
            case_timeout=case_timeout,
            resume=resume,
            expectations=expectations,
        )
    )


@main.command()
@backend_option
@device_option
@out_option
@one_line_errors
def smoke(backend: str, device: str | None, out: Path) -> None:
    """Is the adapter right? Which conventions it follows, on a dozen tiny cases, and the verdict on the plain ones."""
    from attnconform.conformance.explain.smoke import smoke_command
    from attnconform.conformance.running import judge_and_report

    chosen = default_device(device)
    misfit = smoke_command(console, backend=backend, device=chosen)
    sys.exit(judge_and_report(console, backend=backend, device=chosen, out=out, level="L0", workers=1) or misfit)


@main.command()
@backend_option
@device_option
@out_option
@click.option(
    "--baseline", type=click.Path(path_type=Path, dir_okay=False), required=True,
    help="results.jsonl, or with --performance a bench's JSON, to hold on to",
)  # fmt: skip
@click.option("--level", default="L1", show_default=True)
@click.option("-n", "--workers", type=click.IntRange(1), default=None)
@click.option("--select", default="")
@click.option("--margin", type=float, default=None, help="how far a figure may get worse, as a factor")
@click.option("--write-baseline", is_flag=True, help="write the baseline from this run instead of comparing")
@click.option(
    "--performance", is_flag=True, help="compare speed, by ratios measured in one run, instead of correctness"
)
@click.option("--suite", "suites", multiple=True, default=("seed64k",), show_default=True, help="with --performance")
@click.option("--peer", default=None, help="with --performance")
@one_line_errors
def gate(
    backend: str, device: str | None, out: Path, baseline: Path, level: str, workers: int | None, select: str,
    margin: float | None, write_baseline: bool, performance: bool, suites: tuple[str, ...], peer: str | None,
) -> None:  # fmt: skip
    """Compare a run with a baseline; exit 1 on anything that got worse."""
    if performance:
        from attnconform.conformance.bench.command import check_choices, run_suites
        from attnconform.conformance.bench.performance_gate import performance_gate

        check_choices(suites, backend, peer)
        sys.exit(
            performance_gate(
                console,
                baseline=baseline,
                run=lambda: run_suites(console, suites=suites, backend=backend, peer=peer),
                out=out,
                margin=margin,
                write_baseline=write_baseline,
            )
        )
    from attnconform.conformance.running import run_gate

    sys.exit(
        run_gate(
            console,
            baseline=baseline,
            margin=margin,
            write_baseline=write_baseline,
            backend=backend,
            device=default_device(device),
            out=out,
            level=level,
            workers=workers,
            select=select,
        )
    )


@main.command()
@click.argument("trace", type=click.Path(path_type=Path))
@backend_option
@device_option
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--max-cases", type=click.IntRange(1), default=24, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("attnconform-replay"), show_default=True
)
@one_line_errors
def replay(trace: Path, backend: str, device: str | None, seed: int, max_cases: int, out: Path) -> None:
    """Judge a backend on candidates synthesized from a recorded trace."""
    from attnconform.conformance.replay import replay_trace

    sys.exit(
        replay_trace(
            console, trace, backend=backend, device=default_device(device), seed=seed, max_cases=max_cases, out=out
        )
    )


@main.command()
@click.argument("case", required=False)
@backend_option
@device_option
@click.option("--blind", is_flag=True, help="measure explain itself: every deviation, unnamed, has to be found again")
@click.option("--select", default="", help="with --blind: deviations whose id or clause holds this, or a fault class")
@click.option("--shard", default="1/1", show_default=True, metavar="I/N", help="with --blind: some of the deviations")
@click.option(
    "--join", multiple=True, type=click.Path(path_type=Path, dir_okay=False),
    help="with --blind: JSON of another run, whose deviations are not tried again",
)  # fmt: skip
@click.option("--processes", type=click.IntRange(1), default=1, show_default=True, help="with --blind")
@click.option("--seed", type=int, default=0, show_default=True, help="with --blind: the order of all of them")
@click.option("--rounding", is_flag=True, help="with --blind: subjects round like another implementation")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), default=None,
    help="with --blind: where a record a deviation is written",
)  # fmt: skip
@one_line_errors
def explain(
    case: str | None, backend: str, device: str | None, blind: bool, select: str, shard: str, join: tuple[Path, ...],
    processes: int, seed: int, rounding: bool, json_path: Path | None,
) -> None:  # fmt: skip
    """Say why a backend fails a case: a case id, a run's case as FOLDER/CASE_ID, or a case's JSON file."""
    if blind == (case is not None):
        raise ValueError("explain takes either a case or --blind")
    if case is None:
        from attnconform.conformance.explain.blind_command import blind_command

        sys.exit(
            blind_command(
                console, select=select, shard=shard, processes=processes, seed=seed, rounding=rounding, join=join,
                json_path=json_path,
            )
        )  # fmt: skip
    from attnconform.conformance.explain import explain_case

    sys.exit(explain_case(console, case, backend=backend, device=default_device(device)))


@main.command()
@backend_option
@device_option
@click.option("--examples", type=click.IntRange(1), default=200, show_default=True, help="cases drawn at most")
@click.option("--seconds", type=click.FloatRange(min=0, min_open=True), default=None, help="end after so long")
@click.option("--seed", type=int, default=None, help="draw the same cases again [default: others every time]")
@click.option(
    "--operation", "operations", multiple=True, type=click.Choice(["forward", "backward"]),
    default=("forward", "backward"), show_default=True,
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), default=Path("attnconform-hunt"), show_default=True
)
@one_line_errors
def hunt(
    backend: str, device: str | None, examples: int, seconds: float | None, seed: int | None,
    operations: tuple[Any, ...], out: Path,
) -> None:  # fmt: skip
    """Judge a backend on cases that nobody wrote down, drawn ever nearer to its bounds, until one fails."""
    try:
        from attnconform.conformance.hunt import hunt_command
    except ModuleNotFoundError as missing:
        raise ValueError(f"hunt needs the package {missing.name}: pip install 'attnconform[hunt]'") from None

    sys.exit(
        hunt_command(
            console, backend=backend, device=default_device(device), examples=examples, seconds=seconds, seed=seed,
            operations=operations, out=out,
        )
    )  # fmt: skip


@main.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(path_type=Path, file_okay=False))
@out_option
@one_line_errors
def merge(folders: tuple[Path, ...], out: Path) -> None:
    """Join the shards of one run; refuses mixed devices and missing cases."""
    from attnconform.conformance.running import merge_command

    sys.exit(merge_command(console, list(folders), out))


@main.command()
@click.argument("first", type=click.Path(path_type=Path, file_okay=False))
@click.argument("second", type=click.Path(path_type=Path, file_okay=False))
@one_line_errors
def compare(first: Path, second: Path) -> None:
    """Cases on which two runs disagree; exit 1 where there are any."""
    from attnconform.conformance.running import compare_command

    sys.exit(compare_command(console, first, second))


@main.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@one_line_errors
def verify(folder: Path) -> None:
    """Is this a whole, unedited run of this suite?"""
    from attnconform.conformance.running import verify_command

    sys.exit(verify_command(console, folder))


@main.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=None, help="page.html or page.md to be written"
)
@click.option(
    "--record", "folder", type=click.Path(path_type=Path, file_okay=False), default=None,
    help="folder for what the page needs of each run: one small file for each backend, device and level",
)  # fmt: skip
@click.option(
    "--findings", type=click.Path(path_type=Path, dir_okay=False), default=None,
    help="TOML file of faults found in released packages [default: those that come with the suite]",
)  # fmt: skip
@one_line_errors
def results(paths: tuple[Path, ...], out: Path | None, folder: Path | None, findings: Path | None) -> None:
    """Many runs on one page: results.jsonl files, records that --record wrote, or folders that hold some."""
    from attnconform.conformance.report.results_page import results_command

    sys.exit(results_command(paths, findings=findings, out=out, folder=folder))


@main.command("kill-matrix")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), default=None)
@click.option("--html", "html_path", type=click.Path(path_type=Path, dir_okay=False), default=None)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="deviations must be killed, variants accepted, under each of so many",
)
@click.option("--select", default="", help="keep deviations and variants whose id or clause contains this")
@click.option("--processes", type=click.IntRange(1), default=2, show_default=True)
@one_line_errors
def kill_matrix(json_path: Path | None, html_path: Path | None, seeds: int, select: str, processes: int) -> None:
    """Measure the suite's own power: deviations it must catch, faithful variants it must accept."""
    from attnconform.conformance.kill_matrix import kill_matrix_command

    sys.exit(kill_matrix_command(json_path, html_path=html_path, seeds=seeds, select=select, processes=processes))


@main.command()
@click.option("--coverage", is_flag=True, help="clause, reference function, checks and deviations; fails on a gap")
@one_line_errors
def spec(coverage: bool) -> None:
    """The clauses of SPEC.md."""
    from attnconform.conformance.spec_report import print_clauses, print_coverage

    sys.exit(print_coverage(console) if coverage else print_clauses(console))


@main.command("exec-check")
@click.argument("command")
@device_option
@one_line_errors
def exec_check(command: str, device: str | None) -> None:
    """Does a program speak the exec protocol? Quote its arguments with it."""
    from attnconform.conformance.running import exec_check_command

    sys.exit(exec_check_command(console, command, device=default_device(device)))


@main.command()
@click.option("--level", default="L1", show_default=True)
@click.option("-b", "--backend", default=None, help="what this backend's declaration leaves out")
@device_option
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), default=None)
@one_line_errors
def cases(level: str, backend: str | None, device: str | None, json_path: Path | None) -> None:
    """What a level covers: cases by axis value, pairs and triples of values."""
    from attnconform.conformance.report.coverage import cases_command

    sys.exit(cases_command(console, level=level, backend=backend, device=default_device(device), json_path=json_path))


@main.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--select", default="", help="keep cases whose id contains this, or that exercise this clause")
@click.option("--shard", default="1/1", show_default=True, metavar="I/N", help="for several processes, a file each")
@click.option("--quick", is_flag=True, help="only until one deviation of a case is enough")
@one_line_errors
def detectability(json_path: Path, select: str, shard: str, quick: bool) -> None:
    """How far the deviations of its clauses move each case of L1; goes on from what the file holds."""
    from attnconform.conformance.report.detectability import detectability_command

    sys.exit(detectability_command(console, json_path=json_path, select=select, shard=shard, quick=quick))


@main.command()
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(["float32", "bfloat16", "float16"]),
    default=("float32", "bfloat16", "float16"), show_default=True,
)  # fmt: skip
@click.option("--comparisons", type=click.IntRange(1), default=1_000_000, show_default=True, help="elements a dtype")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), default=None)
@one_line_errors
def honest(dtypes: tuple[Any, ...], comparisons: int, json_path: Path | None) -> None:
    """Emulated honest kernels against the bounds: no false FAIL, and how much of each bound they use."""
    from attnconform.conformance.report.honest import honest_command

    sys.exit(honest_command(console, dtypes=dtypes, comparisons=comparisons, json_path=json_path))


@main.group()
def fixtures() -> None:
    """Frozen, language-neutral vectors."""


@fixtures.command("verify")
@one_line_errors
def fixtures_verify() -> None:
    """Recompute every fixture from the reference."""
    from attnconform.conformance.golden import verify_command

    sys.exit(verify_command(console))


@fixtures.command("write")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@one_line_errors
def fixtures_write(folder: Path) -> None:
    """Write every fixture anew into a folder."""
    from attnconform.conformance.golden import write_command

    sys.exit(write_command(console, folder))


@main.command()
@click.option("-b", "--backend", default="triton", show_default=True, help="bundled name, MODULE:CLASS or exec:COMMAND")
@click.option(
    "--suite",
    "suites",
    multiple=True,
    type=click.Choice(
        [
            "seed64k",
            "prefill",
            "nsa",
            "block-mask",
            "index",
            "quant",
            "backward",
            "backward-tuning",
            "training",
            "tiers",
            "starts",
            "sweep",
            "targets",
        ]
    ),
    default=("seed64k",),
    show_default=True,
)
@click.option(
    "--peer",
    type=click.Choice(["flashinfer", "flex", "fla", "fla-public", "sdpa", "cudnn", "dense-mask"]),
    default=None,
)
@click.option("--trace", type=click.Path(path_type=Path), default=None, help="candidate trace: its lists and lengths")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), default=None)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), default=None, help="writes F.png and F.html")
@click.option(
    "--agrees-with", type=click.Path(path_type=Path, dir_okay=False), default=None, help="earlier JSON of this version"
)
@click.option(
    "--limit", type=click.FloatRange(0, min_open=True), default=None, help="seconds after which no work is begun"
)
@click.option(
    "-n", "--processes", type=click.IntRange(min=1), default=None,
    help="suites targets and backward-tuning: a process for every line; so many warm up side by side, one measures",
)  # fmt: skip
@click.option("--line", "lines", multiple=True, help="of those suites: only lines with this in their name")
@click.option("--no-counters", is_flag=True, help="do not start the hardware profiler where it is installed")
@click.option("--diagnose", is_flag=True, help="take one batch apart: four runs, and what the decision tree says")
@click.option(
    "--subject",
    "subjects",
    multiple=True,
    type=click.Choice(["healthy", "gather", "long-row", "tier"]),
    default=("healthy", "gather", "long-row", "tier"),
    show_default=True,
    help="with --diagnose: the kernels used well, and three seeded faults",
)
@one_line_errors
def bench(
    backend: str, suites: tuple[str, ...], peer: str | None, trace: Path | None, json_path: Path | None,
    plot: Path | None, agrees_with: Path | None, limit: float | None, processes: int | None,
    lines: tuple[str, ...], no_counters: bool, diagnose: bool, subjects: tuple[str, ...],
) -> None:  # fmt: skip
    """Time kernels beside a peer. Without a GPU: tiny shapes in the interpreter, whose times mean nothing."""
    from attnconform.conformance.bench.command import bench_command
    from attnconform.conformance.bench.diagnosing import diagnose_command

    if diagnose:
        sys.exit(diagnose_command(console, subjects=subjects, json_path=json_path, with_counters=not no_counters))
    sys.exit(
        bench_command(
            console,
            suites=suites,
            backend=backend,
            peer=peer,
            trace=trace,
            json_path=json_path,
            plot=plot,
            agrees_with=agrees_with,
            with_counters=not no_counters,
            limit=limit,
            lines=lines,
            processes=processes,
        )
    )


if __name__ == "__main__":
    main()
