"""A call that raised is over: it decides nothing about the calls that come after it."""

from attnconform.conformance.backend import Forward
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.hygiene import declares_fallback
from attnconform.conformance.judge.storage import store_inputs, store_upstream
from attnconform.conformance.judge.trial import NAN, BackendCrash, Trial
from attnconform.conformance.judge.verdict import Finding

PERIOD = 2  # of two cases in a row one is asked before its first forward, the other after its second


@checks("SAFE-PATH")
def check_after_a_call_that_raised(trial: Trial) -> list[Finding]:
    """A backend without gradients is asked for them; the forward that comes next takes the path that it would have.

    In one half of the cases that forward is the first: a compilation that failed may decide about all that are still
    to come, so the case's own must not have been made yet. Only a name that says fallback tells there. In the other
    half two forwards come before, and their path, whatever its name, is the one to take again.
    Numbers that are wrong since are for the checks of numbers, which come after.
    """
    if trial.backend.capabilities.has_backward:
        return []
    return path_taken_after(trial) if trial.case.seed % PERIOD else first_path_after(trial)


def first_path_after(trial: Trial) -> list[Finding]:
    """Whether the first forward after the error falls back where no fallback is declared."""
    error = error_of_gradients(trial)
    path = None if error is None else trial.base.path
    if path is None or not path.startswith("fallback") or declares_fallback(trial):
        return []
    return [told(f"after a call for gradients that raised {error}, a forward ran on {path!r}")]


def path_taken_after(trial: Trial) -> list[Finding]:
    """Whether a forward after the error takes another path than the same ones before it."""
    before = trial.base.path
    if trial.second.path != before:
        return []  # calls alone choose among paths here, so that another one says nothing of the error
    error = error_of_gradients(trial)
    after = before if error is None else trial.run(trial.values).path
    if after == before:
        return []
    return [told(f"forwards ran on {before!r}; after a call for gradients that raised {error}, one ran on {after!r}")]


def told(message: str) -> Finding:
    """A finding about the path of a call."""
    return Finding(state="FALLBACK_UNDECLARED", clauses=("SAFE-PATH",), message=message)


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
