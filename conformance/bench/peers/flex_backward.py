"""FlexAttention's gradients on the same prompts; only its backward is timed."""

import torch

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.flex import block_mask_of, flex_callable, heads_first, score_mod_of
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
    mask, compiled, score_mod = block_mask_of(work, machine), flex_callable(machine), score_mod_of(work, machine.device)
    heads = (work.num_qo_heads, work.num_kv_heads, work.num_kv_heads)
    leaves = [heads_first(work, x, n).requires_grad_() for x, n in zip(inputs, heads, strict=True)]
    out = compiled(*leaves, score_mod=score_mod, block_mask=mask, enable_gqa=True)
    upstream = heads_first(work, dout, work.num_qo_heads)

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, upstream, retain_graph=True)

    return PeerRun(
        name="flex compiled",
        stages={"backward": [run]},
        answer=lambda: (run()[0].transpose(1, 2).reshape(inputs[0].shape), None),
        outputs="dq, dk, dv",
        first_call_seconds=timed_first(run, machine),
    )
