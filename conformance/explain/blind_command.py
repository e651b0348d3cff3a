"""`explain --blind`: which deviations are tried, what is printed of them, and how slices of one trial are joined."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from attnconform.conformance.deviations import DEVIATIONS, FAULT_CLASSES, Deviation
from attnconform.conformance.explain.blind import BlindRecord, BlindReport, run_blind
from attnconform.conformance.selection import parse_shard

TARGET = 0.9  # of the deviations have to be found


def blind_command(
    console: Console,
    *,
    select: str,
    shard: str,
    processes: int,
    seed: int,
    rounding: bool,
    join: Sequence[Path],  # records of other runs; their deviations are not tried again
    json_path: Path | None,
) -> int:
    """Runs it, prints what was not found and the figures by fault class; 0 where TARGET is reached, else 1.

    Raises ValueError where nothing is selected, and where a report to be joined is of another kind.
    """
    chosen = select_deviations(select, shard)
    known = [record for path in join for record in joinable(path, seed=seed, rounding=rounding).records]
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("explaining blind", total=len(chosen))

        def show(record: BlindRecord, done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=f"{done} of {total}")
            if not record.is_found:
                bar.console.print(not_found(record), highlight=False, markup=False, soft_wrap=True)

        report = run_blind(chosen, seed=seed, rounding=rounding, processes=processes, known=known, progress=show)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(report, order="deterministic")))
    print_report(console, report)
    return 0 if report.share_found >= TARGET else 1


def select_deviations(select: str, shard: str) -> list[Deviation]:
    """Deviations whose id or clause holds the text, or of that fault class, in one shard by a hash of their ids.

    Raises ValueError where none is left.
    """
    index, count = parse_shard(shard)
    kept = [d for d in DEVIATIONS.values() if select in d.id or select in d.clause or select == d.fault_class]
    kept = [d for d in kept if zlib.crc32(d.id.encode()) % count == index]
    if not kept:
        raise ValueError(f"select is {select!r}, and no deviation of shard {shard} has that in its id or clause")
    return kept


def joinable(path: Path, *, seed: int, rounding: bool) -> BlindReport:
    """A report that was written earlier. Raises ValueError where it is none, or of another seed or rounding."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=BlindReport)
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(f"{path} is no report of a blind trial: {error}") from None
    for name, asked in (("seed", seed), ("rounding", rounding)):
        if getattr(report, name) != asked:
            raise ValueError(f"{path} has {name} {getattr(report, name)}, but {asked} is asked for")
    return report


def not_found(record: BlindRecord) -> str:
    """One line on a deviation that was not ranked first."""
    if record.error:
        return f"{record.id} [{record.clause}]: {record.error}"
    return (
        f"{record.id} [{record.clause}]: rank {record.rank}, behind {record.named_first}, on {record.minimal_case_id}"
    )


def print_report(console: Console, report: BlindReport) -> None:
    """Found and alone, by fault class, and in all."""
    table = Table(title="explain, tried blind")
    for column in ("fault class", "deviations", "found", "found alone", "clause named first", "one head", "seconds"):
        table.add_column(column, justify="left" if column == "fault class" else "right")
    groups = {name: [r for r in report.records if r.fault_class == name] for name in FAULT_CLASSES}
    for name, records in [*groups.items(), ("all", list(report.records))]:
        if records:
            title = name if name == "all" else f"{name}: {FAULT_CLASSES[name]}"  # type: ignore[index]
            table.add_row(title, *figures(records))
    console.print(table)


def figures(records: Sequence[BlindRecord]) -> tuple[str, ...]:
    """The columns of some records."""
    found = [r for r in records if r.is_found]
    return (
        str(len(records)),
        str(len(found)),
        str(sum(not r.ties for r in found)),
        str(sum(r.is_clause_first for r in records)),
        f"{sum(is_of_one_head(r) for r in records)} of {sum(bool(r.sizes) for r in records)}",
        f"{sum(r.seconds for r in records):.0f}",
    )


def is_of_one_head(record: BlindRecord) -> bool:
    """Whether the smallest case has one request and one head left; one that is not shrunk has no sizes."""
    return bool(record.sizes) and record.sizes["requests"] == record.sizes["heads"] == 1
