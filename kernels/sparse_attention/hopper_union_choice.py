"""Whether union tiles go to `hopper_union`: what its kernel can say, and how its boxes fit pages and blocks.

Decided when a plan is made, as `hopper_choice` decides for tiles whose rows share a list. Where it cannot run, nothing
is refused: the same rows run apart, or as union tiles of `attend_union`.
"""

from __future__ import annotations

from math import gcd

import torch

from attnconform.kernels.sparse_attention.hopper_choice import Call, has_hints, why_not, why_not_here
from attnconform.kernels.sparse_attention.tuning import UNION_TILE_KV, Geometry


def choose_union_box(geometry: Geometry, call: Call, rows_per_union: int | None, device: torch.device) -> int:
    """Keys of a TMA box, 0 where the kernel is not asked for or cannot run."""
    wanted = geometry.choice.forward
    if call.candidates is None or rows_per_union is not None or wanted == "plain":
        return 0
    if wanted is None and has_hints(geometry):
        return 0
    reason = why_not_here(device) or why_not_union(geometry, call)
    return union_box_size(call) if reason is None else 0


def why_not_union(geometry: Geometry, call: Call) -> str | None:
    """What of a call the kernel cannot say, None where it can say all of it."""
    if call.candidates is None or call.candidates.q_block_size > 1:
        return "its kernel of unions takes rows with lists of their own"
    if call.score_rules:
        return "its kernel of unions knows no score rule"
    return why_not(geometry, call)


def union_box_size(call: Call) -> int:
    """The most keys, up to a tile's, that pages and listed blocks are whole multiples of."""
    assert call.candidates is not None
    return gcd(call.page_size, call.candidates.block_size, UNION_TILE_KV)
