"""Candidate lists as CSR, at fixed width with holes and as rows of a dense mask; and the dense mask of a problem.

Each form has a decoder: a loop that says which lists the form stands for. A hole is nothing in all of them.
"""

from collections.abc import Sequence

import numpy as np

from attnconform.reference.attention import effective_sets
from attnconform.reference.candidates import HOLE
from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem


def decode_csr(
    indptr: IntArray,  # (num_lists + 1,) where each list starts in `indices`; the end is exclusive
    indices: IntArray,  # (total,) entries, HOLE anywhere
) -> list[list[int]]:
    """The lists that indptr and indices stand for, holes left out: this loop defines the format. [FORMAT-CSR]

    Raises RefusedInput where indptr does not run from 0 to len(indices) without falling.

    >>> decode_csr(np.array([0, 2, 2, 5]), np.array([7, 3, 4, -1, 4]))
    [[7, 3], [], [4, 4]]
    """
    check_csr(indptr, indices)
    lists: list[list[int]] = []
    for row in range(len(indptr) - 1):
        entries = []
        for at in range(int(indptr[row]), int(indptr[row + 1])):
            if indices[at] != HOLE:
                entries.append(int(indices[at]))
        lists.append(entries)
    return lists


def decode_fixed_width(fixed: IntArray) -> list[list[int]]:
    """The lists that (num_lists, width) stands for: this loop defines the format. [FORMAT-FIXED-WIDTH]

    >>> decode_fixed_width(np.array([[-1, 7, 3], [-1, -1, -1]]))
    [[7, 3], []]
    """
    lists: list[list[int]] = []
    for row in range(fixed.shape[0]):
        entries = []
        for column in range(fixed.shape[1]):
            if fixed[row, column] != HOLE:
                entries.append(int(fixed[row, column]))
        lists.append(entries)
    return lists


def check_csr(indptr: IntArray, indices: IntArray) -> None:
    """Refuses an indptr that does not run from 0 to len(indices) without falling. [FORMAT-CSR]"""
    if indptr.ndim != 1 or not len(indptr):
        raise RefusedInput("FORMAT-CSR", "indptr.shape", indptr.shape, "must be (num_lists + 1,)")
    if indptr[0] != 0:
        raise RefusedInput("FORMAT-CSR", "indptr", int(indptr[0]), "must start at 0", (0,))
    falls = np.flatnonzero(np.diff(indptr) < 0)
    if falls.size:
        at = int(falls[0]) + 1
        raise RefusedInput("FORMAT-CSR", "indptr", int(indptr[at]), f"the entry before is {int(indptr[at - 1])}", (at,))
    if indptr[-1] != len(indices):
        last = len(indptr) - 1
        raise RefusedInput("FORMAT-CSR", "indptr", int(indptr[last]), f"len(indices) is {len(indices)}", (last,))


def lists_to_csr(lists: Sequence[Sequence[int]]) -> tuple[IntArray, IntArray]:
    """indptr and indices of some lists, as they are. [FORMAT-CSR]"""
    indptr = np.cumsum([0, *(len(entries) for entries in lists)], dtype=np.int64)
    return indptr, np.array([entry for entries in lists for entry in entries], dtype=np.int64)


def csr_to_fixed_width(indptr: IntArray, indices: IntArray, width: int) -> IntArray:
    """(num_lists, width) with HOLE after each list's end; the lists are unchanged. [FORMAT-FIXED-WIDTH, SET-HOLE]

    Raises RefusedInput where a list is longer than width: cutting it off would lose keys. [FORMAT-WIDTH]
    """
    check_csr(indptr, indices)
    lengths = np.diff(indptr)
    if lengths.size and lengths.max() > width:
        longest = int(lengths.argmax())
        raise RefusedInput("FORMAT-WIDTH", "len(list)", int(lengths[longest]), f"width is {width}", (longest,))
    fixed = np.full((len(lengths), width), HOLE, dtype=np.int64)
    fixed[np.arange(width) < lengths[:, None]] = indices
    return fixed


def fixed_width_to_csr(fixed: IntArray) -> tuple[IntArray, IntArray]:
    """indptr and indices of (num_lists, width), holes dropped wherever they stand. [FORMAT-ROUND-TRIP, SET-HOLE]"""
    kept = fixed != HOLE
    indptr = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int64)
    return indptr, fixed[kept].astype(np.int64)


def csr_to_dense(indptr: IntArray, indices: IntArray, num_columns: int) -> BoolArray:
    """(num_lists, num_columns): True where a list holds the column. Order and duplicates are lost. [FORMAT-DENSE]

    Raises RefusedInput where an entry is neither a hole nor a column.
    """
    dense = np.zeros((len(indptr) - 1, num_columns), dtype=bool)
    check_csr(indptr, indices)
    outside = np.flatnonzero(((indices < 0) & (indices != HOLE)) | (indices >= num_columns))
    if outside.size:
        at = int(outside[0])
        raise RefusedInput("FORMAT-DENSE", "indices", int(indices[at]), f"there are {num_columns} columns", (at,))
    rows = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    kept = indices != HOLE
    dense[rows[kept], indices[kept]] = True
    return dense


def dense_to_csr(dense: BoolArray) -> tuple[IntArray, IntArray]:
    """indptr and indices of (num_lists, num_columns), ascending within a list. [FORMAT-DENSE]"""
    indptr = np.concatenate([[0], np.cumsum(dense.sum(axis=1))]).astype(np.int64)
    return indptr, np.nonzero(dense)[1].astype(np.int64)


def dense_masks(problem: AttentionProblem) -> list[BoolArray]:
    """For each request (num_qo_heads, seqlen_q, seqlen_kv): True where a right kernel attends. [BLOCK-MEMBER]"""
    edges = effective_sets(problem)
    seqlen_q = np.diff(problem.qo_indptr)
    masks = [
        np.zeros((problem.num_qo_heads, int(seqlen_q[n]), int(problem.seqlen_kv[n])), dtype=bool)
        for n in range(problem.batch_size)
    ]
    for where in problem.rows():
        for h in range(problem.num_qo_heads):
            masks[where.request][h, where.local, edges.of(where.row, h)[0]] = True
    return masks
