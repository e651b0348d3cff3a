"""FlexAttention's gradients on the same prompts and blocks; only its backward is timed."""

from typing import Any

import torch

from attnconform.conformance.bench.block_sparse_work import BlockSparseWork
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.flex import head_tensors, heads_first, parts_of
from attnconform.conformance.bench.peers.flex_blocks import block_mask_of as chosen_mask_of
from attnconform.conformance.bench.peers.flex_blocks import compiled_once
from attnconform.conformance.bench.peers.flex_blocks import heads_first as chosen_heads_first
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first
from attnconform.conformance.bench.prefill_work import PrefillWork


def flex_backward(
    work: PrefillWork,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    machine: Machine,
) -> PeerRun:
    """Gradients of q, k and v. Raises ValueError without a GPU, where FlexAttention has no backward."""
    if not machine.is_real:
        raise ValueError("FlexAttention has no backward on a CPU")
    compiled, score_mod, mask = parts_of(work, machine)
    leaves = [x.requires_grad_() for x in head_tensors(work, inputs)]
    out = compiled(*leaves, score_mod=score_mod, block_mask=mask, enable_gqa=True)
    return gradients_of(out, leaves, heads_first(work, dout, work.num_qo_heads), machine)


def flex_blocks_backward(work: BlockSparseWork, dout: torch.Tensor, machine: Machine) -> PeerRun:
    """The same over chosen blocks, all of them whole."""
    if not machine.is_real:
        raise ValueError("FlexAttention has no backward on a CPU")
    leaves = [chosen_heads_first(x).requires_grad_() for x in work.inputs]
    out = compiled_once(is_real=True)(*leaves, block_mask=chosen_mask_of(work, is_real=True), enable_gqa=True)
    return gradients_of(out, leaves, chosen_heads_first(dout), machine)


def gradients_of(out: Any, leaves: list[torch.Tensor], upstream: torch.Tensor, machine: Machine) -> PeerRun:
    """The backward alone, as often as asked."""

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, upstream, retain_graph=True)

    def dq() -> torch.Tensor:
        return run()[0].transpose(1, 2).flatten(0, 1)

    return PeerRun(
        name="flex compiled",
        stages={"backward": [run]},
        answer=lambda: (dq(), None),
        outputs="dq, dk, dv",
        first_call_seconds=timed_first(run, machine),
    )
