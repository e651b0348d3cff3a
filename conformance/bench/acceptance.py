"""One scenario from end to end: long documents in one prompt, a causal window, training, prefill and decode.

    python -m attnconform.conformance.bench.acceptance [--json FILE]

32,768 tokens, a window of 4,096, documents apart. What can be enumerated is, at a small length: adjacency, block
statistics, and out, lse and gradients against the float64 reference. Then the mask is rebuilt and reused, heads are
grouped, the region is checkpointed, and the same rule serves prefill, decode and shuffled pages. On a GPU the full
length is held against FlexAttention and timed; elsewhere the small length stands for it, and the script says so. A
check prints what it found; the script ends with 1 where one is not met.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
import torch

from attnconform.conformance.bench.acceptance_long import long_checks
from attnconform.conformance.bench.acceptance_small import (
    Check,
    adjacency_checks,
    number_checks,
    reuse_checks,
    serving_checks,
    statistics_checks,
    training_checks,
)
from attnconform.conformance.bench.machine import Environment, Machine, open_machine, read_environment
from attnconform.conformance.bench.prefill_work import WORKS, PrefillWork

SCENARIO = next(work for work in WORKS if work.window and work.documents)
# A document ends inside a page, a block and a window; the last page is not whole.
SMALL = replace(
    SCENARIO, name="the same at 56 tokens", seqlen=56, window=16, document_len=21, num_qo_heads=4, num_kv_heads=2,
    head_dim=16, page_size=16, dtype=torch.float32,
)  # fmt: skip
NOT_LONG = "no GPU: the small length stands for the full one, in Triton's interpreter; nothing is timed"
PARTS: dict[str, Callable[[PrefillWork, Machine], Iterator[Check]]] = {
    "adjacency": adjacency_checks,
    "block statistics": statistics_checks,
    "numbers": number_checks,
    "reuse": reuse_checks,
    "training": training_checks,
    "serving": serving_checks,
}


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and on what."""

    date: str
    environment: Environment
    scenario: str
    note: str
    checks: list[Check]

    @property
    def is_met(self) -> bool:
        return all(check.is_met for check in self.checks)


def accept(machine: Machine, tell: Callable[[str], object]) -> Acceptance:
    """Every part, each check told as it comes."""
    note = "" if machine.is_real else NOT_LONG
    if note:
        tell(note)
    checks: list[Check] = []
    for part, checks_of in PARTS.items():
        for check in checks_of(SMALL, machine):
            checks.append(check)
            tell(f"{part}: {check.line}")
    for check in long_checks(SCENARIO, machine) if machine.is_real else ():
        checks.append(check)
        tell(f"full length: {check.line}")
    return Acceptance(
        date=datetime.now(UTC).date().isoformat(),
        environment=read_environment(machine),
        scenario=SCENARIO.name,
        note=note,
        checks=checks,
    )


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), default=None)
def main(json_path: Path | None) -> None:
    """Runs the scenario on this machine."""
    found = accept(open_machine("cuda" if torch.cuda.is_available() else "cpu"), click.echo)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    missed: list[Any] = [check.name for check in found.checks if not check.is_met]
    met = len(found.checks) - len(missed)
    click.echo(f"{met} of {len(found.checks)} checks are met" + "".join(f", not {name}" for name in missed))
    sys.exit(0 if found.is_met else 1)


if __name__ == "__main__":
    main()
