"""Candidate sets drawn from a trace: rows whose counts, places and changes are distributed as recorded.

A row is drawn in two steps. First its blocks: how many, how many at each distance, which of them the row before
had. Then, for selectors of tokens, how many tokens in each block and which. Every draw is a function of the seed, the
purpose and the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnconform.traces.block_drawer import Shape
from attnconform.traces.draws import draw
from attnconform.traces.selection_model import SelectionModel
from attnconform.traces.token_drawer import RowDrawer

if TYPE_CHECKING:
    from attnconform.traces.format import GroupKey, Trace
    from attnconform.traces.statistics import Granularity, Ints


@dataclass(frozen=True)
class CandidateRows:
    """Candidate sets of some query rows of one request and KV head."""

    seqlen_kv: int
    q_positions: Ints  # (rows,)
    indptr: Ints  # (rows + 1,)
    indices: Ints  # token positions or block numbers; distinct and rising inside a row unless listed as recorded
    granularity: Granularity
    block_size: int
    layer: int
    kv_head: int

    def row(self, r: int) -> Ints:
        """The ids of row r."""
        return self.indices[self.indptr[r] : self.indptr[r + 1]]


def synthesize(
    trace: Trace,
    *,
    seed: int,
    num_rows: int,
    seqlen_kv: int,
    layer: int | None = None,
    kv_head: int | None = None,
    phase: str,
    selector: str,
    consecutive: bool = True,
    as_listed: bool = False,
) -> CandidateRows:
    """Candidate rows as the selector would have listed them, drawn from the trace's distributions.

    The rows are the last num_rows positions of seqlen_kv, each like the one before; with consecutive=False they are
    spread over the whole request and independent. Without a layer or KV head, the seed picks one of those recorded.
    as_listed adds the repetitions and holes (-1) of the recorded lists; without it every row is a set, sorted.
    The same arguments give the same rows. Ids are never negative (holes apart), never past their row.
    """
    q_positions = _positions(seed, num_rows, seqlen_kv, consecutive)
    group = _pick_group(trace, seed, layer, kv_head, phase, selector)
    model = SelectionModel(trace.groups[group])
    block_size = trace.header.block_size
    granularity = trace.header.selector(selector).granularity
    shape = Shape(granularity, block_size, trace.header.model.windows[group.layer], consecutive)
    drawer = RowDrawer(model, shape, seed, num_rows)
    rows = [drawer.next(r, int(i)) for r, i in enumerate(q_positions)]
    if as_listed:
        rows = [list_as_recorded(model, seed, r, ids) for r, ids in enumerate(rows)]
    return CandidateRows(
        seqlen_kv=seqlen_kv,
        q_positions=q_positions,
        indptr=np.concatenate([[0], np.cumsum([len(ids) for ids in rows])]).astype(np.int64),
        indices=np.concatenate(rows).astype(np.int64),
        granularity=granularity,
        block_size=block_size,
        layer=group.layer,
        kv_head=group.kv_head,
    )


def _positions(seed: int, num_rows: int, seqlen_kv: int, consecutive: bool) -> Ints:
    if not 1 <= num_rows <= seqlen_kv:
        raise ValueError(f"num_rows is {num_rows}, want 1 to seqlen_kv = {seqlen_kv}")
    if consecutive:
        return np.arange(seqlen_kv - num_rows, seqlen_kv, dtype=np.int64)
    edges = np.arange(num_rows + 1) * seqlen_kv // num_rows
    inside = draw(seed, "position", 0, num_rows) * np.diff(edges)
    return edges[:-1] + inside.astype(np.int64)


def _pick_group(trace: Trace, seed: int, layer: int | None, kv_head: int | None, phase: str, selector: str) -> GroupKey:
    groups = [
        group
        for group in trace.recorded(phase, selector)
        if layer in (None, group.layer) and kv_head in (None, group.kv_head)
    ]
    if not groups:
        raise ValueError(f"the trace {trace.header.name!r} has no layer {layer}, KV head {kv_head}")
    return groups[int(draw(seed, "group", 0, 1)[0] * len(groups))]


def list_as_recorded(model: SelectionModel, seed: int, r: int, ids: Ints) -> Ints:
    """The ids in no order, with as many repetitions and holes as a recorded list has."""
    u = draw(seed, "listed", r, 2)
    repeats, holes = model.value("duplicates", u[0], 0), model.value("holes", u[1], 0)
    again = ids[(draw(seed, "repeats", r, repeats) * len(ids)).astype(np.int64)]
    entries = np.concatenate([ids, again, np.full(holes, -1)])
    return np.asarray(entries[np.argsort(draw(seed, "order", r, len(entries)), kind="stable")])
