"""How far the deviations of a case's clauses move it: a case that nothing can fail asks nothing.

The ratio of a deviation on a case is its largest error / worst-case bound over all elements of all outputs. A mistake
that moves no number far enough counts where a check catches it outright: what was written, read or kept, an input that
changed, a multiplicity that is another. The ratios of L1 are stored beside the cases.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.structure import Case
from attnconform.conformance.deviations import DEVIATIONS, Deviation
from attnconform.conformance.deviations.observation import Call, observe, trial_of
from attnconform.conformance.judge.gradient_bounds import compare_gradients
from attnconform.conformance.judge.hygiene import check_repeat
from attnconform.conformance.judge.interference import check_other_rows, check_unselected
from attnconform.conformance.judge.judge import judge_case
from attnconform.conformance.judge.membership import check_membership
from attnconform.conformance.judge.trial import BackendCrash, Trial
from attnconform.conformance.judge.values import Comparison, compare_forward

Kind = Literal["value", "hygiene", "crash", "membership", "repeat", "interference"]
ENOUGH = 2.0  # times the bound that some deviation must move a case
FILE = "l1_detectability.json"
OUTRIGHT: dict[str, Kind] = {
    "check_membership": "membership",
    "check_repeat": "repeat",
    "check_unselected": "interference",
    "check_other_rows": "interference",
}
MAX_OUTRIGHT = 2  # deviations of a clause that are put before the checks that need more than one call


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """The deviation of a clause that shows most on a case, and how."""

    deviation: str
    ratio: float  # largest error / bound; 0 where no number moves
    kind: Kind

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
    """The best of one call each; where that is not enough, of the checks that need more calls."""
    found = [detection for detection in (detect(case, deviation) for deviation in deviations) if detection is not None]
    best = max(found, key=lambda detection: (detection.is_enough, detection.ratio), default=None)
    if best is not None and best.is_enough:
        return best
    caught = (caught_outright(case, deviation) for deviation in deviations[:MAX_OUTRIGHT])
    return next((detection for detection in caught if detection is not None), best)


def detect(case: Case, deviation: Deviation) -> Detection | None:
    """How one call of a deviation shows beside the oracle; None where it does not show at all."""
    try:
        call = observe(case, deviation.build())
    except BackendCrash:
        return Detection(deviation=deviation.id, ratio=0.0, kind="crash")
    if call.equals(OF_THE_REFERENCE.call(case)):
        return None
    ratio = largest_ratio(case, call)
    if ratio < ENOUGH and leaves_traces(call):
        return Detection(deviation=deviation.id, ratio=ratio, kind="hygiene")
    return Detection(deviation=deviation.id, ratio=ratio, kind="value")


def leaves_traces(call: Call) -> bool:
    """Whether a call wrote where it must not, or took a path that is none of the declared ones."""
    changed = call.gradients.mutated if call.gradients is not None else ()
    forward = call.forward
    return bool(forward.mutated or changed) or not forward.guards_intact or forward.path != "native"


def largest_ratio(case: Case, call: Call) -> float:
    """The largest error / bound over all elements of all outputs, under the plain class of the case's dtype."""
    ratios = [comparison.worst_ratio for comparison in comparisons(case, call)]
    return min(max(ratios, default=0.0), sys.float_info.max)


def comparisons(case: Case, call: Call) -> Iterator[Comparison]:
    """Every output of a call with its bounds."""
    trial = trial_of(case, StepsBackend())
    got = {"out": call.forward.out, "lse": call.forward.lse}
    for comparison in OF_THE_REFERENCE.bounds(trial):
        mine = got.get(comparison.name)
        if mine is not None and mine.shape == comparison.want.shape:
            yield Comparison(comparison.name, mine, comparison.want, comparison.worst, comparison.probable)
    if call.gradients is not None:
        oracle = trial.oracle_gradients(trial.values, trial.oracle)
        yield from compare_gradients(trial, trial.values, call.gradients, oracle, trial.oracle)


class OfTheReference:
    """Call and bounds of the case that was asked for last: every deviation of a case needs the same ones."""

    def __init__(self) -> None:
        self.calls: dict[str, Call] = {}
        self.compared: dict[str, list[Comparison]] = {}

    def call(self, case: Case) -> Call:
        """The reference's own call."""
        if case.id not in self.calls:
            self.calls = {case.id: observe(case, StepsBackend())}
        return self.calls[case.id]

    def bounds(self, trial: Trial) -> list[Comparison]:
        """out and lse with their bounds."""
        if trial.case.id not in self.compared:
            self.compared = {trial.case.id: compare_forward(trial, trial.values, trial.base, trial.oracle)}
        return self.compared[trial.case.id]


OF_THE_REFERENCE = OfTheReference()


def caught_outright(case: Case, deviation: Deviation) -> Detection | None:
    """What a check that needs more than one call says of a deviation on a forward case."""
    if case.operation != "forward":
        return None
    checks = (check_membership, check_repeat, check_unselected, check_other_rows)
    for finding in judge_case(case, deviation.build(), checks).findings:
        if finding.check in OUTRIGHT and finding.state.startswith("FAIL"):
            return Detection(deviation=deviation.id, ratio=0.0, kind=OUTRIGHT[finding.check])
    return None


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
