"""The hunt: Hypothesis draws cases that a backend declares, and goes on from those that came nearest to their bound.

The matrix asks what it has always asked; the hunt asks what nobody wrote down. It ends with the first case that fails.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings, target
from rich.console import Console

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.row_draws import hunted_cases
from attnconform.conformance.cases.structure import Case, Operation, encode_case
from attnconform.conformance.explain.explain import describe, minimal_case, say
from attnconform.conformance.isolation import is_spoilt, with_device_state
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.ratio import ratio_text
from attnconform.conformance.judge.verdict import CaseResult
from attnconform.conformance.report.terminal import make_progress
from attnconform.conformance.report.text import finding_text

Make = Callable[[], Backend]  # a fresh backend at every call
# a failure is shrunk by `explain`, structure first, and not by Hypothesis, which knows nothing of structures
PHASES = (Phase.reuse, Phase.generate, Phase.target)
CURRENT, NEAREST = "current.json", "nearest.json"


class Failed(Exception):
    """A case failed; Hypothesis keeps the example and stops."""


class TimeIsUp(BaseException):
    """No more cases are wanted; no Exception, for Hypothesis would take that for a failure and try it again."""


@dataclass(frozen=True)
class Nearest:
    """The case that came nearest to the bound of one output."""

    case: Case
    ratio: float  # largest error / bound


@dataclass
class Bag:
    """What a hunt has met so far."""

    judged: int = 0
    unsupported: int = 0
    nearest: dict[str, Nearest] = field(default_factory=dict)  # by output
    failed: tuple[Case, CaseResult] | None = None

    def take(self, case: Case, result: CaseResult) -> None:
        """Counts a verdict, and keeps the case where it is the nearest of an output, or failed."""
        if result.state == "UNSUPPORTED":
            self.unsupported += 1
            return
        self.judged += 1
        for name, ratio in result.usage.items():
            if name not in self.nearest or ratio > self.nearest[name].ratio:
                self.nearest[name] = Nearest(case, ratio)
        if result.is_failing:
            self.failed = (case, result)


def hunt(
    make: Make,
    *,
    examples: int,
    seconds: float | None = None,
    seed: int | None = None,
    operations: Sequence[Operation] = ("forward", "backward"),
    before: Callable[[Case], None] = lambda case: None,  # is called with every case before it is judged
) -> Bag:
    """Judges drawn cases until one fails, `examples` are drawn or `seconds` are over.

    What failed once is drawn first the next time; the profile `hunt` says where such examples are kept.
    """
    backend, bag, started = make(), Bag(), time.monotonic()

    def judge(case: Case) -> None:
        if bag.failed is None or bag.failed[0].id != case.id:  # Hypothesis runs a failure twice
            if seconds is not None and time.monotonic() - started > seconds:
                raise TimeIsUp
            before(case)
            result = with_device_state(judge_case(case, backend), backend.device)
            bag.take(case, result)
            for name, ratio in result.usage.items():
                target(ratio, label=name)
            if not result.is_failing:
                return
        raise Failed(case.id)

    run = settings_of(examples)(given(hunted_cases(backend.capabilities, operations))(judge))
    if seed is not None:
        run = hypothesis.seed(seed)(run)
    try:
        run()
    except (Failed, TimeIsUp):
        pass
    finally:
        backend.close()
    return bag


def settings_of(examples: int) -> settings:
    """The profile `hunt` with so many examples."""
    profiles.register_profiles()
    return settings(
        settings.get_profile("hunt"),
        max_examples=examples,
        phases=PHASES,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


# -- on the terminal ---------------------------------------------------------------------------------------------------


def hunt_command(
    console: Console,
    *,
    backend: str,
    device: str,
    examples: int,
    seconds: float | None,
    seed: int | None,
    operations: Sequence[Operation],
    out: Path,
) -> int:
    """Hunts and prints what was met; 0 where nothing failed, 1 where a case did, 3 where nothing was judged."""
    make = partial(load_backend, backend, device)
    out.mkdir(parents=True, exist_ok=True)
    current = out / CURRENT
    name_culprit(console, current, backend)
    with make_progress(console) as bar:
        task = bar.add_task(f"hunting in {backend}", total=examples)

        def note(case: Case) -> None:
            write_case(current, case)
            bar.advance(task)

        bag = hunt(make, examples=examples, seconds=seconds, seed=seed, operations=operations, before=note)
    current.unlink(missing_ok=True)
    print_bag(console, bag, out, backend)
    if bag.failed is not None:
        print_failure(console, *bag.failed, make, out=out, backend=backend)
    return 1 if bag.failed is not None else 0 if bag.judged else 3


def write_case(path: Path, case: Case) -> None:
    """A case as `attnconform explain` takes it."""
    path.write_bytes(encode_case(case))


def name_culprit(console: Console, current: Path, backend: str) -> None:
    """Says which case an earlier hunt ended in, where it took the whole process with it."""
    if current.exists():
        kept = current.rename(current.with_name("ended_in.json"))
        say(console, f"an earlier hunt ended in the middle of {kept}: attnconform explain {kept} -b {backend}")


def print_bag(console: Console, bag: Bag, out: Path, backend: str) -> None:
    """How many cases were judged, and how near their outputs came to their bounds."""
    beside = f", {bag.unsupported} more that {backend} does not declare" if bag.unsupported else ""
    say(console, f"{backend}: {bag.judged} cases judged{beside}")
    for name, near in sorted(bag.nearest.items(), key=lambda item: -item[1].ratio):
        say(console, f"largest error / bound of {name}: {ratio_text(near.ratio)}, {describe(near.case)}")
    if bag.nearest:
        near = max(bag.nearest.values(), key=lambda one: one.ratio)
        write_case(out / NEAREST, near.case)
        say(console, f"wrote {out / NEAREST}, the case with the largest of all")


def print_failure(console: Console, case: Case, result: CaseResult, make: Make, *, out: Path, backend: str) -> None:
    """What failed, and the smallest case that fails in the same way."""
    say(console, f"{case.id}: {result.state}")
    for finding in result.findings:
        say(console, finding_text(finding))
    small = case if is_spoilt(result) else minimal_case(case, make, result)
    path = out / f"{small.id}.json"
    write_case(path, small)
    say(console, f"smallest failing case: {describe(small)}")
    say(console, f"wrote {path}; go on with attnconform explain {path} -b {backend}")
