"""Suite prefill: long prompts under a window, documents, ALiBi and a soft cap."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from attnconform.conformance.bench.block_mask import block_mask_rows
from attnconform.conformance.bench.block_sparse import block_sparse_rows
from attnconform.conformance.bench.blocks import Block, Taken, blocks
from attnconform.conformance.bench.bundled import path_of
from attnconform.conformance.bench.figures import plan_figures, with_counters
from attnconform.conformance.bench.honesty import relative_error
from attnconform.conformance.bench.kernel_times import look_inside
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.flex import flex_prefill
from attnconform.conformance.bench.peers.peer import PeerBench, PeerRun
from attnconform.conformance.bench.peers.sdpa_prefill import cudnn_prefill, dense_mask_prefill, sdpa_prefill
from attnconform.conformance.bench.prefill_work import Inputs, PrefillWork, make_inputs, reference_rows, works
from attnconform.conformance.bench.prompt_rows import SHORT, Told, prompt_rows
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import measure

PEERS: dict[str, Callable[[PrefillWork, list[Inputs], Machine], PeerRun]] = {
    "flex": flex_prefill,
    "sdpa": sdpa_prefill,
    "cudnn": cudnn_prefill,
    "dense-mask": dense_mask_prefill,
}
CHECKED_ROWS = 64  # rows whose outputs are compared with float32


@dataclass(eq=False)
class OurPrefill:
    """The bundled kernels over pages that lie in order."""

    work: PrefillWork
    inputs: Inputs

    @cached_property
    def out(self) -> torch.Tensor:
        return torch.full_like(self.inputs[0], float("nan"))

    @cached_property
    def lse(self) -> torch.Tensor:
        return torch.full(self.inputs[0].shape[:2], float("nan"), device=self.inputs[0].device)

    def make_plan(self) -> Any:
        from attnconform.kernels import sparse_attention

        work, q, device = self.work, self.inputs[0], self.inputs[0].device
        return sparse_attention.plan(
            qo_indptr=torch.arange(work.batch + 1, device=device) * work.seqlen,
            seqlen_kv=torch.full((work.batch,), work.seqlen, device=device),
            page_table=torch.arange(work.batch * work.pages, device=device).view(work.batch, work.pages).int(),
            page_size=work.page_size,
            num_pages=work.batch * work.pages,
            num_qo_heads=work.num_qo_heads,
            num_kv_heads=work.num_kv_heads,
            head_dim_qk=work.head_dim,
            head_dim_vo=work.head_dim,
            sm_scale=1 / math.sqrt(work.head_dim),
            dtype=q.dtype,
            device=device,
            mask_rule=work.mask_rule(),
            score_rules=work.score_rules(),
        )

    @cached_property
    def plan(self) -> Any:
        return self.make_plan()

    def run(self) -> None:
        from attnconform.kernels import sparse_attention

        sparse_attention.run(self.plan, *self.inputs, out=self.out, lse=self.lse)


def our_prefill(work: PrefillWork, *inputs: torch.Tensor) -> OurPrefill:
    q, k, v = inputs
    return OurPrefill(work, (q, k, v))


def prefill_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Forward and plan of every work, beside the peer's forward and mask build; a block mask; then chosen blocks."""
    for work in works(machine):
        yield from work_rows(work, machine, options)
    flex_only = options if options.peer == "flex" else replace(options, peer=None)
    yield from block_mask_rows(machine, flex_only)
    yield from block_sparse_rows(machine, flex_only)


def work_rows(work: PrefillWork, machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Rows of one kind of prompt; one input set is larger than L2 by itself."""
    taken, peer, told = Taken(), PeerBench(options.peer, machine), list[Told]()
    for block in blocks(machine):
        ours = [OurPrefill(work, make_inputs(work, machine)) for _ in range(2)]
        told += time_block(ours, block, taken, peer, options)
        del ours
    yield from prompt_rows(told[0], taken.joined(), peer.by_stage())


def time_block(
    ours: list[OurPrefill], block: Block, taken: Taken, peer: PeerBench, options: BenchOptions
) -> list[Told]:
    """Attention and plan of ours, then the peer's; in the first block, what else there is to say."""
    work, first = ours[0].work, ours[0]
    taken.add("attention", block.measure([run.run for run in ours], options.seconds))
    taken.add("plan", block.measure(first.make_plan, min(SHORT, options.seconds)))
    build = PEERS.get(options.peer or "")
    if build is not None:
        sets = [run.inputs for run in ours]
        peer.time(block, lambda: build(work, sets, block.machine), (first.out, first.lse), seconds=options.seconds)
    return [tell(ours, block.machine, options)] if block.is_first else []


def tell(ours: list[OurPrefill], machine: Machine, options: BenchOptions) -> Told:
    """Counts, the answer's error, and the time of a causal prompt of the same length where this one is sparse."""
    work = ours[0].work
    figures = plan_figures(
        ours[0].plan,
        processors=machine.processors,
        lengths=np.asarray(work.row_lengths),
        edges=work.edges * work.num_qo_heads,
        bytes_ideal=work.bytes,
    )
    causal = OurPrefill(work.without_rules(), ours[0].inputs)
    dense = None if work.rate == 1 else measure(causal.run, machine, seconds=min(SHORT, options.seconds)).timing
    counted = options.counters.of(work.name) if options.counters else None
    return Told(
        suite="prefill",
        work=work.name,
        rate=work.rate,
        num_sets=len(ours),
        figures=with_counters(figures, counted),
        error=max(checked_error(run) for run in ours),
        path=path_of(ours[0].plan),
        kernels=look_inside([run.run for run in ours], machine).kernels,
        dense=dense,
    )


def checked_error(run: OurPrefill) -> float:
    """How far some rows, from the first to the last, are from float32."""
    run.run()
    tokens = run.work.tokens
    rows = torch.linspace(0, tokens - 1, min(CHECKED_ROWS, tokens)).long()
    want = reference_rows(run.work, run.inputs, rows)
    return relative_error(run.out[rows.to(run.out.device)], want)
