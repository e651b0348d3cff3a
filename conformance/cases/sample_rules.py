"""Registered rules that the matrix uses: a mask that no interval describes, a score rule that no built-in one equals.

Importing this module registers them. Their lowerings to torch and to a kernel's own functions lie beside the adapters.
"""

import numpy as np

from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray
from attnconform.reference.custom_rules import MASKS, register_mask, register_score

STRIPES, DECAY, IMPURE = "attnconform.stripes", "attnconform.decay", "attnconform.impure"
STRIPE, REACH = 3, 32.0


def stripes(request: int, qo_head: int, q_idx: IntArray | int, kv_idx: IntArray) -> BoolArray:
    """Causal, without every third key; which third depends on the query head."""
    return (kv_idx <= q_idx) & ((kv_idx + qo_head) % STRIPE != 1)


def decay_factor(q_idx: IntArray | int, kv_idx: IntArray) -> FloatArray:
    """Falls from 1 with the distance, to a half at REACH."""
    return REACH / (REACH + np.abs(kv_idx - q_idx))


def decay(scores: FloatArray, qo_head: int, q_idx: IntArray | int, kv_idx: IntArray) -> FloatArray:
    """Scores that fade with distance."""
    return scores * decay_factor(q_idx, kv_idx)


def decay_slope(scores: FloatArray, qo_head: int, q_idx: IntArray | int, kv_idx: IntArray) -> FloatArray:
    """The factor itself."""
    return np.broadcast_to(decay_factor(q_idx, kv_idx), scores.shape)


class CountsItsCalls:
    """A mask that shifts by one key each time it is asked: what a rule must never be. [RULE-PURE]"""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, request: int, qo_head: int, q_idx: IntArray | int, kv_idx: IntArray) -> BoolArray:
        self.calls += 1
        return kv_idx + self.calls % 2 <= q_idx


if STRIPES not in MASKS:
    register_mask(STRIPES, stripes)
    register_mask(IMPURE, CountsItsCalls())
    register_score(DECAY, decay, decay_slope)
