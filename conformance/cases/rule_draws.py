"""Drawn inputs for structures: rules and their compositions, extents at block edges, masks with every kind of block."""

import numpy as np

from attnconform.conformance.cases.draw import Draw
from attnconform.reference.blocks.build import Extent
from attnconform.reference.coordinates import BoolArray
from attnconform.reference.rules import And, Causal, Document, MaskRule, Or, PrefixLM, Window

BLOCK = 4
EDGE_LENGTHS = (1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3)


def drawn_rule(draw: Draw, seqlen: int, depth: int = 2) -> MaskRule:
    """A rule of one request, or a composition of some, with parameters that cut inside the length."""
    kind = draw.integer(0, 5 if depth else 3)
    match kind:
        case 0:
            return Causal()
        case 1:
            return Window(left=draw.integer(0, 5), right=draw.choice((None, 0, draw.integer(0, 3))))
        case 2:
            return PrefixLM((draw.integer(0, seqlen),))
        case 3:
            starts = {0, *(draw.integer(1, max(seqlen - 1, 1)) for _ in range(2))}
            return Document((tuple(sorted(starts)),))
        case _:
            parts = tuple(drawn_rule(draw, seqlen, depth - 1) for _ in range(2))
            return And(parts) if kind == 4 else Or(parts)


def drawn_extent(draw: Draw) -> Extent:
    """Lengths around block edges; the rows at the end of the keys, or from the first on."""
    seqlen_kv = draw.choice(EDGE_LENGTHS)
    seqlen_q = draw.integer(1, seqlen_kv)
    return Extent(
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_kv,
        q_block_size=draw.choice((1, 2, BLOCK)),
        kv_block_size=draw.choice((1, 2, BLOCK)),
        q_offset=draw.choice((0, seqlen_kv - seqlen_q)),
    )


def drawn_mask(draw: Draw, shape: tuple[int, ...]) -> BoolArray:
    """(num_heads, seqlen_q, seqlen_kv): noise, with a rectangle of edges and one without."""
    bits = draw.integers(int(np.prod(shape)), 0, 1)
    mask = np.array(bits, dtype=bool).reshape(shape)
    for value in (True, False):
        top, left = (draw.integer(0, n - 1) for n in shape[1:])
        mask[:, top : top + BLOCK, left : left + BLOCK] = value
    return mask
