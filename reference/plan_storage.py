"""What a plan owns: fixed places for tasks, a capacity, and index storage that a run in flight keeps."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from attnconform.reference.coordinates import IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.task_table import TaskTable, build_task_table

NO_TASK = -1
WAIT = -1  # no storage is free: the caller waits for the event of a run
TASK_FIELDS = ("row", "start", "end", "split", "generation")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a call needs, or the most that a plan was made for. [PLAN-CAPACITY]"""

    batch_size: int
    num_rows: int
    num_entries: int  # of the longest list
    num_splits: int
    workspace_bytes: int


def check_capacity(need: Sizes, capacity: Sizes) -> None:
    """Refuses a call that needs more of anything than the plan was made for. [PLAN-CAPACITY]

    >>> made_for = Sizes(batch_size=4, num_rows=4, num_entries=128, num_splits=8, workspace_bytes=2**20)
    >>> check_capacity(made_for, made_for)
    """
    for name in (field.name for field in fields(need)):
        if getattr(need, name) > getattr(capacity, name):
            limit = f"the plan was made for {getattr(capacity, name)}"
            raise RefusedInput("PLAN-CAPACITY", name, getattr(need, name), limit)


class TaskStorage:
    """A task table of fixed places, which a captured launch reads whole. [PLAN-REPLAN, PLAN-LAYER]"""

    def __init__(self, *, capacity: int) -> None:
        if capacity < 1:
            raise RefusedInput("PLAN-CAPACITY", "capacity", capacity, "must be at least 1")
        self.places: IntArray = np.full((capacity, len(TASK_FIELDS)), NO_TASK, dtype=np.int64)

    @property
    def address(self) -> int:
        """Where the places lie: the same for every plan, since a captured launch keeps it."""
        return int(self.places.ctypes.data)

    def plan(self, indptr: IntArray, *, target: int) -> None:
        """Tasks of these lists in the first places, and none in any other. [PLAN-REPLAN]

        Raises RefusedInput where they do not fit, and then the plan before still stands. [PLAN-CAPACITY]
        """
        tasks = build_task_table(indptr, target=target)
        if len(tasks) > len(self.places):
            limit = f"the plan was made for {len(self.places)}"
            raise RefusedInput("PLAN-CAPACITY", "num_tasks", len(tasks), limit)
        self.places[:] = NO_TASK
        self.places[: len(tasks)] = np.stack([getattr(tasks, name) for name in TASK_FIELDS], axis=1)

    def launched(self) -> TaskTable:
        """The tasks that a launch over every place runs."""
        held = self.places[self.places[:, 0] != NO_TASK]
        return TaskTable(**{name: held[:, i].copy() for i, name in enumerate(TASK_FIELDS)})


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What a launch after one planning runs, and from where."""

    address: int
    was_refused: bool
    tasks: TaskTable


def plan_each(indptrs: Sequence[IntArray], *, target: int, capacity: int) -> list[Planned]:
    """One plan made for list after list, layer after layer: what each launch runs. [PLAN-REPLAN, PLAN-LAYER]

    Shapes, capacity and addresses serve all of them, tasks only the lists they were made from.
    """
    storage, planned = TaskStorage(capacity=capacity), []
    for indptr in indptrs:
        try:
            storage.plan(indptr, target=target)
            was_refused = False
        except RefusedInput:
            was_refused = True
        planned.append(Planned(address=storage.address, was_refused=was_refused, tasks=storage.launched()))
    return planned


@dataclass(frozen=True)
class StorageEvent:
    """Something that happens to index storage."""

    kind: Literal["update", "launch", "finish"]
    run: int = 0  # of a launch and a finish


def replay_storage(num_buffers: int, events: Sequence[StorageEvent]) -> list[int]:
    """One answer an event: the buffer that an update writes, a launch reads, a finish lets go. [PLAN-STORAGE]

    An update writes a buffer that no run in flight reads, or is told to WAIT and changes nothing. A launch reads the
    buffer that was written last, until its finish. Raises RefusedInput for a launch before any update, and for a
    finish without a launch.

    >>> log = [StorageEvent("update"), StorageEvent("launch", 0), StorageEvent("update"), StorageEvent("launch", 1),
    ...        StorageEvent("update"), StorageEvent("finish", 0), StorageEvent("update")]
    >>> replay_storage(2, log), replay_storage(1, log[:3])
    ([0, 0, 1, 1, -1, 0, 0], [0, 0, -1])
    """
    if num_buffers < 1:
        raise RefusedInput("PLAN-STORAGE", "num_buffers", num_buffers, "must be at least 1")
    latest, read_by, in_flight, answers = WAIT, dict[int, int](), Counter[int](), []
    for at, event in enumerate(events):
        if event.kind == "update":
            answers.append(next((b for b in range(num_buffers) if not in_flight[b]), WAIT))
            latest = latest if answers[-1] == WAIT else answers[-1]
        elif event.kind == "launch":
            if latest == WAIT or event.run in read_by:
                raise RefusedInput("PLAN-STORAGE", "run", event.run, "there is nothing new for it to read", (at,))
            read_by[event.run] = latest
            in_flight[latest] += 1
            answers.append(latest)
        else:
            if event.run not in read_by:
                raise RefusedInput("PLAN-STORAGE", "run", event.run, "it is not in flight", (at,))
            answers.append(read_by.pop(event.run))
            in_flight[answers[-1]] -= 1
    return answers
