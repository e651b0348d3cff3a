"""Which positions a query row lists: dynamic entries D, a local window W, sink positions A.

Lists come as CSR (indptr and indices) or at fixed width, with holes; at token or block granularity; one per
query head, per KV head or shared by all heads; one per query row or per block of query rows.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.errors import RefusedInput

Granularity = Literal["token", "block"]
Sharing = Literal["query_head", "kv_head", "shared"]
Form = Literal["set", "sequence", "multiset"]
HOLE = -1


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Dynamic lists of a batch, with the window and the sink positions that join every list.

    Lists are row-major over (request, block of query rows, head): request n has ceil(seqlen_q / q_block_size)
    blocks, and there are num_qo_heads, num_kv_heads or 1 lists per block.
    """

    indptr: IntArray  # (num_lists + 1,) where each list starts in `indices`; the end is exclusive
    indices: IntArray  # (total,) token positions or block ids of the request; HOLE anywhere
    granularity: Granularity = "token"
    block_size: int = 1  # tokens per listed block; 1 at token granularity
    sharing: Sharing = "query_head"
    q_block_size: int = 1  # query rows that share a list
    window: int = 0  # W: positions j with 0 <= q_idx - j < window
    num_sink_tokens: int = 0  # A: the first positions of the request
    form: Form = "set"
    rank_bias: FloatArray | None = None  # (max_rank,) of a sequence: what entry number r adds to its key's score

    @property
    def num_lists(self) -> int:
        return len(self.indptr) - 1

    def entries(self, list_idx: int) -> IntArray:
        """One list as given: holes, duplicates and order kept."""
        return self.indices[self.indptr[list_idx] : self.indptr[list_idx + 1]]


def expand_entries(
    entries: IntArray,  # (n,) token positions or block ids, holes removed
    *,
    block_size: int,
    seqlen_kv: int,
) -> IntArray:
    """Every token position the entries admit; a block admits its tokens below seqlen_kv. [BLOCK-EXPAND]"""
    tokens = (entries[:, None] * block_size + np.arange(block_size)).ravel()
    return tokens[tokens < seqlen_kv]


def window_positions(q_idx: int, *, window: int, seqlen_kv: int) -> IntArray:
    """W: the last `window` positions up to and including the query's own. [SET-UNION]"""
    return np.arange(max(0, q_idx - window + 1), max(0, min(q_idx + 1, seqlen_kv)), dtype=np.int64)


def sink_positions(*, num_sink_tokens: int, seqlen_kv: int) -> IntArray:
    """A: the first positions of the request. [SET-UNION]"""
    return np.arange(min(num_sink_tokens, seqlen_kv), dtype=np.int64)


def candidate_set(
    entries: IntArray,  # (n,) one list as given
    *,
    q_idx: int,
    seqlen_kv: int,
    block_size: int,
    window: int,
    num_sink_tokens: int,
) -> Positions:
    """S = unique(D ∪ W ∪ A), ascending. [SET-IDENTITY, SET-DUPLICATE, SET-ORDER, SET-HOLE, SET-UNION]

    >>> candidate_set(np.array([5, -1, 2, 5]), q_idx=7, seqlen_kv=8, block_size=1, window=2, num_sink_tokens=1).values
    array([0, 2, 5, 6, 7])
    """
    dynamic = expand_entries(entries[entries != HOLE], block_size=block_size, seqlen_kv=seqlen_kv)
    local = window_positions(q_idx, window=window, seqlen_kv=seqlen_kv)
    sinks = sink_positions(num_sink_tokens=num_sink_tokens, seqlen_kv=seqlen_kv)
    return Positions(np.unique(np.concatenate([dynamic, local, sinks])))


def check_entries(entries: IntArray, *, list_idx: int, start: int, block_size: int, seqlen_kv: int) -> None:
    """Refuses an id that is neither a hole nor inside the request. [SET-RANGE]"""
    # ids are compared as ids: an id times block_size may not fit 64 bits
    num_ids = -(-seqlen_kv // block_size)
    outside = np.flatnonzero(((entries < 0) & (entries != HOLE)) | (entries >= num_ids))
    if outside.size:
        at = int(outside[0])
        limit = f"list {list_idx} belongs to a request with seqlen_kv {seqlen_kv} and blocks of {block_size}"
        raise RefusedInput("SET-RANGE", "indices", int(entries[at]), limit, (start + at,))


def rank_bias_of(
    entries: IntArray,  # (n,) one list as given; holes keep their rank
    positions: IntArray,  # (m,) logical
    rank_bias: FloatArray,
) -> FloatArray:
    """What each position's place in its list adds to its score; 0 for a position that is not listed. [SET-SEQUENCE]

    >>> rank_bias_of(np.array([5, -1, 2]), np.array([2, 5, 7]), np.array([0.5, 0.25, 0.125]))
    array([0.125, 0.5  , 0.   ])
    """
    bias = np.zeros(len(positions))
    for rank, entry in enumerate(entries.tolist()):
        if entry != HOLE:
            bias[positions == entry] = rank_bias[rank]
    return bias


def check_sequence(candidates: Candidates) -> None:
    """Refuses a sequence whose entries have no rank of their own, or one rank twice. [SET-SEQUENCE]"""
    if candidates.rank_bias is None:
        raise RefusedInput("SET-SEQUENCE", "rank_bias", None, "a sequence has a bias for each rank")
    for name, value, want in (
        ("granularity", candidates.granularity, "token"),
        ("window", candidates.window, 0),
        ("num_sink_tokens", candidates.num_sink_tokens, 0),
    ):
        if value != want:
            raise RefusedInput("SET-SEQUENCE", name, value, f"must be {want}: what a list does not name has no rank")
    bad = np.flatnonzero(~np.isfinite(candidates.rank_bias))
    if bad.size:
        r = int(bad[0])
        raise RefusedInput("SAFE-FINITE", "rank_bias", float(candidates.rank_bias[r]), "must be finite", (r,))
    for i in range(candidates.num_lists):
        _check_ranks(candidates, i)


def _check_ranks(candidates: Candidates, list_idx: int) -> None:
    assert candidates.rank_bias is not None
    entries, start = candidates.entries(list_idx), int(candidates.indptr[list_idx])
    if len(entries) > len(candidates.rank_bias):
        limit = f"list {list_idx} has no more ranks than rank_bias, {len(candidates.rank_bias)}"
        raise RefusedInput("SET-SEQUENCE", "len(entries)", len(entries), limit)
    seen: set[int] = set()
    for at, entry in enumerate(entries.tolist()):
        if entry != HOLE and entry in seen:
            raise RefusedInput("SET-SEQUENCE", "indices", entry, "a key has one rank", (start + at,))
        seen.add(entry)
