"""From the scored wishes of a group's query heads to one list of their KV head, before attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Literal

import numpy as np

from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.scored_list import ScoredList, best_positions, check_distinct, check_finite

GroupPolicy = Literal["max", "sum", "private"]


@dataclass(frozen=True)
class GroupLists:
    """What a KV head loads, and what each of its query heads attends; all lists ascend."""

    loaded: IntArray
    of_head: tuple[IntArray, ...]  # one list a query head of the group, each a part of `loaded`


def merge_by_max(heads: Sequence[ScoredList], *, budget: int) -> GroupLists:
    """The positions whose largest score among the heads is highest, for the whole group. [GQA-MERGE-MAX]

    >>> heads = [ScoredList(np.array([2, 5]), np.array([0.5, 0.4])), ScoredList(np.array([5, 9]), np.array([0.4, 0.7]))]
    >>> merge_by_max(heads, budget=2).loaded
    array([2, 9])
    """
    return shared_lists(heads, max, budget=budget)


def merge_by_sum(heads: Sequence[ScoredList], *, budget: int) -> GroupLists:
    """The positions whose scores add up highest over the heads, for the whole group. [GQA-MERGE-SUM]

    A head that does not list a position adds 0, so scores are weights: a negative one is refused, or leaving a
    position out would speak for it. The sum is rounded once, whatever the order of the heads.

    >>> heads = [ScoredList(np.array([2, 5]), np.array([0.5, 0.4])), ScoredList(np.array([5, 9]), np.array([0.4, 0.7]))]
    >>> merge_by_sum(heads, budget=2).loaded
    array([5, 9])
    """
    for h, head in enumerate(heads):
        negative = np.flatnonzero(head.scores < 0)
        if negative.size:
            at = int(negative[0])
            limit = "a head that lists nothing would add more"
            raise RefusedInput("GQA-MERGE-SUM", "scores", float(head.scores[at]), limit, (h, at))
    return shared_lists(heads, fsum, budget=budget)


def keep_private(heads: Sequence[ScoredList], *, budget: int) -> GroupLists:
    """Every head's own best; the KV head loads their union, and no head attends another's. [GQA-MERGE-PRIVATE]

    >>> heads = [ScoredList(np.array([2, 5]), np.array([0.5, 0.4])), ScoredList(np.array([5, 9]), np.array([0.4, 0.7]))]
    >>> keep_private(heads, budget=1)
    GroupLists(loaded=array([2, 9]), of_head=(array([2]), array([9])))
    """
    check_heads(heads)
    kept = tuple(best_positions(head, budget=budget) for head in heads)
    return GroupLists(np.unique(np.concatenate([np.empty(0, dtype=np.int64), *kept])), kept)


GROUP_POLICIES: dict[GroupPolicy, Callable[..., GroupLists]] = {
    "max": merge_by_max,
    "sum": merge_by_sum,
    "private": keep_private,
}


def merge_groups(
    heads: Sequence[ScoredList],  # one a query head
    *,
    num_kv_heads: int,
    policy: GroupPolicy,
    budget: int,
) -> list[GroupLists]:
    """The lists of every KV head, query heads in groups of neighbours. [GQA-MAP]

    Raises RefusedInput where the query heads are no multiple of the KV heads, and for an unknown policy.
    """
    if num_kv_heads < 1 or len(heads) % num_kv_heads:
        limit = f"must be a multiple of num_kv_heads, {num_kv_heads}"
        raise RefusedInput("GQA-MAP", "num_qo_heads", len(heads), limit)
    if policy not in GROUP_POLICIES:
        raise RefusedInput("GQA-LISTS", "policy", policy, f"must be one of {', '.join(GROUP_POLICIES)}")
    size = len(heads) // num_kv_heads
    return [GROUP_POLICIES[policy](heads[g * size : (g + 1) * size], budget=budget) for g in range(num_kv_heads)]


def shared_lists(heads: Sequence[ScoredList], combine: Callable[[list[float]], float], *, budget: int) -> GroupLists:
    """One list for the whole group, by what `combine` makes of each position's scores."""
    check_heads(heads)
    said: dict[int, list[float]] = {}
    for head in heads:
        for position, score in zip(head.positions.tolist(), head.scores.tolist(), strict=True):
            said.setdefault(position, []).append(score)
    scores: FloatArray = np.array([combine(values) for values in said.values()], dtype=np.float64)
    loaded = best_positions(ScoredList(np.array(list(said), dtype=np.int64), scores), budget=budget)
    return GroupLists(loaded, (loaded,) * len(heads))


def check_heads(heads: Sequence[ScoredList]) -> None:
    """Refuses a head whose arrays do not fit, and one that names a position twice."""
    for head in heads:
        if head.scores.shape != head.positions.shape:
            raise RefusedInput("SAFE-SHAPE", "scores.shape", head.scores.shape, f"must be {head.positions.shape}")
        check_finite("scores", head.scores)
        check_distinct("positions", head.positions)
