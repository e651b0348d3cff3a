"""The three coordinates of a cached token, as three types that never mix. [COORD-SLOT]

A *kv position* is logical and counts tokens of one request: causality, windows and ALiBi see it.
A *page and offset* is logical too: which page of the request, which token of that page.
A *slot* is physical: where the token lies in the pool. Only loads and stores see it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Positions:
    """Logical kv positions of one request."""

    values: IntArray  # (n,)

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class PageOffsets:
    """Logical page of a request and offset within that page, pairwise."""

    page: IntArray  # (n,)
    offset: IntArray  # (n,), 0 <= offset < page_size


@dataclass(frozen=True)
class Slots:
    """Physical places in the pool, in tokens."""

    values: IntArray  # (n,)

    def __len__(self) -> int:
        return len(self.values)


def to_page_offsets(positions: Positions, *, page_size: int) -> PageOffsets:
    """Logical page and offset of every position. [COORD-SLOT]"""
    return PageOffsets(positions.values // page_size, positions.values % page_size)


def to_slots(
    where: PageOffsets,
    page_table_row: IntArray,  # (max_pages,) physical page of each logical page of one request
    *,
    page_size: int,
) -> Slots:
    """Physical slot of every token, in 64-bit arithmetic. [COORD-SLOT, COORD-WIDE]"""
    return Slots(page_table_row[where.page].astype(np.int64) * page_size + where.offset)
