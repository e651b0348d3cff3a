"""torch's scaled_dot_product_attention on whole prompts: causal, by any kernel or by cuDNN's; or under a dense mask."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.flex import head_tensors
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first
from attnconform.conformance.bench.prefill_work import Inputs, PrefillWork

Chosen = Callable[[], AbstractContextManager[None]]  # which of torch's kernels may run


def prefill_tensors(work: PrefillWork, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = head_tensors(work, inputs)
    return q, k, v


def dense_mask(work: PrefillWork, device: str) -> torch.Tensor:
    """(seqlen, seqlen), True where a row may look."""
    idx = torch.arange(work.seqlen, device=device)
    kept: torch.Tensor = work.keeps(None, None, idx[:, None], idx[None, :])
    return kept


def check_causal(work: PrefillWork, peer: str) -> None:
    """Raises ValueError where more has to be said than that a prompt is causal."""
    if work.window is not None or work.documents or work.alibi or work.soft_cap:
        raise ValueError(f"{peer} has no rule but causal, and this is {work.name}: use dense-mask")


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sdpa_prefill(work: PrefillWork, sets: list[Inputs], machine: Machine) -> PeerRun:
    """Dense causal attention; nothing else can be said to it without a mask."""
    check_causal(work, "sdpa")
    return causal_run("sdpa", work, sets, machine, nullcontext)


def cudnn_prefill(work: PrefillWork, sets: list[Inputs], machine: Machine) -> PeerRun:
    """The same by cuDNN's kernel and no other: where it does not take this, torch raises."""
    check_causal(work, "cudnn")
    return causal_run("sdpa, cuDNN", work, sets, machine, lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION))


def causal_run(
    name: str,
    work: PrefillWork,
    sets: list[Inputs],
    machine: Machine,
    chosen: Callable[[], AbstractContextManager[None]],
) -> PeerRun:
    tensors = [prefill_tensors(work, inputs) for inputs in sets]

    def run(n: int) -> torch.Tensor:
        with chosen():
            return causal(*tensors[n])

    return PeerRun(
        name=name,
        stages={"attention": [partial(run, n) for n in range(len(sets))]},
        answer=lambda: (run(0).transpose(1, 2).reshape(sets[0][0].shape), None),
        outputs="out",
        first_call_seconds=timed_first(partial(run, 0), machine),
    )


def dense_mask_prefill(work: PrefillWork, sets: list[Inputs], machine: Machine) -> PeerRun:
    """Dense attention under a mask of every pair; building it stands beside our plan."""
    if work.alibi or work.soft_cap:
        raise ValueError(f"a boolean mask changes no score, and this is {work.name}: use flex")
    mask = dense_mask(work, machine.device)
    tensors = [under_mask(work, inputs) for inputs in sets]

    def run(n: int) -> torch.Tensor:
        return scaled_dot_product_attention(*tensors[n], attn_mask=mask)

    return PeerRun(
        name="sdpa under a dense mask",
        stages={
            "attention": [partial(run, n) for n in range(len(sets))],
            "plan": [partial(dense_mask, work, machine.device)],
        },
        answer=lambda: (run(0).transpose(1, 2).reshape(sets[0][0].shape), None),
        outputs="out",
        workspace_bytes=mask.nbytes,
        first_call_seconds=timed_first(partial(run, 0), machine),
    )


def under_mask(work: PrefillWork, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values repeated for every query head: masked kernels know no groups."""
    q, k, v = prefill_tensors(work, inputs)
    group = work.num_qo_heads // work.num_kv_heads
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
