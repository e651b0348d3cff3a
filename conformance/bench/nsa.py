"""Suite nsa: every token of a long prompt selects 16 blocks of 64 per KV head, and its own causal part of them.

Once at random, the worst case for sharing reads, and once as trained selectors do: neighbours keep 3 of 4 blocks.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attnconform.conformance.bench.blocks import Block, Taken, blocks
from attnconform.conformance.bench.bundled import path_of
from attnconform.conformance.bench.figures import Figures, plan_figures, with_counters
from attnconform.conformance.bench.honesty import relative_error
from attnconform.conformance.bench.kernel_times import look_inside
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.nsa_work import NsaShape, NsaWork, make_nsa, nsa_plan, shapes
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.fla import fla_nsa
from attnconform.conformance.bench.peers.peer import PeerBench, PeerRun
from attnconform.conformance.bench.prompt_rows import SHORT, Told, prompt_rows
from attnconform.conformance.bench.row import BenchRow
from attnconform.reference.cost.traffic import kv_bytes, step_bytes

PEERS: dict[str, Callable[[NsaWork, Machine], PeerRun]] = {"fla": fla_nsa}
CHECKED_ROWS = 32


@dataclass(eq=False)
class OurNsa:
    """The bundled kernels over one prompt's selections."""

    work: NsaWork

    @cached_property
    def plan(self) -> Any:
        return nsa_plan(self.work)

    @cached_property
    def out(self) -> torch.Tensor:
        return torch.full_like(self.work.q, float("nan"))

    @cached_property
    def lse(self) -> torch.Tensor:
        return torch.full(self.work.q.shape[:2], float("nan"), device=self.work.q.device)

    def run(self) -> None:
        from attnconform.kernels import sparse_attention

        sparse_attention.run(self.plan, self.work.q, self.work.k, self.work.v, out=self.out, lse=self.lse)


def nsa_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Forward of the selection branch, beside fla's; one input set is several times larger than L2."""
    for shape in shapes(machine):
        yield from shape_rows(shape, machine, options)


def shape_rows(shape: NsaShape, machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Attention and plan of one kind of selections."""
    taken, peer, told = Taken(), PeerBench(options.peer, machine), list[Told]()
    for block in blocks(machine):
        told += time_block(OurNsa(make_nsa(shape, machine.device)), block, taken, peer, options)
    yield from prompt_rows(told[0], taken.joined(), peer.by_stage())


def time_block(ours: OurNsa, block: Block, taken: Taken, peer: PeerBench, options: BenchOptions) -> list[Told]:
    """Both stages of ours, then the peer's; in the first block, what else there is to say."""
    machine = block.machine
    taken.add("attention", block.measure(ours.run, options.seconds))
    taken.add("plan", block.measure(lambda: nsa_plan(ours.work), min(SHORT, options.seconds)))
    if options.peer is not None:
        build = PEERS[options.peer]
        peer.time(block, lambda: build(ours.work, machine), (ours.out, ours.lse), seconds=options.seconds)
    return [tell(ours, machine, options)] if block.is_first else []


def tell(ours: OurNsa, machine: Machine, options: BenchOptions) -> Told:
    work, s = ours.work, ours.work.shape
    counted = options.counters.of(s.name) if options.counters else None
    return Told(
        suite="nsa",
        work=s.name,
        rate=float(work.row_lengths.sum()) / (s.num_kv_heads * s.seqlen * (s.seqlen + 1) / 2),
        num_sets=1,
        figures=with_counters(nsa_figures(ours, machine), counted),
        error=checked_error(work, ours.out),
        path=path_of(ours.plan),
        kernels=look_inside([ours.run], machine).kernels,
    )


def nsa_figures(ours: OurNsa, machine: Machine) -> Figures:
    """Counts of the attention."""
    work, s = ours.work, ours.work.shape
    width, lengths = s.dtype.itemsize, work.row_lengths
    kv = kv_bytes(s.seqlen, head_dim_qk=s.head_dim, num_kv_heads=s.num_kv_heads, k_bytes=width, v_bytes=width)
    moved = step_bytes(
        kv, num_rows=s.seqlen * s.num_qo_heads, head_dim_qk=s.head_dim, head_dim_vo=s.head_dim,
        index_read=work.blocks.nbytes, element_bytes=width,
    )  # fmt: skip
    return plan_figures(
        ours.plan, processors=machine.processors, lengths=lengths, edges=int(lengths.sum()) * s.group_size,
        bytes_ideal=int(moved),
    )  # fmt: skip


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
