"""The dense side of a sweep: every key of the same batch, by the fastest of what can be had."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnconform.conformance.bench.block_sparse import OurBlocks
from attnconform.conformance.bench.block_sparse_work import BlockSparseWork
from attnconform.conformance.bench.bundled import PlanRun
from attnconform.conformance.bench.decode_work import DecodeWork, geometry_of
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.sdpa import attend, logical
from attnconform.conformance.bench.timing import Call, measure

POINT_SECONDS = 0.05


def timed(calls: Call | Sequence[Call], machine: Machine) -> float:
    """Median microseconds of the device, in little time."""
    return measure(calls, machine, seconds=POINT_SECONDS, host_events=5).timing.median


def dense_time(work: DecodeWork, seqlen_q: int, machine: Machine) -> float:
    """Of a decode batch: the same kernels over pages, or torch's over keys that lie in order."""
    k, v = logical(work, work.k_cache), logical(work, work.v_cache)
    if seqlen_q == 1:
        return min(timed(PlanRun.dense(work), machine), timed(lambda: attend(work, k, v), machine))
    s = work.shape
    q = torch.randn(s.batch, s.num_qo_heads, seqlen_q, s.head_dim, dtype=s.dtype, device=work.q.device)
    by_head = (s.batch, s.num_kv_heads, s.seqlen_kv, s.head_dim)
    ours = timed(rows_call(work, seqlen_q, is_sparse=False), machine)
    return fastest(ours, torch_rows(q, k.view(by_head), v.view(by_head)), machine)


def dense_chunk_time(work: BlockSparseWork, machine: Machine) -> float:
    """Of a chunk of a prompt: the same kernels, or torch's."""
    q, k, v = (x.reshape(-1, *x.shape[-2:]).transpose(0, 1).contiguous()[None] for x in work.inputs)
    return fastest(timed(OurBlocks(work.dense()).run, machine), torch_rows(q, k, v), machine)


def fastest(ours: float, theirs: Call, machine: Machine) -> float:
    """The lesser of two times, where torch has a kernel for this device and these heads."""
    try:
        return min(ours, timed(theirs, machine))
    except RuntimeError:
        return ours


def torch_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Rows that end where the keys end, each seeing what is not after it."""
    from torch.nn.attention.bias import causal_lower_right  # imports triton, which must hear of the interpreter first

    mask = causal_lower_right(q.shape[2], k.shape[2])
    return lambda: scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def rows_call(work: DecodeWork, seqlen_q: int, *, is_sparse: bool) -> Any:
    """A planned run of seqlen_q rows a request: each row has a list of its own, and sees no key after it."""
    from attnconform.kernels import sparse_attention
    from attnconform.kernels.sparse_attention import rules

    s, device = work.shape, work.q.device
    ids, count = s.seqlen_kv // s.block_size, s.candidates // s.block_size
    lists = s.batch * seqlen_q * s.num_kv_heads
    candidates = None
    if is_sparse:
        chosen = torch.rand(lists, ids, device=device).topk(count, dim=-1).indices.int()
        candidates = sparse_attention.CandidateLists(
            granularity=s.granularity,
            block_size=s.block_size,
            sharing="kv_head",
            indptr=torch.arange(0, chosen.numel() + 1, count, device=device, dtype=torch.int32),
            indices=chosen.reshape(-1),
        )
    plan = sparse_attention.plan(
        qo_indptr=torch.arange(s.batch + 1, device=device) * seqlen_q,
        seqlen_kv=torch.full((s.batch,), s.seqlen_kv, device=device),
        page_table=work.page_table,
        mask_rule=rules.Causal(),
        candidates=candidates,
        **geometry_of(work),
    )
    q = torch.randn(s.batch * seqlen_q, s.num_qo_heads, s.head_dim, dtype=s.dtype, device=device)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    return lambda: sparse_attention.run(plan, q, work.k_cache, work.v_cache, out=out, lse=lse)
