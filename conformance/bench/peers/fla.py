"""flash-linear-attention's NSA: its selection branch over the same blocks."""

import torch

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.nsa_work import NsaWork
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first


def fla_nsa(work: NsaWork, machine: Machine) -> PeerRun:
    """The forward kernel of parallel_nsa, which takes block lists and returns a natural-log lse."""
    from fla.ops.nsa.parallel import parallel_nsa_fwd

    s = work.shape
    shape = (1, s.seqlen, s.num_kv_heads, s.head_dim)
    k, v = work.k.view(shape), work.v.view(shape)
    # a list entry past the row's own block is skipped, as our hole is
    blocks = torch.where(work.blocks >= 0, work.blocks, s.seqlen // s.block_size)[None].long()
    arguments = {
        "q": work.q[None], "k": k, "v": v, "block_indices": blocks, "block_counts": work.blocks.shape[-1],
        "block_size": s.block_size, "scale": s.head_dim**-0.5,
    }  # fmt: skip

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = parallel_nsa_fwd(**arguments)[:2]
        return out, lse

    def answer() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run()
        return out[0], lse[0]

    first = timed_first(run, machine)
    return PeerRun(name="fla parallel_nsa_fwd", stages={"attention": [run]}, answer=answer, first_call_seconds=first)
