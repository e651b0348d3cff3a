"""Chosen blocks of a long prompt: forward and plan, beside FlexAttention over the same blocks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from attnconform.conformance.bench.block_sparse_work import (
    TINY_BLOCKS,
    BlockSparseShape,
    BlockSparseWork,
    block_plan,
    make_blocks,
)
from attnconform.conformance.bench.blocks import Block, Taken, blocks
from attnconform.conformance.bench.bundled import path_of
from attnconform.conformance.bench.figures import plan_figures
from attnconform.conformance.bench.honesty import relative_error
from attnconform.conformance.bench.kernel_times import look_inside
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.flex_blocks import flex_blocks
from attnconform.conformance.bench.peers.peer import PeerBench, PeerRun
from attnconform.conformance.bench.prompt_rows import SHORT, Told, prompt_rows
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import measure

PEERS: dict[str, Callable[[list[BlockSparseWork], Machine], PeerRun]] = {"flex": flex_blocks}
CHECKED_ROWS = 64


@dataclass(eq=False)
class OurBlocks:
    """The bundled kernels over one set of inputs."""

    work: BlockSparseWork

    @cached_property
    def plan(self) -> Any:
        return block_plan(self.work)

    @cached_property
    def out(self) -> torch.Tensor:
        return torch.full_like(self.work.inputs[0], float("nan"))

    @cached_property
    def lse(self) -> torch.Tensor:
        q = self.work.inputs[0]
        return torch.full(q.shape[:2], float("nan"), device=q.device)

    def run(self) -> None:
        from attnconform.kernels import sparse_attention

        sparse_attention.run(self.plan, *self.work.inputs, out=self.out, lse=self.lse)


def block_sparse_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Attention and plan; one input set is larger than L2 by itself, and two rotate."""
    shape = BlockSparseShape() if machine.is_real else TINY_BLOCKS
    taken, peer, told = Taken(), PeerBench(options.peer, machine), list[Told]()
    for block in blocks(machine):
        ours = [OurBlocks(make_blocks(shape, machine)) for _ in range(2)]
        told += time_block(ours, block, taken, peer, options)
        del ours
    yield from prompt_rows(told[0], taken.joined(), peer.by_stage())


def time_block(ours: list[OurBlocks], block: Block, taken: Taken, peer: PeerBench, options: BenchOptions) -> list[Told]:
    """Both stages of ours, then the peer's; in the first block, what else there is to say."""
    first = ours[0]
    taken.add("attention", block.measure([run.run for run in ours], options.seconds))
    taken.add("plan", block.measure(lambda: block_plan(first.work), min(SHORT, options.seconds)))
    if options.peer is not None:
        build, works = PEERS[options.peer], [run.work for run in ours]
        peer.time(block, lambda: build(works, block.machine), (first.out, first.lse), seconds=options.seconds)
    return [tell(ours, block.machine, options)] if block.is_first else []


def tell(ours: list[OurBlocks], machine: Machine, options: BenchOptions) -> Told:
    """Counts, the answer's error, and the time of every block."""
    first, work = ours[0], ours[0].work
    return Told(
        suite="prefill",
        work=work.shape.name,
        rate=work.rate,
        num_sets=len(ours),
        figures=plan_figures(
            first.plan,
            processors=machine.processors,
            lengths=work.row_lengths,
            edges=work.edges,
            bytes_ideal=work.bytes,
        ),
        error=max(checked_error(run) for run in ours),
        path=path_of(first.plan),
        kernels=look_inside([run.run for run in ours], machine).kernels,
        dense=measure(OurBlocks(work.dense()).run, machine, seconds=min(SHORT, options.seconds)).timing,
    )


def checked_error(run: OurBlocks) -> float:
    """How far some rows, from the first to the last, are from float32."""
    run.run()
    s, device = run.work.shape, run.out.device
    rows = torch.linspace(0, s.seqlen_q - 1, min(CHECKED_ROWS, s.seqlen_q)).long().tolist()
    want = torch.stack([reference_row(run.work, row) for row in rows])
    return relative_error(run.out[torch.tensor(rows, device=device)], want)


def reference_row(work: BlockSparseWork, row: int) -> torch.Tensor:
    """One row's output in float32, (num_qo_heads, head_dim)."""
    s, (q, k, v) = work.shape, work.inputs
    listed = work.chosen[row // s.block_size].nonzero()[:, 0]
    tokens = (listed[:, None] * s.block_size + torch.arange(s.block_size, device=q.device)).flatten()
    if s.is_causal:
        tokens = tokens[tokens <= s.seqlen - s.seqlen_q + row]
    ks, vs = (c.view(-1, s.num_kv_heads, s.head_dim)[tokens].float() for c in (k, v))
    grouped = q[row].float().view(s.num_kv_heads, s.group_size, s.head_dim)
    p = (torch.einsum("hgd,khd->hgk", grouped, ks) / s.head_dim**0.5).softmax(-1)
    return torch.einsum("hgk,khd->hgd", p, vs).flatten(0, 1)
