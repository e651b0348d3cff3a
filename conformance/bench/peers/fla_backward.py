"""flash-linear-attention's NSA gradients over the same blocks; only its backward is timed.

Once through the autograd function of the selection branch alone, and once through the operation that a user calls,
with the gate of that branch: its backward multiplies by the gate and sums the gate's own gradient too.
"""

import torch

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.nsa_work import NsaWork
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first


def fla_nsa_backward(work: NsaWork, dout: torch.Tensor, machine: Machine) -> PeerRun:
    """Gradients of q, k and v through the library's own autograd function."""
    from fla.ops.nsa.parallel import ParallelNSAFunction

    leaves, blocks = leaves_of(work), blocks_of(work)
    s = work.shape
    out = ParallelNSAFunction.apply(*leaves, blocks, work.blocks.shape[-1], s.block_size, s.head_dim**-0.5, None)
    return gradients_of("fla parallel_nsa_bwd", out, leaves, dout, machine, "dq, dk, dv")


def fla_public_backward(work: NsaWork, dout: torch.Tensor, machine: Machine) -> PeerRun:
    """Gradients of q, k, v and the gate through `parallel_nsa`, the gate being 1 everywhere."""
    from fla.ops.nsa.parallel import parallel_nsa

    leaves, s = leaves_of(work), work.shape
    gate = torch.ones(1, s.seqlen, s.num_qo_heads, dtype=s.dtype, device=work.q.device, requires_grad=True)
    out = parallel_nsa(
        *leaves, g_slc=gate, block_indices=blocks_of(work), block_counts=work.blocks.shape[-1],
        block_size=s.block_size, scale=s.head_dim**-0.5,
    )  # fmt: skip
    return gradients_of("fla parallel_nsa", out, [*leaves, gate], dout, machine, "dq, dk, dv and the gate's")


def leaves_of(work: NsaWork) -> list[torch.Tensor]:
    """q, k and v as the library takes them, (1, tokens, heads, dim)."""
    shape = (1, work.shape.seqlen, work.shape.num_kv_heads, work.shape.head_dim)
    return [x.detach().requires_grad_() for x in (work.q[None], work.k.view(shape), work.v.view(shape))]


def blocks_of(work: NsaWork) -> torch.Tensor:
    """The lists; an entry past the row's own block is skipped, as our hole is."""
    return torch.where(work.blocks >= 0, work.blocks, work.shape.seqlen // work.shape.block_size)[None].long()


def gradients_of(
    name: str, out: torch.Tensor, leaves: list[torch.Tensor], dout: torch.Tensor, machine: Machine, outputs: str
) -> PeerRun:
    """The backward alone, as often as asked."""

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, dout[None], retain_graph=True)

    return PeerRun(
        name=name,
        stages={"backward": [run]},
        answer=lambda: (run()[0][0], None),
        outputs=outputs,
        first_call_seconds=timed_first(run, machine),
    )
