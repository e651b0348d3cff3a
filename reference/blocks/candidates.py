"""Block masks of a whole problem: its mask rule, and the candidates of its rows."""

from collections.abc import Callable

import numpy as np

from attnconform.reference.block_mask import BlockMask
from attnconform.reference.blocks.build import Extent, assemble, check_extent_sizes, rule_block_mask, to_lists
from attnconform.reference.coordinates import IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.steps import Steps

EdgesOf = Callable[[int, int], IntArray]  # (head, row of the request) -> positions it attends, each once


def problem_block_mask(problem: AttentionProblem, request: int, *, q_block_size: int, kv_block_size: int) -> BlockMask:
    """The block mask of one request over all query heads, candidates and mask rule together. [BLOCK-CANDIDATES]

    Without candidates it comes from the rule alone; with them its cost grows with the edges, not with the lengths.
    Raises RefusedInput for a request that the batch does not have.
    """
    if not 0 <= request < problem.batch_size:
        raise RefusedInput("BLOCK-EXTENT", "request", request, f"batch_size is {problem.batch_size}")
    extent = problem_extent(problem, request, q_block_size=q_block_size, kv_block_size=kv_block_size)
    if problem.candidates is None:
        return rule_block_mask(problem.mask_rule, extent, request=request, num_heads=problem.num_qo_heads)
    steps, start = Steps(), int(problem.qo_indptr[request])

    def edges_of(head: int, local: int) -> IntArray:
        where = QueryRow(start + local, request, local, extent.q_offset + local)
        return steps.effective(problem, where, head).values

    return edge_block_mask(edges_of, extent, num_heads=problem.num_qo_heads)


def problem_extent(problem: AttentionProblem, request: int, *, q_block_size: int, kv_block_size: int) -> Extent:
    """Lengths and offset of one request, cut into blocks."""
    return Extent(
        seqlen_q=int(problem.qo_indptr[request + 1] - problem.qo_indptr[request]),
        seqlen_kv=int(problem.seqlen_kv[request]),
        q_block_size=q_block_size,
        kv_block_size=kv_block_size,
        q_offset=int(problem.q_offset[request]),
    )


def edge_block_mask(edges_of: EdgesOf, extent: Extent, *, num_heads: int) -> BlockMask:
    """The block mask of listed edges: a block is full when it holds as many edges as elements. [BLOCK-CANDIDATES]

    The union of the rows' lists says which blocks are listed; that a block is in the union never makes it full.
    """
    check_extent_sizes(extent)
    full: list[IntArray] = []
    partial: list[IntArray] = []
    for head in range(num_heads):
        for q_block in range(extent.num_q_blocks):
            first = q_block * extent.q_block_size
            num_rows = len(extent.queries(q_block))
            edges = np.concatenate([edges_of(head, row) for row in range(first, first + num_rows)])
            columns, counts = np.unique(edges // extent.kv_block_size, return_counts=True)
            ends = np.minimum((columns + 1) * extent.kv_block_size, extent.seqlen_kv)
            is_full = counts == num_rows * (ends - columns * extent.kv_block_size)
            full.append(columns[is_full])
            partial.append(columns[~is_full])
    return assemble(extent, num_heads, to_lists(full), to_lists(partial))
