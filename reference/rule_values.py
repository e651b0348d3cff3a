"""What the rules mean, in numpy: the lowering that every other lowering is held to."""

from itertools import pairwise

import numpy as np

from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray
from attnconform.reference.custom_rules import MASKS, SCORES, check_custom_mask, check_custom_score
from attnconform.reference.errors import RefusedInput
from attnconform.reference.rules import (
    Alibi,
    And,
    Causal,
    CustomMask,
    CustomScore,
    Document,
    HeadWindow,
    MaskRule,
    Or,
    PrefixLM,
    RelativeBias,
    ScoreRule,
    SoftCap,
    Window,
)


def mask_allows(
    rule: MaskRule | None,
    request: int,
    q_idx: IntArray | int,  # logical query positions, broadcast against kv_idx
    kv_idx: IntArray,
    qo_head: int | None = None,  # None: of a rule that is the same for every head
) -> BoolArray:
    """True where a query may look; no rule allows everything. [MASK-CAUSAL, MASK-PREFIX, MASK-DOCUMENT]

    Raises ValueError where a rule depends on the query head and none is given.
    """
    if qo_head is None:
        if depends_on_head(rule):
            raise ValueError(f"qo_head is None, but {rule} depends on the query head [MASK-HEAD-WINDOW]")
        qo_head = 0
    everything = np.ones(np.broadcast(q_idx, kv_idx).shape, dtype=bool)
    match rule:
        case None:
            return everything
        case Causal():
            return kv_idx <= q_idx
        case Window(left, right):
            return in_window(left, right, q_idx, kv_idx)
        case HeadWindow(left, right):  # [MASK-HEAD-WINDOW]
            return in_window(left[qo_head], right[qo_head], q_idx, kv_idx)
        case PrefixLM(prefix_len):
            return (kv_idx < prefix_len[request]) | (kv_idx <= q_idx)
        case Document(starts):
            return document_of(starts[request], q_idx) == document_of(starts[request], kv_idx)
        case CustomMask(name):
            return np.broadcast_to(MASKS[name](request, qo_head, q_idx, kv_idx), everything.shape)
        case And(rules):
            parts = (mask_allows(r, request, q_idx, kv_idx, qo_head) for r in rules)
            return np.logical_and.reduce([everything, *parts])
        case Or(rules):
            parts = (mask_allows(r, request, q_idx, kv_idx, qo_head) for r in rules)
            return np.logical_or.reduce([~everything, *parts])


def in_window(left: int | None, right: int | None, q_idx: IntArray | int, kv_idx: IntArray) -> BoolArray:
    """True from `left` positions before the query to `right` after it; None is unlimited. [MASK-WINDOW]"""
    everything = np.ones(np.broadcast(q_idx, kv_idx).shape, dtype=bool)
    near_left = everything if left is None else q_idx - kv_idx <= left
    near_right = everything if right is None else kv_idx - q_idx <= right
    return near_left & near_right


def document_of(starts: tuple[int, ...], idx: IntArray | int) -> IntArray:
    """Which document a position lies in; documents run from one start to the next."""
    return np.asarray(np.searchsorted(np.asarray(starts), idx, side="right"), dtype=np.int64)


def depends_on_head(rule: MaskRule | None) -> bool:
    """Whether two query heads may see different keys under a rule."""
    match rule:
        case And(rules) | Or(rules):
            return any(depends_on_head(part) for part in rules)
        case _:
            return isinstance(rule, HeadWindow | CustomMask)


def apply_score_rule(
    rule: ScoreRule,
    scores: FloatArray,
    qo_head: int,
    q_idx: IntArray | int,
    kv_idx: IntArray,
) -> FloatArray:
    """Scores after one rule. [SCORE-ALIBI, SCORE-SOFTCAP, SCORE-RELATIVE, SCORE-HEAD]"""
    match rule:
        case Alibi(slopes):
            return scores + slopes[qo_head] * (kv_idx - q_idx)
        case RelativeBias(tables):
            return scores + np.asarray(tables[qo_head])[relative_bucket(len(tables[qo_head]), q_idx, kv_idx)]
        case SoftCap(cap):
            return np.asarray(cap * np.tanh(scores / cap))
        case CustomScore(name):
            return np.asarray(SCORES[name].apply(scores, qo_head, q_idx, kv_idx))


def relative_bucket(num_buckets: int, q_idx: IntArray | int, kv_idx: IntArray) -> IntArray:
    """Index into a table of 2 D + 1 entries by signed distance; what lies farther takes the last. [SCORE-RELATIVE]

    >>> relative_bucket(5, 4, np.array([0, 2, 3, 4, 5, 9]))
    array([0, 0, 1, 2, 3, 4])
    """
    farthest = num_buckets // 2
    return np.asarray(np.clip(kv_idx - q_idx, -farthest, farthest) + farthest)


