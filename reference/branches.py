"""What becomes of a position that several branches list: decided before attention, or by gates after it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.scored_list import check_distinct, check_finite
from attnconform.reference.states import finish, softmax_state


class Entry(NamedTuple):
    """What a branch says of one position."""

    score: float
    gate: float


@dataclass(frozen=True)
class Branch:
    """Positions of one branch, each once, with the route's score and the branch's gate."""

    positions: IntArray  # (n,) logical
    scores: FloatArray  # (n,)
    gates: FloatArray  # (n,)


BranchPolicy = Literal["cover", "keep_larger_score", "accumulate_gates"]


def cover(earlier: Entry, later: Entry) -> Entry:
    """The later branch's entry, whatever the scores. [SET-BRANCH-COVER]

    >>> cover(Entry(0.9, 0.25), Entry(0.4, 0.5))
    Entry(score=0.4, gate=0.5)
    """
    return later


def keep_larger_score(earlier: Entry, later: Entry) -> Entry:
    """The entry of larger score, with its own gate; the earlier one of equals. [SET-BRANCH-LARGER]

    >>> keep_larger_score(Entry(0.9, 0.25), Entry(0.4, 0.5))
    Entry(score=0.9, gate=0.25)
    """
    return later if later.score > earlier.score else earlier


def accumulate_gates(earlier: Entry, later: Entry) -> Entry:
    """The sum of the gates, with the larger score. [SET-BRANCH-GATES]

    >>> accumulate_gates(Entry(0.9, 0.25), Entry(0.4, 0.5))
    Entry(score=0.9, gate=0.75)
    """
    return Entry(max(earlier.score, later.score), earlier.gate + later.gate)


POLICIES: dict[BranchPolicy, Callable[[Entry, Entry], Entry]] = {
    "cover": cover,
    "keep_larger_score": keep_larger_score,
    "accumulate_gates": accumulate_gates,
}


def merge_branches(branches: Sequence[Branch], policy: BranchPolicy) -> Branch:
    """One branch with every position of any branch once, ascending.

    [SET-BRANCH-COVER, SET-BRANCH-LARGER, SET-BRANCH-GATES, SET-DUPLICATE]

    Raises RefusedInput where a branch names a position twice, and for scores and gates that are not finite.
    """
    if policy not in POLICIES:
        raise RefusedInput("SET-FORM", "policy", policy, f"must be one of {', '.join(POLICIES)}")
    merged: dict[int, Entry] = {}
    for branch in branches:
        check_branch(branch)
        for position, *said in zip(
            *map(np.ndarray.tolist, (branch.positions, branch.scores, branch.gates)), strict=True
        ):
            entry = Entry(*said)
            merged[position] = POLICIES[policy](merged[position], entry) if position in merged else entry
    ordered = sorted(merged)
    scores, gates = (np.array([merged[t][part] for t in ordered], dtype=np.float64) for part in (0, 1))
    return Branch(np.array(ordered, dtype=np.int64), scores, gates)


def check_branch(branch: Branch) -> None:
    """Refuses a branch whose arrays do not fit, and one that names a position twice."""
    for name in ("scores", "gates"):
        values = getattr(branch, name)
        if values.shape != branch.positions.shape:
            raise RefusedInput("SAFE-SHAPE", f"{name}.shape", values.shape, f"must be {branch.positions.shape}")
        check_finite(name, values)
    check_distinct("positions", branch.positions)


def gate_branches(
    lists: Sequence[IntArray],  # one list of positions a branch, each position once in it
    gates: FloatArray,  # (num_branches,)
    scores: FloatArray,  # (seqlen_kv,) of every position
    v: FloatArray,  # (seqlen_kv, head_dim_vo)
) -> FloatArray:
    """Σ_b gate_b · softmax over S_b · v, (head_dim_vo,): a softmax each, gated afterwards. [SET-BRANCH-SOFTMAX]

    A branch that lists nothing adds nothing. Raises RefusedInput where the gates are not one a branch.

    >>> lists, gates = [np.array([0, 1]), np.array([1])], np.array([0.5, 0.5])
    >>> gate_branches(lists, gates, np.zeros(2), np.array([[0.0], [1.0]])), repeat_positions(
    ...     lists, gates, np.zeros(2), np.array([[0.0], [1.0]]))
    (array([0.75]), array([0.33333333]))
    """
    check_gates(lists, gates)
    out = np.zeros(v.shape[1])
    for listed, gate in zip(lists, gates.tolist(), strict=True):
        out += gate * finish(softmax_state(scores[listed], v[listed]))[0]
    return out


def repeat_positions(lists: Sequence[IntArray], gates: FloatArray, scores: FloatArray, v: FloatArray) -> FloatArray:
    """What gate_branches is *not*: one softmax in which a position stands once a branch, each weight times a gate.

    The denominators of the branches have become one, and a position of two branches counts in it twice.
    [SET-BRANCH-SOFTMAX]
    """
    check_gates(lists, gates)
    listed = np.concatenate([np.empty(0, dtype=np.int64), *lists])
    gate_of = np.repeat(gates, [len(positions) for positions in lists])
    if not len(listed):
        return np.zeros(v.shape[1])
    p = np.exp(scores[listed] - scores[listed].max())
    return np.asarray((gate_of * p) @ v[listed] / p.sum())


def check_gates(lists: Sequence[IntArray], gates: FloatArray) -> None:
    """Refuses gates that are not one finite number a branch, and a branch that names a position twice."""
    if gates.shape != (len(lists),):
        raise RefusedInput("SAFE-SHAPE", "gates.shape", gates.shape, f"must be ({len(lists)},)")
    check_finite("gates", gates)
    for listed in lists:
        check_distinct("positions", listed)
