"""How far the deviations of a case's clauses move it: a case that nothing can fail asks nothing.

The ratio of a deviation on a case is its largest error / worst-case bound over all elements of all outputs. A mistake
that moves no number far enough counts where a check of its clause catches it outright: what was written, read or kept,
an input that changed, a multiplicity that is another. The ratios of L1 are stored beside the cases.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backend
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.clauses import CHECKS
from attnconform.conformance.deviations import DEVIATIONS, Deviation
from attnconform.conformance.deviations.observation import TRIALS, Call, observe, trial_of
from attnconform.conformance.judge.gradient_bounds import compare_gradients, given
from attnconform.conformance.judge.judge import CHECKS_OF, Check, run_checks, undeclared
from attnconform.conformance.judge.trial import BackendCrash
from attnconform.conformance.judge.values import Comparison, compare_forward
from attnconform.conformance.judge.verdict import CONFORMING, NOT_RUN
from attnconform.reference.coordinates import FloatArray

ENOUGH = 2.0  # times the bound that some deviation must move a case
FILE = "l1_detectability.json"
OF_ONE_CALL = ("check_values", "check_gradients", "check_inputs", "check_bounds")  # what the numbers say already


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """The deviation of a clause that shows most on a case, and how."""

    deviation: str
    ratio: float  # largest error / bound; 0 where no number moves
    kind: str  # value, hygiene, crash, or the check that caught it outright, such as membership

    @property
    def is_enough(self) -> bool:
        return self.kind != "value" or self.ratio >= ENOUGH


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was found on a case: of all its clauses, or the first deviation that was enough."""

    clauses: dict[str, Detection]  # without those of which nothing shows
    complete: bool

    @property
    def is_detectable(self) -> bool:
        return any(detection.is_enough for detection in self.clauses.values())


def measure(case: Case) -> Measured:
    """What shows most of every clause that a case is tagged with.

    Takes seconds a case: every deviation of its clauses is run once.
    """
    found = {}
    with np.errstate(all="ignore"):  # mistakes overflow and divide by 0 on purpose
        for clause in case.clauses:
            best = strongest(case, of_clause(clause))
            if best is not None:
                found[clause] = best
    return Measured(clauses=found, complete=True)


def measure_quickly(case: Case) -> Measured:
    """The first deviation of a case's clauses that is enough."""
    with np.errstate(all="ignore"):
        for deviation in (deviation for clause in case.clauses for deviation in of_clause(clause)):
            detection = detect(case, deviation)
            if detection is not None and detection.is_enough:
                return Measured(clauses={deviation.clause: detection}, complete=False)
    return measure(case)  # only what takes more than one call can show here


def is_detectable(case: Case) -> bool:
    """Whether some deviation of a case's clauses moves it far enough, or is caught outright."""
    return measure_quickly(case).is_detectable


def of_clause(clause: str) -> list[Deviation]:
    """The deviations that break a clause."""
    return [deviation for deviation in DEVIATIONS.values() if deviation.clause == clause]


def strongest(case: Case, deviations: Sequence[Deviation]) -> Detection | None:
    """The best of one call each; where that is not enough, of the checks of the clause that need more calls."""
    found = [detection for detection in (detect(case, deviation) for deviation in deviations) if detection is not None]
    best = max(found, key=lambda detection: (detection.is_enough, detection.ratio), default=None)
    if best is not None and best.is_enough:
        return best
    caught = (caught_outright(case, deviation) for deviation in deviations)
    return next((detection for detection in caught if detection is not None), best)


def detect(case: Case, deviation: Deviation) -> Detection | None:
    """How one call of a deviation shows beside the oracle; None where it does not show at all."""
    reference = of_the_reference(case)
    try:
        call = observe_enough(case, deviation.build(), reference)
    except BackendCrash:
        return Detection(deviation=deviation.id, ratio=0.0, kind="crash")
    if call.equals(reference.call):
        return None
    ratio = largest_ratio(call, reference)
    if ratio < ENOUGH and leaves_traces(call):
        return Detection(deviation=deviation.id, ratio=ratio, kind="hygiene")
    return Detection(deviation=deviation.id, ratio=ratio, kind="value")


def observe_enough(case: Case, backend: Backend, reference: "OfTheReference") -> Call:
    """One call; its backward, which costs twice as much, only where the forward does not show far enough already."""
    trial = trial_of(case, backend)
    forward = Call(trial.base, None, takes_dlse=False)
    if case.operation != "backward" or largest_ratio(forward, reference) >= ENOUGH:
        return forward
    gradients = trial.run_backward(trial.values, trial.base)
    return Call(trial.base, gradients, backend.capabilities.gradient_of_lse)


