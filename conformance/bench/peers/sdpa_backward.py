"""scaled_dot_product_attention's gradients of causal prompts; only its backward is timed."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.flex import heads_first
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first
from attnconform.conformance.bench.peers.sdpa_prefill import prefill_tensors
from attnconform.conformance.bench.prefill_work import PrefillWork


def sdpa_backward(
    work: PrefillWork,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    dout: torch.Tensor,
    machine: Machine,
) -> PeerRun:
    """Gradients of q, k and v."""
    if work.window is not None or work.documents or work.alibi or work.soft_cap:
        raise ValueError(f"sdpa has no rule but causal, and this is {work.name}")
    leaves = [x.requires_grad_() for x in prefill_tensors(work, inputs)]
    q, k, v = leaves
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    upstream = heads_first(work, dout, work.num_qo_heads)

    def run() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, leaves, upstream, retain_graph=True)

    return PeerRun(
        name="sdpa",
        stages={"backward": [run]},
        answer=lambda: (run()[0].transpose(1, 2).reshape(inputs[0].shape), None),
        outputs="dq, dk, dv",
        first_call_seconds=timed_first(run, machine),
    )
