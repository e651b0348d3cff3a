"""Mistakes in plans: keys that miss or hold too much, tasks left standing, storage written over. [PLAN]"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np

from attnconform.conformance.adapters.reference_structures import ReferenceStructures
from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.coordinates import IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.plan_cache import CacheCounts, CallDescription
from attnconform.reference.plan_storage import (
    TASK_FIELDS,
    WAIT,
    Planned,
    Sizes,
    StorageEvent,
    TaskStorage,
    replay_storage,
)
from attnconform.reference.rules import Alibi, SoftCap
from attnconform.reference.task_table import build_task_table


class KeysWithout(ReferenceStructures):
    """A plan's key in which some fields are always the same."""

    forgotten: ClassVar[dict[str, object]]

    def plan_key(self, call: CallDescription) -> Hashable:
        return super().plan_key(replace(call, **self.forgotten))  # type: ignore[arg-type]


@deviates(
    "PLAN-KEY", fault_class="C", report="article 1, 5.2: a dimension less in the key, and another kernel is reused"
)
class KeysWithoutTheDtype(KeysWithout):
    """A plan made for one dtype is found for another."""

    forgotten: ClassVar[dict[str, object]] = {"dtype": "any"}


@deviates("PLAN-KEY", fault_class="C", report="article 1, 6.2: a configuration carried to another architecture")
class KeysWithoutTheArchitecture(KeysWithout):
    """A plan made on one architecture is found on another."""

    forgotten: ClassVar[dict[str, object]] = {"architecture": "any"}


@deviates("PLAN-KEY", fault_class="C", report="article 1, 5.2: the capacity tier belongs to the key")
class KeysWithoutTheTier(KeysWithout):
    """A plan made for a small tier is found for a larger one."""

    forgotten: ClassVar[dict[str, object]] = {"tier": 0}


@deviates("PLAN-KEY", fault_class="Q", report="article 1, 7.2: a kernel for one cache format reads another")
class KeysWithoutTheFeatures(KeysWithout):
    """A plan made for plain keys is found for a cache of codes."""

    forgotten: ClassVar[dict[str, object]] = {"features": frozenset()}


@deviates("PLAN-KEY", fault_class="G", report="article 1, 5.2: the GQA ratio belongs to the key")
class KeysWithoutTheGroupSize(ReferenceStructures):
    """A plan made for one group size is found for another."""

    def plan_key(self, call: CallDescription) -> Hashable:
        return super().plan_key(replace(call, num_kv_heads=call.num_qo_heads))


@deviates("PLAN-KEY", fault_class="D", report="no report: one head dimension stands for both")
class KeysByTheQueryDimension(ReferenceStructures):
    """The head dimension of values is taken to be that of queries."""

    def plan_key(self, call: CallDescription) -> Hashable:
        return super().plan_key(replace(call, head_dim_vo=call.head_dim_qk))


@deviates("PLAN-KEY", fault_class="C", report="article 2, 4.1: another rule is other code")
class KeysWithoutTheOrderOfRules(ReferenceStructures):
    """Score rules are keyed as a set, whatever their order."""

    def plan_key(self, call: CallDescription) -> Hashable:
        return super().plan_key(replace(call, score_rules=tuple(sorted(call.score_rules, key=repr))))


@deviates("PLAN-VALUES", fault_class="C", report="article 2, 4.1: versions explode where inputs become constants")
class CompilesTheNumbersIn(ReferenceStructures):
    """Slopes and caps are part of a plan's key."""

    def plan_key(self, call: CallDescription) -> Hashable:
        numbers = [rule for rule in call.score_rules if isinstance(rule, Alibi | SoftCap)]
        return super().plan_key(call), repr(numbers)


@deviates("PLAN-VALUES", fault_class="C", report="article 1, 5.1: a plan for every length is planned at every step")
class PlansForEveryLength(ReferenceStructures):
    """The lengths of the requests are part of a plan's key."""

    def plan_key(self, call: CallDescription) -> Hashable:
        return super().plan_key(call), call.seqlens_kv


