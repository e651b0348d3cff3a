"""One scenario from end to end: long documents in one prompt, a causal window, training, prefill and decode.

    python -m attnconform.conformance.bench.acceptance [--json FILE] [--limit SECONDS]

32,768 tokens, a window of 4,096, documents apart. What can be enumerated is, at a small length: adjacency, block
statistics, and out, lse and gradients against the float64 reference. Then the mask is rebuilt and reused, heads are
grouped, the region is checkpointed, and the same rule serves prefill, decode and shuffled pages. On a GPU the full
length is held against FlexAttention and timed; elsewhere the small length stands for it, and the script says so. A
check prints what it found; the script ends with 1 where one is not met, or where the limit left one out.
"""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
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
from attnconform.conformance.bench.machine import Environment, Machine, TimeUp, open_machine, read_environment
from attnconform.conformance.bench.prefill_work import WORKS, PrefillWork

SCENARIO = next(work for work in WORKS if work.window and work.documents)
# A document ends inside a page, a block and a window; the last page is not whole.
SMALL = replace(
    SCENARIO, name="the same at 56 tokens", seqlen=56, window=16, document_len=21, num_qo_heads=4, num_kv_heads=2,
    head_dim=16, page_size=16, dtype=torch.float32,
)  # fmt: skip
NOT_LONG = "no GPU: the small length stands for the full one, in Triton's interpreter; nothing is timed"
LONG = "full length"
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
    left_out: list[str] = []  # parts that the limit ended or kept from beginning

    @property
    def is_met(self) -> bool:
        return not self.left_out and all(check.is_met for check in self.checks)


def accept(machine: Machine, tell: Callable[[str], object]) -> Acceptance:
    """Every part, each check told as it comes."""
    note = "" if machine.is_real else NOT_LONG
    if note:
        tell(note)
    checks: list[Check] = []
    left_out: list[str] = []
    parts = [(name, partial(checks_of, SMALL, machine)) for name, checks_of in PARTS.items()]
    for part, make in [*parts, *([(LONG, partial(long_checks, SCENARIO, machine))] if machine.is_real else [])]:
        try:
            machine.check_time()
            for check in make():
                checks.append(check)
                tell(f"{part}: {check.line}")
        except TimeUp:
            left_out.append(part)
            tell(f"{part}: the limit was reached")
    return Acceptance(
        date=datetime.now(UTC).date().isoformat(),
        environment=read_environment(machine),
        scenario=SCENARIO.name,
        note=note,
        checks=checks,
        left_out=left_out,
    )


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), default=None)
@click.option("--limit", type=click.FloatRange(0, min_open=True), default=None, help="seconds; then no part begins")
def main(json_path: Path | None, limit: float | None) -> None:
    """Runs the scenario on this machine."""
    machine = open_machine("cuda" if torch.cuda.is_available() else "cpu")
    machine.deadline = None if limit is None else time.monotonic() + limit
    found = accept(machine, click.echo)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    missed: list[Any] = [check.name for check in found.checks if not check.is_met]
    met = len(found.checks) - len(missed)
    told = [f", not {name}" for name in missed] + [f", {part} not finished" for part in found.left_out]
    click.echo(f"{met} of {len(found.checks)} checks are met" + "".join(told))
    sys.exit(0 if found.is_met else 1)


if __name__ == "__main__":
    main()
