"""Step 1: everything is written, nothing else is, and the same call gives the same bits."""

from collections.abc import Sequence

import numpy as np

from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.dense_watch import watch_for_dense
from attnconform.conformance.judge.storage import BETWEEN
from attnconform.conformance.judge.trial import HUGE, SECOND_POISON, Observed, Trial, same_bits
from attnconform.conformance.judge.verdict import Finding, State
from attnconform.reference.coordinates import BoolArray

NATIVE = "native"  # the path that a backend names where it names no other
REPEATS = 5  # of a call whose second run differed


@checks("SAFE-WRITE", "COORD-ROW", "COORD-STRIDE")
def check_written(trial: Trial) -> list[Finding]:
    """An element that still holds the poison in both runs was never written."""
    findings = []
    for name in ("out", "lse"):
        unwritten = never_written(trial, name)
        if unwritten.any():
            where = tuple(int(i) for i in np.argwhere(unwritten)[0])
            message = f"{name}{list(where)} was never written ({int(unwritten.sum())} of {unwritten.size} elements)"
            clauses: tuple[str, ...] = ("SAFE-WRITE",)
            if gap_of(name) in trial.base.overruns:
                message = f"{message}, but what lies between its rows was: {name} is taken for a tensor without gaps"
                clauses = ("COORD-STRIDE", "SAFE-WRITE")
            findings.append(Finding(state="FAIL_unwritten", clauses=clauses, message=message))
    return findings


def never_written(trial: Trial, name: str) -> BoolArray:
    """Where an output still holds the poison of both runs; nowhere where the backend returns none."""
    first, second = getattr(trial.base, name), getattr(trial.second, name)
    if first is None or second is None:
        return np.zeros(0, dtype=bool)
    return np.asarray(np.isnan(first) & (second == SECOND_POISON))


def gap_of(name: str) -> str:
    """The guard band between the rows of an output, as overruns name it."""
    return f"{BETWEEN} {name}"


@checks("SAFE-BOUNDS", "COORD-STRIDE")
def check_bounds(trial: Trial) -> list[Finding]:
    """Guard bands around the outputs, and between the rows of strided ones, hold what they held."""
    taken_for_dense = {gap_of(name) for name in ("out", "lse") if never_written(trial, name).any()}
    return [
        Finding(
            state="FAIL_oob_write",
            clauses=("COORD-STRIDE", "SAFE-BOUNDS") if overrun in taken_for_dense else ("SAFE-BOUNDS",),
            message=f"bytes {overrun} were overwritten",
        )
        for overrun in dict.fromkeys((*trial.base.overruns, *trial.second.overruns))
    ]


@checks("SAFE-INPUTS")
def check_inputs(trial: Trial) -> list[Finding]:
    """Inputs hold what they held, index arrays included."""
    return mutation_findings((*trial.base.mutated, *trial.second.mutated), "forward")


def mutation_findings(names: tuple[str, ...], call: str) -> list[Finding]:
    """A finding for every input that a call changed, each once."""
    return [
        Finding(state="FAIL_input_mutated", clauses=("SAFE-INPUTS",), message=f"{call} changed its input {name}")
        for name in dict.fromkeys(names)
    ]


@checks("SAFE-PATH")
def check_path(trial: Trial) -> list[Finding]:
    """A fallback that the backend did not declare for this case is a failure, whatever its numbers."""
    path = next((path for path in (trial.base.path, *trial.paths) if path.startswith("fallback")), trial.base.path)
    if not path.startswith("fallback"):
        return denied_fallback(trial)
    if declares_fallback(trial):
        message = f"ran on {path!r}, as declared"
        return [Finding(state="FALLBACK_DECLARED", clauses=("SAFE-PATH",), message=message)]
    message = f"ran on {path!r}, which it does not declare for these axes"
    return [Finding(state="FALLBACK_UNDECLARED", clauses=("SAFE-PATH",), message=message)]


def denied_fallback(trial: Trial) -> list[Finding]:
    """A dense path under the name of the native one, where candidates leave few edges and torch computed them all."""
    if trial.base.path != NATIVE or trial.problem.candidates is None or declares_fallback(trial):
        return []
    dense = watch_for_dense(trial)
    if dense is None:
        return []
    message = f"reports {NATIVE!r}, but {dense}: every pair of query and key, where candidates leave few"
    return [Finding(state="FALLBACK_UNDECLARED", clauses=("SAFE-PATH",), message=message)]


