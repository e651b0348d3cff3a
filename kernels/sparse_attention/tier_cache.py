"""Tiers by capacity, made when they are first needed and found again by what their code and storage are made of.

A row goes to the smallest tier that holds it. What no tier holds is refused, and what outgrows its tier is planned
again in the next one: never cut off, never overrun.
[FORMAT-TIER, FORMAT-TIER-LIMIT, PLAN-CAPACITY, PLAN-KEY, PLAN-COUNT]
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from attnconform.kernels.sparse_attention.autotune import architecture_of, compiler_version
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.plan import full_device
from attnconform.kernels.sparse_attention.tier import Tier, plan_tier


def smallest_tier(length: int, capacities: Sequence[int]) -> int:
    """The least capacity that holds a list of `length` entries. [FORMAT-TIER]

    Raises PlanError where none does, and for capacities that do not ascend from 1 on. [FORMAT-TIER-LIMIT]
    """
    if not capacities:
        raise PlanError("FORMAT-TIER", "tiers", "()", "there must be at least one")
    for i, capacity in enumerate(capacities):
        least = capacities[i - 1] + 1 if i else 1
        if capacity < least:
            raise PlanError("FORMAT-TIER", "tiers", capacity, f"must be at least {least}", (i,))
    if length < 0:
        raise PlanError("FORMAT-TIER", "length", length, "must be at least 0")
    for capacity in capacities:
        if length <= capacity:
            return capacity
    raise PlanError("FORMAT-TIER-LIMIT", "length", length, f"the largest tier is {capacities[-1]}")


def tier_key(arguments: Mapping[str, Any]) -> Hashable:
    """Equal for two calls of plan_tier exactly where one's tier serves the other.

    Machine and compiler are in it, and every argument: numbers of rules are part of a tier's storage, though not of its
    code. A tensor is the same one or another one.
    """
    device = full_device(arguments["device"])
    own = {name: _part(value) for name, value in arguments.items() if name != "device"}
    return (architecture_of(device), compiler_version(), str(device), *sorted(own.items(), key=lambda item: item[0]))


def _part(value: object) -> Hashable:
    if isinstance(value, Tensor):
        return ("tensor", id(value))
    return tuple(value) if isinstance(value, list) else value  # type: ignore[return-value]


@dataclass(eq=False)
class TierCache:
    """Tiers of some capacities for any calls that differ in what a tier is made of."""

    capacities: Sequence[int]
    tiers: dict[Hashable, tuple[Tier, Mapping[str, Any]]] = field(default_factory=dict)
    hits: int = 0
    misses: int = 0
    num_replans: int = 0

    def tier(self, length: int, **arguments: Any) -> Tier:
        """The smallest tier for lists of up to `length` tokens; `arguments` are those of plan_tier but its capacity."""
        given = {**arguments, "capacity": smallest_tier(length, self.capacities)}
        key = tier_key(given)
        if key in self.tiers:
            self.hits += 1
        else:
            self.misses += 1
            # the arguments are kept too, so that no other tensor gets the identity of one of theirs
            self.tiers[key] = (plan_tier(**given), given)
        return self.tiers[key][0]

    def update(
        self,
        tier: Tier,
        *,
        arguments: Mapping[str, Any],  # as they were given to `tier`
        **inputs: Tensor,  # of Tier.update
    ) -> Tier:
        """The tier that took the inputs: the one given, or a larger one where they did not fit. Synchronizes.

        Raises PlanError for any other refusal, and where no tier is large enough. [PLAN-CAPACITY]
        """
        while True:
            tier.update(**inputs)
            try:
                tier.raise_if_refused()
            except PlanError as error:
                if error.clause != "PLAN-CAPACITY":
                    raise
                tier = self.tier(tier.capacity + 1, **arguments)
                self.num_replans += 1
            else:
                return tier
