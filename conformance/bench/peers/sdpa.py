"""torch's scaled_dot_product_attention: over gathered keys, over every key under a mask, or causal."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnconform.conformance.bench.decode_work import DecodeWork
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first
from attnconform.conformance.bench.timing import Call


def gathered(work: DecodeWork, cache: torch.Tensor) -> torch.Tensor:
    """Keys or values of every list, copied together: (lists, 1, candidates, head_dim)."""
    s = work.shape
    _, owner = work.positions
    by_slot = cache.view(-1, s.num_kv_heads, s.head_dim)
    return by_slot[work.slots, owner % s.num_kv_heads].view(s.num_lists, 1, -1, s.head_dim)


def logical(work: DecodeWork, cache: torch.Tensor) -> torch.Tensor:
    """Every key in logical order, (lists, 1, seqlen_kv, head_dim)."""
    s = work.shape
    by_page = cache[work.page_table.long()].reshape(s.batch, s.seqlen_kv, s.num_kv_heads, s.head_dim)
    return by_page.transpose(1, 2).reshape(s.num_lists, 1, s.seqlen_kv, s.head_dim).contiguous()


def attend(work: DecodeWork, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """A group's query heads are the rows of one list, so that no key is repeated."""
    s = work.shape
    q = work.q.view(s.num_lists, 1, s.group_size, s.head_dim)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1 / math.sqrt(s.head_dim)).view(work.q.shape)


def sdpa_decode(sets: list[DecodeWork], machine: Machine) -> PeerRun:
    """Dense attention over candidates that were copied together; the copy is the index stage."""
    if len({int(n) for work in sets for n in work.list_lengths}) > 1:
        raise ValueError("sdpa reads lists of one length, and these are ragged: use dense-mask")
    copies = [(gathered(work, work.k_cache), gathered(work, work.v_cache)) for work in sets]

    def run(n: int) -> Call:
        return lambda: attend(sets[n], *copies[n])

    def copy(n: int) -> Call:
        return lambda: (gathered(sets[n], sets[n].k_cache), gathered(sets[n], sets[n].v_cache))

    def both(n: int) -> Call:
        return lambda: attend(sets[n], gathered(sets[n], sets[n].k_cache), gathered(sets[n], sets[n].v_cache))

    indices = range(len(sets))
    return PeerRun(
        name="sdpa over gathered keys",
        stages={
            "attention": [run(n) for n in indices],
            "index": [copy(n) for n in indices],
            "from candidates": [both(n) for n in indices],
        },
        answer=lambda: (attend(sets[0], *copies[0]), None),
        outputs="out",
        workspace_bytes=sum(k.nbytes + v.nbytes for k, v in copies[:1]),
        first_call_seconds=timed_first(run(0), machine),
        same_as={"attention of a tier": "attention"},
    )


def dense_mask_decode(sets: list[DecodeWork], machine: Machine) -> PeerRun:
    """Every key of the cache under an explicit boolean mask; building the mask is the index stage."""
    k, v = logical(sets[0], sets[0].k_cache), logical(sets[0], sets[0].v_cache)

    def build(work: DecodeWork) -> torch.Tensor:
        tokens, owner = work.positions
        mask = torch.zeros(work.shape.num_lists, work.shape.seqlen_kv, dtype=torch.bool, device=tokens.device)
        mask[owner, tokens] = True
        return mask[:, None, None, :].expand(-1, 1, work.shape.group_size, -1)

    masks = [build(work) for work in sets]

    def stage(call: Callable[[int], object]) -> list[Call]:
        return [partial(call, n) for n in range(len(sets))]

    return PeerRun(
        name="sdpa under a dense mask",
        stages={
            "attention": stage(lambda n: attend(sets[n], k, v, masks[n])),
            "index": stage(lambda n: build(sets[n])),
            "from candidates": stage(lambda n: attend(sets[n], k, v, build(sets[n]))),
        },
        answer=lambda: (attend(sets[0], k, v, masks[0]), None),
        outputs="out",
        workspace_bytes=masks[0].nbytes // sets[0].shape.group_size,
        first_call_seconds=timed_first(lambda: attend(sets[0], k, v, masks[0]), machine),
        same_as={"attention of a tier": "attention"},
    )
