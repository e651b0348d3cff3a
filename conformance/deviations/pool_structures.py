"""Mistakes in a page pool: pages shared too long, copied never, freed too early or twice over. [COORD]"""

from typing import ClassVar

import numpy as np

from attnconform.conformance.adapters.reference_structures import ReferenceStructures
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.structures import Pool
from attnconform.reference.page_pool import Handle, PageCopy, PagePool


class KeepsAPool(ReferenceStructures):
    """A backend whose pool is a variation of the reference's."""

    pool: ClassVar[type[PagePool]]

    def page_pool(self, num_pages: int, page_size: int, num_rows: int) -> Pool:
        return self.pool(num_pages=num_pages, page_size=page_size, num_rows=num_rows)


class CopyingPool(PagePool):
    """Forks get pages of their own, while there are any."""

    def fork(self, handle: Handle, num_tokens: int) -> Handle:
        child = super().fork(handle, num_tokens)
        shared, free = self.tables[child.row], np.flatnonzero(self.readers == 0)
        if len(free) >= len(shared):
            own = [int(page) for page in free[: len(shared)]]
            self.readers[own] = 1
            self.readers[shared] -= 1
            self.tables[child.row] = own
        return child


@deviates("COORD-FORK", fault_class="T", report="article 1, 7.3: a shared prefix is the same physical page")
class ForksIntoPagesOfItsOwn(KeepsAPool):
    """A fork takes new pages for its prefix, and nobody copies the tokens there."""

    pool = CopyingPool


class WholePagesPool(PagePool):
    """Forks end at a page's end."""

    def fork(self, handle: Handle, num_tokens: int) -> Handle:
        return super().fork(handle, num_tokens // self.page_size * self.page_size)


@deviates("COORD-FORK", fault_class="T", report="no report: the last, partly filled page of a prefix is left out")
class ForksWholePagesAlone(KeepsAPool):
    """A fork loses the tokens of its prefix past the last full page."""

    pool = WholePagesPool


class InPlacePool(PagePool):
    """A last page always passes for the request's own."""

    def append(self, handle: Handle, num_tokens: int) -> tuple[PageCopy, ...]:
        self.check(handle)
        table = self.tables[handle.row]
        readers = self.readers[table[-1:]].copy()
        self.readers[table[-1:]] = 1  # so that the last page passes for its own
        before = list(table)
        try:
            return super().append(handle, num_tokens)
        finally:
            self.readers[before[-1:]] = readers


@deviates("COORD-COPY-ON-WRITE", fault_class="T", report="article 1, 7.3: copy-on-write pages and who reads them")
class WritesIntoSharedPages(KeepsAPool):
    """A token goes into the last page whoever else reads it."""

    pool = InPlacePool


class ForgetfulPool(PagePool):
    """Copies are never named."""

    def append(self, handle: Handle, num_tokens: int) -> tuple[PageCopy, ...]:
        super().append(handle, num_tokens)
        return ()


@deviates("COORD-COPY-ON-WRITE", fault_class="U", report="no report: a page is replaced, and its tokens stay behind")
class ReplacesAPageWithoutItsTokens(KeepsAPool):
    """A shared page is replaced by a new one that nothing is copied to."""

    pool = ForgetfulPool


class OffByOnePool(PagePool):
    """Copies end a token early."""

    def append(self, handle: Handle, num_tokens: int) -> tuple[PageCopy, ...]:
        copies = super().append(handle, num_tokens)
        return tuple(PageCopy(copy.source, copy.target, copy.num_tokens - 1) for copy in copies)


@deviates("COORD-COPY-ON-WRITE", fault_class="P", report="no report: the last token of a shared page is not copied")
class CopiesATokenTooFew(KeepsAPool):
    """The last token of a shared page is left behind."""

    pool = OffByOnePool


class UncountedPool(PagePool):
    """A page has a reader or none."""

    def _release(self, pages: list[int]) -> None:
        self.readers[pages] = 0


@deviates("COORD-FREE", fault_class="P", report="article 1, 7.3: pages are recycled while another request reads them")
class FreesPagesThatOthersRead(KeepsAPool):
    """The first request that ends frees its pages for everybody."""

    pool = UncountedPool


class LeakyPool(PagePool):
    """Pages past a new end keep a reader that is not there."""

    def truncate(self, handle: Handle, num_tokens: int) -> None:
        kept = -(-num_tokens // self.page_size)
        lost = self.tables[handle.row][kept:] if handle.row in self.tables else []
        super().truncate(handle, num_tokens)
        self.readers[lost] += 1


@deviates("COORD-FREE", fault_class="C", report="no report: a shortened request never gives its pages back")
class LosesPagesOfShortenedRequests(KeepsAPool):
    """Pages past the end of a shortened request are never free again."""

    pool = LeakyPool


class TimelessPool(PagePool):
    """Every request of a place is its first."""

    def free(self, handle: Handle) -> None:
        super().free(handle)
        self.generations[handle.row] = 0


@deviates("COORD-GENERATION", fault_class="C", report="article 1, 7.4: a slot that was retired and given away")
class ReusesTheGeneration(KeepsAPool):
    """The next request of a place has the handle of the one before."""

    pool = TimelessPool


class TrustingPool(PagePool):
    """A place in use is not asked whose it is."""

    def check(self, handle: Handle) -> None:
        if handle.row in self.tables:
            return
        super().check(handle)


@deviates("COORD-GENERATION", fault_class="C", report="article 1, 7.4: late work writes into the next request's place")
class TakesAnyHandleOfAPlaceInUse(KeepsAPool):
    """A handle serves as long as its place is in use, by whomever."""

    pool = TrustingPool
