"""FlashInfer's batch decode over the same candidates: KV heads become requests of one head each."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from attnconform.conformance.bench.decode_work import DecodeWork
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first

WORKSPACE_BYTES = 512 << 20


@dataclass(frozen=True, eq=False)
class FlashInferDecode:
    """One input set as FlashInfer reads it best: a pool of one-head pages, copied once, outside the timing."""

    wrapper: Any
    work: DecodeWork
    indptr: torch.Tensor
    indices: torch.Tensor  # physical page of each (request, KV head), heads outermost in the pool's view
    last_page_len: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    q: torch.Tensor

    def plan(self) -> None:
        s = self.work.shape
        self.wrapper.plan(
            self.indptr, self.indices, self.last_page_len, s.group_size, 1, s.head_dim, s.block_size,
            q_data_type=self.q.dtype, kv_data_type=self.q.dtype,
        )  # fmt: skip

    def run(self) -> Any:
        return self.wrapper.run(self.q, self.caches, return_lse=True)

    def plan_and_run(self) -> Any:
        self.plan()
        return self.run()


def one_head_pages(work: DecodeWork) -> tuple[torch.Tensor, torch.Tensor]:
    """(num_pages, page_size, heads, dim) as pages of one head, (heads * num_pages, 1, page_size, dim), HND."""
    s = work.shape
    pool = work.k_cache.shape[0] * s.page_size // s.block_size
    k, v = (
        c.view(pool, s.block_size, s.num_kv_heads, s.head_dim)
        .permute(2, 0, 1, 3)
        .reshape(-1, 1, s.block_size, s.head_dim)
        for c in (work.k_cache, work.v_cache)
    )
    return k, v


def decode_of(work: DecodeWork, caches: tuple[torch.Tensor, torch.Tensor]) -> FlashInferDecode:
    """A wrapper with its own workspace, so that plans of several sets stand side by side."""
    import flashinfer

    s = work.shape
    owner = torch.repeat_interleave(torch.arange(s.num_lists, device=work.q.device), work.indptr.diff().long())
    slots = work.slots[:: s.block_size]  # the first of every id
    pool = work.k_cache.shape[0] * s.page_size // s.block_size
    pages = (slots // s.block_size + owner % s.num_kv_heads * pool).int()
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=work.q.device)
    return FlashInferDecode(
        wrapper=flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True),
        work=work,
        indptr=work.indptr,
        indices=pages,
        last_page_len=torch.full((s.num_lists,), s.block_size, device=work.q.device, dtype=torch.int32),
        caches=caches,
        q=work.q.view(s.num_lists, s.group_size, s.head_dim),
    )


def flashinfer_run(sets: list[DecodeWork], machine: Machine) -> PeerRun:
    """Stages of FlashInfer: its plan stands beside our index, its run beside our attention."""
    caches = one_head_pages(sets[0])
    runs = [decode_of(work, caches) for work in sets]
    first = timed_first(runs[0].plan_and_run, machine)
    for run in runs:
        run.plan_and_run()

    def answer() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse_log2 = runs[0].plan_and_run()
        work = runs[0].work
        return out.view(work.q.shape), lse_log2.view(work.q.shape[:2]) * math.log(2)

    return PeerRun(
        name="flashinfer",
        stages={
            "attention": [run.run for run in runs],
            "index": [run.plan for run in runs],
            "from candidates": [run.plan_and_run for run in runs],
        },
        answer=answer,
        workspace_bytes=WORKSPACE_BYTES,
        first_call_seconds=first,
        same_as={"attention of a tier": "attention", "one-off plan": "index"},
    )
