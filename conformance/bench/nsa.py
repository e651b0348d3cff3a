"""Suite nsa: every token of a long prompt selects 16 blocks of 64 per KV head, and its own causal part of them."""

import math
from collections.abc import Iterator

import torch
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.bundled import path_of
from attnconform.conformance.bench.decode import figures_of
from attnconform.conformance.bench.figures import plan_figures
from attnconform.conformance.bench.honesty import relative_error
from attnconform.conformance.bench.kernel_times import look_inside
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.nsa_work import TINY_NSA, NsaShape, NsaWork, make_nsa, nsa_plan
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.fla import fla_nsa
from attnconform.conformance.bench.peers.peer import time_peer
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import measure
from attnconform.reference.cost.traffic import kv_bytes, step_bytes

CHECKED_ROWS = 32


def nsa_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Forward of the selection branch, beside fla's."""
    from attnconform.kernels import sparse_attention

    work = make_nsa(NsaShape() if machine.is_real else TINY_NSA, machine.device)
    s, plan = work.shape, nsa_plan(work)
    out = torch.full_like(work.q, float("nan"))
    lse = torch.full(work.q.shape[:2], float("nan"), device=work.q.device)

    def run() -> None:
        sparse_attention.run(plan, work.q, work.k, work.v, out=out, lse=lse)

    run()
    error = checked_error(work, out)
    samples = {
        "attention": measure(run, machine, seconds=options.seconds),
        "one-off plan": measure(lambda: nsa_plan(work), machine, seconds=0.2),
    }
    peers = {}
    if options.peer == "fla":
        peers = time_peer("fla", lambda: fla_nsa(work, machine), machine, (out, lse), seconds=options.seconds)
    inside = look_inside([run], machine)
    lengths = work.row_lengths
    width = s.dtype.itemsize
    kv = kv_bytes(s.seqlen, head_dim_qk=s.head_dim, num_kv_heads=s.num_kv_heads, k_bytes=width, v_bytes=width)
    moved = step_bytes(
        kv, num_rows=s.seqlen * s.num_qo_heads, head_dim_qk=s.head_dim, head_dim_vo=s.head_dim,
        index_read=work.blocks.nbytes, element_bytes=width,
    )  # fmt: skip
    figures = plan_figures(
        plan, processors=machine.processors, lengths=lengths, edges=int(lengths.sum()) * s.group_size,
        bytes_ideal=int(moved),
    )  # fmt: skip
    for stage, taken in samples.items():
        is_attention = stage == "attention"
        yield BenchRow(
            suite="nsa",
            phase="prefill",
            work=f"{s.blocks_per_row} blocks of {s.block_size} a row and KV head, T {s.seqlen}, heads "
            f"{s.num_qo_heads}/{s.num_kv_heads}",
            stage=stage,
            ours=taken.timing,
            figures=replaced(figures_of(stage, figures, None), recompiles=taken.recompiles),
            peer=peers.get(stage, peers.get("")) if is_attention else None,
            rate=float(lengths.sum()) / (s.num_kv_heads * s.seqlen * (s.seqlen + 1) / 2),
            error=error if is_attention else None,
            path=path_of(plan),
            kernels=inside.kernels if is_attention else {},
        )


def checked_error(work: NsaWork, out: torch.Tensor) -> float:
    """How far some rows are from float32."""
    s = work.shape
    rows = torch.linspace(0, s.seqlen - 1, min(CHECKED_ROWS, s.seqlen)).long()
    k, v = (c.view(-1, s.num_kv_heads, s.head_dim) for c in (work.k, work.v))
    want = torch.empty(len(rows), s.num_qo_heads, s.head_dim, device=work.q.device)
    for n, row in enumerate(rows.tolist()):
        for head in range(s.num_kv_heads):
            blocks = work.blocks[row, head]
            tokens = blocks[blocks >= 0].long()[:, None] * s.block_size + torch.arange(s.block_size, device=k.device)
            tokens = tokens.flatten()
            tokens = tokens[tokens <= row]
            heads = slice(head * s.group_size, (head + 1) * s.group_size)
            scores = work.q[row, heads].float() @ k[tokens, head].float().T / math.sqrt(s.head_dim)
            want[n, heads] = scores.softmax(-1) @ v[tokens, head].float()
    return relative_error(out[rows.to(out.device)], want)
