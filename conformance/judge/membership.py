"""Step 2: which keys did the kernel attend? With q = 0 every weight is known, and one-hot V says whose it is.

`out * exp(lse)` is then the unnormalized weight of each slot; divided by the weight one edge should have, it is how
often the slot was counted. One call tells head_dim_vo slots apart.
"""

from dataclasses import dataclass

import numpy as np

from attnconform.conformance.cases.values import Values
from attnconform.conformance.clauses import checks
from attnconform.conformance.judge.diagnosis import name_extra, name_missing
from attnconform.conformance.judge.memory import watched_memory
from attnconform.conformance.judge.trial import Trial, with_values
from attnconform.conformance.judge.verdict import Finding
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.steps import Steps

HEAD_ROTATION = 5  # one-hot columns differ by KV head, so that a wrong head shows as wrong slots
LEAST_WEIGHT = 1e-6  # of a row's denominator; what is lighter may vanish in half precision
MAX_LISTED = 4


@dataclass(frozen=True)
class SlotWeights:
    """Unnormalized weights of every slot; [row, query head, slot]."""

    expected: FloatArray
    observed: FloatArray
    edges: IntArray  # how many edges each slot should carry
    resolvable: BoolArray  # [row, query head, slot] where an edge is heavy enough to be seen


@checks(
    "SET-IDENTITY", "SET-DUPLICATE", "SET-ORDER", "SET-HOLE", "SET-UNION", "SET-ALIAS", "COORD-SLOT", "COORD-RENUMBER",
    "COORD-LOGICAL", "COORD-WIDE", "COORD-STRIDE", "COORD-ROW", "MASK-BEFORE-MAX", "MASK-CAUSAL", "MASK-OFFSET",
    "MASK-WINDOW", "MASK-PREFIX", "MASK-DOCUMENT", "MASK-COMPOSE", "MASK-TAIL", "BLOCK-EXPAND", "BLOCK-MEMBER",
    "BLOCK-BIND", "BLOCK-COMPLETE", "BLOCK-EXCLUSIVE", "BLOCK-FULL", "BLOCK-DECODE", "GQA-MAP", "GQA-LISTS",
    "MERGE-DISJOINT", "MERGE-SPLIT", "MERGE-EMPTY", "COORD-HEAD-PAGE", "MASK-HEAD-WINDOW", "RULE-CUSTOM",
    "DROPOUT-COUNTER", "DROPOUT-NUMERATOR",
)  # fmt: skip
def check_membership(trial: Trial) -> list[Finding]:
    """Names every missing, extra and repeated position, with its row, head, page and slot."""
    weights = probe(trial)
    trial.unresolved += int(((weights.edges > 0) & ~weights.resolvable).sum())
    multiplicity = np.divide(
        weights.observed * weights.edges,
        weights.expected,
        out=np.zeros_like(weights.observed),
        where=weights.expected > 0,
    )
    counted = np.rint(multiplicity)
    wanted = weights.edges > 0
    seen = wanted & weights.resolvable
    nan = np.asarray(np.isnan(weights.observed).any(axis=2))
    missing = seen & (counted < weights.edges)
    repeated = seen & (counted > weights.edges)
    extra = ~wanted & (weights.observed > LEAST_WEIGHT * weights.expected.max(axis=2, keepdims=True, initial=0.0))
    return [
        *_nan_findings(nan),
        *_listed(trial, missing, counted, "missing"),
        *_listed(trial, extra, counted, "extra"),
        *_listed(trial, repeated, counted, "repeated"),
    ]


def probe(trial: Trial) -> SlotWeights:
    """Weights of every slot, as they should be and as the backend has them."""
    expected, edges = expected_weights(trial)
    scaled = observed_outputs(trial)
    observed = scaled if trial.backend.capabilities.returns_lse else normalized(scaled, expected)
    resolvable = expected >= LEAST_WEIGHT * denominators(trial.problem, expected)
    return SlotWeights(expected, observed, edges, resolvable)


def denominators(problem: AttentionProblem, expected: FloatArray) -> FloatArray:
    """(total_q, num_qo_heads, 1): what weights are divided by, their sum and the weight of a sink. [LSE-SINK]"""
    total = expected.sum(axis=2, keepdims=True)
    return total if problem.sink_logits is None else total + np.exp(problem.sink_logits)[None, :, None]


def expected_weights(trial: Trial) -> tuple[FloatArray, IntArray]:
    """exp(score) summed over the edges of each slot, with q = 0; and the number of those edges.

    An edge that dropout drops is none: it stays in the denominator alone. [DROPOUT-NUMERATOR]
    """
    problem, steps = trial.problem, Steps()
    shape = (problem.total_q, problem.num_qo_heads, problem.cache.num_slots)
    weights, edges = np.zeros(shape), np.zeros(shape, dtype=np.int64)
    for where in problem.rows():
        for h in range(problem.num_qo_heads):
            positions = steps.effective(problem, where, h)
            slots = steps.head_slots(problem, steps.slots(problem, where, positions), steps.kv_head(problem, h))
            scores, _ = steps.scores(problem, where, h, positions, np.zeros(len(positions)))
            kept = steps.dropout_weights(problem, where, h, positions)
            np.add.at(weights[where.row, h], slots, kept * np.exp(scores))
            np.add.at(edges[where.row, h], slots, kept > 0)
    return weights, edges


