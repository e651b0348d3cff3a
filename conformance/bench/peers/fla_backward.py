"""flash-linear-attention's NSA gradients over the same blocks; only its backward is timed."""

import torch

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.nsa_work import NsaWork
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first


def fla_nsa_backward(work: NsaWork, dout: torch.Tensor, machine: Machine) -> PeerRun:
    """Gradients of q, k and v through the library's own autograd function."""
    from fla.ops.nsa.parallel import ParallelNSAFunction

    s = work.shape
    shape = (1, s.seqlen, s.num_kv_heads, s.head_dim)
    leaves = [x.detach().requires_grad_() for x in (work.q[None], work.k.view(shape), work.v.view(shape))]
    # a list entry past the row's own block is skipped, as our hole is
    blocks = torch.where(work.blocks >= 0, work.blocks, s.seqlen // s.block_size)[None].long()
    out = ParallelNSAFunction.apply(*leaves, blocks, work.blocks.shape[-1], s.block_size, s.head_dim**-0.5, None)

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout[None], retain_graph=True)

    return PeerRun(
        name="fla parallel_nsa_bwd",
        stages={"backward": [run]},
        answer=lambda: (run()[0][0], None),
        outputs="dq, dk, dv",
        first_call_seconds=timed_first(run, machine),
    )
