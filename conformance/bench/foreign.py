"""Any backend under `-b`: its adapter call over the same batch, which plans and runs, as the suite's judge calls it."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import torch
from msgspec.structs import replace as replaced

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.backend import Backend, Forward, Tensors
from attnconform.conformance.bench.blocks import Taken, blocks
from attnconform.conformance.bench.bundled import PlanRun
from attnconform.conformance.bench.decode_work import DecodeWork
from attnconform.conformance.bench.figures import Figures, Lengths
from attnconform.conformance.bench.honesty import output_error, poisoned_error
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.slices import NO_FALLBACK, SetFacts, slice_events
from attnconform.conformance.bench.timing import measure
from attnconform.conformance.views import ProblemView
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import Candidates
from attnconform.reference.cost.flops import attention_flops
from attnconform.reference.problem import AttentionProblem


def foreign_rows(
    draw: Callable[[int], list[DecodeWork]], machine: Machine, options: BenchOptions
) -> Iterator[BenchRow]:
    """One row: the backend's forward from candidates to output."""
    backend = load_backend(options.backend, machine.device)
    yield foreign_row(backend, draw, machine, seconds=options.seconds)
    backend.close()


def foreign_row(
    backend: Backend, draw: Callable[[int], list[DecodeWork]], machine: Machine, *, seconds: float
) -> BenchRow:
    """Times, answer and fallbacks of a backend over some input sets, drawn anew in every block."""
    taken, facts, rows = Taken(), list[SetFacts](), list[BenchRow]()
    for block in blocks(machine):
        sets = draw(block.number)
        calls = [AdapterCall(backend, work) for work in sets]
        samples = taken.add("attention", block.measure(calls, seconds))
        facts += [call.facts for call in calls]
        if block.is_first:
            rows.append(replaced(told_row(calls, machine, seconds), ours=samples.timing))
        del sets, calls
    samples = taken.joined()["attention"]
    reasons = Counter(fact.fallback for fact in facts if fact.fallback != NO_FALLBACK)
    return replaced(
        rows[0],
        ours=samples.timing,
        figures=replaced(rows[0].figures, recompiles=samples.recompiles, fallbacks=dict(reasons)),
        slices=slice_events(samples, facts),
    )


def told_row(calls: "list[AdapterCall]", machine: Machine, seconds: float) -> BenchRow:
    """The answer's error, a dense time of the bundled kernels, and counts; poison comes last and spoils the cache."""
    work, shape = calls[0].work, calls[0].work.shape
    dense = measure(PlanRun.dense(work), machine, seconds=min(0.3, seconds)).timing
    return BenchRow(
        suite="seed64k",
        phase="decode",
        work=shape.name,
        stage="attention from candidates",
        ours=dense,
        figures=Figures(
            bytes_ideal=work.bytes,
            flops_useful=attention_flops(work.edges, head_dim_qk=shape.head_dim),
            row_lengths=Lengths.of(work.list_lengths),
            valid_tokens=shape.batch,
            processed_tokens=shape.batch,
        ),
        dense=dense,
        rate=work.rate,
        error=max(output_error(call.answer, call.work) for call in calls),
        path=", ".join(sorted({call.path for call in calls})),
        sets=len(calls),
        poisoned_error=poisoned_error(calls[0].answer, work),
    )


class AdapterCall:
    """A backend's forward over one input set."""

    def __init__(self, backend: Backend, work: DecodeWork) -> None:
        self.backend, self.work = backend, work
        self.view = ProblemView(problem_of(work), device=str(work.q.device))
        out = torch.full_like(work.q, float("nan"))
        lse = torch.full(work.q.shape[:2], float("nan"), device=work.q.device)
        self.tensors = Tensors(q=work.q, k_cache=work.k_cache, v_cache=work.v_cache, out=out, lse=lse)
        self.path = ""

    def __call__(self) -> Forward:
        forward = self.backend.forward(self.view, self.tensors)
        self.path = forward.path
        return forward

    def answer(self) -> torch.Tensor:
        return self().out

    @property
    def facts(self) -> SetFacts:
        """What may explain a slow event, with the fallback that the backend told of."""
        fell = self.path.startswith("fallback")
        return replaced(self.work.facts, fallback=self.path) if fell else self.work.facts


def problem_of(work: DecodeWork) -> AttentionProblem:
    """The batch as the contract writes it."""
    s = work.shape
    return AttentionProblem(
        qo_indptr=np.arange(s.batch + 1),
        seqlen_kv=np.full(s.batch, s.seqlen_kv),
        q_offset=np.full(s.batch, s.seqlen_kv - 1),
        num_qo_heads=s.num_qo_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim_qk=s.head_dim,
        head_dim_vo=s.head_dim,
        cache=PagedCache(
            page_size=s.page_size, num_pages=work.k_cache.shape[0], page_table=work.page_table.cpu().numpy()
        ),
        sm_scale=1 / math.sqrt(s.head_dim),
        candidates=Candidates(
            granularity=s.granularity,
            block_size=s.block_size,
            sharing="kv_head",
            q_block_size=1,
            indptr=work.indptr.cpu().numpy(),
            indices=work.indices.cpu().numpy(),
        ),
    )
