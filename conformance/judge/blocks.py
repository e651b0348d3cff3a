"""The oracle's own data, cut into the blocks that bounds are computed on: one request and one KV head each."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnconform.conformance.bounds.block import AttentionBlock
from attnconform.conformance.bounds.numerics import FORMATS
from attnconform.conformance.cases.values import Values
from attnconform.conformance.judge.trial import Trial, declared_numerics
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rope import frequencies, pairs
from attnconform.reference.rule_values import apply_score_rule
from attnconform.reference.rules import CustomScore, SoftCap
from attnconform.reference.steps import Steps

UNIT = FORMATS["float32"].u
SCALE_ROUNDINGS = 2  # a code times its scale, or a product that was scaled afterwards
TURN_ROUNDINGS = 4  # frequency, angle, sine or cosine, and the two products with their sum


@dataclass(frozen=True)
class PlacedBlock:
    """A block's data, and where its rows and keys stand in the problem."""

    block: AttentionBlock
    rows: IntArray  # (num_rows,) index into out, head after head
    heads: IntArray  # (num_rows,) query head
    q_idx: IntArray  # (num_rows,) logical position
    slots: IntArray  # (num_keys,) physical
    kv_head: int


def placed_blocks(trial: Trial, values: Values) -> Iterator[PlacedBlock]:
    """Every (request, KV head) with query rows."""
    problem = trial.problem
    rows_of: dict[int, list[QueryRow]] = {}
    for where in problem.rows():
        rows_of.setdefault(where.request, []).append(where)
    for request, rows in rows_of.items():
        for kv_head in range(problem.num_kv_heads):
            slots = trial.view.slots(request, kv_head).cpu().numpy()
            heads = range(kv_head * problem.group_size, (kv_head + 1) * problem.group_size)
            yield place_block(trial, values, [(w, h) for h in heads for w in rows], slots, kv_head)


def place_block(
    trial: Trial, values: Values, stacked: list[tuple[QueryRow, int]], slots: IntArray, kv_head: int
) -> PlacedBlock:
    """The block of some rows and heads that read one KV head of one request."""
    problem, steps = trial.problem, Steps()
    every = Positions(np.arange(len(slots)))
    q = np.stack([steps.query(problem, w, values.q[w.row, h]) for w, h in stacked])
    k = steps.keys(problem, every, slots, kv_head, values.k)
    v = steps.values(problem, slots, kv_head, values.v)
    mask = np.zeros((len(stacked), len(slots)), dtype=bool)
    scores, slope = np.zeros(mask.shape), np.ones(mask.shape)
    for i, (where, h) in enumerate(stacked):
        mask[i, trial.edges.of(where.row, h)[0]] = True
        scores[i], slope[i] = steps.scores(problem, where, h, every, k @ q[i])
    heads = np.array([h for _, h in stacked])
    q_idx = np.array([w.q_idx for w, _ in stacked])
    numerics = declared_numerics(trial)
    errors = operand_errors(problem, numerics.scale_bits, q_idx, q, k, v)
    block = AttentionBlock(
        q=q,
        k=k,
        v=v,
        mask=mask,
        scores=scores,
        sm_scale=problem.sm_scale,
        added=added_bias(trial, stacked, q @ k.T),
        slope=slope,
        cap=next((rule.cap for rule in problem.score_rules if isinstance(rule, SoftCap)), None),
        sink=None if problem.sink_logits is None else problem.sink_logits[heads],
        dropout=None
        if problem.dropout is None
        else np.stack([steps.dropout_weights(problem, w, h, every) for w, h in stacked]),
        **errors,
        num_heads=problem.group_size,
    )
    return PlacedBlock(block, np.array([w.row for w, _ in stacked]), heads, q_idx, slots, kv_head)


def added_bias(trial: Trial, stacked: list[tuple[QueryRow, int]], dots: FloatArray) -> FloatArray | None:
    """Sum of |bias| that the score rules and a sequence's ranks add, (num_rows, num_keys)."""
    problem, steps, num_keys = trial.problem, Steps(), dots.shape[1]
    kv_idx = np.arange(num_keys)
    rules = [rule for rule in problem.score_rules if not isinstance(rule, SoftCap)]
    if not rules and (problem.candidates is None or problem.candidates.rank_bias is None):
        return None
    added = np.zeros((len(stacked), num_keys))
    for i, (where, h) in enumerate(stacked):
        added[i] = np.abs(steps.rank_bias(problem, where, h, Positions(kv_idx)))
        for rule in rules:
            if isinstance(rule, CustomScore):  # whatever it computes, it computes with numbers of this size
                given = steps.scale(problem, dots[i])
                added[i] += 2 * np.abs(given) + np.abs(apply_score_rule(rule, given, h, where.q_idx, kv_idx))
            else:
                added[i] += np.abs(apply_score_rule(rule, np.zeros(num_keys), h, where.q_idx, kv_idx))
    return added


def operand_errors(
    problem: AttentionProblem, scale_bits: int, q_idx: IntArray, q: FloatArray, k: FloatArray, v: FloatArray
) -> dict[str, FloatArray]:
    """How far operands that a kernel makes on its way may be off: products with a scale, turns by an angle.

    A scale that is multiplied into q or into P instead changes each product by as much.
    An angle is a position times a frequency, each rounded, so its error grows with the position. [ROPE-POSITION]
    """
    errors = {}
    scaled = 2.0**-scale_bits if scale_bits else SCALE_ROUNDINGS * UNIT
    if problem.k_quant is not None:
        errors["k_error"] = scaled * np.abs(k)
    if problem.v_quant is not None:
        errors["v_error"] = scaled * np.abs(v)
    rope = problem.rope
    if rope is None or not rope.turns:
        return errors
    first, second = pairs(rope)
    for name, x, positions in (("q_error", q, q_idx), ("k_error", k, np.arange(len(k)))):
        turned = TURN_ROUNDINGS * UNIT * (1 + np.abs(positions)[:, None] * frequencies(rope))
        error = np.zeros_like(x)
        error[:, first] = error[:, second] = turned * np.hypot(x[:, first], x[:, second])
        errors[name] = error + errors.get(name, 0.0)
    return errors
