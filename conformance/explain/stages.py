"""The first stage at which a backend parts from the reference: index, scores, merge, lse, out, gradients."""

from dataclasses import dataclass

import msgspec
import numpy as np

from attnconform.conformance.explain.location import Edge, locate, where_edges_are_wrong
from attnconform.conformance.judge.gradient_bounds import compare_gradients
from attnconform.conformance.judge.membership import check_membership, column_of, one_hot_values, probe
from attnconform.conformance.judge.ratio import ratio_text
from attnconform.conformance.judge.trial import Trial, with_values
from attnconform.conformance.judge.values import Comparison, compare_forward
from attnconform.conformance.views import Hints
from attnconform.reference.coordinates import FloatArray, IntArray

ORDER = ("lse", "out", "dv", "dq", "dk", "dsink")
FACTOR = 0.05  # by which two weights of a row may differ and still have one factor
LEAST_SHARE = 1e-3  # of a row's weight: what is lighter says too little of its score


@dataclass(frozen=True)
class Stage:
    """A stage, and what is wrong there."""

    name: str
    message: str
    where: str  # in kernel terms


def first_wrong_stage(trial: Trial) -> Stage | None:
    """Stops at the first stage that differs; None where all agree."""
    edges = check_membership(trial)
    if edges and not is_factor_of_rows(trial):
        return Stage("index", edges[0].message, where_edges_are_wrong(trial))
    forward = compare_forward(trial, trial.values, trial.base, trial.oracle)
    if any(c.worst_ratio > 1 for c in forward):
        return wrong_merge(trial, forward) or wrong_score(trial) or wrong_output(trial, forward)
    return wrong_output(trial, gradients_of(trial)) if trial.case.operation == "backward" else None


def is_factor_of_rows(trial: Trial) -> bool:
    """Whether every wrong weight of the membership probe is right but for one factor a row: then only lse is wrong."""
    weights = probe(trial)
    told = (weights.edges > 0) & weights.resolvable
    if weights.observed[weights.edges == 0].any() or not np.isfinite(weights.observed[told]).all():
        return False
    ratio = np.divide(weights.observed, weights.expected, out=np.full_like(weights.observed, np.nan), where=told)
    rows = ratio[told.any(axis=2)]
    least, most = np.nanmin(rows, axis=1), np.nanmax(rows, axis=1)
    return bool((least > 0).all() and (most <= (1 + FACTOR) * least).all())


def gradients_of(trial: Trial) -> list[Comparison]:
    """The gradients beside the oracle's."""
    gradients = trial.run_backward(trial.values, trial.base)
    oracle = trial.oracle_gradients(trial.values, trial.oracle)
    return compare_gradients(trial, trial.values, gradients, oracle, trial.oracle)


def wrong_output(trial: Trial, compared: list[Comparison]) -> Stage | None:
    """The first output that is past its bound."""
    known = sorted(compared, key=lambda c: ORDER.index(c.name) if c.name in ORDER else len(ORDER))
    wrong = next((c for c in known if c.worst_ratio > 1), None)
    if wrong is None:
        return None
    return Stage(wrong.name, wrong.message(wrong.worst), locate(trial, wrong))


def wrong_merge(trial: Trial, compared: list[Comparison]) -> Stage | None:
    """Whether the numbers are right as soon as a row is not split: then the merge of its pieces is wrong."""
    splits = trial.case.structure.hints.num_kv_splits or 1
    if splits == 1:
        return None
    hints = Hints(num_kv_splits=1)
    whole = msgspec.structs.replace(trial.case, structure=msgspec.structs.replace(trial.case.structure, hints=hints))
    unsplit = Trial(whole, trial.backend)
    if any(c.worst_ratio > 1 for c in compare_forward(unsplit, unsplit.values, unsplit.base, unsplit.oracle)):
        return None
    wrong = max(compared, key=lambda c: c.worst_ratio)
    message = f"right in one piece, wrong in {splits}: {wrong.message(wrong.worst)}"
    return Stage("merge", message, locate(trial, wrong))


@dataclass(frozen=True)
class Shares:
    """A row's softmax weight of every slot, as one-hot values show it; [row, query head, slot]."""

    got: FloatArray
    want: FloatArray
    bound: FloatArray


def wrong_score(trial: Trial) -> Stage | None:
    """The edge whose score is farthest off beside the other scores of its row. [SCORE-SCALE, SCORE-ORDER]

    None where they are right; what is added to all scores of a row alike is the lse's matter.
    """
    if getattr(trial.problem, "epilogue", ()):  # an output is then no sum of values
        return None
    shares = observed_shares(trial)
    worst, message, wrong = 1.0, "", list[Edge]()
    for where in trial.problem.rows():
        for h in range(trial.problem.num_qo_heads):
            positions, slots = trial.edges.of(where.row, h)
            off, bound = errors_of_row(shares, where.row, h, slots)
            ratio = np.abs(off) / bound
            wrong += [(where.row, h, int(slot)) for slot in slots[ratio > 1]]
            if not ratio.size or ratio.max() <= worst:
                continue
            i, worst = int(ratio.argmax()), float(ratio.max())
            message = (
                f"score[row {where.row}, head {h}, position {int(positions[i])}] is off by {off[i]:.6g} beside the "
                f"row's others, {ratio_text(worst)} x the bound {bound[i]:.3g}"
            )
    return Stage("scores", message, where_edges_are_wrong(trial, wrong)) if wrong else None


def errors_of_row(shares: Shares, row: int, head: int, slots: IntArray) -> tuple[FloatArray, FloatArray]:
    """Error of each score beside the row's median error, and its bound; 0 and infinite where nothing can be said."""
    got, want, bound = (array[row, head, slots] for array in (shares.got, shares.want, shares.bound))
    told = (want >= LEAST_SHARE) & (np.bincount(slots, minlength=1)[slots] == 1) & (got > 0)
    off, limit = np.zeros(len(slots)), np.full(len(slots), np.inf)
    if told.sum() > 1:
        error = np.log(got[told] / want[told])
        roundings = bound[told] / want[told]
        off[told] = error - np.median(error)
        limit[told] = np.maximum(roundings + roundings.max(), np.finfo(np.float32).tiny)
    return off, limit


def observed_shares(trial: Trial) -> Shares:
    """Weights of all slots with the case's own q and k, head_dim_vo slots a call."""
    problem, dim = trial.problem, trial.problem.head_dim_vo
    shape = (problem.total_q, problem.num_qo_heads, problem.cache.num_slots)
    got, want, bound = (np.zeros(shape) for _ in range(3))
    for start in range(0, problem.cache.num_slots, dim):
        slots = np.arange(start, min(start + dim, problem.cache.num_slots))
        values = with_values(trial.values, v=one_hot_values(trial.values, slots).v)
        out = compare_forward(trial, values, trial.run(values, unowned=0.0), trial.oracle_of(values))[0]
        for h in range(problem.num_qo_heads):
            columns = column_of(slots, h // problem.group_size, dim)
            for into, array in ((got, out.got), (want, out.want), (bound, out.worst)):
                into[:, h, slots] = array[:, h, columns]
    return Shares(got, want, bound)
