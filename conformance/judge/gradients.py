"""Gradients: each alone within its bound, exactly 0 where no query selects, and over the forward's own edges."""

from dataclasses import replace

import numpy as np
import torch

from attnconform.conformance.backend import Backward
from attnconform.conformance.cases.values import Values
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.gradient_bounds import compare_gradients, given
from attnconform.conformance.judge.hygiene import mutation_findings
from attnconform.conformance.judge.membership import HEAD_ROTATION, LEAST_WEIGHT, expected_weights
from attnconform.conformance.judge.trial import ObservedGradients, Trial, same_bits, with_values
from attnconform.conformance.judge.values import SEEDS, Comparison, judge_comparisons
from attnconform.conformance.judge.verdict import Finding
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray


@checks(
    "GRAD-FORMULA", "GRAD-SET", "GRAD-SUM", "GRAD-SOFTCAP", "GRAD-SINK", "GRAD-LSE", "GRAD-ZERO", "EMPTY-GRAD",
    "GRAD-RULE", "GRAD-EPILOGUE", "DROPOUT-BACKWARD", "ROPE-GRAD", "QUANT-GRAD", "BOUND-RULE",
    "DETERMINISM-RUN", "COORD-STRIDE", "BLOCK-TRANSPOSE", "SAFE-INPUTS", "BOUND-GRAD", "SET-ALIAS", "SCORE-HEAD",
    "GQA-MAP", "MASK-INTERFERE",
)  # fmt: skip
def check_gradients(trial: Trial) -> list[Finding]:
    """dQ, dK, dV and dsink, each alone, element by element."""
    observed = trial.base_gradients
    findings = [*mutation_findings(observed.mutated, "backward"), *repeat_findings(trial, observed)]
    oracle = trial.oracle_gradients(trial.values, trial.oracle)
    if oracle.dsink is not None and observed.dsink is None:
        message = "backward returned no dsink, though the problem has sink logits"
        findings.append(Finding(state="FAIL_gradient", clauses=("GRAD-SINK",), message=message))
    shapes = [g.shape for g in oracle.dscore]
    got_shapes = [g.shape for g in observed.dscore or ()]
    if trial.backend.capabilities.score_gradients and got_shapes != shapes:
        message = f"dscore has shapes {got_shapes}, but the score rules' parameters have {shapes}"
        findings.append(Finding(state="FAIL_gradient", clauses=("GRAD-RULE",), message=message))
    findings += zero_findings(trial, observed)
    compared = compare_gradients(trial, trial.values, observed, oracle, trial.oracle)
    findings += judge_comparisons(trial, compared, exceeds_under_other_seeds, "FAIL_gradient")
    return findings or interference_findings(trial, compared)


def interference_findings(trial: Trial, compared: list[Comparison]) -> list[Finding]:
    """Gradients that were right stay so whatever lies in slots of a request that no row attends. [MASK-INTERFERE]"""
    if not (trial.owned & ~trial.selected).any():
        return []
    got = given(trial.run_backward(trial.values, trial.second))
    for comparison in compared:
        other = replace(comparison, got=got.get(comparison.name, comparison.got))
        if other.worst_ratio > 1:
            message = f"with other bytes in slots that no row attends: {other.message(other.worst)}"
            return [Finding(state="FAIL_interference", clauses=("MASK-INTERFERE", "GRAD-SET"), message=message)]
    return []


def repeat_findings(trial: Trial, observed: ObservedGradients) -> list[Finding]:
    """The same backward again, after a forward of other numbers, gives the same bits, where determinism is declared.

    What it is given belongs to its own forward, whichever ran last. [DETERMINISM-RUN, GRAD-SET]
    """
    if trial.backend.capabilities.determinism == "none":
        return []
    trial.run(trial.with_seed(trial.case.seed + (1 << 41)))
    again = trial.run_backward(trial.values, trial.base)
    name = other_bits(observed, again)
    if name is None:
        return []
    if other_bits(again, trial.run_backward(trial.values, trial.base)) is None:
        message = f"after a forward of other numbers the same backward gives other bits of {name}"
        return [Finding(state="FAIL_determinism", clauses=("GRAD-SET", "DETERMINISM-RUN"), message=message)]
    message = f"the same backward gives other bits of {name}"
    return [Finding(state="FAIL_determinism", clauses=("DETERMINISM-RUN",), message=message)]


def other_bits(first: ObservedGradients, second: ObservedGradients) -> str | None:
    """The first of all gradients that differs between two backwards."""
    others = given_gradients(second.raw)
    pairs = ((name, tensor, others.get(name)) for name, tensor in given_gradients(first.raw).items())
    return next((name for name, a, b in pairs if b is None or not same_bits(a, b)), None)


