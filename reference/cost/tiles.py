"""Blocks and tiles: how many there are, and which part of what they hold is wanted."""

from math import inf

import numpy as np

from attnconform.reference.coordinates import IntArray
from attnconform.reference.cost.positive import check_counts, check_positive
from attnconform.reference.errors import RefusedInput


def num_blocks(length: int, block_size: int) -> int:
    """Blocks of an axis, the last one perhaps short. [COST-GRID]

    >>> num_blocks(1_000_000, 128), num_blocks(65536, 128) ** 2  # one axis of a million; a mask of 64K by 64K
    (7813, 262144)
    >>> 65536**2  # its elements
    4294967296
    """
    check_counts("COST-GRID", length=length)
    check_positive("COST-GRID", block_size=block_size)
    return -(-length // block_size)


def aligned_tiles(
    pages: IntArray,  # (n,) logical pages a row lists, each once
    *,
    page_size: int,
    tile_size: int,
) -> int:
    """Tiles of a kernel whose tiles are aligned runs of logical positions: those that hold a listed token. [COST-TILES]

    256 selected pages and 16 recent ones, 8 of them in both, in tiles of 64 and of 16 (article 1, formula 11): the 16
    recent pages fill 4 tiles, 32 more tiles are full, 40 hold two pages and 40 hold one.

    >>> def pages_of(first_tile, num_tiles, pages_each):
    ...     return (np.arange(first_tile, first_tile + num_tiles)[:, None] * 4 + np.arange(pages_each)).ravel()
    >>> pages = np.concatenate([pages_of(1020, 4, 4), pages_of(0, 32, 4), pages_of(40, 40, 2), pages_of(100, 40, 1)])
    >>> len(pages), aligned_tiles(pages, page_size=16, tile_size=64), aligned_tiles(pages, page_size=16, tile_size=16)
    (264, 116, 264)
    """
    check_positive("COST-TILES", page_size=page_size, tile_size=tile_size)
    if len(np.unique(pages)) != len(pages):
        raise RefusedInput("COST-TILES", "pages", len(pages), f"only {len(np.unique(pages))} of them differ")
    tokens = pages[:, None] * page_size + np.arange(page_size)
    return len(np.unique(tokens // tile_size))


def tile_efficiency(num_tokens: int, num_tiles: int, tile_size: int) -> float:
    """Wanted part of what the tiles compute. [COST-TILES]

    >>> tile_efficiency(2048, 40, 64), round(tile_efficiency(4224, 116, 64), 4), tile_efficiency(4224, 264, 16)
    (0.8, 0.569, 1.0)
    """
    return _share("COST-TILES", num_tokens, num_tiles * tile_size)


def block_use(num_tokens: int, num_blocks: int, block_size: int) -> float:
    """η_blk = k / (u B): wanted part of the blocks that k tokens touch. [COST-UTILIZATION] (article 1, formula 18)

    >>> block_use(6, 2, 64)  # the six candidates 1, 2, 63, 64, 65 and 127
    0.046875
    """
    return _share("COST-UTILIZATION", num_tokens, num_blocks * block_size)


def index_use(lengths: IntArray, width: int) -> float:
    """η_idx = Σ k_i / (N K): used part of a fixed-width index table. [COST-INDEX-USE] (article 1, formula 20)

    Raises RefusedInput where a list is longer than the width.

    >>> index_use(np.array([32, 32, 32, 800]), 800)
    0.28
    """
    if len(lengths) and int(lengths.max()) > width:
        limit, row = f"width is {width}", int(lengths.argmax())
        raise RefusedInput("COST-INDEX-USE", "lengths", int(lengths[row]), limit, (row,))
    return _share("COST-INDEX-USE", int(lengths.sum()), len(lengths) * width)


def execution_amplification(executed: int, num_edges: int) -> float:
    """γ = P / E: elements computed per edge. [COST-AMPLIFICATION] (article 2, 6.3)

    1 where nothing is executed, and infinite where blocks without an edge are all that is.

    >>> round(execution_amplification(36, 26), 4)  # 8 tokens, causal, window 4, blocks of 2 by 2
    1.3846
    """
    check_counts("COST-AMPLIFICATION", executed=executed, num_edges=num_edges)
    if num_edges > executed:
        raise RefusedInput("COST-AMPLIFICATION", "num_edges", num_edges, f"only {executed} elements are computed")
    if not num_edges:
        return inf if executed else 1.0
    return executed / num_edges


def _share(clause: str, part: int, whole: int) -> float:
    check_counts(clause, part=part, whole=whole)
    if part > whole:
        raise RefusedInput(clause, "part", part, f"the whole is {whole}")
    return part / whole if whole else 1.0
