"""Is a timed answer the right one? Against float32, and with NaN in every slot that no list names.

A fast time may come from keys that were skipped, and a right answer from a dense pass; speed says neither.
"""

import math
from collections.abc import Callable

import torch

from attnconform.conformance.bench.decode_work import DecodeWork

ERROR_BOUND = 1e-2  # |out - want| / |want|: bf16 operands give 1e-3 to 5e-3, one key of 2,000 skipped gives 2e-2


def reference_output(work: DecodeWork) -> torch.Tensor:
    """Attention of every row over its lists in float32, (batch, num_qo_heads, head_dim)."""
    s = work.shape
    out = torch.empty(work.q.shape, dtype=torch.float32, device=work.q.device)
    k, v = (c.view(-1, s.num_kv_heads, s.head_dim) for c in (work.k_cache, work.v_cache))
    ends = torch.as_tensor(work.list_lengths).cumsum(0).tolist()
    for number, end in enumerate(ends):
        slots = work.slots[end - int(work.list_lengths[number]) : end]
        request, head = divmod(number, s.num_kv_heads)
        heads = slice(head * s.group_size, (head + 1) * s.group_size)
        scores = work.q[request, heads].float() @ k[slots, head].float().T / math.sqrt(s.head_dim)
        out[request, heads] = scores.softmax(-1) @ v[slots, head].float()
    return out


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    """|out - want| / |want|; NaN where out has a NaN."""
    return float((out.float() - want).norm() / want.norm())


def output_error(call: Callable[[], torch.Tensor], work: DecodeWork) -> float:
    """How far one call's output is from the reference."""
    return relative_error(call(), reference_output(work))


def poison(work: DecodeWork) -> None:
    """NaN in every slot of every KV head that none of its lists names; the cache is of no use to other sets then."""
    s = work.shape
    listed = torch.zeros(work.k_cache.shape[0] * s.page_size, s.num_kv_heads, dtype=torch.bool, device=work.q.device)
    _, owner = work.positions
    listed[work.slots, owner % s.num_kv_heads] = True
    for cache in (work.k_cache, work.v_cache):
        flat = cache.view(-1, s.num_kv_heads, s.head_dim)
        flat.masked_fill_(~listed[..., None], float("nan"))


def poisoned_error(call: Callable[[], torch.Tensor], work: DecodeWork) -> float:
    """The error again where whatever reads an unlisted key gets NaN."""
    want = reference_output(work)
    poison(work)
    return relative_error(call(), want)
