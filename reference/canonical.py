"""N(D, W, A, T): from what a row lists to triples of position, page and offset, and slot. (article 1, formula 16)"""

from dataclasses import dataclass

import numpy as np

from attnconform.reference.candidates import HOLE, check_entries, expand_entries, sink_positions, window_positions
from attnconform.reference.coordinates import (
    BoolArray,
    IntArray,
    PageOffsets,
    Positions,
    Slots,
    to_page_offsets,
    to_slots,
)
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem, QueryRow, check_problem


@dataclass(frozen=True, kw_only=True)
class RequestPages:
    """What one request may read of the pool."""

    seqlen_kv: int  # T: committed tokens
    page_table_row: IntArray  # (max_pages,) physical page of each logical page
    page_size: int
    num_pages: int  # of the pool
    owned: BoolArray | None = None  # (num_pages,) True where the request may read; None: all that its table names


@dataclass(frozen=True)
class CanonicalRow:
    """One row's candidates, entry by entry in all three coordinates, ascending in position. [SET-CANONICAL]"""

    positions: Positions
    where: PageOffsets
    slots: Slots

    def triples(self) -> list[tuple[int, tuple[int, int], int]]:
        """(t, (logical page, offset), slot) of every candidate."""
        pages = zip(self.where.page.tolist(), self.where.offset.tolist(), strict=True)
        return list(zip(self.positions.values.tolist(), pages, self.slots.values.tolist(), strict=True))


def canonical_row(
    dynamic: IntArray,  # (n,) D: positions that a selector listed, HOLE anywhere
    window: IntArray,  # W
    sinks: IntArray,  # A
    request: RequestPages,
    *,
    last_visible: int | None = None,  # the list's own last position, where it is declared causal
) -> CanonicalRow:
    """{(t, l(t), p(t)) : t in D ∪ W ∪ A, 0 <= t < T}, each t once. [SET-CANONICAL, SET-VALIDATE]

    W and A come from a rule and end where the data ends. D comes from a selector: an entry of it that is out of range
    is refused, and so is one past last_visible. Then every page of a candidate is checked, before any slot is made.

    >>> pages = RequestPages(seqlen_kv=128, page_table_row=np.array([41, 7]), page_size=64, num_pages=64)
    >>> canonical_row(np.array([65, HOLE, 1, 65]), np.array([127, 128]), np.array([0]), pages).triples()
    [(0, (0, 0), 2624), (1, (0, 1), 2625), (65, (1, 1), 449), (127, (1, 63), 511)]
    """
    check_entries(dynamic, list_idx=0, start=0, block_size=1, seqlen_kv=request.seqlen_kv)
    check_causality(dynamic, last_visible)
    by_rule = np.concatenate([window, sinks]).astype(np.int64)
    committed = by_rule[(by_rule >= 0) & (by_rule < request.seqlen_kv)]
    positions = Positions(np.unique(np.concatenate([dynamic[dynamic != HOLE], committed])))
    where = to_page_offsets(positions, page_size=request.page_size)
    check_candidate_pages(np.unique(where.page), request)
    return CanonicalRow(positions, where, to_slots(where, request.page_table_row, page_size=request.page_size))


def check_causality(dynamic: IntArray, last_visible: int | None) -> None:
    """Refuses an entry past the end that its list was declared to have; None declares nothing. [SET-VALIDATE]"""
    if last_visible is None:
        return
    future = np.flatnonzero(dynamic > last_visible)
    if future.size:
        at = int(future[0])
        limit = f"the list was declared to end at position {last_visible}"
        raise RefusedInput("SET-VALIDATE", "indices", int(dynamic[at]), limit, (at,))


def check_candidate_pages(logical: IntArray, request: RequestPages) -> None:
    """Refuses candidates whose page is not in the table, not in the pool or another request's. [SET-VALIDATE]"""
    for page in logical.tolist():
        if page >= len(request.page_table_row):
            limit = f"page_table has {len(request.page_table_row)} pages of the request"
            raise RefusedInput("COORD-PAGE-RANGE", "logical page", page, limit)
        physical = int(request.page_table_row[page])
        if not 0 <= physical < request.num_pages:
            raise RefusedInput("COORD-PAGE-RANGE", "page_table", physical, f"num_pages is {request.num_pages}", (page,))
        if request.owned is not None and not request.owned[physical]:
            raise RefusedInput("SAFE-OWNER", "page_table", physical, "the request does not own that page", (page,))


def canonical_rows(problem: AttentionProblem) -> list[CanonicalRow]:
    """The canonical candidates of every row and query head, row-major. [SET-CANONICAL, GQA-LISTS]"""
    check_problem(problem)
    return [
        canonical_row(*listed_parts(problem, where, qo_head), request_pages(problem, where.request))
        for where in problem.rows()
        for qo_head in range(problem.num_qo_heads)
    ]


def listed_parts(problem: AttentionProblem, where: QueryRow, qo_head: int) -> tuple[IntArray, IntArray, IntArray]:
    """D, W and A of one row and head, in positions; D is every committed position where nothing is listed."""
    seqlen_kv, none = int(problem.seqlen_kv[where.request]), np.empty(0, dtype=np.int64)
    lists = problem.candidates
    if lists is None:
        return np.arange(seqlen_kv), none, none
    entries = lists.entries(problem.list_index(where, qo_head))
    dynamic = expand_entries(entries[entries != HOLE], block_size=lists.block_size, seqlen_kv=seqlen_kv)
    window = window_positions(where.q_idx, window=lists.window, seqlen_kv=seqlen_kv)
    return dynamic, window, sink_positions(num_sink_tokens=lists.num_sink_tokens, seqlen_kv=seqlen_kv)


def request_pages(problem: AttentionProblem, request: int) -> RequestPages:
    """What a request of a problem may read."""
    cache = problem.cache
    return RequestPages(
        seqlen_kv=int(problem.seqlen_kv[request]),
        page_table_row=cache.page_table[request],
        page_size=cache.page_size,
        num_pages=cache.num_pages,
        owned=None if cache.owned is None else cache.owned[request],
    )
