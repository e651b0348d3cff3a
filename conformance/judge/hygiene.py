"""Step 1: everything is written, nothing else is, and the same call gives the same bits."""

import numpy as np

from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.trial import SECOND_POISON, Observed, Trial, same_bits
from attnconform.conformance.judge.verdict import Finding


@checks("SAFE-WRITE", "COORD-ROW")
def check_written(trial: Trial) -> list[Finding]:
    """An element that still holds the poison in both runs was never written."""
    findings = []
    for name in ("out", "lse"):
        first, second = getattr(trial.base, name), getattr(trial.second, name)
        if first is None or second is None:
            continue
        unwritten = np.isnan(first) & (second == SECOND_POISON)
        if unwritten.any():
            where = tuple(int(i) for i in np.argwhere(unwritten)[0])
            message = f"{name}{list(where)} was never written ({int(unwritten.sum())} of {unwritten.size} elements)"
            findings.append(Finding(state="FAIL_unwritten", clauses=("SAFE-WRITE",), message=message))
    return findings


@checks("SAFE-BOUNDS")
def check_bounds(trial: Trial) -> list[Finding]:
    """Guard bands around the outputs hold what they held."""
    if trial.base.guards_intact and trial.second.guards_intact:
        return []
    message = "bytes beside out or lse were overwritten"
    return [Finding(state="FAIL_oob_write", clauses=("SAFE-BOUNDS",), message=message)]


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
    if not trial.base.path.startswith("fallback"):
        return []
    if declares_fallback(trial):
        message = f"ran on {trial.base.path!r}, as declared"
        return [Finding(state="FALLBACK_DECLARED", clauses=("SAFE-PATH",), message=message)]
    message = f"ran on {trial.base.path!r}, which it does not declare for these axes"
    return [Finding(state="FALLBACK_UNDECLARED", clauses=("SAFE-PATH",), message=message)]


def declares_fallback(trial: Trial) -> bool:
    """Whether some axis value of the case lies in a declared fallback domain."""
    domains = trial.backend.capabilities.fallback
    return any(axis in domains and domains[axis].holds(value) for axis, value in trial.case.axes.items())


@checks("DETERMINISM-RUN", "MASK-INTERFERE", "SAFE-WRITE")
def check_repeat(trial: Trial) -> list[Finding]:
    """The second run gives the first run's bits, whatever lies in slots that nobody owns."""
    if trial.backend.capabilities.determinism == "none" or same_outputs(trial.base, trial.second):
        return []
    again = trial.run(trial.values)
    if same_outputs(trial.base, again):
        held = trial.run(trial.values, poison=SECOND_POISON)
        if not same_outputs(trial.base, held):
            message = f"out changes with what it held before: {first_difference(trial.base, held)}"
            return [Finding(state="FAIL_unwritten", clauses=("SAFE-WRITE",), message=message)]
        message = f"out changes with bytes that no request owns: {first_difference(trial.base, trial.second)}"
        return [Finding(state="FAIL_interference", clauses=("MASK-INTERFERE", "MASK-TAIL"), message=message)]
    message = f"the same call gives other bits: {first_difference(trial.base, again)}"
    return [Finding(state="FAIL_determinism", clauses=("DETERMINISM-RUN",), message=message)]


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