def leaves_traces(call: Call) -> bool:
    """Whether a call wrote where it must not, or took a path that is none of the declared ones."""
    changed = call.gradients.mutated if call.gradients is not None else ()
    forward = call.forward
    return bool(forward.mutated or changed) or bool(forward.overruns) or forward.path != "native"


class OfTheReference:
    """A case's own call with its bounds: what every deviation of the case is held against."""

    def __init__(self, case: Case) -> None:
        trial_of(case, StepsBackend())
        shared = TRIALS[case.id]  # every trial of the case is a copy of this one, and has what it has computed
        shared.oracle, shared.selected  # noqa: B018
        self.trial = trial_of(case, StepsBackend())

    @cached_property
    def call(self) -> Call:
        return observe(self.trial.case, StepsBackend())

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Every output with its bounds, under the plain class of the case's dtype."""
        trial, call = self.trial, self.call
        found = compare_forward(trial, trial.values, call.forward, trial.oracle)
        if call.gradients is not None:
            oracle = trial.oracle_gradients(trial.values, trial.oracle)
            found += compare_gradients(trial, trial.values, call.gradients, oracle, trial.oracle)
        return found


LAST: dict[str, OfTheReference] = {}  # of the one case that was asked for last


def of_the_reference(case: Case) -> OfTheReference:
    """Made once a case, as long as its deviations come one after another; what was kept of the case before goes."""
    if case.id not in LAST:
        for earlier in LAST:
            TRIALS.pop(earlier, None)
        LAST.clear()
        LAST[case.id] = OfTheReference(case)
    return LAST[case.id]


def largest_ratio(call: Call, reference: OfTheReference) -> float:
    """The largest error / bound over all elements of all outputs."""
    got, ratios = outputs_of(call), [0.0]
    for known in reference.comparisons:
        mine = got.get(known.name)
        if mine is not None and mine.shape == known.want.shape:
            ratios.append(Comparison(known.name, mine, known.want, known.worst, known.probable).worst_ratio)
    return min(max(ratios), sys.float_info.max)


def outputs_of(call: Call) -> dict[str, FloatArray]:
    """Every output of a call by its name in a comparison."""
    out = {"out": call.forward.out} | ({} if call.forward.lse is None else {"lse": call.forward.lse})
    return out if call.gradients is None else out | given(call.gradients)


def caught_outright(case: Case, deviation: Deviation) -> Detection | None:
    """What the checks of a deviation's clause say that need more than one call."""
    backend = deviation.build()
    if undeclared(case, backend) is not None:
        return None
    findings = run_checks(trial_of(case, backend), checks_of(case.operation, deviation.clause))
    for finding in findings:
        if finding.state not in CONFORMING | NOT_RUN | {"UNRESOLVED", "HARNESS_ERROR"}:
            return Detection(deviation=deviation.id, ratio=0.0, kind=finding.check.removeprefix("check_"))
    return None


@contextmanager
def one_thread() -> Iterator[None]:
    """Tensors of a case are so small that threads cost more than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def checks_of(operation: str, clause: str) -> tuple[Check, ...]:
    """The checks of an operation that judge a clause by more than the numbers of one call."""
    carry = {name for name, clauses in CHECKS.items() if clause in clauses}
    return tuple(
        check
        for check in CHECKS_OF[operation]
        if f"{check.__module__}.{check.__qualname__}" in carry and check.__name__ not in OF_ONE_CALL
    )


def stored() -> dict[str, Measured]:
    """What is stored of L1, by case id."""
    data = resources.files("attnconform.conformance.cases").joinpath(FILE).read_bytes()
    return msgspec.json.decode(data, type=dict[str, Measured])


def read(path: Path) -> dict[str, Measured]:
    """What a file holds, by case id; nothing where there is none."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Measured]) if path.exists() else {}


def measure_all(cases: Iterable[Case], path: Path, *, quick: bool = False) -> Iterator[tuple[str, Measured]]:
    """Measures cases that the file has not, and adds each to it at once, so that a run cut off goes on.

    What was measured quickly is measured again where it is to be complete.
    """
    known = read(path)
    for case in cases:
        if case.id in known and (quick or known[case.id].complete):
            continue
        with one_thread():
            known[case.id] = measure_quickly(case) if quick else measure(case)
        write(path, known)
        yield case.id, known[case.id]


def write(path: Path, known: dict[str, Measured]) -> None:
    """The file, a line a case, in the order of the ids."""
    lines = (f'"{case_id}": {msgspec.json.encode(known[case_id]).decode()}' for case_id in sorted(known))
    draft = path.with_name(path.name + ".part")
    draft.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    draft.replace(path)


def vacuous(found: dict[str, Measured]) -> list[str]:
    """Ids of the cases that no deviation of their clauses moves far enough."""
    return [case_id for case_id, measured in found.items() if not measured.is_detectable]
