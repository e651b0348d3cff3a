"""FlexAttention on the same prompts, eager without a GPU; its block mask stands beside our plan."""

from functools import partial
from typing import Any

import torch

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.peer import PeerRun, timed_first
from attnconform.conformance.bench.prefill_work import Inputs, PrefillWork

BLOCK = 128


def heads_first(work: PrefillWork, x: torch.Tensor, heads: int) -> torch.Tensor:
    """(tokens, heads, dim), paged or not, as (batch, heads, seqlen, dim), made contiguous outside the timing."""
    return x.reshape(work.batch, work.seqlen, heads, work.head_dim).transpose(1, 2).contiguous()


def head_tensors(work: PrefillWork, inputs: Inputs) -> list[torch.Tensor]:
    """q, k and v with heads first."""
    heads = (work.num_qo_heads, work.num_kv_heads, work.num_kv_heads)
    return [heads_first(work, x, n) for x, n in zip(inputs, heads, strict=True)]


def score_mod_of(work: PrefillWork, device: str) -> Any:
    """The score rules of a work as FlexAttention asks for them; None where there are none."""
    if not work.alibi and work.soft_cap is None:
        return None
    table, cap = torch.tensor(work.slopes(), device=device), work.soft_cap

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if work.alibi:
            s = s + table[h] * (kv_idx - q_idx)
        return s if cap is None else cap * torch.tanh(s / cap)

    return score


def flex_callable(machine: Machine) -> Any:
    """FlexAttention as it is fastest here."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if machine.is_real else flex_attention


def block_mask_of(work: PrefillWork, machine: Machine) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def keeps(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:  # a plain function: its parameters are counted
        return work.keeps(b, h, q_idx, kv_idx)

    return create_block_mask(keeps, None, None, work.seqlen, work.seqlen, device=machine.device, BLOCK_SIZE=BLOCK)


Parts = tuple[Any, Any, Any]  # function, score rule, block mask
_parts: dict[PrefillWork, Parts] = {}


def parts_of(work: PrefillWork, machine: Machine) -> Parts:
    """Made once for all blocks of a work: a new function or rule would be compiled anew."""
    if work not in _parts:
        _parts.clear()
        _parts[work] = flex_callable(machine), score_mod_of(work, machine.device), block_mask_of(work, machine)
    return _parts[work]


def flex_prefill(work: PrefillWork, sets: list[Inputs], machine: Machine) -> PeerRun:
    """Forward with lse."""
    attend, score_mod, mask = parts_of(work, machine)
    tensors = [head_tensors(work, inputs) for inputs in sets]

    def run(n: int) -> Any:
        return attend(*tensors[n], score_mod=score_mod, block_mask=mask, enable_gqa=True, return_lse=True)

    def answer() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = run(0)
        q = sets[0][0]
        return out.transpose(1, 2).reshape(q.shape), lse.transpose(1, 2).reshape(q.shape[:2])

    return PeerRun(
        name=f"flex {'compiled' if machine.is_real else 'eager'}",
        stages={
            "attention": [partial(run, n) for n in range(len(sets))],
            "plan": [partial(block_mask_of, work, machine)],
        },
        answer=answer,
        first_call_seconds=timed_first(partial(run, 0), machine),
    )
