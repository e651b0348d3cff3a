"""Candidate lists as CSR and as fixed width with holes, and the dense mask of a whole problem."""

import numpy as np

from attnconform.reference.attention import effective_sets
from attnconform.reference.candidates import HOLE
from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.problem import AttentionProblem


def csr_to_fixed_width(indptr: IntArray, indices: IntArray, width: int) -> IntArray:
    """(num_lists, width) with HOLE after each list's end; the lists themselves are unchanged. [SET-HOLE]

    Raises ValueError where a list is longer than width.
    """
    lengths = np.diff(indptr)
    if lengths.size and lengths.max() > width:
        raise ValueError(f"list {int(lengths.argmax())} has {int(lengths.max())} entries, but width is {width}")
    fixed = np.full((len(lengths), width), HOLE, dtype=np.int64)
    fixed[np.arange(width) < lengths[:, None]] = indices
    return fixed


def fixed_width_to_csr(fixed: IntArray) -> tuple[IntArray, IntArray]:
    """indptr and indices of (num_lists, width), holes wherever they stand dropped. [SET-HOLE]"""
    kept = fixed != HOLE
    indptr = np.concatenate([[0], np.cumsum(kept.sum(axis=1))]).astype(np.int64)
    return indptr, fixed[kept]


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
