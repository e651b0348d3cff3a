"""Rotary embeddings by logical position, for caches whose keys were written unrotated. [ROPE-POSITION]"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.errors import RefusedInput

KeyPosition = Literal["encoded", "raw"]


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary embedding of a model, and whether the cache's keys carry it.

    encoded: q and the cached keys arrive rotated, and attention rotates nothing.
    raw: q and the cached keys arrive unrotated, and both are rotated at read by their logical positions.
    """

    theta: float = 10000.0
    rotary_dim: int  # leading components that turn; even
    interleaved: bool = False  # pairs (2 i, 2 i + 1); else (i, i + rotary_dim / 2)
    k_position: KeyPosition = "encoded"

    @property
    def turns(self) -> bool:
        """Whether attention itself rotates."""
        return self.k_position == "raw"


def pairs(rope: Rope) -> tuple[IntArray, IntArray]:
    """Components that turn together, as two index arrays of rotary_dim / 2. [ROPE-PAIRS]"""
    half = rope.rotary_dim // 2
    i = np.arange(half)
    return (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)


def frequencies(rope: Rope) -> FloatArray:
    """Angle per position of each pair, in radians, (rotary_dim / 2,). [ROPE-PAIRS]"""
    return np.asarray(rope.theta ** (-2.0 * np.arange(rope.rotary_dim // 2) / rope.rotary_dim))


def rotate(
    x: FloatArray,  # (n, head_dim_qk)
    positions: IntArray,  # (n,) logical
    rope: Rope,
    *,
    inverse: bool = False,
) -> FloatArray:
    """Each row turned by its position; the inverse turns gradients back. [ROPE-POSITION, ROPE-PAIRS]

    >>> rope = Rope(theta=10000.0, rotary_dim=2, k_position="raw")
    >>> rotate(np.array([[1.0, 0.0]]), np.array([3]), rope).round(4)
    array([[-0.99  ,  0.1411]])
    """
    first, second = pairs(rope)
    angle = positions[:, None] * frequencies(rope) * (-1 if inverse else 1)
    cos, sin = np.cos(angle), np.sin(angle)
    turned = x.copy()
    turned[:, first] = x[:, first] * cos - x[:, second] * sin
    turned[:, second] = x[:, second] * cos + x[:, first] * sin
    return turned


def check_rope(rope: Rope, head_dim_qk: int) -> None:
    """Refuses an odd rotary_dim, one beyond the head, and a base that is not above 0. [ROPE-PAIRS]"""
    if rope.rotary_dim < 2 or rope.rotary_dim % 2 or rope.rotary_dim > head_dim_qk:
        limit = f"must be even, at least 2 and at most head_dim_qk, {head_dim_qk}"
        raise RefusedInput("ROPE-PAIRS", "rotary_dim", rope.rotary_dim, limit)
    if not (np.isfinite(rope.theta) and rope.theta > 0):
        raise RefusedInput("SAFE-FINITE", "theta", rope.theta, "must be finite and above 0")
    if rope.k_position not in ("encoded", "raw"):
        raise RefusedInput("ROPE-ENCODED", "k_position", rope.k_position, "must be 'encoded' or 'raw'")


def check_encoded_pages(
    page_table: IntArray,  # (batch_size, max_pages)
    pages_needed: IntArray,  # (batch_size,)
) -> None:
    """Refuses a page that stands at two logical places, whose keys were rotated for one of them. [ROPE-ENCODED]"""
    place_of: dict[int, int] = {}
    for n, needed in enumerate(pages_needed.tolist()):
        for place, page in enumerate(page_table[n, :needed].tolist()):
            if place_of.setdefault(page, place) != place:
                limit = f"its keys were rotated for logical page {place_of[page]}, and k_position is 'encoded'"
                raise RefusedInput("ROPE-ENCODED", "page_table", page, limit, (n, place))