def score_rule_slope(
    rule: ScoreRule, scores: FloatArray, qo_head: int, q_idx: IntArray | int, kv_idx: IntArray
) -> FloatArray:
    """Derivative of one rule with respect to the score it is given. [GRAD-SOFTCAP]"""
    match rule:
        case Alibi() | RelativeBias():
            return np.ones_like(scores)
        case SoftCap(cap):
            return np.asarray(1 - np.tanh(scores / cap) ** 2)
        case CustomScore(name):
            return np.asarray(SCORES[name].slope(scores, qo_head, q_idx, kv_idx))


def parameter_shape(rule: ScoreRule) -> tuple[int, ...]:
    """Shape of a rule's parameters: what its gradient is the gradient of. [GRAD-RULE]"""
    match rule:
        case Alibi(slopes):
            return (len(slopes),)
        case RelativeBias(tables):
            return (len(tables), len(tables[0]))
        case SoftCap():
            return ()
        case CustomScore():
            return (0,)


def parameter_gradient(
    rule: ScoreRule,
    scores: FloatArray,  # that the rule is given
    upstream: FloatArray,  # d loss / d what the rule makes of them
    qo_head: int,
    q_idx: int,
    kv_idx: IntArray,
) -> FloatArray:
    """One row's part of d loss / d parameters, in their shape. [GRAD-RULE]"""
    gradient = np.zeros(parameter_shape(rule))
    match rule:
        case Alibi():
            gradient[qo_head] = upstream @ (kv_idx - q_idx)
        case RelativeBias(tables):
            np.add.at(gradient[qo_head], relative_bucket(len(tables[qo_head]), q_idx, kv_idx), upstream)
        case SoftCap(cap):
            x = scores / cap
            gradient[()] = upstream @ (np.tanh(x) - x * (1 - np.tanh(x) ** 2))
        case CustomScore():
            pass
    return gradient


def check_mask_rule(rule: MaskRule | None, batch_size: int, num_qo_heads: int | None = None) -> None:
    """Refuses tables of another batch size or head count, and documents that do not start at 0. [SAFE-SHAPE]"""
    match rule:
        case And(rules) | Or(rules):
            if not rules:
                raise RefusedInput("MASK-COMPOSE", "rules", "()", "a composition needs at least one rule")
            for part in rules:
                check_mask_rule(part, batch_size, num_qo_heads)
        case Window(left, right):
            _check_sizes("MASK-WINDOW", left, right)
        case HeadWindow(lefts, rights):
            for name, sizes in (("left", lefts), ("right", rights)):
                _check_length(name, len(sizes), len(lefts) if num_qo_heads is None else num_qo_heads)
            for left, right in zip(lefts, rights, strict=True):
                _check_sizes("MASK-HEAD-WINDOW", left, right)
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
        case CustomMask(name):
            check_custom_mask(name)


def check_score_rule(rule: ScoreRule, num_qo_heads: int) -> None:
    """Refuses parameters of another head count and values that are not finite. [SAFE-FINITE, SAFE-SHAPE]"""
    match rule:
        case Alibi(slopes):
            _check_length("slopes", len(slopes), num_qo_heads)
            _check_finite("slopes", slopes)
        case RelativeBias(tables):
            _check_length("tables", len(tables), num_qo_heads)
            for h, table in enumerate(tables):
                if len(table) != len(tables[0]) or len(table) % 2 == 0:
                    limit = f"must be one odd length, and table 0 has {len(tables[0])}"
                    raise RefusedInput("SCORE-RELATIVE", "len(tables)", len(table), limit, (h,))
                _check_finite("tables", table, (h,))
        case SoftCap(cap):
            if not (np.isfinite(cap) and cap > 0):
                raise RefusedInput("SAFE-FINITE", "cap", cap, "must be finite and above 0")
        case CustomScore(name):
            check_custom_score(name)


def _check_sizes(clause: str, left: int | None, right: int | None) -> None:
    for name, size in (("window_left", left), ("window_right", right)):
        if size is not None and size < 0:
            raise RefusedInput(clause, name, size, "must be None or at least 0")


def _check_finite(name: str, values: tuple[float, ...], at: tuple[int, ...] = ()) -> None:
    for i, value in enumerate(values):
        if not np.isfinite(value):
            raise RefusedInput("SAFE-FINITE", name, value, "must be finite", (*at, i))


def _check_length(name: str, got: int, want: int) -> None:
    if got != want:
        raise RefusedInput("SAFE-SHAPE", f"len({name})", got, f"must be {want}")
