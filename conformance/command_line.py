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
    "-b", "--backend", default="triton", show_default=True, help="bundled name or MODULE:CLASS"
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
        )
    )


@main.command()
@backend_option
@device_option
@out_option
@one_line_errors
def smoke(backend: str, device: str | None, out: Path) -> None:
    """Is the adapter right? A handful of plain cases."""
    from attnconform.conformance.running import judge_and_report

    sys.exit(judge_and_report(console, backend=backend, device=default_device(device), out=out, level="L0", workers=1))


@main.command()
@backend_option
@device_option
@out_option
@click.option(
    "--baseline", type=click.Path(path_type=Path, dir_okay=False), required=True, help="results.jsonl to hold on to"
)
@click.option("--level", default="L1", show_default=True)
@click.option("-n", "--workers", type=click.IntRange(1), default=None)
@click.option("--select", default="")
@click.option("--margin", type=float, default=None, help="how far max(error / bound) may rise, as a factor")
@click.option("--write-baseline", is_flag=True, help="write the baseline from this run instead of comparing")
@one_line_errors
def gate(
    backend: str, device: str | None, out: Path, baseline: Path, level: str, workers: int | None, select: str,
    margin: float | None, write_baseline: bool,
) -> None:  # fmt: skip
    """Compare a run with a baseline; exit 1 on anything that got worse."""
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
@click.argument("case")
@backend_option
@device_option
@one_line_errors
def explain(case: str, backend: str, device: str | None) -> None:
    """Say why a backend fails a case: a case id, or a case's JSON file."""
    from attnconform.conformance.explain import explain_case

    sys.exit(explain_case(console, case, backend=backend, device=default_device(device)))


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


@main.command("kill-matrix")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), default=None)
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True)
@one_line_errors
def kill_matrix(json_path: Path | None, seeds: int) -> None:
    """Measure the suite's own power: deviations it must catch, faithful variants it must accept."""
    from attnconform.conformance.kill_matrix import kill_matrix_command

    sys.exit(kill_matrix_command(json_path, seeds=seeds))


@main.command()
@click.option("--coverage", is_flag=True, help="clause, reference function, checks and deviations; fails on a gap")
@one_line_errors
def spec(coverage: bool) -> None:
    """The clauses of SPEC.md."""
    from attnconform.conformance.spec_report import print_clauses, print_coverage

    sys.exit(print_coverage(console) if coverage else print_clauses(console))


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
@click.option(
    "--suite", "suites", multiple=True, type=click.Choice(["seed64k", "index", "prefill"]), default=("seed64k",)
)
@click.option("--peer", type=click.Choice(["flashinfer", "flex"]), default=None)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), default=None)
@one_line_errors
def bench(suites: tuple[str, ...], peer: str | None, json_path: Path | None) -> None:
    """Time the bundled kernels beside a peer, on this machine's GPU."""
    from attnconform.conformance.bench.command import bench_command

    sys.exit(bench_command(console, suites=suites, peer=peer, json_path=json_path))


if __name__ == "__main__":
    main()