def declares_fallback(trial: Trial) -> bool:
    """Whether some axis value of the case lies in a declared fallback domain."""
    domains = trial.backend.capabilities.fallback
    return any(axis in domains and domains[axis].holds(value) for axis, value in trial.case.axes.items())


@checks("DETERMINISM-RUN", "MASK-INTERFERE", "SAFE-WRITE")
def check_repeat(trial: Trial) -> list[Finding]:
    """The second run gives the first run's bits, whatever lies in slots that nobody owns or attends.

    Where it does not, five repeats of the first call tell what decides: the calls themselves, or what they were given.
    """
    if trial.backend.capabilities.determinism == "none" or same_outputs(trial.base, trial.second):
        return []
    unstable = classify_repeats(trial)
    if unstable is not None:
        return [unstable]
    # the call repeats bit for bit, so what it was given decides: what the outputs held, or what nobody owns
    held = trial.run(trial.values, poison=SECOND_POISON)
    if not same_outputs(trial.base, held):
        message = f"out changes with what it held before: {first_difference(trial.base, held)}"
        return [Finding(state="FAIL_unwritten", clauses=("SAFE-WRITE",), message=message)]
    filled = trial.run(trial.values, unowned=HUGE)
    if same_outputs(trial.base, filled):
        return []  # what no row attends decides, which is for the check of that
    message = f"out changes with bytes that no request owns: {first_difference(trial.base, filled)}"
    return [Finding(state="FAIL_interference", clauses=("MASK-INTERFERE", "MASK-TAIL"), message=message)]


def classify_repeats(trial: Trial) -> Finding | None:
    """How five repeats of the first call differ from it and from one another; None where none does."""
    repeats = [trial.run(trial.values) for _ in range(REPEATS)]
    kinds = group_by_bits([trial.base, *repeats])
    if len(kinds) == 1:
        # a race that the repeats missed shows where the second call does not give its own bits again
        again = trial.run_second()
        if same_outputs(trial.second, again):
            return None
        where = first_difference(trial.second, again)
        return unrepeatable("FAIL_race", f"differs from run to run, rarely: {REPEATS} repeats agree, but {where}")
    if len(group_by_bits(repeats[1:])) == 1:  # each of these ran after itself, the first one after the second call
        trial.run(trial.with_seed(trial.case.seed + (1 << 40)))
        after_other = trial.run(trial.values)
        if not same_outputs(repeats[-1], after_other):
            where = first_difference(repeats[-1], after_other)
            return unrepeatable(
                "FAIL_determinism", f"differs with what ran before it: after itself, after others {where}"
            )
        if same_outputs(repeats[0], repeats[-1]):
            where = first_difference(trial.base, repeats[0])
            return unrepeatable("FAIL_determinism", f"differs by the first call only (warm-up or stale state): {where}")
    odd = next(observed for observed in repeats if not same_outputs(observed, repeats[-1]))
    answers = f"{len(kinds)} answers in {REPEATS + 1} calls"
    where = first_difference(repeats[-1], odd)
    return unrepeatable("FAIL_race", f"differs from run to run, {answers}: {where}")


def unrepeatable(state: State, message: str) -> Finding:
    """A finding about a call that does not repeat."""
    return Finding(state=state, clauses=("DETERMINISM-RUN",), message=f"the same call {message}")


def group_by_bits(runs: Sequence[Observed]) -> list[Observed]:
    """One run of each answer, in order of appearance."""
    kinds: list[Observed] = []
    for observed in runs:
        if not any(same_outputs(observed, kind) for kind in kinds):
            kinds.append(observed)
    return kinds


def same_outputs(a: Observed, b: Observed) -> bool:
    """Bitwise the same out and lse."""
    if not same_bits(a.out_bits, b.out_bits):
        return False
    return a.lse_bits is None or b.lse_bits is None or same_bits(a.lse_bits, b.lse_bits)


def first_difference(a: Observed, b: Observed) -> str:
    """Where two runs part, as `out[row, head, dim] is x, then y`."""
    for name in ("out", "lse"):
        x, y = getattr(a, name), getattr(b, name)
        if x is None or y is None:
            continue
        differs = ~((x == y) | (np.isnan(x) & np.isnan(y)))
        if differs.any():
            where = tuple(int(i) for i in np.argwhere(differs)[0])
            return f"{name}{list(where)} is {x[where]:.9g}, then {y[where]:.9g}"
    return "only signs of zero or NaN differ"
