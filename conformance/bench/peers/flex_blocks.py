"""FlexAttention over chosen blocks of a long prompt, all of them whole."""

from functools import lru_cache, partial
from typing import Any

import torch

from attnconform.conformance.bench.block_sparse_work import BlockSparseWork
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first


@lru_cache(maxsize=1)
def compiled_once(*, is_real: bool) -> Any:
    """One function for all blocks of a work: a new one would be compiled anew."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if is_real else flex_attention


def block_mask_of(work: BlockSparseWork, *, is_real: bool) -> Any:
    """Eager FlexAttention reads no block lists, so that it needs them as a function."""
    from torch.nn.attention.flex_attention import BlockMask

    counts = work.counts.int()[None, None]
    order = (~work.chosen).int().argsort(dim=-1, stable=True).int()[None, None]
    if is_real:
        return BlockMask.from_kv_blocks(
            torch.zeros_like(counts), torch.zeros_like(order), counts, order, BLOCK_SIZE=work.shape.block_size
        )
    size = work.shape.block_size

    def keeps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return work.chosen[q_idx // size, kv_idx // size]

    return BlockMask.from_kv_blocks(counts, order, mask_mod=keeps, BLOCK_SIZE=size)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """(tokens, heads, dim), in pages or not, as (1, heads, tokens, dim), made contiguous outside the timing."""
    return x.reshape(-1, *x.shape[-2:]).transpose(0, 1).contiguous()[None]


def flex_blocks(works: list[BlockSparseWork], machine: Machine) -> PeerRun:
    """Forward with lse; making the block mask stands beside our plan."""
    shape = works[0].shape
    if shape.is_causal or shape.rows is not None:
        raise ValueError(f"this peer takes whole blocks of a whole prompt, and this is {shape.name}")
    attend = compiled_once(is_real=machine.is_real)
    tensors = [[heads_first(x) for x in work.inputs] for work in works]
    masks = [block_mask_of(work, is_real=machine.is_real) for work in works]

    def run(n: int) -> Any:
        return attend(*tensors[n], block_mask=masks[n], enable_gqa=True, return_lse=True)

    def answer() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run(0)
        return out[0].transpose(0, 1), lse[0].transpose(0, 1)

    return PeerRun(
        name=f"flex {'compiled' if machine.is_real else 'eager'}",
        stages={
            "attention": [partial(run, n) for n in range(len(works))],
            "plan": [partial(block_mask_of, works[0], is_real=machine.is_real)],
        },
        answer=answer,
        first_call_seconds=timed_first(partial(run, 0), machine),
    )
