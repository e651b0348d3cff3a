"""A dense attention in float64 that torch differentiates: what sparse gradients are held to."""

import os
from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from attnconform.conformance.adapters.quickened_interpreter import quicken

if not torch.cuda.is_available():
    quicken()

Scores = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def attend_densely(
    q: torch.Tensor,  # (seqlen_q, num_qo_heads, head_dim), the last rows of one request
    k_cache: torch.Tensor,  # (num_pages, page_size, num_kv_heads, head_dim)
    v_cache: torch.Tensor,
    page_row: torch.Tensor,  # (pages,) of the request
    admitted: torch.Tensor,  # (num_qo_heads, seqlen_q, seqlen_kv)
    *,
    score: Scores | None = None,  # (scores, distance) to scores, both (num_qo_heads, seqlen_q, seqlen_kv)
    sink_logits: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse in float64, for rows that all have a key or a sink."""
    seqlen_q, heads, head_dim = q.shape
    seqlen_kv = admitted.shape[2]
    group = heads // k_cache.shape[2]
    k, v = (cache[page_row.long()].flatten(0, 1)[:seqlen_kv].double() for cache in (k_cache, v_cache))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * head_dim**-0.5
    q_idx = torch.arange(seqlen_kv - seqlen_q, seqlen_kv, device=q.device)
    distance = (torch.arange(seqlen_kv, device=q.device) - q_idx[:, None]).expand_as(scores)
    scores = scores if score is None else score(scores, distance)
    scores = scores.masked_fill(~admitted, float("-inf"))
    terms = scores
    if sink_logits is not None:
        sinks = sink_logits.double()[:, None, None].expand(heads, seqlen_q, 1)
        terms = torch.cat([scores, sinks], dim=2)
    lse = torch.logsumexp(terms, dim=2)
    out = torch.einsum("hqk,khd->qhd", torch.exp(scores - lse[..., None]), v)
    return out, lse.T


@pytest.fixture(scope="session")
def dense() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return attend_densely
