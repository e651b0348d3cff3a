"""Mask rules as intervals of key positions, from which block masks follow without looking at elements.

Causal, windows, PrefixLM and Document allow a query at i one interval of the integers, and i lies in it. And and Or of
intervals that share a point are intervals around that point again, so every composition of these rules is one. Its
ends never fall as i grows. Both facts together say everything about a block of consecutive queries a .. b: what some
row sees is [lo(a), hi(b)], without a gap, and what every row sees is [lo(b), hi(a)].
"""

from dataclasses import dataclass

import numpy as np

from attnconform.reference.coordinates import IntArray
from attnconform.reference.rules import And, Causal, Document, HeadWindow, MaskRule, Or, PrefixLM, Window

FAR = 2**62  # past every position; a limit that no rule sets


@dataclass(frozen=True)
class Intervals:
    """One interval of key positions per query, both ends included; empty where lo > hi."""

    lo: IntArray  # (n,)
    hi: IntArray  # (n,)


def everything(q_idx: IntArray) -> Intervals:
    """Every position, for each query."""
    return Intervals(np.full(q_idx.shape, -FAR), np.full(q_idx.shape, FAR))


def nothing(q_idx: IntArray) -> Intervals:
    """No position, for each query."""
    return Intervals(np.full(q_idx.shape, FAR), np.full(q_idx.shape, -FAR))


def outer_intervals(rule: MaskRule | None, request: int, q_idx: IntArray, qo_head: int = 0) -> Intervals:
    """An interval that holds all that a rule allows each query; exact for interval rules. [BLOCK-INTERVAL]

    A rule without intervals may allow anything. [BLOCK-CONSERVATIVE]

    >>> outer_intervals(And((Causal(), Window(left=3))), 0, np.array([4, 7]))
    Intervals(lo=array([1, 4]), hi=array([4, 7]))
    """
    return _intervals(rule, request, q_idx, qo_head, opaque=everything(q_idx))


def inner_intervals(rule: MaskRule | None, request: int, q_idx: IntArray, qo_head: int = 0) -> Intervals:
    """An interval of which a rule allows every position; exact for interval rules. [BLOCK-INTERVAL]

    A rule without intervals may allow nothing. [BLOCK-CONSERVATIVE]
    """
    return _intervals(rule, request, q_idx, qo_head, opaque=nothing(q_idx))


def is_interval_rule(rule: MaskRule | None) -> bool:
    """Whether a rule is made of intervals throughout, so that inner and outer ones are the same."""
    match rule:
        case And(rules) | Or(rules):
            return all(is_interval_rule(part) for part in rules)
        case None | Causal() | Window() | HeadWindow() | PrefixLM() | Document():
            return True
        case _:
            return False


def _intervals(rule: MaskRule | None, request: int, q_idx: IntArray, qo_head: int, opaque: Intervals) -> Intervals:
    match rule:
        case None:
            return everything(q_idx)
        case Causal():
            return Intervals(np.full(q_idx.shape, -FAR), q_idx)
        case Window(left, right):
            return _window_intervals(left, right, q_idx)
        case HeadWindow(lefts, rights):
            return _window_intervals(lefts[qo_head], rights[qo_head], q_idx)
        case PrefixLM(prefix_len):
            return Intervals(np.full(q_idx.shape, -FAR), np.maximum(q_idx, prefix_len[request] - 1))
        case Document(starts):
            return _document_intervals(np.asarray(starts[request]), q_idx)
        case And(rules):
            parts = [everything(q_idx), *(_intervals(r, request, q_idx, qo_head, opaque) for r in rules)]
            return Intervals(np.maximum.reduce([p.lo for p in parts]), np.minimum.reduce([p.hi for p in parts]))
        case Or(rules):
            parts = [nothing(q_idx), *(_intervals(r, request, q_idx, qo_head, opaque) for r in rules)]
            return Intervals(np.minimum.reduce([p.lo for p in parts]), np.maximum.reduce([p.hi for p in parts]))
        case _:
            return opaque


def _window_intervals(left: int | None, right: int | None, q_idx: IntArray) -> Intervals:
    every = everything(q_idx)
    return Intervals(every.lo if left is None else q_idx - left, every.hi if right is None else q_idx + right)


def _document_intervals(starts: IntArray, q_idx: IntArray) -> Intervals:
    """From a document's start up to the next one's; a query before position 0 lies in none that has keys."""
    bounds = np.concatenate([[-FAR], starts, [FAR + 1]])
    document = np.searchsorted(starts, q_idx, side="right")
    return Intervals(bounds[document], bounds[document + 1] - 1)
