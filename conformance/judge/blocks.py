"""The oracle's own data, cut into the blocks that bounds are computed on: one request and one KV head each."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnconform.conformance.bounds.block import AttentionBlock
from attnconform.conformance.cases.values import Values
from attnconform.conformance.judge.trial import Trial
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.problem import QueryRow
from attnconform.reference.rules import Alibi, SoftCap
from attnconform.reference.steps import Steps


@dataclass(frozen=True)
class PlacedBlock:
    """A block's data, and where its rows and keys stand in the problem."""

    block: AttentionBlock
    rows: IntArray  # (num_rows,) index into out, head after head
    heads: IntArray  # (num_rows,) query head
    slots: IntArray  # (num_keys,) physical
    kv_head: int


def placed_blocks(trial: Trial, values: Values) -> Iterator[PlacedBlock]:
    """Every (request, KV head) with query rows."""
    problem = trial.problem
    rows_of: dict[int, list[QueryRow]] = {}
    for where in problem.rows():
        rows_of.setdefault(where.request, []).append(where)
    for request, rows in rows_of.items():
        slots = trial.view.slots(request).cpu().numpy()
        for kv_head in range(problem.num_kv_heads):
            heads = range(kv_head * problem.group_size, (kv_head + 1) * problem.group_size)
            yield place_block(trial, values, [(w, h) for h in heads for w in rows], slots, kv_head)


def place_block(
    trial: Trial, values: Values, stacked: list[tuple[QueryRow, int]], slots: IntArray, kv_head: int
) -> PlacedBlock:
    """The block of some rows and heads that read one KV head of one request."""
    problem, steps = trial.problem, Steps()
    every = Positions(np.arange(len(slots)))
    q = np.stack([values.q[w.row, h] for w, h in stacked])
    k, v = values.k[slots, kv_head], values.v[slots, kv_head]
    mask = np.zeros((len(stacked), len(slots)), dtype=bool)
    scores, slope = np.zeros(mask.shape), np.ones(mask.shape)
    for i, (where, h) in enumerate(stacked):
        mask[i, trial.edges.of(where.row, h)[0]] = True
        scores[i], slope[i] = steps.scores(problem, where, h, every, k @ q[i])
    heads = np.array([h for _, h in stacked])
    block = AttentionBlock(
        q=q,
        k=k,
        v=v,
        mask=mask,
        scores=scores,
        sm_scale=problem.sm_scale,
        added=added_bias(trial, stacked, len(slots)),
        slope=slope,
        cap=next((rule.cap for rule in problem.score_rules if isinstance(rule, SoftCap)), None),
        sink=None if problem.sink_logits is None else problem.sink_logits[heads],
        num_heads=problem.group_size,
    )
    return PlacedBlock(block, np.array([w.row for w, _ in stacked]), heads, slots, kv_head)


def added_bias(trial: Trial, stacked: list[tuple[QueryRow, int]], num_keys: int) -> FloatArray | None:
    """Sum of |bias| that the score rules add, (num_rows, num_keys)."""
    rules = [rule for rule in trial.problem.score_rules if isinstance(rule, Alibi)]
    if not rules:
        return None
    distance = np.abs(np.array([w.q_idx for w, _ in stacked])[:, None] - np.arange(num_keys))
    slopes = sum(np.abs([rule.slopes[h] for _, h in stacked]) for rule in rules)
    return np.asarray(slopes)[:, None] * distance