@deviates("PLAN-MASK-KEY", fault_class="C", report="article 2, 1.2: a document boundary moves, and the mask stays")
class KeepsTheMaskOfOtherDocuments(ReferenceStructures):
    """A block mask is found by the kind of its rule, whatever the numbers in it."""

    def mask_key(self, call: CallDescription) -> Hashable:
        return super().mask_key(replace(call, mask_rule=None)), type(call.mask_rule).__name__


@deviates("PLAN-MASK-KEY", fault_class="C", report="article 2, 1.2: a change of scores alone reuses the block mask")
class BuildsTheMaskAnewForScores(ReferenceStructures):
    """Score rules are part of a block mask's key."""

    def mask_key(self, call: CallDescription) -> Hashable:
        return super().mask_key(call), call.score_rules, call.score_version


@deviates("PLAN-MASK-KEY", fault_class="C", report="article 2, 1.2: versions of the tensors that decide the structure")
class MissesEditedTensors(ReferenceStructures):
    """A tensor that the mask rule captures may be edited, and the mask stays."""

    def mask_key(self, call: CallDescription) -> Hashable:
        return super().mask_key(replace(call, mask_version=0))


@deviates("PLAN-MASK-KEY", fault_class="M", report="article 2, 5.1: a decode step that moves its query offset")
class MissesTheQueryOffset(ReferenceStructures):
    """The mask of one decode step is found for the next."""

    def mask_key(self, call: CallDescription) -> Hashable:
        return super().mask_key(replace(call, q_offset=(0,) * len(call.q_offset)))


@deviates("PLAN-COUNT", fault_class="C", report="article 2, 1.2: one number for two caches hides which was cold")
class CountsOneCacheForBoth(ReferenceStructures):
    """A call is a hit where both caches had what it asked for, and a miss of both otherwise."""

    def count_lookups(self, calls: Sequence[CallDescription]) -> CacheCounts:
        seen: set[Hashable] = set()
        for call in calls:
            seen.add((self.plan_key(call), self.mask_key(call)))
        hits = len(calls) - len(seen)
        return CacheCounts(plan_hits=hits, plan_misses=len(seen), mask_hits=hits, mask_misses=len(seen))


@deviates("PLAN-CAPACITY", fault_class="A", report="article 1, 5.1: an overflow is refused, never run over")
class ChecksTheWorkspaceAlone(ReferenceStructures):
    """Only bytes of workspace are compared with the capacity."""

    def check_capacity(self, need: Sizes, capacity: Sizes) -> None:
        super().check_capacity(replace(capacity, workspace_bytes=need.workspace_bytes), capacity)


class StoresTasks(ReferenceStructures):
    """Task storage that is planned otherwise than the reference's."""

    def plan_each(self, indptrs: Sequence[IntArray], target: int, capacity: int) -> Sequence[Planned]:
        storage, planned = TaskStorage(capacity=capacity), []
        for indptr in indptrs:
            was_refused = not self.place_tasks(storage, indptr, target)
            planned.append(Planned(address=storage.address, was_refused=was_refused, tasks=storage.launched()))
        return planned

    def place_tasks(self, storage: TaskStorage, indptr: IntArray, target: int) -> bool:
        """Plans as the mistake does; False for a refusal."""
        try:
            storage.plan(indptr, target=target)
        except RefusedInput:
            return False
        return True


def tasks_of(indptr: IntArray, target: int) -> IntArray:
    """(num_tasks, 5) the tasks of some lists, as storage holds them."""
    tasks = build_task_table(indptr, target=target)
    return np.stack([getattr(tasks, name) for name in TASK_FIELDS], axis=1)


@deviates("PLAN-CAPACITY", fault_class="K", report="article 1, 5.1: tasks past the capacity are lost")
class DropsTasksThatDoNotFit(StoresTasks):
    """Tasks past the capacity are left out, and nothing is refused."""

    def place_tasks(self, storage: TaskStorage, indptr: IntArray, target: int) -> bool:
        tasks = tasks_of(indptr, target)[: len(storage.places)]
        storage.places[:] = -1
        storage.places[: len(tasks)] = tasks
        return True


