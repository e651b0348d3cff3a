"""Ragged lists as a table of tasks of about equal length: who computes what, and where the result belongs."""

from dataclasses import dataclass

import numpy as np

from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.errors import RefusedInput


@dataclass(frozen=True, kw_only=True)
class TaskTable:
    """One entry a task; the order of the tasks means nothing. [FORMAT-TASK-TABLE, FORMAT-ROW-IDENTITY]"""

    row: IntArray  # (num_tasks,) identity of the row, where its result belongs; never its rank in a sorted batch
    start: IntArray  # (num_tasks,) first entry in `indices`
    end: IntArray  # (num_tasks,) one past the last
    split: IntArray  # (num_tasks,) which piece of its row, from 0
    generation: IntArray  # (num_tasks,) version of the row's place when the task was planned

    def __len__(self) -> int:
        return len(self.row)

    def take(self, order: IntArray) -> "TaskTable":
        """The tasks in another order, or some of them."""
        fields = {name: getattr(self, name)[order] for name in ("row", "start", "end", "split", "generation")}
        return TaskTable(**fields)


def build_task_table(
    indptr: IntArray,  # (num_lists + 1,)
    *,
    target: int,  # entries, or weight, that a task should have at most
    row_ids: IntArray | None = None,  # (num_lists,) None: 0, 1, ..
    generations: IntArray | None = None,  # (num_lists,) None: all 0
    weights: IntArray | None = None,  # (total,) of every entry, at least 1; None: all 1
) -> TaskTable:
    """Tasks that divide every list into ceil(length / target) pieces of nearly equal length.

    [FORMAT-TASK-TABLE, FORMAT-TASK-BALANCE, FORMAT-TASK-SHORT, FORMAT-TASK-EMPTY]

    weights, such as pages or memory transactions of an entry, replace the count; a piece then exceeds its equal share
    by less than one entry. Raises RefusedInput for a target below 1 and for arrays of another length.

    >>> table = build_task_table(np.array([0, 5, 5, 7]), target=2)
    >>> list(zip(table.row.tolist(), table.start.tolist(), table.end.tolist(), table.split.tolist()))
    [(0, 0, 2, 0), (0, 2, 4, 1), (0, 4, 5, 2), (1, 5, 5, 0), (2, 5, 7, 0)]
    """
    num_lists, total = len(indptr) - 1, int(indptr[-1])
    row_ids = np.arange(num_lists) if row_ids is None else row_ids
    generations = np.zeros(num_lists, dtype=np.int64) if generations is None else generations
    weights = np.ones(total, dtype=np.int64) if weights is None else weights
    _check_plan(target, num_lists, total, row_ids, generations, weights)
    bounds = [indptr[i] + cut_points(weights[indptr[i] : indptr[i + 1]], target=target) for i in range(num_lists)]
    # the prefix sum of the number of pieces gives each task its place in the table
    pieces = np.array([len(b) - 1 for b in bounds], dtype=np.int64)
    rows = np.repeat(np.arange(num_lists), pieces)
    first = np.cumsum(pieces) - pieces
    none = np.empty(0, dtype=np.int64)
    return TaskTable(
        row=row_ids[rows],
        start=np.concatenate([none, *(b[:-1] for b in bounds)]),
        end=np.concatenate([none, *(b[1:] for b in bounds)]),
        split=np.arange(len(rows)) - first[rows],
        generation=generations[rows],
    )


def cut_points(weights: IntArray, *, target: int) -> IntArray:
    """Where a list is cut, from 0 to its length: ceil(weight / target) pieces, none of them empty.

    [FORMAT-TASK-BALANCE]

    Piece s of n starts at the first entry before which at least s / n of the weight lies. A list that fits the target
    is one piece, an empty list too.

    >>> cut_points(np.ones(116, dtype=np.int64), target=29)
    array([  0,  29,  58,  87, 116])
    """
    before = np.concatenate([[0], np.cumsum(weights)]).astype(np.int64)
    total = int(before[-1])
    if not total:
        return np.array([0, 0])
    num_pieces = -(-total // target)
    # in whole numbers: piece s starts where before * num_pieces >= s * total
    return np.unique(np.searchsorted(before * num_pieces, np.arange(num_pieces + 1) * total))


def decode_task_table(
    table: TaskTable,
    indices: IntArray,  # (total,) the entries that start and end refer to
) -> dict[int, list[int]]:
    """Entries of every row that has a task, by row identity: this loop defines the format. [FORMAT-TASK-TABLE]

    The pieces of a row are put together by split, whatever the order of the tasks. [FORMAT-ROW-IDENTITY]
    """
    lists: dict[int, list[int]] = {}
    for task in np.lexsort((table.split, table.row)).tolist():
        entries = lists.setdefault(int(table.row[task]), [])
        for at in range(int(table.start[task]), int(table.end[task])):
            entries.append(int(indices[at]))
    return lists


def live_tasks(
    table: TaskTable,
    generations: IntArray,  # (num_rows,) of every place now, by row identity
) -> BoolArray:
    """True where a task may still write: its row's place has not been given to another row. [FORMAT-GENERATION]

    Raises RefusedInput for a row identity that has no place.

    >>> table = build_task_table(np.array([0, 2, 4]), target=2, generations=np.array([5, 8]))
    >>> live_tasks(table, np.array([5, 9]))
    array([ True, False])
    """
    outside = np.flatnonzero((table.row < 0) | (table.row >= len(generations)))
    if outside.size:
        task = int(outside[0])
        limit = f"there are {len(generations)} rows"
        raise RefusedInput("FORMAT-ROW-IDENTITY", "row", int(table.row[task]), limit, (task,))
    return np.asarray(table.generation == generations[table.row])


def _check_plan(
    target: int, num_lists: int, total: int, row_ids: IntArray, generations: IntArray, weights: IntArray
) -> None:
    if target < 1:
        raise RefusedInput("FORMAT-TASK-BALANCE", "target", target, "must be at least 1")
    for name, array, length in (
        ("row_ids", row_ids, num_lists),
        ("generations", generations, num_lists),
        ("weights", weights, total),
    ):
        if array.shape != (length,):
            raise RefusedInput("FORMAT-TASK-TABLE", f"{name}.shape", array.shape, f"must be ({length},)")
    repeated = np.flatnonzero(np.diff(np.sort(row_ids)) == 0)
    if repeated.size:
        row = int(np.sort(row_ids)[repeated[0]])
        raise RefusedInput("FORMAT-ROW-IDENTITY", "row_ids", row, "two rows have this identity")
    light = np.flatnonzero(weights < 1)
    if light.size:
        at = int(light[0])
        raise RefusedInput("FORMAT-TASK-BALANCE", "weights", int(weights[at]), "must be at least 1", (at,))
