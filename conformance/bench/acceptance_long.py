"""The acceptance scenario at its full length on a GPU: block figures, agreement with FlexAttention, times apart.

Valid tokens are fixed. Making the mask, compiling, prefill, backward and decode are timed apart; so is the peak memory,
allocated and reserved. The raw figures stay in the report, so that a later run can say what moved.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attnconform.conformance.bench.acceptance_small import Check, describe_statistics, equal, statistics_of
from attnconform.conformance.bench.honesty import ERROR_BOUND, relative_error
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.peers.flex import head_tensors, heads_first, parts_of
from attnconform.conformance.bench.peers.peer import timed_first
from attnconform.conformance.bench.prefill import OurPrefill
from attnconform.conformance.bench.prefill_work import Inputs, PrefillWork, make_inputs, reference_rows
from attnconform.conformance.bench.timing import Call, measure

BLOCK, SECONDS, DECODED = 128, 0.3, 8


def long_checks(work: PrefillWork, machine: Machine) -> Iterator[Check]:
    """Everything that the full length can show; the forward runs before its memory is read."""
    inputs = make_inputs(work, machine)
    ours = OurPrefill(work, inputs)
    yield told("block mask of 128x128", describe_statistics(statistics_of(work, BLOCK)))
    yield told("first forward, compiling or from its cache", f"{timed_first(ours.run, machine):.2f} s")
    dout = torch.randn_like(ours.out)
    yield from against_float32(ours, work)
    for checks in (against_flex(ours, dout, machine), time_checks(ours, dout, machine), decode_checks(ours, machine)):
        machine.check_time()
        yield from checks


def told(name: str, found: str) -> Check:
    """A figure without a limit."""
    return Check(name=name, found=found, is_met=True)


def close(name: str, ours: torch.Tensor, want: torch.Tensor) -> Check:
    error = relative_error(ours, want.float())
    found = f"off by {error:.1e} of its size, at most {ERROR_BOUND:.0e}"
    return Check(name=name, found=found, is_met=error <= ERROR_BOUND)


def against_float32(ours: OurPrefill, work: PrefillWork) -> Iterator[Check]:
    """Rows at both sides of every boundary of documents."""
    edges = torch.arange(0, work.seqlen, work.document_len)
    rows = torch.cat([edges, (edges[1:] - 1), torch.tensor([work.seqlen - 1])]).unique()
    want = reference_rows(work, ours.inputs, rows)
    yield close("rows beside the boundaries of documents", ours.out[rows.to(ours.out.device)], want)


def against_flex(ours: OurPrefill, dout: torch.Tensor, machine: Machine) -> Iterator[Check]:
    """out, lse, dq, dk and dv of FlexAttention with the same rule."""
    from attnconform.kernels.sparse_attention import backward

    work = ours.work
    attend, score_mod, mask = parts_of(work, machine)
    leaves = [x.requires_grad_() for x in head_tensors(work, ours.inputs)]
    out, lse = attend(*leaves, score_mod=score_mod, block_mask=mask, enable_gqa=True, return_lse=True)
    theirs = torch.autograd.grad(out, leaves, heads_first(work, dout, work.num_qo_heads))
    mine = backward(ours.plan, *ours.inputs, ours.out, ours.lse, dout)
    yield close("out of FlexAttention", ours.out, tokens_first(out.detach()))
    yield close("lse of FlexAttention", ours.lse, lse.detach()[0].T)
    for name, gradient, want in zip(("dq", "dk", "dv"), mine[:3], theirs, strict=True):
        yield close(f"{name} of FlexAttention", gradient.flatten(0, -3), tokens_first(want))


def tokens_first(x: torch.Tensor) -> torch.Tensor:
    """(1, heads, tokens, dim) as (tokens, heads, dim)."""
    return x[0].transpose(0, 1)


def time_checks(ours: OurPrefill, dout: torch.Tensor, machine: Machine) -> Iterator[Check]:
    """The mask made and used again, forward, backward of every mode, and the memory that a step takes."""
    from attnconform.kernels.sparse_attention import BackwardHints, backward, plan_backward
    from attnconform.kernels.sparse_attention.backward_hints import MODES

    saved = (*ours.inputs, ours.out, ours.lse, dout)
    works = {mode: plan_backward(ours.plan, BackwardHints(mode=mode)) for mode in MODES}

    def rebuilt() -> None:
        again = OurPrefill(ours.work, ours.inputs)
        again.run()

    calls: dict[str, Call] = {
        "plan": ours.make_plan,
        "plan of the backward": lambda: plan_backward(ours.plan),
        "forward, mask used again": ours.run,
        "forward, mask rebuilt": rebuilt,
        **{f"backward {mode}": partial(backward, ours.plan, *saved, work=work) for mode, work in works.items()},
    }
    torch.cuda.reset_peak_memory_stats()
    for name, call in calls.items():
        machine.check_time()
        taken = measure(call, machine, seconds=SECONDS)
        found = f"{taken.timing.median:.0f} us on the device, {taken.timing.host.median:.0f} us by the host"
        yield told(name, f"{found}, {taken.recompiles} recompilations")
    peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    yield told("peak memory", f"{peak / 2**30:.2f} GiB allocated, {reserved / 2**30:.2f} GiB reserved")
    for mode, work in works.items():
        parts = ", ".join(f"{name} {n / 2**20:.1f} MiB" for name, n in work.workspace_bytes.items() if n)
        yield told(f"workspace of backward {mode}", parts)


def decode_checks(ours: OurPrefill, machine: Machine) -> Iterator[Check]:
    """The last tokens one by one, in order and over shuffled pages, against the prefill."""
    work, (q, k, v) = ours.work, ours.inputs
    order = torch.randperm(k.shape[0], device=q.device)
    moved = (torch.empty_like(k), torch.empty_like(v))
    moved[0][order], moved[1][order] = k, v
    rows = range(work.seqlen - DECODED, work.seqlen)
    in_order = torch.cat([decode(work, (q, k, v), torch.arange(len(order), device=q.device), row) for row in rows])
    shuffled = torch.cat([decode(work, (q, *moved), order, row) for row in rows])
    yield close("decode of the last tokens, against prefill", in_order, ours.out[-DECODED:])
    yield equal("decode over shuffled pages", shuffled, in_order)
    plan = decode_plan(work, torch.arange(len(order), device=q.device), work.seqlen - 1)
    taken = measure(lambda: run_plan(plan, q[-1:], k, v), machine, seconds=SECONDS).timing
    yield told("a decoded token, planned before", f"{taken.median:.1f} us on the device")


def decode(work: PrefillWork, inputs: Inputs, pages: torch.Tensor, row: int) -> torch.Tensor:
    """One token's output, the cache holding those up to it."""
    q, k, v = inputs
    return run_plan(decode_plan(work, pages, row), q[row : row + 1], k, v)


def run_plan(plan: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from attnconform.kernels.sparse_attention import run

    out: torch.Tensor = run(plan, q, k, v)[0]
    return out


def decode_plan(work: PrefillWork, pages: torch.Tensor, row: int) -> Any:
    """Of one row, which is the last that the cache holds."""
    from attnconform.kernels import sparse_attention

    one = replace(work, batch=1)
    return sparse_attention.plan(
        qo_indptr=[0, 1], seqlen_kv=[row + 1], page_table=pages.int()[None], page_size=work.page_size,
        num_pages=len(pages), num_qo_heads=work.num_qo_heads, num_kv_heads=work.num_kv_heads,
        head_dim_qk=work.head_dim, head_dim_vo=work.head_dim, sm_scale=work.head_dim**-0.5, dtype=work.dtype,
        device=pages.device, mask_rule=one.mask_rule(),
    )  # fmt: skip
