"""The paged KV cache: pages of a pool, and a table that says which page holds which tokens."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from attnconform.reference.coordinates import BoolArray, IntArray, Positions, Slots, to_page_offsets, to_slots
from attnconform.reference.errors import RefusedInput

Layout = Literal["NHD", "HND"]
UNUSED_PAGE = -1


@dataclass(frozen=True, kw_only=True)
class PagedCache:
    """One pool of pages shared by all requests of a batch."""

    page_size: int  # tokens per page
    num_pages: int  # pages in the pool
    page_table: IntArray  # (batch_size, max_pages) physical page of each logical page, UNUSED_PAGE past the end
    layout: Layout = "NHD"
    owned: BoolArray | None = (
        None  # (batch_size, num_pages) True where a request may read a page; None: all its table names
    )
    # (num_pages, num_kv_heads) page of the pool where a KV head's part of a page lies; None: the page itself
    head_pages: IntArray | None = None

    @property
    def num_slots(self) -> int:
        return self.num_pages * self.page_size

    def slots(self, request: int, positions: Positions) -> Slots:
        """Physical slots of a request's logical positions. [COORD-SLOT]"""
        where = to_page_offsets(positions, page_size=self.page_size)
        return to_slots(where, self.page_table[request], page_size=self.page_size)

    def head_slots(self, slots: Slots, kv_head: int) -> Slots:
        """Where one KV head's part of some slots lies. [COORD-HEAD-PAGE]

        >>> table, pages = np.array([[0]]), np.array([[0, 1], [1, 0]])
        >>> cache = PagedCache(page_size=4, num_pages=2, page_table=table, head_pages=pages)
        >>> cache.head_slots(cache.slots(0, Positions(np.array([1, 3]))), 1).values
        array([5, 7])
        """
        if self.head_pages is None:
            return slots
        page, offset = slots.values // self.page_size, slots.values % self.page_size
        return Slots(self.head_pages[page, kv_head].astype(np.int64) * self.page_size + offset)


def check_head_pages(cache: PagedCache, num_kv_heads: int) -> None:
    """Refuses bases of another shape or outside the pool. [COORD-HEAD-PAGE]"""
    if cache.head_pages is None:
        return
    if cache.head_pages.shape != (cache.num_pages, num_kv_heads):
        limit = f"must be {(cache.num_pages, num_kv_heads)}"
        raise RefusedInput("SAFE-SHAPE", "head_pages.shape", cache.head_pages.shape, limit)
    outside = np.argwhere((cache.head_pages < 0) | (cache.head_pages >= cache.num_pages))
    if len(outside):
        at = tuple(int(i) for i in outside[0])
        limit = f"num_pages is {cache.num_pages}"
        raise RefusedInput("COORD-HEAD-PAGE", "head_pages", int(cache.head_pages[at]), limit, at)


def check_cache(cache: PagedCache, seqlen_kv: IntArray) -> None:
    """Refuses a table that points outside the pool or into another request's pages.

    [COORD-PAGE-RANGE, SAFE-OWNER]
    """
    for name in ("page_size", "num_pages"):
        if getattr(cache, name) < 1:
            raise RefusedInput("SAFE-SHAPE", name, getattr(cache, name), "must be at least 1")
    if cache.page_table.ndim != 2 or cache.page_table.shape[0] != len(seqlen_kv):
        raise RefusedInput("SAFE-SHAPE", "page_table.shape", cache.page_table.shape, f"batch_size is {len(seqlen_kv)}")
    if cache.owned is not None and cache.owned.shape != (len(seqlen_kv), cache.num_pages):
        limit = f"must be {(len(seqlen_kv), cache.num_pages)}"
        raise RefusedInput("SAFE-SHAPE", "owned.shape", cache.owned.shape, limit)
    pages_needed = -(-seqlen_kv // cache.page_size)
    short = np.flatnonzero(pages_needed > cache.page_table.shape[1])
    if short.size:
        n = int(short[0])
        limit = f"page_table has room for {cache.page_table.shape[1]} pages of {cache.page_size}"
        raise RefusedInput("COORD-PAGE-RANGE", "seqlen_kv", int(seqlen_kv[n]), limit, (n,))
    for n, needed in enumerate(pages_needed.tolist()):
        _check_pages(cache, n, cache.page_table[n, :needed])


def _check_pages(cache: PagedCache, request: int, pages: IntArray) -> None:
    outside = np.flatnonzero((pages < 0) | (pages >= cache.num_pages))
    if outside.size:
        p = int(outside[0])
        limit = f"num_pages is {cache.num_pages}"
        raise RefusedInput("COORD-PAGE-RANGE", "page_table", int(pages[p]), limit, (request, p))
    if cache.owned is None:
        return
    foreign = np.flatnonzero(~cache.owned[request, pages])
    if foreign.size:
        p = int(foreign[0])
        limit = f"request {request} does not own that page"
        raise RefusedInput("SAFE-OWNER", "page_table", int(pages[p]), limit, (request, p))
