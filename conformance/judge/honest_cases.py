"""Inputs on which honest kernels are tried: families of numbers, sinks, and score rules with parameters."""

from dataclasses import dataclass, replace

import numpy as np

from attnconform.conformance.bounds.block import Array, AttentionBlock
from attnconform.conformance.cases.structure import Dtype
from attnconform.conformance.cases.values import EXTREME_SCORE, FAR_SCORE, LANE_SCORE, round_to
from attnconform.reference import philox
from attnconform.reference.coordinates import IntArray
from attnconform.reference.rule_values import apply_score_rule, score_rule_slope
from attnconform.reference.rules import Alibi, RelativeBias, ScoreRule, SoftCap

FAMILIES = (
    "normal", "peaked", "zero_q", "equal_keys", "v_mean", "half_mass", "extreme", "far_key", "zero_lane",
)  # fmt: skip
FEATURES = ("plain", "sink", "slope", "table", "cap")
NUM_HEADS = 4
VISIBLE = 0.7  # share of its keys that a row sees
NUM_BUCKETS = 9
CAP = 5.0
DEEPEST_BIAS = 4.0  # of a slope, at the farthest key


@dataclass(frozen=True)
class HonestCase:
    """A block, its upstream gradient, and the rule that its scores went through."""

    block: AttentionBlock
    do: Array
    rule: ScoreRule | None = None

    @property
    def q_idx(self) -> IntArray:
        """Each head's rows are the last queries."""
        rows, keys = self.block.mask.shape
        return np.tile(np.arange(keys - rows // NUM_HEADS, keys), NUM_HEADS)

    @property
    def heads(self) -> IntArray:
        """Query head of each row."""
        return np.repeat(np.arange(NUM_HEADS), len(self.block.q) // NUM_HEADS)

    @property
    def given(self) -> Array:
        """Scores that the rule is given."""
        return self.block.sm_scale * (self.block.q @ self.block.k.T)


def build_case(
    dtype: Dtype, family: str, feature: str, *, keys: int, rows: int, head_dim: int, seed: int, kv_dtype: Dtype
) -> HonestCase:
    """One draw; kv_dtype is float32 where keys and values are dequantized."""
    sm_scale = head_dim**-0.5
    q, k, v, do = (philox.normal(seed, i, (n, head_dim)) for i, n in ((0, rows), (1, keys), (2, keys), (5, rows)))
    mask = philox.uniform(seed, 3, (rows, keys)) < VISIBLE
    mask[0] = True
    q, k, v = shaped(family, q, k, v, sm_scale)
    q, k, v = round_to(q, dtype), round_to(k, kv_dtype), round_to(v, kv_dtype)
    scores = sm_scale * (q @ k.T)
    block = AttentionBlock(q=q, k=k, v=v, mask=mask, scores=scores, sm_scale=sm_scale, num_heads=NUM_HEADS)
    return with_feature(HonestCase(block, round_to(do, dtype)), feature, seed)


def shaped(family: str, q: Array, k: Array, v: Array, sm_scale: float) -> tuple[Array, Array, Array]:
    """Normal numbers bent into a family: the same families as the matrix has."""
    scores = {
        "half_mass": (float(np.log(max(len(k), 2))), 0.0),
        "extreme": (EXTREME_SCORE, -EXTREME_SCORE),
        "far_key": (FAR_SCORE, 0.0),
        "zero_lane": (LANE_SCORE, LANE_SCORE),
    }
    if family not in scores:
        return {
            "normal": (q, k, v),
            "peaked": (4 * q, k, v),
            "zero_q": (0 * q, k, v),
            "equal_keys": (q, np.broadcast_to(k[:1], k.shape), v),
            "v_mean": (q, k, 1 + v / 8),
        }[family]
    first, other = scores[family]
    along = np.sqrt(abs(first) / sm_scale)
    new_q, new_k = np.zeros_like(q), np.zeros_like(k)
    new_q[:, 0], new_q[:, 1] = along, q[:, 1]
    new_k[:, 0], new_k[:, 1] = other / (sm_scale * along), k[:, 1]
    new_k[0, 0] = first / (sm_scale * along)
    return new_q, new_k, v


def with_feature(case: HonestCase, feature: str, seed: int) -> HonestCase:
    """The case with sinks, or with a score rule; plain otherwise."""
    drawn = round_to(philox.normal(seed, 4, (NUM_HEADS, NUM_BUCKETS)), "float32")
    match feature:
        case "sink":
            return replace(case, block=replace(case.block, sink=drawn[case.heads, 0]))
        case "slope":
            slopes = DEEPEST_BIAS / len(case.block.k) / np.arange(1, NUM_HEADS + 1)
            return with_rule(case, Alibi(tuple(round_to(slopes, "float32").tolist())))
        case "table":
            return with_rule(case, RelativeBias(tuple(map(tuple, drawn.tolist()))))
        case "cap":
            return with_rule(case, SoftCap(CAP))
    return case


def with_rule(case: HonestCase, rule: ScoreRule) -> HonestCase:
    """Scores as they are after the rule, and what its bounds need to know of it."""
    given, scores = case.given, apply_rule(case, rule, case.given)
    cap = rule.cap if isinstance(rule, SoftCap) else None
    added = None if cap else np.abs(scores - given)
    slope = np.ones_like(given) if cap is None else score_rule_slope(rule, given, 0, 0, np.arange(len(case.block.k)))
    return replace(case, block=replace(case.block, scores=scores, added=added, slope=slope, cap=cap), rule=rule)


def apply_rule(case: HonestCase, rule: ScoreRule, scores: Array) -> Array:
    """Scores after the rule, row by row."""
    rows = zip(scores, case.heads.tolist(), case.q_idx.tolist(), strict=True)
    return np.array([apply_score_rule(rule, row, head, q_idx, np.arange(len(row))) for row, head, q_idx in rows])
