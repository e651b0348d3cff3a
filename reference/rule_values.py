"""What the rules mean, in numpy: the lowering that every other lowering is held to."""

from itertools import pairwise

import numpy as np

from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.rules import Alibi, And, Causal, Document, MaskRule, Or, PrefixLM, ScoreRule, SoftCap, Window


def mask_allows(
    rule: MaskRule | None,
    request: int,
    q_idx: IntArray | int,  # logical query positions, broadcast against kv_idx
    kv_idx: IntArray,
) -> BoolArray:
    """True where a query may look; no rule allows everything. [MASK-CAUSAL, MASK-WINDOW, MASK-PREFIX, MASK-DOCUMENT]"""
    everything = np.ones(np.broadcast(q_idx, kv_idx).shape, dtype=bool)
    match rule:
        case None:
            return everything
        case Causal():
            return kv_idx <= q_idx
        case Window(left, right):
            near_left = everything if left is None else q_idx - kv_idx <= left
            near_right = everything if right is None else kv_idx - q_idx <= right
            return near_left & near_right
        case PrefixLM(prefix_len):
            return (kv_idx < prefix_len[request]) | (kv_idx <= q_idx)
        case Document(starts):
            return document_of(starts[request], q_idx) == document_of(starts[request], kv_idx)
        case And(rules):  # [MASK-COMPOSE]
            return np.logical_and.reduce([everything, *(mask_allows(r, request, q_idx, kv_idx) for r in rules)])
        case Or(rules):
            return np.logical_or.reduce([~everything, *(mask_allows(r, request, q_idx, kv_idx) for r in rules)])


def document_of(starts: tuple[int, ...], idx: IntArray | int) -> IntArray:
    """Which document a position lies in; documents run from one start to the next."""
    return np.asarray(np.searchsorted(np.asarray(starts), idx, side="right"), dtype=np.int64)


def apply_score_rule(
    rule: ScoreRule,
    scores: FloatArray,
    qo_head: int,
    q_idx: IntArray | int,
    kv_idx: IntArray,
) -> FloatArray:
    """Scores after one rule. [SCORE-ALIBI, SCORE-SOFTCAP, SCORE-HEAD]"""
    match rule:
        case Alibi(slopes):
            return scores + slopes[qo_head] * (kv_idx - q_idx)
        case SoftCap(cap):
            return np.asarray(cap * np.tanh(scores / cap))


def score_rule_slope(rule: ScoreRule, scores: FloatArray) -> FloatArray:
    """Derivative of one rule with respect to the score it is given. [GRAD-SOFTCAP]"""
    match rule:
        case Alibi():
            return np.ones_like(scores)
        case SoftCap(cap):
            return np.asarray(1 - np.tanh(scores / cap) ** 2)


def check_mask_rule(rule: MaskRule | None, batch_size: int) -> None:
    """Refuses per-request tables of another batch size, and documents that do not start at 0. [SAFE-SHAPE]"""
    match rule:
        case And(rules) | Or(rules):
            if not rules:
                raise RefusedInput("MASK-COMPOSE", "rules", "()", "a composition needs at least one rule")
            for part in rules:
                check_mask_rule(part, batch_size)
        case Window(left, right):
            for name, size in (("window_left", left), ("window_right", right)):
                if size is not None and size < 0:
                    raise RefusedInput("MASK-WINDOW", name, size, "must be None or at least 0")
        case PrefixLM(prefix_len):
            _check_length("prefix_len", len(prefix_len), batch_size)
            for n, tokens in enumerate(prefix_len):
                if tokens < 0:
                    raise RefusedInput("MASK-PREFIX", "prefix_len", tokens, "must be at least 0", (n,))
        case Document(starts):
            _check_length("starts", len(starts), batch_size)
            for n, row in enumerate(starts):
                if not row or row[0] != 0 or any(a >= b for a, b in pairwise(row)):
                    raise RefusedInput("MASK-DOCUMENT", "starts", row, "must ascend strictly from 0", (n,))


def check_score_rule(rule: ScoreRule, num_qo_heads: int) -> None:
    """Refuses slopes of another head count and values that are not finite. [SAFE-FINITE, SAFE-SHAPE]"""
    match rule:
        case Alibi(slopes):
            _check_length("slopes", len(slopes), num_qo_heads)
            for h, slope in enumerate(slopes):
                if not np.isfinite(slope):
                    raise RefusedInput("SAFE-FINITE", "slopes", slope, "must be finite", (h,))
        case SoftCap(cap):
            if not (np.isfinite(cap) and cap > 0):
                raise RefusedInput("SAFE-FINITE", "cap", cap, "must be finite and above 0")


def _check_length(name: str, got: int, want: int) -> None:
    if got != want:
        raise RefusedInput("SAFE-SHAPE", f"len({name})", got, f"must be {want}")
