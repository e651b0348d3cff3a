"""Pages of a pool, handed to requests: shared by forks, copied before they differ, given back by their last reader."""

from typing import NamedTuple

import numpy as np

from attnconform.reference.coordinates import IntArray
from attnconform.reference.errors import RefusedInput


class Handle(NamedTuple):
    """A request's place, and which of the place's requests it is. [COORD-GENERATION]"""

    row: int
    generation: int


class PageCopy(NamedTuple):
    """What has to be copied before new tokens are written: the first tokens of a page. [COORD-COPY-ON-WRITE]"""

    source: int
    target: int
    num_tokens: int


class PagePool:
    """Who reads which page. It moves no data: `append` says what the caller must copy, and then may write."""

    def __init__(self, *, num_pages: int, page_size: int, num_rows: int) -> None:
        for name, size in (("num_pages", num_pages), ("page_size", page_size), ("num_rows", num_rows)):
            if size < 1:
                raise RefusedInput("SAFE-SHAPE", name, size, "must be at least 1")
        self.page_size = page_size
        self.readers: IntArray = np.zeros(num_pages, dtype=np.int64)  # requests whose table names the page
        self.generations: IntArray = np.zeros(num_rows, dtype=np.int64)
        self.tables: dict[int, list[int]] = {}  # row in use -> physical pages in logical order
        self.lengths: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        return int((self.readers == 0).sum())

    def allocate(self) -> Handle:
        """A request without tokens, in the first free place. Raises RefusedInput where there is none. [PLAN-CAPACITY]

        >>> pool = PagePool(num_pages=4, page_size=4, num_rows=2)
        >>> pool.allocate(), pool.allocate()
        (Handle(row=0, generation=0), Handle(row=1, generation=0))
        """
        row = next((row for row in range(len(self.generations)) if row not in self.tables), None)
        if row is None:
            limit = f"the pool has {len(self.generations)} places, all in use"
            raise RefusedInput("PLAN-CAPACITY", "num_requests", len(self.tables) + 1, limit)
        self.tables[row], self.lengths[row] = [], 0
        return Handle(row, int(self.generations[row]))

    def page_table(self, handle: Handle) -> IntArray:
        """(num_pages of the request,) physical page of each logical page, as they are now."""
        self.check(handle)
        return np.array(self.tables[handle.row], dtype=np.int64)

    def seqlen_kv(self, handle: Handle) -> int:
        """Committed tokens of a request."""
        self.check(handle)
        return self.lengths[handle.row]

    def append(self, handle: Handle, num_tokens: int) -> tuple[PageCopy, ...]:
        """Room for more tokens; what to copy before they are written. [COORD-COPY-ON-WRITE, COORD-FREE]

        A last page that others read too is replaced by a page of the request's own. Raises RefusedInput where the pool
        has too few free pages, and then nothing has changed. [PLAN-CAPACITY]
        """
        self.check(handle)
        if num_tokens < 0:
            raise RefusedInput("SAFE-SHAPE", "num_tokens", num_tokens, "must be at least 0")
        table, length = self.tables[handle.row], self.lengths[handle.row]
        used = length % self.page_size
        is_shared = bool(num_tokens and used and self.readers[table[-1]] > 1)
        num_new = -(-(length + num_tokens) // self.page_size) - len(table)
        pages = self._take(num_new + is_shared)
        copies: tuple[PageCopy, ...] = ()
        if is_shared:
            copies = (PageCopy(table[-1], pages[0], used),)
            self._release([table.pop()])
        table.extend(pages)
        self.lengths[handle.row] = length + num_tokens
        return copies

    def fork(self, handle: Handle, num_tokens: int) -> Handle:
        """A request that begins with the first tokens of another, in the very same pages. [COORD-FORK]

        Raises RefusedInput for a prefix longer than the request.
        """
        self.check(handle)
        if not 0 <= num_tokens <= self.lengths[handle.row]:
            limit = f"row {handle.row} has {self.lengths[handle.row]} tokens"
            raise RefusedInput("COORD-FORK", "num_tokens", num_tokens, limit)
        shared = self.tables[handle.row][: -(-num_tokens // self.page_size)]
        child = self.allocate()
        self.readers[shared] += 1
        self.tables[child.row], self.lengths[child.row] = list(shared), num_tokens
        return child

    def truncate(self, handle: Handle, num_tokens: int) -> None:
        """Keeps the first tokens of a request and gives back the pages past them. [COORD-FREE]

        Raises RefusedInput for more tokens than there are.
        """
        self.check(handle)
        if not 0 <= num_tokens <= self.lengths[handle.row]:
            limit = f"row {handle.row} has {self.lengths[handle.row]} tokens"
            raise RefusedInput("COORD-FREE", "num_tokens", num_tokens, limit)
        kept = -(-num_tokens // self.page_size)
        table = self.tables[handle.row]
        self._release(table[kept:])
        self.tables[handle.row], self.lengths[handle.row] = table[:kept], num_tokens

    def free(self, handle: Handle) -> None:
        """Ends a request: its pages lose a reader, and its place starts a new generation. [COORD-GENERATION]"""
        self.check(handle)
        self._release(self.tables.pop(handle.row))
        del self.lengths[handle.row]
        self.generations[handle.row] += 1

    def check(self, handle: Handle) -> None:
        """Refuses a handle of a request that has ended. [COORD-GENERATION]"""
        if not 0 <= handle.row < len(self.generations):
            raise RefusedInput("COORD-GENERATION", "row", handle.row, f"there are {len(self.generations)} places")
        now = int(self.generations[handle.row])
        if handle.generation != now or handle.row not in self.tables:
            limit = f"the place's next request has {now}"
            raise RefusedInput("COORD-GENERATION", "generation", handle.generation, limit, (handle.row,))

    def _take(self, count: int) -> list[int]:
        """Free pages, lowest first, with one reader each."""
        free = np.flatnonzero(self.readers == 0)
        if len(free) < count:
            raise RefusedInput("PLAN-CAPACITY", "num_pages", count, f"only {len(free)} pages are free")
        self.readers[free[:count]] = 1
        return [int(page) for page in free[:count]]

    def _release(self, pages: list[int]) -> None:
        """One reader less each; a request names no page twice. [COORD-FREE]"""
        self.readers[pages] -= 1
