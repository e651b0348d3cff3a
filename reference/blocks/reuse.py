"""Block masks that are cut out of larger ones: rows for a decode step, and shorter lengths where that is right."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from attnconform.reference.block_mask import BlockLists, BlockMask, build_block_mask, decode_block_mask
from attnconform.reference.coordinates import BoolArray
from attnconform.reference.errors import RefusedInput

MaskOfLength = Callable[[int], BoolArray]  # length -> (num_heads, length, length), as a rebuild makes it


def slice_rows(block_mask: BlockMask, start: int, stop: int) -> BlockMask:
    """The block mask of query rows start to stop, over the same keys. [BLOCK-SLICE]

    The rows keep their blocks: start begins one, or the rows lie within one. A partial block still asks the element
    mask of the rows' own positions, never of rows counted from 0. [BLOCK-OFFSET] Raises RefusedInput for rows that
    the mask does not have and for rows that straddle its blocks.

    >>> from attnconform.reference.blocks.build import Extent, rule_block_mask
    >>> from attnconform.reference.rules import Causal
    >>> largest = rule_block_mask(Causal(), Extent(seqlen_q=8, seqlen_kv=8, q_block_size=4, kv_block_size=4))
    >>> row = slice_rows(largest, 5, 6)
    >>> row.shape, row.full.of(0), row.partial.of(0)
    ((1, 1, 8), array([0]), array([1]))
    """
    size = block_mask.q_block_size
    if not 0 <= start <= stop <= block_mask.seqlen_q:
        raise RefusedInput("BLOCK-EXTENT", "rows", (start, stop), f"the block mask has seqlen_q {block_mask.seqlen_q}")
    if start % size and (stop - 1) // size != start // size:
        limit = f"rows up to {stop} straddle its blocks of {size}"
        raise RefusedInput("BLOCK-SLICE", "start", start, limit)
    first, last = start // size, -(-stop // size)
    full, partial = (_some_rows(lists, block_mask, first, last) for lists in (block_mask.full, block_mask.partial))
    return replace(block_mask, seqlen_q=stop - start, full=full, partial=partial)


def crop_lengths(block_mask: BlockMask, seqlen_q: int, seqlen_kv: int) -> BlockMask:
    """The blocks of the upper left corner, whether or not that is the mask of these lengths. [BLOCK-CROP]

    Only a `CropList` says for which rules it is. Raises RefusedInput for lengths above the mask's own: what is not
    there cannot be cropped. [BLOCK-EXTENT]
    """
    for name, got, have in (
        ("seqlen_q", seqlen_q, block_mask.seqlen_q),
        ("seqlen_kv", seqlen_kv, block_mask.seqlen_kv),
    ):
        if not 0 <= got <= have:
            raise RefusedInput("BLOCK-EXTENT", name, got, f"the block mask was made for {have}")
    rows, columns = -(-seqlen_q // block_mask.q_block_size), -(-seqlen_kv // block_mask.kv_block_size)
    full, partial = (
        _some_columns(_some_rows(lists, block_mask, 0, rows), columns)
        for lists in (block_mask.full, block_mask.partial)
    )
    return replace(block_mask, seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, full=full, partial=partial)


def crop_failures(
    mask_of: MaskOfLength, *, max_seqlen: int, lengths: Iterable[int], q_block_size: int, kv_block_size: int
) -> list[int]:
    """Lengths at which the cropped block mask of max_seqlen is not what a rebuild gives. [BLOCK-ADMIT]

    The decoded masks are compared everywhere, and the lists themselves where the length is a whole number of blocks:
    in a ragged last block a rebuild may know more.

    >>> def last_key(n):
    ...     return np.arange(n)[None, None, :] + np.zeros((1, n, 1)) == n - 1
    >>> crop_failures(last_key, max_seqlen=8, lengths=[2, 4, 6, 8], q_block_size=2, kv_block_size=2)
    [2, 4, 6]
    """
    sizes = {"q_block_size": q_block_size, "kv_block_size": kv_block_size}
    largest = build_block_mask(mask_of(max_seqlen), **sizes)
    failures = []
    for length in lengths:
        wanted = mask_of(length)
        cropped, rebuilt = crop_lengths(largest, length, length), build_block_mask(wanted, **sizes)
        same = np.array_equal(decode_block_mask(cropped, wanted), wanted)
        if length % q_block_size == 0 and length % kv_block_size == 0:
            same = same and same_lists(cropped, rebuilt)
        if not same:
            failures.append(length)
    return failures


@dataclass
class CropList:
    """The rules whose block masks may be cropped: a name enters by comparison with rebuilds alone. [BLOCK-ADMIT]"""

    admitted: dict[str, int] = field(default_factory=dict)  # name -> largest length compared

    def admit(
        self, name: str, mask_of: MaskOfLength, *, max_seqlen: int, q_block_size: int, kv_block_size: int
    ) -> list[int]:
        """Admits a rule if cropping equals a rebuild at every length up to max_seqlen; returns where it does not."""
        failures = crop_failures(
            mask_of,
            max_seqlen=max_seqlen,
            lengths=range(max_seqlen + 1),
            q_block_size=q_block_size,
            kv_block_size=kv_block_size,
        )
        if not failures:
            self.admitted[name] = max_seqlen
        return failures

    def crop(self, name: str, block_mask: BlockMask, seqlen_q: int, seqlen_kv: int) -> BlockMask:
        """The cropped block mask of an admitted rule. [BLOCK-CROP] Raises RefusedInput for any other rule."""
        if name not in self.admitted:
            raise RefusedInput("BLOCK-CROP", "rule", name, "only rules whose crop equals a rebuild may be cropped")
        return crop_lengths(block_mask, seqlen_q, seqlen_kv)


def same_lists(a: BlockMask, b: BlockMask) -> bool:
    """Whether two block masks list the same blocks as full and as partial."""
    pairs = ((a.full, b.full), (a.partial, b.partial))
    return (
        all(np.array_equal(x.indptr, y.indptr) and np.array_equal(x.indices, y.indices) for x, y in pairs)
        and a.shape == b.shape
    )


def _some_rows(lists: BlockLists, block_mask: BlockMask, first: int, last: int) -> BlockLists:
    """Block rows first to last of every head."""
    chosen = np.add.outer(np.arange(block_mask.num_heads) * block_mask.num_q_blocks, np.arange(first, last)).ravel()
    parts = [lists.of(row) for row in chosen.tolist()]
    indptr = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return BlockLists(indptr, np.concatenate([np.empty(0, dtype=np.int64), *parts]))


def _some_columns(lists: BlockLists, num_columns: int) -> BlockLists:
    kept = lists.indices < num_columns
    before = np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)
    return BlockLists(before[lists.indptr], lists.indices[kept])
