"""Lists of pages in FlashInfer's form: one list for each query row, or one for each request."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnconform.conformance.adapters.flashinfer_package import HeadGroup
from attnconform.conformance.views import ProblemView
from attnconform.reference.candidates import HOLE, expand_entries
from attnconform.reference.coordinates import IntArray
from attnconform.reference.problem import QueryRow


@dataclass(frozen=True)
class PageLists:
    """CSR of physical pages; all of a list's pages but the last are whole.

    FlashInfer documents 1 <= last_page_len <= page_size and a length of (pages - 1) * page_size + last_page_len: an
    empty list's last page is whole, or the offsets of the masks after it are wrong.
    """

    indptr: Tensor  # (num_lists + 1,) int32
    pages: Tensor  # (total,) int32
    last_page_len: Tensor  # (num_lists,) int32

    @property
    def num_lists(self) -> int:
        return len(self.last_page_len)


def page_lists(lists: list[tuple[IntArray, int]], device: str) -> PageLists:
    """The CSR of lists of pages, each with the length of its last page."""
    lengths = [len(pages) for pages, _ in lists]
    arrays = (
        np.concatenate([[0], np.cumsum(lengths)]),
        np.concatenate([np.zeros(0, dtype=np.int64), *(pages for pages, _ in lists)]),
        np.asarray([last for _, last in lists]),
    )
    indptr, pages, last_page_len = (torch.as_tensor(array, dtype=torch.int32, device=device) for array in arrays)
    return PageLists(indptr, pages, last_page_len)


def request_pages(problem: ProblemView) -> PageLists:
    """Each request's pages, as its page table has them."""
    cache, lengths = problem.spec.cache, problem.spec.seqlen_kv.tolist()
    needed = [-(-length // cache.page_size) for length in lengths]
    return page_lists(
        [
            (row[:count], length - (count - 1) * cache.page_size)
            for row, count, length in zip(cache.page_table, needed, lengths, strict=True)
        ],
        problem.device,
    )


def row_pages(problem: ProblemView, group: HeadGroup, page_size: int) -> PageLists:
    """Each query row's pages for the heads of a group: pages of one token, or whole pages of the cache."""
    return page_lists([pages_of_row(problem, row, group, page_size) for row in problem.spec.rows()], problem.device)


def pages_of_row(problem: ProblemView, row: QueryRow, group: HeadGroup, page_size: int) -> tuple[IntArray, int]:
    """Pages of a row's keys in the order of its list, the one that is not whole at the end; how many keys it has."""
    keys = Counter(position // page_size for position in positions_of_row(problem, row, group.qo_heads.start))
    logical = sorted(keys, key=lambda page: -keys[page])
    slots = problem.slots(row.request, group.kv_heads.start).cpu().numpy()
    physical = slots[np.asarray(logical, dtype=np.int64) * page_size] // page_size
    return physical, keys[logical[-1]] if logical else page_size


def positions_of_row(problem: ProblemView, row: QueryRow, qo_head: int) -> list[int]:
    """What a row attends, each position once: as listed, then what window and sinks add. [SET-ORDER, SET-UNION]"""
    spec, allowed = problem.spec, problem.masks[row.request][qo_head, row.local].cpu().numpy()
    listed = np.zeros(0, dtype=np.int64)
    if spec.candidates is not None:
        entries = spec.candidates.entries(spec.list_index(row, qo_head))
        seqlen_kv = int(spec.seqlen_kv[row.request])
        listed = expand_entries(entries[entries != HOLE], block_size=spec.candidates.block_size, seqlen_kv=seqlen_kv)
    every = dict.fromkeys([*listed.tolist(), *range(len(allowed))])
    return [position for position in every if allowed[position]]
