"""Any backend under `-b`: its adapter call over the same batch, which plans and runs, as the suite's judge calls it."""

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

from attnconform.conformance.adapters.registry import load_backend
from attnconform.conformance.backend import Backend, Forward, Tensors
from attnconform.conformance.bench.bundled import PlanRun
from attnconform.conformance.bench.decode_work import DecodeWork
from attnconform.conformance.bench.figures import Figures, Lengths
from attnconform.conformance.bench.honesty import output_error, poisoned_error
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.slices import slice_events
from attnconform.conformance.bench.timing import measure
from attnconform.conformance.views import ProblemView
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import Candidates
from attnconform.reference.cost.flops import attention_flops
from attnconform.reference.problem import AttentionProblem


def foreign_rows(sets: list[DecodeWork], machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """One row: the backend's forward from candidates to output."""
    backend = load_backend(options.backend, machine.device)
    yield foreign_row(backend, sets, machine, seconds=options.seconds)
    backend.close()


def foreign_row(backend: Backend, sets: list[DecodeWork], machine: Machine, *, seconds: float) -> BenchRow:
    """Times, answer and fallbacks of a backend over some input sets."""
    work = sets[0]
    calls = [AdapterCall(backend, w) for w in sets]
    error = max(output_error(call.answer, w) for call, w in zip(calls, sets, strict=True))
    taken = measure(calls, machine, seconds=seconds)
    dense = measure(PlanRun.dense(work), machine, seconds=min(0.3, seconds)).timing
    paths = Counter(call.path for call in calls)
    shape = work.shape
    return BenchRow(
        suite="seed64k",
        phase="decode",
        work=shape.name,
        stage="attention from candidates",
        ours=taken.timing,
        figures=Figures(
            bytes_ideal=work.bytes,
            flops_useful=attention_flops(work.edges, head_dim_qk=shape.head_dim),
            row_lengths=Lengths.of(work.list_lengths),
            valid_tokens=shape.batch,
            processed_tokens=shape.batch,
            recompiles=taken.recompiles,
            fallbacks={path: n for path, n in paths.items() if path.startswith("fallback")},
        ),
        dense=dense,
        rate=work.rate,
        error=error,
        poisoned_error=poisoned_error(calls[0].answer, work),
        path=", ".join(sorted(paths)),
        sets=len(sets),
        slices=slice_events(taken, [w.facts for w in sets]),
    )


class AdapterCall:
    """A backend's forward over one input set."""

    def __init__(self, backend: Backend, work: DecodeWork) -> None:
        self.backend, self.view = backend, ProblemView(problem_of(work), device=str(work.q.device))
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
