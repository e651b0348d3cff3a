"""Suite prefill: long prompts under a window, documents, ALiBi and a soft cap."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.bundled import path_of
from attnconform.conformance.bench.decode import figures_of
from attnconform.conformance.bench.figures import plan_figures
from attnconform.conformance.bench.honesty import relative_error
from attnconform.conformance.bench.kernel_times import look_inside
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.flex import flex_prefill
from attnconform.conformance.bench.peers.peer import PeerRun, time_peer
from attnconform.conformance.bench.peers.sdpa_prefill import dense_mask_prefill, sdpa_prefill
from attnconform.conformance.bench.prefill_work import PrefillWork, make_inputs, reference_rows, works
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import Call, measure

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
PEERS: dict[str, Callable[[PrefillWork, Inputs, Machine], PeerRun]] = {
    "flex": flex_prefill,
    "sdpa": sdpa_prefill,
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
    """Forward and plan of every work, beside the peer's forward and mask build."""
    for work in works(machine):
        yield from work_rows(work, machine, options)
        machine.release()


def work_rows(work: PrefillWork, machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Rows of one kind of prompt; one input set is larger than L2 by itself."""
    sets = [make_inputs(work, machine) for _ in range(2)]
    ours = [OurPrefill(work, inputs) for inputs in sets]
    calls: list[Call] = [run.run for run in ours]
    samples = {
        "attention": measure(calls, machine, seconds=options.seconds),
        "plan": measure(ours[0].make_plan, machine, seconds=min(0.2, options.seconds)),
    }
    build, peers = PEERS.get(options.peer or ""), {}
    if build is not None:
        peers = time_peer(
            options.peer or "",
            lambda: build(work, sets[0], machine),
            machine,
            (ours[0].out, ours[0].lse),
            seconds=options.seconds,
        )
    figures = plan_figures(
        ours[0].plan,
        processors=machine.processors,
        lengths=np.asarray(work.row_lengths),
        edges=work.edges * work.num_qo_heads,
        bytes_ideal=work.bytes,
    )
    counted = options.counters.of(work.name) if options.counters else None
    error = max(checked_error(run) for run in ours)
    inside = look_inside(calls, machine)
    for stage, taken in samples.items():
        is_attention = stage == "attention"
        yield BenchRow(
            suite="prefill",
            phase="prefill",
            work=work.name,
            stage=stage,
            ours=taken.timing,
            figures=replaced(figures_of(stage, figures, counted), recompiles=taken.recompiles),
            peer=peers.get(stage, peers.get("")),
            rate=work.edges / (work.batch * work.seqlen * (work.seqlen + 1) / 2),
            error=error if is_attention else None,
            path=path_of(ours[0].plan),
            sets=len(sets),
            kernels=inside.kernels if is_attention else {},
        )


def checked_error(run: OurPrefill) -> float:
    """How far some rows, from the first to the last, are from float32."""
    run.run()
    tokens = run.work.tokens
    rows = torch.linspace(0, tokens - 1, min(CHECKED_ROWS, tokens)).long()
    want = reference_rows(run.work, run.inputs, rows)
    return relative_error(run.out[rows.to(run.out.device)], want)
