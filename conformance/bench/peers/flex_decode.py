"""FlexAttention on a decode batch: one query row a request, and a block mask made of the lists."""

from functools import lru_cache, partial
from typing import Any

import torch

from attnconform.conformance.bench.decode_work import DecodeWork
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first

Q_BLOCK = 128


@lru_cache(maxsize=1)
def compiled_once(*, is_real: bool) -> Any:
    """One function for all blocks of a work: a new one would be compiled anew."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if is_real else flex_attention


def listed_blocks(work: DecodeWork) -> tuple[torch.Tensor, torch.Tensor]:
    """Listed blocks of every query head, first in a row as wide as the cache: counts, and block ids."""
    s = work.shape
    counts = work.indptr.diff().view(s.batch, s.num_kv_heads, 1)
    member = torch.zeros(s.num_lists, s.seqlen_kv // s.block_size, dtype=torch.bool, device=work.q.device)
    owner = torch.repeat_interleave(torch.arange(s.num_lists, device=work.q.device), work.indptr.diff().long())
    member[owner, work.indices.long()] = True
    order = (~member).int().argsort(dim=-1, stable=True).int().view(s.batch, s.num_kv_heads, 1, -1)
    counts, order = (x.repeat_interleave(s.group_size, dim=1) for x in (counts.int(), order))
    return counts, order


def block_mask_of(work: DecodeWork, *, is_real: bool) -> Any:
    """Every listed block is whole. Eager FlexAttention reads no block lists, so that it needs them as a function."""
    from torch.nn.attention.flex_attention import BlockMask

    s = work.shape
    counts, order = listed_blocks(work)
    sizes: dict[str, Any] = {"BLOCK_SIZE": (Q_BLOCK, s.block_size), "seq_lengths": (1, s.seqlen_kv)}
    if is_real:
        none = torch.zeros_like(counts)
        return BlockMask.from_kv_blocks(none, torch.zeros_like(order), counts, order, **sizes)
    rank = order.argsort(-1)[:, :, 0]  # of every block among the listed ones
    member = rank < counts

    def keeps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return member[b, h, kv_idx // s.block_size]

    return BlockMask.from_kv_blocks(counts, order, mask_mod=keeps, **sizes)


def contiguous_cache(work: DecodeWork, cache: torch.Tensor) -> torch.Tensor:
    """Every key in logical order, (batch, num_kv_heads, seqlen_kv, head_dim): FlexAttention reads no page table."""
    s = work.shape
    by_page = cache[work.page_table.long()].reshape(s.batch, s.seqlen_kv, s.num_kv_heads, s.head_dim)
    return by_page.transpose(1, 2).contiguous()


def flex_decode(sets: list[DecodeWork], machine: Machine) -> PeerRun:
    """Forward with lse over contiguous keys; making the block mask stands beside our index."""
    k, v = (contiguous_cache(sets[0], cache) for cache in (sets[0].k_cache, sets[0].v_cache))
    attend = compiled_once(is_real=machine.is_real)
    masks = [block_mask_of(work, is_real=machine.is_real) for work in sets]

    def run(n: int) -> Any:
        q = sets[n].q[:, :, None]
        return attend(q, k, v, block_mask=masks[n], enable_gqa=True, return_lse=True)

    def answer() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run(0)
        return out[:, :, 0], lse[:, :, 0]

    return PeerRun(
        name=f"flex {'compiled' if machine.is_real else 'eager'}",
        stages={
            "attention": [partial(run, n) for n in range(len(sets))],
            "index": [partial(block_mask_of, work, is_real=machine.is_real) for work in sets],
        },
        answer=answer,
        first_call_seconds=timed_first(partial(run, 0), machine),
        same_as={"attention of a tier": "attention"},
    )
