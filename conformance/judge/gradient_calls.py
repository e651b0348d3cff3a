"""Further backward calls of a case: through lse alone, and after backwards of other problems on the same shapes."""

import numpy as np

from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.gradient_bounds import compare_gradients
from attnconform.conformance.judge.lifecycle import other_problems
from attnconform.conformance.judge.trial import Trial, with_values
from attnconform.conformance.judge.values import Comparison
from attnconform.conformance.judge.verdict import Finding

PERIOD = 4  # of four backward cases in a row, each check below takes those of its own remainder
ALONE, AGAIN = 1, 3


@checks("GRAD-LSE")
def check_gradient_of_lse(trial: Trial) -> list[Finding]:
    """What enters by lse alone reaches every gradient: dout is 0 everywhere, and no row may be skipped for that."""
    if "GRAD-LSE" not in trial.case.clauses or trial.case.seed % PERIOD != ALONE:
        return []
    if not trial.backend.capabilities.gradient_of_lse:
        return []
    alone = with_values(trial.values, dout=np.zeros_like(trial.values.dout))
    observed = trial.run_backward(alone, trial.base)
    compared = compare_gradients(trial, alone, observed, trial.oracle_gradients(alone, trial.oracle), trial.oracle)
    return gradient_findings("with dout 0 everywhere", compared, "GRAD-LSE")


@checks("GRAD-SET", "PLAN-REPLAN")
def check_gradients_of_other_problems(trial: Trial) -> list[Finding]:
    """The backward of a problem on the same tensors is its own: nothing is kept of the problem before it."""
    is_plain = trial.case.structure.page_stride is None
    if "GRAD-SET" not in trial.case.clauses or trial.case.seed % PERIOD != AGAIN or not is_plain:
        return []
    findings: list[Finding] = []
    for what, other in other_problems(trial).items():
        try:
            compared = compare_own_gradients(other)
        finally:
            trial.calls += other.calls
        findings += gradient_findings(f"after another problem, with {what}", compared, "PLAN-REPLAN", "GRAD-SET")
    return findings


def compare_own_gradients(trial: Trial) -> list[Comparison]:
    """A forward and a backward of a trial's own numbers, beside its oracle."""
    observed = trial.run_backward(trial.values)
    oracle = trial.oracle_gradients(trial.values, trial.oracle)
    return compare_gradients(trial, trial.values, observed, oracle, trial.oracle)


def gradient_findings(what: str, compared: list[Comparison], *clauses: str) -> list[Finding]:
    """A finding for the first gradient with an element past its worst case; what was done comes first."""
    over = [c.message(c.worst) for c in compared if c.worst_ratio > 1]
    return [Finding(state="FAIL_gradient", clauses=clauses, message=f"{what}: {line}") for line in over[:1]]
