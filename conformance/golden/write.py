"""Makes the frozen vectors: for every deviation that shows in numbers, the tiny case in which it shows most."""

from collections.abc import Iterator

import msgspec
import numpy as np

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.cases.refusals import refusal_cases
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.deviations import DEVIATIONS, Deviation
from attnconform.conformance.golden.tiny_cases import tiny_cases
from attnconform.conformance.golden.vector import Refusal, Vector, to_array
from attnconform.conformance.golden.worked import worked_vectors
from attnconform.conformance.judge.gradient_bounds import compare_gradients
from attnconform.conformance.judge.trial import BackendCrash, Trial
from attnconform.conformance.judge.values import Comparison, compare_forward
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import check_problem

LEAST_DETECTABILITY = 2.0  # below this a mistake could hide behind an honest kernel's rounding


def all_vectors() -> Iterator[Vector]:
    """Every vector, each once."""
    yield from worked_vectors()
    yield from refusal_vectors()
    for deviation in DEVIATIONS.values():
        vector = vector_of(deviation)
        if vector is not None:
            yield vector


def vector_of(deviation: Deviation) -> Vector | None:
    """The vector that shows a deviation best; None where no tiny case shows it in deterministic numbers."""
    operation = "backward" if "GRAD" in deviation.clause or deviation.clause == "DROPOUT-BACKWARD" else "forward"
    best: tuple[float, int, Case, list[Comparison]] | None = None
    for case in tiny_cases(operation):
        if deviation.clause not in case.clauses:
            continue
        found = shown_by(deviation, case)
        ratio = max((c.worst_ratio for c in found), default=0.0)
        size = build_problem(case.structure).cache.num_slots
        # among cases that show it plainly, the smallest is the one to read
        rank = (min(ratio, 100.0), -size)
        if ratio >= LEAST_DETECTABILITY and (best is None or rank > best[:2]):
            best = (*rank, case, found)
    return None if best is None else make_vector(deviation, best[2], best[3])


def shown_by(deviation: Deviation, case: Case) -> list[Comparison]:
    """The outputs of a deviation on a case beside the right ones; none where it gives no stable numbers."""
    try:
        first, second = (comparisons(Trial(case, deviation.build())) for _ in range(2))
    except (BackendCrash, ValueError, IndexError):
        return []
    stable = all(np.array_equal(a.got, b.got, equal_nan=True) for a, b in zip(first, second, strict=True))
    return first if stable else []


def comparisons(trial: Trial) -> list[Comparison]:
    """All outputs of a backend on one case, beside the oracle's and their bounds."""
    compared = compare_forward(trial, trial.values, trial.base, trial.oracle)
    if trial.case.operation == "backward":
        gradients = trial.run_backward(trial.values, trial.base)
        oracle = trial.oracle_gradients(trial.values, trial.oracle)
        compared += compare_gradients(trial, trial.values, gradients, oracle, trial.oracle)
    return compared


def make_vector(deviation: Deviation, case: Case, wrong: list[Comparison]) -> Vector:
    """The file of one deviation and case."""
    trial = Trial(case, StepsBackend())
    values = trial.values
    tensors = {"q": values.q, "k": values.k, "v": values.v}
    quants = {"k_scale": trial.problem.k_quant, "v_scale": trial.problem.v_quant}
    tensors |= {name: quant.scale for name, quant in quants.items() if quant is not None}
    if case.operation == "backward":
        tensors |= {"dout": values.dout, "dlse": values.dlse}
    ratio = max(c.worst_ratio for c in wrong)
    # k and v are stored by slot, whatever the layout of the case they come from
    plain = msgspec.structs.replace(case.structure, layout="NHD", interleaved=False)
    return Vector(
        path=f"vectors/{deviation.id}.json",
        kind="backward" if case.operation == "backward" else "forward",
        clause=deviation.clause,
        fault_class=deviation.id,
        effect=deviation.idea,
        bug=deviation.report,
        structure=plain,
        tensors={name: to_array(array) for name, array in tensors.items()},
        expected={c.name: to_array(c.want) for c in wrong},
        bound={c.name: to_array(c.worst) for c in wrong},
        wrong={c.name: to_array(c.got) for c in wrong},
        detectability=ratio if np.isfinite(ratio) else None,
    )


def refusal_vectors() -> Iterator[Vector]:
    """Problems that must be refused, with what the refusal must name; those JSON can hold."""
    for case in refusal_cases():
        if case.structure.corruption is not None:
            continue
        try:
            check_problem(build_problem(case.structure))
        except RefusedInput as refused:
            name = case.axes["refusal"]
            yield Vector(
                path=f"vectors/refuse-{name}.json",
                kind="refusal",
                clause=refused.clause,
                fault_class=f"accepts-{name}",
                effect="the input is accepted and something else than what was asked for is computed",
                structure=case.structure,
                refusal=Refusal(refused.clause, refused.name, str(refused.value), refused.index),
            )
