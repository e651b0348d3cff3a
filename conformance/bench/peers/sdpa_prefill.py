"""torch's scaled_dot_product_attention on whole prompts: causal, or under an explicit dense mask."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.flex import heads_first
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first
from attnconform.conformance.bench.prefill_work import PrefillWork


def prefill_tensors(
    work: PrefillWork, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads = (work.num_qo_heads, work.num_kv_heads, work.num_kv_heads)
    q, k, v = (heads_first(work, x, n) for x, n in zip(inputs, heads, strict=True))
    return q, k, v


def dense_mask(work: PrefillWork, device: str) -> torch.Tensor:
    """(seqlen, seqlen), True where a row may look."""
    idx = torch.arange(work.seqlen, device=device)
    kept: torch.Tensor = work.keeps(None, None, idx[:, None], idx[None, :])
    return kept


def sdpa_prefill(
    work: PrefillWork, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], machine: Machine
) -> PeerRun:
    """Dense causal attention; nothing else can be said to it without a mask."""
    if work.window is not None or work.documents or work.alibi or work.soft_cap:
        raise ValueError(f"sdpa has no rule but causal, and this is {work.name}: use dense-mask")
    q, k, v = prefill_tensors(work, inputs)

    def run() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return PeerRun(
        name="sdpa",
        stages={"attention": [run]},
        answer=lambda: (run().transpose(1, 2).reshape(inputs[0].shape), None),
        outputs="out",
        first_call_seconds=timed_first(run, machine),
    )


def dense_mask_prefill(
    work: PrefillWork, inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor], machine: Machine
) -> PeerRun:
    """Dense attention under a mask of every pair; building it stands beside our plan."""
    if work.alibi or work.soft_cap:
        raise ValueError(f"a boolean mask changes no score, and this is {work.name}: use flex")
    q, k, v = prefill_tensors(work, inputs)
    group = work.num_qo_heads // work.num_kv_heads
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))  # masked kernels know no groups
    mask = dense_mask(work, machine.device)

    def run() -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return PeerRun(
        name="sdpa under a dense mask",
        stages={"attention": [run], "plan": [lambda: dense_mask(work, machine.device)]},
        answer=lambda: (run().transpose(1, 2).reshape(inputs[0].shape), None),
        outputs="out",
        workspace_bytes=mask.nbytes,
        first_call_seconds=timed_first(run, machine),
    )
