"""Partial softmax states, and how they merge: a commutative monoid whose identity is the empty state."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from attnconform.reference.coordinates import FloatArray


@dataclass(frozen=True)
class PartialState:
    """A row's attention over some of its keys, before normalization. [MERGE-STATE]

    The empty state is (m, l, o) = (-inf, 0, 0).
    """

    m: float  # largest score; -inf where no key was seen
    l: float  # noqa: E741  sum of exp(score - m); the articles' and papers' letter
    o: FloatArray  # (head_dim_vo,) sum of exp(score - m) * v


def empty_state(head_dim_vo: int) -> PartialState:
    """The state of a row that has seen no key. [MERGE-EMPTY]"""
    return PartialState(-np.inf, 0.0, np.zeros(head_dim_vo))


def softmax_state(
    scores: FloatArray,  # (n,) of the keys a row sees, masked keys already removed
    v: FloatArray,  # (n, head_dim_vo)
) -> PartialState:
    """The state over one set of keys. Masked keys are gone before the maximum is taken. [MASK-BEFORE-MAX]"""
    if not len(scores):
        return empty_state(v.shape[1])
    m = float(scores.max())
    p = np.exp(scores - m)
    return PartialState(m, float(p.sum()), p @ v)


def merge(a: PartialState, b: PartialState) -> PartialState:
    """The state over the union of two disjoint key sets. [MERGE-DISJOINT, MERGE-EMPTY]

    >>> c = merge(PartialState(2.0, 3.0, np.array([6.0])), PartialState(1.0, 4.0, np.array([8.0])))
    >>> round(c.l, 3), round(float(c.o[0]), 3), float(c.o[0] / c.l)
    (4.472, 8.943, 2.0)
    """
    m = max(a.m, b.m)
    if m == -np.inf:
        return a
    # exp(-inf - m) is an exact 0, so the empty state drops out without a special case
    weight_a, weight_b = np.exp(a.m - m), np.exp(b.m - m)
    return PartialState(m, float(weight_a * a.l + weight_b * b.l), weight_a * a.o + weight_b * b.o)


def merge_all(states: list[PartialState], head_dim_vo: int) -> PartialState:
    """The state over all splits; their number and order change nothing. [MERGE-SPLIT]"""
    return reduce(merge, states, empty_state(head_dim_vo))


def running_states(
    scores: FloatArray,  # (n,) of the keys a row sees
    v: FloatArray,  # (n, head_dim_vo)
    tiles: Sequence[slice],  # of the keys, in the order in which a kernel visits them
) -> list[PartialState]:
    """The state after every tile: the m, l and o that a tiled kernel carries along. [MERGE-STATE, MERGE-SPLIT]

    >>> scores, v = np.array([8.0, 7.0, 9.0, 6.0]), np.ones((4, 1))
    >>> [(s.m, round(s.l, 3)) for s in running_states(scores, v, [slice(0, 1), slice(1, 3), slice(3, 3), slice(3, 4)])]
    [(8.0, 1.0), (9.0, 1.503), (9.0, 1.503), (9.0, 1.553)]
    """
    states, state = [], empty_state(v.shape[1])
    for tile in tiles:
        state = merge(state, softmax_state(scores[tile], v[tile]))
        states.append(state)
    return states


def add_sink(state: PartialState, sink_logit: float) -> PartialState:
    """The state with one more key, the sink, whose value is 0. Called once, after every merge. [LSE-SINK]"""
    return merge(state, PartialState(sink_logit, 1.0, np.zeros_like(state.o)))


def finish(state: PartialState) -> tuple[FloatArray, float]:
    """Output and natural-log lse; an empty state gives exactly 0 and -inf. [EMPTY-OUT, EMPTY-LSE, LSE-NATURAL]"""
    if state.l == 0:
        return np.zeros_like(state.o), -np.inf
    return state.o / state.l, state.m + float(np.log(state.l))


def merge_outputs(
    out_a: FloatArray,
    lse_a: FloatArray,  # (..., head_dim_vo), (...)
    out_b: FloatArray,
    lse_b: FloatArray,  # likewise, over keys that a does not have
) -> tuple[FloatArray, FloatArray]:
    """The merge of finished results, for kernels that keep (out, lse) per split. [MERGE-OUTPUTS, MERGE-EMPTY]

    Raises ValueError where the shapes differ.
    """
    if out_a.shape != out_b.shape or lse_a.shape != out_a.shape[:-1] or lse_b.shape != out_b.shape[:-1]:
        raise ValueError(f"shapes differ: out {out_a.shape} and {out_b.shape}, lse {lse_a.shape} and {lse_b.shape}")
    lse = np.logaddexp(lse_a, lse_b)
    # two empty rows: -inf - -inf would be NaN, and 0 is the weight that keeps both outputs at 0
    seen = np.where(np.isneginf(lse), 0.0, lse)
    weight_a, weight_b = np.exp(lse_a - seen), np.exp(lse_b - seen)
    return weight_a[..., None] * out_a + weight_b[..., None] * out_b, lse