@deviates("PLAN-CAPACITY", fault_class="C", report="article 1, 5.1: what was planned before a refusal still stands")
class ClearsBeforeItRefuses(StoresTasks):
    """The plan before is gone by the time the next one is refused."""

    def place_tasks(self, storage: TaskStorage, indptr: IntArray, target: int) -> bool:
        storage.places[:] = -1
        return super().place_tasks(storage, indptr, target)


@deviates("PLAN-REPLAN", fault_class="C", report="no report: a shorter plan is written over a longer one")
class LeavesOldTasksBehind(StoresTasks):
    """New tasks take the first places, and what stood past them stays."""

    def place_tasks(self, storage: TaskStorage, indptr: IntArray, target: int) -> bool:
        tasks = tasks_of(indptr, target)
        if len(tasks) > len(storage.places):
            return False
        storage.places[: len(tasks)] = tasks
        return True


@deviates("PLAN-LAYER", fault_class="C", report="article 1, 7.4: candidates of another layer under the same task table")
class ReusesTheTasksOfTheFirstLayer(StoresTasks):
    """A task table serves every layer that has as many rows."""

    num_rows = -1

    def place_tasks(self, storage: TaskStorage, indptr: IntArray, target: int) -> bool:
        if len(indptr) == self.num_rows and bool((storage.places >= 0).any()):
            return True
        self.num_rows = len(indptr)
        return super().place_tasks(storage, indptr, target)


@deviates(
    "PLAN-LAYER", fault_class="C", report="article 1, 5.1: a captured launch keeps the addresses it was made with"
)
class AllocatesForEveryPlan(ReferenceStructures):
    """Every planning takes new storage."""

    def plan_each(self, indptrs: Sequence[IntArray], target: int, capacity: int) -> Sequence[Planned]:
        right = super().plan_each(indptrs, target, capacity)
        kept = [np.empty(1) for _ in right]
        return [replace(plan, address=int(own.ctypes.data)) for plan, own in zip(right, kept, strict=True)]


@deviates("PLAN-STORAGE", fault_class="N", report="article 1, 5.1: indices overwritten while a run reads them")
class WritesOverRunsInFlight(ReferenceStructures):
    """Buffers are written in turn, whoever reads them."""

    def replay_storage(self, num_buffers: int, events: Sequence[StorageEvent]) -> Sequence[int]:
        answers: list[int] = []
        latest, written, reads = WAIT, 0, dict[int, int]()
        for event in events:
            if event.kind == "update":
                latest, written = written % num_buffers, written + 1
                answers.append(latest)
            elif event.kind == "launch":
                reads[event.run] = latest
                answers.append(latest)
            else:
                answers.append(reads[event.run])
        return answers


@deviates(
    "PLAN-STORAGE", fault_class="N", report="article 1, 5.1: storage freed when the first of two runs has finished"
)
class FreesStorageWithItsFirstReader(ReferenceStructures):
    """A buffer that several runs read is free when the first of them has finished."""

    def replay_storage(self, num_buffers: int, events: Sequence[StorageEvent]) -> Sequence[int]:
        answers: list[int] = []
        latest, busy, reads = WAIT, set[int](), dict[int, int]()
        for event in events:
            if event.kind == "update":
                answers.append(next((b for b in range(num_buffers) if b not in busy), WAIT))
                latest = latest if answers[-1] == WAIT else answers[-1]
            elif event.kind == "launch":
                reads[event.run] = latest
                busy.add(latest)
                answers.append(latest)
            else:
                answers.append(reads[event.run])
                busy.discard(answers[-1])
        return answers


@deviates("PLAN-STORAGE", fault_class="C", report="article 1, 5.1: one buffer of several, and every update waits")
class UsesOneBufferOfSeveral(ReferenceStructures):
    """However many buffers there are, the first is written and the rest stay idle."""

    def replay_storage(self, num_buffers: int, events: Sequence[StorageEvent]) -> Sequence[int]:
        return replay_storage(1, events)
