"""`attnconform bench --diagnose`: takes subjects apart, prints what the tree says, and writes it down."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from msgspec.structs import replace as replaced
from rich.console import Console

from attnconform.conformance.bench.command import COUNTERS_TIMEOUT, default_device, write_json
from attnconform.conformance.bench.counters import Counters, collect
from attnconform.conformance.bench.diagnose import Diagnosis, diagnose_subject
from attnconform.conformance.bench.evidence import Evidence
from attnconform.conformance.bench.figure_text import share, size
from attnconform.conformance.bench.machine import (
    MEANINGLESS,
    Environment,
    open_machine,
    read_clocks,
    read_environment,
)
from attnconform.conformance.bench.seeded.batch import make_batches
from attnconform.conformance.bench.seeded.subjects import SUBJECTS
from attnconform.conformance.bench.timing import Ceilings, measure_ceilings
from attnconform.conformance.bench.tree import Finding


class DiagnosisReport(msgspec.Struct, frozen=True, kw_only=True):
    """Diagnoses of one run."""

    date: str
    environment: Environment
    ceilings: Ceilings
    diagnoses: list[Diagnosis]
    notes: list[str] = []


def diagnose_command(
    console: Console, *, subjects: tuple[str, ...], json_path: Path | None = None, with_counters: bool = True
) -> int:
    """Takes each subject apart on one batch and prints what the tree says."""
    machine = open_machine(default_device())
    environment = read_environment(machine)
    notes = [] if machine.is_real else [MEANINGLESS]
    chosen = {name: f"diagnose:{name}" for name in subjects}
    counters = collect(chosen, timeout=COUNTERS_TIMEOUT) if machine.is_real and with_counters else Counters()
    notes += [counters.note] if counters.note else []
    ceilings = measure_ceilings(machine)
    environment = replaced(environment, clocks_loaded=read_clocks(machine))
    batches = make_batches(machine)
    found = []
    for name in subjects:
        found.append(diagnose_subject(name, SUBJECTS[name], batches, machine, ceilings, counters))
        print_diagnosis(console, found[-1])
        machine.release()
    for note in notes:
        console.print(note, style="bold", highlight=False)
    if json_path is not None:
        report = DiagnosisReport(
            date=datetime.now(UTC).date().isoformat(),
            environment=environment,
            ceilings=ceilings,
            diagnoses=found,
            notes=notes,
        )
        write_json(json_path, report)
    return 0


def print_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    """The conclusion, the four runs, the four groups of figures, and every finding with its evidence."""
    console.print(f"{diagnosis.subject}: {diagnosis.conclusion}", style="bold", highlight=False)
    for line in evidence_lines(diagnosis.evidence):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    for finding in diagnosis.findings:
        print_finding(console, finding)


def evidence_lines(e: Evidence) -> Iterator[str]:
    """Four runs of one batch, then memory, compute, scheduling and fixed cost."""
    t, m, c, s, f = e.times, e.memory, e.compute, e.scheduling, e.fixed
    yield (
        f"runs: dense {t.dense:.0f} us; index only {t.index:.0f}; fixed candidates {t.attention:.0f}; end to end "
        f"{t.end_to_end:.0f}, of it selector {t.selector:.0f}"
    )
    yield (
        f"memory: needed {size(m.bytes_ideal)}, DRAM {size(m.bytes_dram)}, of it written {size(m.bytes_written_dram)}, "
        f"L2 hits {share(m.l2_hit_rate)}, {e.moved_share:.0%} of the copy bandwidth"
    )
    yield (
        f"compute: {c.flops:.3g} FLOPs, {e.compute_share:.0%} of the matrix rate, tensor cores "
        f"{share(c.tensor_core_share)}, keys of tiles {c.tile_efficiency:.0%}"
    )
    fair = "-" if s.longest_over_fair is None else f"{s.longest_over_fair:.1f}"
    yield (
        f"scheduling: processors busy {share(s.processors_busy)}, longest program {fair} equal shares, rows mean "
        f"{s.row_mean:.0f} keys, longest {s.row_max}, merge {t.merge:.0f} us"
    )
    fallbacks = ", ".join(f"{reason}: {n}" for reason, n in f.fallbacks.items()) or "none"
    yield (
        f"fixed cost: a step by the host's clock {t.host_median:.0f} us, P99 {t.host_p99:.0f}; waits a call "
        f"{f.waits:.1f}, driver allocations {f.device_allocations}, plans {f.replans}, graph exits {f.graph_exits}, "
        f"fallbacks {fallbacks}"
    )


def print_finding(console: Console, finding: Finding) -> None:
    console.print(f"  - {finding.conclusion}", highlight=False)
    for line in finding.evidence:
        console.print(f"      {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"    next: {finding.look_next}", highlight=False, markup=False)