def observed_outputs(trial: Trial) -> FloatArray:
    """out * exp(lse) of every slot; out alone where the backend returns no lse."""
    problem = trial.problem
    dim, num_slots = problem.head_dim_vo, problem.cache.num_slots
    observed = np.zeros((problem.total_q, problem.num_qo_heads, num_slots))
    for start in range(0, num_slots, dim):
        slots = np.arange(start, min(start + dim, num_slots))
        with watched_memory(trial):
            observe_slots(trial, slots, observed)
    return observed


def observe_slots(trial: Trial, slots: IntArray, observed: FloatArray) -> None:
    """Fills in out * exp(lse) of as many slots as one call tells apart."""
    problem = trial.problem
    seen = trial.run(one_hot_values(trial.values, slots), unowned=0.0, view=trial.without_epilogue)
    total = 1.0 if seen.lse is None else np.exp(seen.lse)[..., None]
    for h in range(problem.num_qo_heads):
        columns = column_of(slots, h // problem.group_size, problem.head_dim_vo)
        scales = value_scales(problem, slots, h // problem.group_size, columns)
        observed[:, h, slots] = (seen.out * total)[:, h, columns] / scales


def value_scales(problem: AttentionProblem, slots: IntArray, kv_head: int, columns: IntArray) -> FloatArray:
    """What a code of 1 in each slot's column is worth, (n,)."""
    if problem.v_quant is None:
        return np.ones(len(slots))
    scales = problem.v_quant.scales_at(slots, kv_head, page_size=problem.cache.page_size)
    full = np.broadcast_to(scales, (len(slots), problem.head_dim_vo))
    return full[np.arange(len(slots)), columns]


def one_hot_values(values: Values, slots: IntArray) -> Values:
    """The case's shapes with q = 0 and a 1 in one column of each slot's value."""
    v = np.zeros_like(values.v)
    for head in range(v.shape[1]):
        v[slots, head, column_of(slots, head, v.shape[2])] = 1.0
    return with_values(values, q=np.zeros_like(values.q), k=values.k, v=v)


def column_of(slots: IntArray, kv_head: int, dim: int) -> IntArray:
    """The column that stands for a slot in one KV head's values."""
    return (slots + HEAD_ROTATION * kv_head) % dim


def normalized(scaled: FloatArray, expected: FloatArray) -> FloatArray:
    """Outputs brought to the scale of the expected weights by each row's lightest edge.

    Without lse a factor common to a whole row cannot be seen: every key counted twice looks like every key once.
    """
    ratio = np.divide(scaled, expected, out=np.full_like(scaled, np.inf), where=(expected > 0) & (scaled > 0))
    unit = ratio.min(axis=2, keepdims=True, initial=np.inf)
    return np.divide(scaled, unit, out=np.zeros_like(scaled), where=np.isfinite(unit))


def _nan_findings(nan: BoolArray) -> list[Finding]:
    if not nan.any():
        return []
    row, head = (int(i) for i in np.argwhere(nan)[0])
    message = f"row {row} head {head}: out * exp(lse) is NaN with q = 0 and finite inputs"
    return [Finding(state="FAIL_nonfinite", clauses=("EMPTY-OUT", "MASK-BEFORE-MAX"), message=message)]


def _listed(trial: Trial, where: BoolArray, counted: FloatArray, kind: str) -> list[Finding]:
    """One finding for a kind of wrong edge, naming the first few."""
    if not where.any():
        return []
    places = np.argwhere(where)
    described, clauses = [], list[str]()
    for row, head, slot in places[:MAX_LISTED].tolist():
        text, named = describe(trial, row, head, slot, kind)
        times = f" counted {counted[row, head, slot]:g} times" if kind == "repeated" else ""
        described.append(text + times)
        clauses += [c for c in named if c not in clauses]
    message = f"{kind} ({len(places)} in all): {'; '.join(described)}"
    return [Finding(state="FAIL_membership", clauses=tuple(clauses), message=message)]


def describe(trial: Trial, row: int, head: int, slot: int, kind: str) -> tuple[str, tuple[str, ...]]:
    """A wrong edge in words, and the clauses that would explain it."""
    where = next(w for w in trial.problem.rows() if w.row == row)
    page, offset = divmod(slot, trial.problem.cache.page_size)
    kv_head = head // trial.problem.group_size
    positions = np.flatnonzero(trial.view.slots(where.request, kv_head).cpu().numpy() == slot)
    position = "none of its request" if not len(positions) else str(int(positions[0]))
    text = (
        f"row {row} (request {where.request}, q_idx {where.q_idx}) head {head}: position {position}, "
        f"page {page} offset {offset}, slot {slot}"
    )
    if kind == "extra":
        return text, name_extra(trial, where, head, positions)
    if kind == "repeated":
        return text, ("SET-DUPLICATE", "SET-ALIAS") if trial.problem.candidates is not None else (
            "SET-ALIAS",
            "COORD-SLOT",
        )
    return text, name_missing(trial, where, head, int(positions[0]))
