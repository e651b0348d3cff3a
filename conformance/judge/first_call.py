"""The last call of a case that failed: its first one again, after all that the checks asked in between."""

from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.gradients import other_bits
from attnconform.conformance.judge.hygiene import first_difference, same_outputs
from attnconform.conformance.judge.trial import NAN, Trial
from attnconform.conformance.judge.verdict import Finding

OTHER_NUMBERS = 1 << 42  # added to a case's seed


@checks("DETERMINISM-RUN")
def check_first_call_again(trial: Trial) -> list[Finding]:
    """The same call gives the same bits whatever ran before it, and however much: what wears out fails other checks.

    Asked only where something else has failed, which that may explain; where nothing has, PLAN-REPLAN's check asks the
    same of a part of the cases.
    """
    if not trial.has_failed or trial.backend.capabilities.determinism == "none":
        return []
    for _ in range(1 + trial.calls % 2):  # the first call was odd, so this one is even: buffers may take turns
        trial.run(trial.with_seed(trial.case.seed + OTHER_NUMBERS))
    calls = trial.calls
    again = trial.run(trial.values, unowned=NAN, poison=NAN)
    difference = None if same_outputs(trial.base, again) else first_difference(trial.base, again)
    if difference is None and "base_gradients" in trial.__dict__:
        name = other_bits(trial.base_gradients, trial.run_backward(trial.values, trial.base))
        difference = None if name is None else f"other bits of {name}"
    if difference is None:
        return []
    message = f"the first call, made again after {calls} calls, differs: {difference}"
    return [Finding(state="FAIL_determinism", clauses=("DETERMINISM-RUN",), message=message)]
