"""A call that raised is over: it decides nothing about the calls that come after it."""

from attnconform.conformance.backend import Forward
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.hygiene import declares_fallback
from attnconform.conformance.judge.storage import store_inputs, store_upstream
from attnconform.conformance.judge.trial import NAN, BackendCrash, Trial
from attnconform.conformance.judge.verdict import Finding

PERIOD = 2  # of two cases in a row one is asked: a compilation that fails takes its time


@checks("SAFE-PATH")
def check_after_a_call_that_raised(trial: Trial) -> list[Finding]:
    """Gradients are asked of a backend that has none, before anything else: its first forward runs as any other.

    A compilation that failed may decide about all that are still to come, so the case's own must not have been made
    yet. Numbers that are wrong since are for the checks of numbers, which come after.
    """
    if trial.backend.capabilities.has_backward or trial.case.seed % PERIOD:
        return []
    error = error_of_gradients(trial)
    if error is None or not trial.base.path.startswith("fallback") or declares_fallback(trial):
        return []
    message = f"after a call for gradients that raised {error}, a forward ran on {trial.base.path!r}"
    return [Finding(state="FALLBACK_UNDECLARED", clauses=("SAFE-PATH",), message=message)]


def error_of_gradients(trial: Trial) -> str | None:
    """The type of what a backend without gradients raises when it is asked for them; None where it answers."""
    values, structure, device = trial.values, trial.case.structure, trial.backend.device
    q, k, v = values.q, values.k, values.v
    tensors, _ = store_inputs(structure, trial.problem, q, k, v, owned=trial.owned, device=device, poison=NAN)
    dout, dlse = store_upstream(values.dout, trial.dlse(values), structure, device)
    forward = Forward(tensors.out, tensors.lse)
    try:
        trial.call(trial.backend.backward, trial.view, tensors, forward, dout, dlse)
    except BackendCrash as crash:
        return type(crash.__cause__).__name__
    finally:
        trial.calls -= 1  # what is asked of the first forward again goes by the calls since, and their parity
    return None
