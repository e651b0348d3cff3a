"""How often pages are read by different query tiles, and which of them are gathered rather than added to. [GRAD-SUM]

In a query-centric pass every tile that reads a slot adds to its dK and dV, one addition after another where they meet.
Few meet at a cold page: atomics are cheapest there and need no index. At a hot page thousands would wait for each
other; its readers are listed instead and summed by programs of their own (`backward_transpose`). A page is hot where
at least `reuse_threshold` adds would meet at one of its slots.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.backward_hints import BackwardHints
from attnconform.kernels.sparse_attention.backward_tasks import QUERY_FIELDS, QueryLaunch
from attnconform.kernels.sparse_attention.backward_transpose import ListEntries
from attnconform.kernels.sparse_attention.plan import Plan

COLUMN = {name: column for column, name in enumerate(QUERY_FIELDS)}


@dataclass(frozen=True, eq=False)
class ColdPages:
    """Pages that take atomic adds, each with a row of float32 sums."""

    rows: Tensor  # (num_kv_heads, num_pages) int32, row of the sums, -1: hot, or read by nobody
    kv_head: Tensor  # (num_rows,) int64
    page: Tensor  # (num_rows,) int64
    most_adds: int  # that meet at one slot

    @property
    def num_rows(self) -> int:
        return self.page.numel()


def count_page_adds(plan: Plan, launches: tuple[QueryLaunch, ...], entries: ListEntries) -> Tensor:
    """Query tiles that read the most read slot of every page, (num_kv_heads, num_pages) int64."""
    are_alike = plan.sharing in (None, "shared")
    num_entries = entries.entry_slot.numel()
    # Where all KV heads read the same lists, tasks say which of them each is for.
    reads = entries.entry_slot.new_zeros((plan.num_kv_heads if are_alike else 1, num_entries + 1))
    first_entry = torch.zeros_like(plan.seqlen_kv)
    if plan.list_indptr is None:
        first_entry = plan.seqlen_kv.cumsum(0) - plan.seqlen_kv
    for launch in launches:
        tasks = launch.tasks.long()
        base = first_entry[tasks[:, COLUMN["request"]]]
        head = tasks[:, COLUMN["kv_head"]] if are_alike else torch.zeros_like(base)
        one = torch.ones_like(base)
        reads.index_put_((head, base + tasks[:, COLUMN["kv_start"]]), one, accumulate=True)
        reads.index_put_((head, base + tasks[:, COLUMN["kv_end"]]), -one, accumulate=True)
    reads = reads.cumsum(1)[:, :-1]
    by_slot = reads.new_zeros((plan.num_kv_heads, plan.num_pages * plan.page_size))
    if are_alike:
        by_slot.index_add_(1, entries.entry_slot, reads)
        # One list of readers serves all heads, so that a page is hot for all of them or for none.
        by_slot = by_slot.amax(0).expand_as(by_slot)
    else:
        where = (entries.list_kv_head[entries.entry_list], entries.entry_slot)
        by_slot.index_put_(where, reads[0], accumulate=True)
    return by_slot.reshape(plan.num_kv_heads, plan.num_pages, plan.page_size).amax(2)


def choose_cold_pages(adds: Tensor, hints: BackwardHints) -> ColdPages | None:
    """Pages below the threshold; all of them in atomic mode, None where nothing is added atomically."""
    if hints.mode == "kv_centric":
        return None
    is_cold = adds > 0
    if hints.mode == "hybrid":
        is_cold &= adds < hints.reuse_threshold
    kv_head, page = torch.nonzero(is_cold, as_tuple=True)
    rows = torch.where(is_cold.flatten(), is_cold.flatten().cumsum(0) - 1, -1).reshape(adds.shape)
    most_adds = int(adds[is_cold].max()) if kv_head.numel() else 0
    return ColdPages(rows.int(), kv_head, page, most_adds)
