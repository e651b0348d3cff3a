"""Full, partial or empty, from bounds on a mask instead of the mask."""

from dataclasses import replace

import numpy as np

from attnconform.reference.block_mask import BlockMask, build_block_mask
from attnconform.reference.blocks.algebra import listed_pairs, lists_from_pairs, pairs_of
from attnconform.reference.coordinates import BoolArray
from attnconform.reference.errors import RefusedInput


def classify_blocks(
    outer: BoolArray,  # (num_heads, seqlen_q, seqlen_kv) True wherever the mask may be
    inner: BoolArray,  # likewise, False wherever the mask may be
    *,
    q_block_size: int,
    kv_block_size: int,
) -> BlockMask:
    """A block mask that stands for every mask between two bounds. [BLOCK-CONSERVATIVE]

    A block is listed where the outer bound has an element, and full where the inner bound has all of them.
    Raises RefusedInput for bounds that cross.

    >>> outer = np.array([[[True, True, True, True, False, False]]])
    >>> inner = np.array([[[True, True, True, False, False, False]]])
    >>> blocks = classify_blocks(outer, inner, q_block_size=1, kv_block_size=2)
    >>> blocks.full.of(0), blocks.partial.of(0)
    (array([0]), array([1]))
    """
    crossing = np.argwhere(inner & ~outer)
    if len(crossing):
        at = tuple(int(i) for i in crossing[0])
        raise RefusedInput("BLOCK-CONSERVATIVE", "inner", True, "the outer bound is False there", at)
    sizes = {"q_block_size": q_block_size, "kv_block_size": kv_block_size}
    listed, sure = build_block_mask(outer, **sizes), build_block_mask(inner, **sizes)
    full = pairs_of(sure.full, sure.num_kv_blocks)
    partial = np.setdiff1d(listed_pairs(listed), full)
    return replace(listed, full=lists_from_pairs(full, listed), partial=lists_from_pairs(partial, listed))
