"""One reference selector: scores of an id's summary against the group's query, then top-k.

It stands for the router of any model, so that an end-to-end time has one: summaries are written with the cache and are
not part of a step. A page's summary is the mean of its keys; a token's is its first dimensions, as an indexer keeps.
"""

from dataclasses import dataclass

import torch

from attnconform.conformance.bench.decode_work import DecodeWork

INDEX_DIM = 32  # dimensions of a token's summary


@dataclass(frozen=True, eq=False)
class Selector:
    """Route and top-k of a batch, as calls on the device."""

    summaries: torch.Tensor  # (batch, num_kv_heads, ids, dim)
    count: int  # ids a list
    num_kv_heads: int

    @classmethod
    def of(cls, work: DecodeWork, count: int) -> "Selector":
        """Summaries of every id, made outside any timing."""
        s = work.shape
        if s.granularity == "block":
            means = work.k_cache.float().mean(1).to(s.dtype)  # (num_pages, num_kv_heads, head_dim)
            return cls(means[work.page_table.long()].transpose(1, 2).contiguous(), count, s.num_kv_heads)
        dim = min(INDEX_DIM, s.head_dim)
        short = work.k_cache[..., :dim]
        by_page = short[work.page_table.long()]  # (batch, pages, page_size, num_kv_heads, dim)
        by_token = by_page.reshape(s.batch, s.seqlen_kv, s.num_kv_heads, dim).transpose(1, 2)
        return cls(by_token.contiguous(), count, s.num_kv_heads)

    def route(self, q: torch.Tensor) -> torch.Tensor:
        """Scores of every id, (batch, num_kv_heads, ids)."""
        dim = self.summaries.shape[-1]
        group = q[..., :dim].view(q.shape[0], self.num_kv_heads, -1, dim).sum(2)
        return (self.summaries @ group[..., None])[..., 0]

    def topk(self, scores: torch.Tensor) -> torch.Tensor:
        """The best ids of every list, in no order, (batch, num_kv_heads, count) int32."""
        return scores.topk(self.count, dim=-1, sorted=False).indices.int()
