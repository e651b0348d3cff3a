"""One call of a backend beside the reference's own: cheap, and enough to see whether a mistake shows at all."""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import NUMPY_DTYPES, round_to
from attnconform.conformance.deviations.variants import Unfused
from attnconform.conformance.judge.hygiene import same_outputs
from attnconform.conformance.judge.trial import BackendCrash, Observed, ObservedGradients, Trial, same_bits
from attnconform.conformance.policies import Sample
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.steps import Steps

Outputs = dict[str, FloatArray]  # out; dq, dk and dv of a backward case

# by case id, which names the content: what does not depend on the backend is made once
TRIALS: dict[str, Trial] = {}
REFERENCE_CALLS: dict[str, "Call"] = {}
TARGETS: dict[tuple[str, bool], tuple[Outputs, Outputs]] = {}


@dataclass(frozen=True)
class Call:
    """The first call on a case, and its backward where the case has one."""

    forward: Observed
    gradients: ObservedGradients | None
    takes_dlse: bool

    def outputs(self) -> Outputs:
        """What a policy may look at."""
        if self.gradients is None:
            return {"out": self.forward.out}
        dq, dk, dv = self.gradients.dq, self.gradients.dk, self.gradients.dv
        return {"out": self.forward.out, "dq": dq, "dk": dk, "dv": dv}

    def equals(self, other: "Call") -> bool:
        """Whether both gave the same bits, took the same path and left the same traces."""
        a, b = self.forward, other.forward
        traces = [(x.mutated, x.overruns, x.path) for x in (a, b)]
        if traces[0] != traces[1] or not same_outputs(a, b):
            return False
        if self.gradients is None or other.gradients is None:
            return self.gradients is other.gradients
        return same_gradients(self.gradients, other.gradients)


def same_gradients(a: ObservedGradients, b: ObservedGradients) -> bool:
    """Bitwise the same dq, dk, dv and dsink, and the same inputs changed."""
    pairs = [(a.raw.dq, b.raw.dq), (a.raw.dk, b.raw.dk), (a.raw.dv, b.raw.dv)]
    if a.raw.dsink is not None and b.raw.dsink is not None:
        pairs.append((a.raw.dsink, b.raw.dsink))
    pairs += zip(a.raw.dscore or (), b.raw.dscore or (), strict=False)
    same_rules = len(a.raw.dscore or ()) == len(b.raw.dscore or ())
    return a.mutated == b.mutated and same_rules and all(same_bits(x, y) for x, y in pairs)


def trial_of(case: Case, backend: Backend) -> Trial:
    """A trial that shares numbers and oracle with earlier trials of the case, and nothing a backend could change."""
    if case.id not in TRIALS:
        TRIALS[case.id] = Trial(case, StepsBackend())
        TRIALS[case.id].owned  # noqa: B018  computed here, so that every copy has it
    trial = copy(TRIALS[case.id])
    trial.usage, trial.usage_probable, trial.rewritten = {}, {}, set()  # what a backend showed is its own
    trial.paths, trial.growth = [], []
    trial.backend, trial.problem = backend, build_problem(case.structure)
    trial.view = ProblemView(trial.problem, case.structure.hints, backend.device, case.structure.interleaved)
    return trial


def observe(case: Case, backend: Backend) -> Call:
    """One call on a case. Raises BackendCrash where the backend raises."""
    trial = trial_of(case, backend)
    forward = trial.base
    gradients = trial.run_backward(trial.values, forward) if case.operation == "backward" else None
    return Call(forward, gradients, backend.capabilities.gradient_of_lse)


def shows(case: Case, backend: Backend) -> bool:
    """Whether one call of a backend differs in any bit from the reference's."""
    if case.id not in REFERENCE_CALLS:
        REFERENCE_CALLS[case.id] = observe(case, StepsBackend())
    try:
        return not observe(case, backend).equals(REFERENCE_CALLS[case.id])
    except BackendCrash:
        return True


def samples_of(case: Case, call: Call) -> Iterator[Sample]:
    """Every output of a call, with its oracle and the baseline."""
    oracle, baseline = targets(case, call.takes_dlse)
    for name, observed in call.outputs().items():
        yield Sample(observed, oracle[name], baseline[name], case.structure.dtype)


def targets(case: Case, takes_dlse: bool) -> tuple[Outputs, Outputs]:
    """The oracle of every output, and the baseline's, which is a textbook implementation in the case's dtype."""
    key = (case.id, takes_dlse)
    if key not in TARGETS:
        trial, dtype = trial_of(case, StepsBackend()), case.structure.dtype
        rough = outputs_of(trial, Unfused(NUMPY_DTYPES[dtype]), takes_dlse)
        TARGETS[key] = outputs_of(trial, Steps(), takes_dlse), {n: round_to(x, dtype) for n, x in rough.items()}
    return TARGETS[key]


def outputs_of(trial: Trial, steps: Steps, takes_dlse: bool) -> Outputs:
    """Outputs of a case as some steps compute them; dk and dv over the whole pool."""
    problem, values = trial.problem, trial.values
    result = steps.forward(problem, values.q, values.k, values.v)
    if trial.case.operation != "backward":
        return {"out": result.out}
    dlse = values.dlse if takes_dlse else None
    gradients = steps.backward(problem, values.q, values.k, values.v, result, values.dout, dlse)
    dk, dv = gradients.in_pool(problem.cache.num_slots)
    return {"out": result.out, "dq": gradients.dq, "dk": dk, "dv": dv}