def given_gradients(raw: Backward) -> dict[str, torch.Tensor]:
    """Every gradient that a backward gave, by name."""
    named = {"dq": raw.dq, "dk": raw.dk, "dv": raw.dv}
    if raw.dsink is not None:
        named["dsink"] = raw.dsink
    return named | {f"dscore{i}": gradient for i, gradient in enumerate(raw.dscore or ())}


def zero_findings(trial: Trial, observed: ObservedGradients) -> list[Finding]:
    """dk and dv are exactly 0 where no row attends a slot. [GRAD-ZERO]"""
    findings = []
    for name in ("dk", "dv"):
        stray = (getattr(observed, name) != 0).any(axis=2) & ~trial.selected
        if stray.any():
            slot, head = (int(i) for i in np.argwhere(stray)[0])
            message = (
                f"{name}[slot {slot}, head {head}] is not 0, but no row attends it ({int(stray.sum())} such slots)"
            )
            findings.append(Finding(state="FAIL_gradient", clauses=("GRAD-ZERO", "GRAD-SET"), message=message))
    return findings


def exceeds_under_other_seeds(trial: Trial, name: str) -> int:
    """On how many of the other seeds the probabilistic bound is exceeded as well."""
    times = 0
    for i in range(1, SEEDS):
        values = trial.with_seed(trial.case.seed + (i << 40))
        result = trial.oracle_of(values)
        compared = compare_gradients(
            trial, values, trial.run_backward(values), trial.oracle_gradients(values, result), result
        )
        times += any(c.name == name and c.probable_ratio > 1 for c in compared)
    return times


@checks("GRAD-SET", "GRAD-SUM", "BLOCK-TRANSPOSE", "GRAD-ZERO")
def check_gradient_edges(trial: Trial) -> list[Finding]:
    """With q = 0 and one-hot dO, column c of dV[slot] is the weight that row c gave the slot."""
    problem = trial.problem
    if problem.head_dim_vo < problem.group_size or not problem.total_q:
        return []
    rows_at_once = problem.head_dim_vo // problem.group_size
    findings: list[Finding] = []
    for start in range(0, problem.total_q, rows_at_once):
        rows = np.arange(start, min(start + rows_at_once, problem.total_q))
        findings += edge_findings(trial, rows)
    return findings[:2]


def edge_findings(trial: Trial, rows: IntArray) -> list[Finding]:
    """Edges of some rows that dV did not use, or used without leave."""
    problem = trial.problem
    dout = np.zeros_like(trial.values.dout)
    columns = gradient_columns(trial, rows)
    for (row, head), column in columns.items():
        dout[row, head, column] = 1.0
    values = with_values(
        trial.values, q=np.zeros_like(trial.values.q), dout=dout, dlse=np.zeros_like(trial.values.dlse)
    )
    view = trial.without_epilogue
    dv = trial.run_backward(values, trial.run(values, unowned=0.0, view=view), view).dv
    expected = expected_edges(trial, values)
    findings = []
    for (row, head), column in columns.items():
        got, want = dv[:, head // problem.group_size, column], expected[row, head]
        wrong = wrong_edges(got, want)
        if wrong.any():
            slot = int(np.argmax(wrong))
            place = f"row {row} head {head} slot {slot}"
            message = f"dV used other edges than forward: {place} has {got[slot]:.4g}, want {want[slot]:.4g}"
            clauses = ("GRAD-SET", "GRAD-SUM", "BLOCK-TRANSPOSE")
            findings.append(Finding(state="FAIL_gradient", clauses=clauses, message=message))
    return findings


def gradient_columns(trial: Trial, rows: IntArray) -> dict[tuple[int, int], int]:
    """The dV column that stands for each (row, query head); rotated by head, like the forward probe's."""
    problem, group = trial.problem, trial.problem.group_size
    return {
        (int(row), head): (i * group + head % group + HEAD_ROTATION * (head // group)) % problem.head_dim_vo
        for i, row in enumerate(rows)
        for head in range(problem.num_qo_heads)
    }


def expected_edges(trial: Trial, values: Values) -> FloatArray:
    """Softmax weight of every slot with q = 0, (total_q, num_qo_heads, num_slots)."""
    weights, _ = expected_weights(trial)
    lse = trial.oracle_of(values).lse[..., None]
    return weights * np.exp(-np.where(np.isneginf(lse), np.inf, lse))


def wrong_edges(got: FloatArray, want: FloatArray) -> BoolArray:
    """Where a weight is off by half an edge or more; a missing edge is off by a whole one."""
    seen = (want >= LEAST_WEIGHT) & ~(np.abs(got - want) <= 0.45 * want)
    stray = (want == 0) & ~(np.abs(got) <= LEAST_WEIGHT)
    return np.asarray(seen | stray)
