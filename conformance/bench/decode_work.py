"""A batch of decode rows over chosen pages or tokens of a paged cache: shapes, inputs, and sets that rotate."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.slices import SetFacts
from attnconform.reference.cost.traffic import kv_bytes, step_bytes
from attnconform.traces import Trace, synthesize

Granularity = Literal["block", "token"]
SETS_OVER_L2 = 2  # input sets are together this many times larger than L2
MAX_SETS = 8


@dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """Geometry of one batch."""

    batch: int
    seqlen_kv: int = 65_536
    candidates: int = 4_224  # per KV head: 264 pages of 16
    page_size: int = 16
    granularity: Granularity = "block"
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    run_length: int = 1  # neighbouring ids chosen together
    source: str = ""  # a trace's name where ids come from one

    @property
    def block_size(self) -> int:
        """Tokens of an id."""
        return self.page_size if self.granularity == "block" else 1

    @property
    def pages(self) -> int:
        """Pages of a request."""
        return self.seqlen_kv // self.page_size

    @property
    def num_lists(self) -> int:
        return self.batch * self.num_kv_heads

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def name(self) -> str:
        per_list = self.candidates // self.block_size
        chosen = f"{per_list} pages of {self.page_size}" if self.granularity == "block" else f"{per_list} tokens"
        chosen = self.source or chosen
        return f"{chosen} per KV head of {self.seqlen_kv}, batch {self.batch}"


TINY = DecodeShape(
    batch=2, seqlen_kv=96, candidates=32, num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
)


@dataclass(frozen=True, eq=False)
class DecodeWork:
    """Inputs of one batch."""

    shape: DecodeShape
    k_cache: torch.Tensor  # (num_pages, page_size, num_kv_heads, head_dim)
    v_cache: torch.Tensor
    page_table: torch.Tensor  # (batch, pages of a request) int32
    q: torch.Tensor  # (batch, num_qo_heads, head_dim)
    indptr: torch.Tensor  # (lists + 1,) int32
    indices: torch.Tensor  # (total,) int32, ascending in a list: logical pages, or token positions

    @cached_property
    def list_lengths(self) -> NDArray[np.int64]:
        """Tokens of every list."""
        return np.diff(self.indptr.cpu().numpy()).astype(np.int64) * self.shape.block_size

    @property
    def bytes(self) -> int:
        """Keys and values of every candidate once, queries, ids, outputs. [COST-BYTES]"""
        s = self.shape
        width = s.dtype.itemsize
        kv = kv_bytes(int(self.list_lengths.sum()), head_dim_qk=s.head_dim, k_bytes=width, v_bytes=width)
        rows = s.batch * s.num_qo_heads
        ids = self.indices.nbytes
        moved = step_bytes(
            kv, num_rows=rows, head_dim_qk=s.head_dim, head_dim_vo=s.head_dim, index_read=ids, element_bytes=width
        )
        return int(moved)

    @property
    def edges(self) -> int:
        """(query head, key) pairs."""
        return int(self.list_lengths.sum()) * self.shape.group_size

    @property
    def rate(self) -> float:
        """Candidates over committed keys."""
        return float(self.list_lengths.sum()) / (self.shape.num_lists * self.shape.seqlen_kv)

    @cached_property
    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Every list's token positions and the list each belongs to, flat."""
        counts = self.indptr.diff().long()
        owner = torch.repeat_interleave(torch.arange(self.shape.num_lists, device=counts.device), counts)
        size = self.shape.block_size
        tokens = self.indices.long()[:, None] * size + torch.arange(size, device=counts.device)
        return tokens.reshape(-1), owner[:, None].expand(-1, size).reshape(-1)

    @cached_property
    def slots(self) -> torch.Tensor:
        """Physical slot of every entry of `positions`."""
        tokens, owner = self.positions
        request, size = owner // self.shape.num_kv_heads, self.shape.page_size
        return self.page_table[request, tokens // size].long() * size + tokens % size

    @property
    def facts(self) -> SetFacts:
        """What may explain a slow event."""
        tokens, owner = self.positions
        pages = torch.unique(owner * self.shape.pages + tokens // self.shape.page_size).numel()
        return SetFacts(
            candidate_blocks=self.indices.numel(),
            pages_touched=pages,
            longest_row=int(self.list_lengths.max(initial=0)),
        )


def make_work(shape: DecodeShape, machine: Machine) -> DecodeWork:
    """Random data, random pages, random candidates that differ by KV head."""
    size = (shape.batch * shape.pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    k_cache, v_cache = (torch.empty(size, dtype=shape.dtype, device=machine.device).normal_() for _ in range(2))
    table = torch.randperm(shape.batch * shape.pages, device=machine.device).view(shape.batch, shape.pages).int()
    indptr, indices = draw_lists(shape, machine.device)
    return DecodeWork(shape, k_cache, v_cache, table, draw_queries(shape, machine.device), indptr, indices)


def draw_queries(shape: DecodeShape, device: str) -> torch.Tensor:
    return torch.randn(shape.batch, shape.num_qo_heads, shape.head_dim, dtype=shape.dtype, device=device)


def draw_lists(shape: DecodeShape, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Equally many distinct ids a list, chosen in runs of neighbours."""
    ids, count = shape.seqlen_kv // shape.block_size, shape.candidates // shape.block_size
    run = min(shape.run_length, count)
    scores = torch.rand(shape.num_lists, ids // run, device=device)
    starts = scores.topk(count // run, dim=-1).indices.sort(-1).values * run
    chosen = (starts[:, :, None] + torch.arange(run, device=device)).reshape(shape.num_lists, -1).int()
    indptr = torch.arange(0, chosen.numel() + 1, chosen.shape[1], device=device, dtype=torch.int32)
    return indptr, chosen.reshape(-1)


def make_sets(work: DecodeWork, machine: Machine) -> list[DecodeWork]:
    """Input sets over one cache, other queries and candidates each: together larger than L2; two in the interpreter."""
    wanted = -(-SETS_OVER_L2 * machine.l2_bytes // max(work.bytes, 1)) if machine.is_real else 2
    sets = [work]
    for _ in range(max(2, min(wanted, MAX_SETS)) - 1):
        indptr, indices = draw_lists(work.shape, machine.device)
        sets.append(replace(work, q=draw_queries(work.shape, machine.device), indptr=indptr, indices=indices))
    return sets


def make_trace_sets(
    trace: Trace, selector: str, machine: Machine, *, batch: int, sets: int, first_seed: int = 0
) -> list[DecodeWork]:
    """Input sets whose lists are drawn from a recorded trace, ragged as they were."""
    granularity: Granularity = trace.header.selector(selector).granularity
    size = trace.header.block_size if granularity == "block" else 16
    seqlen_kv = (8_192 if machine.is_real else 256) // size * size
    base = TINY if not machine.is_real else DecodeShape(batch=batch)
    shape = replace(
        base, batch=batch, seqlen_kv=seqlen_kv, page_size=size, granularity=granularity, candidates=size,
        source=f"{trace.header.name} {selector}",
    )  # fmt: skip
    first = make_work(shape, machine)
    works = []
    for n in range(sets):
        drawn = synthesize(
            trace, seed=first_seed + n, num_rows=shape.num_lists, seqlen_kv=seqlen_kv, phase="decode",
            selector=selector, consecutive=False,
        )  # fmt: skip
        indptr, indices = (torch.as_tensor(x, device=machine.device).int() for x in (drawn.indptr, drawn.indices))
        works.append(replace(first, q=draw_queries(shape, machine.device), indptr=indptr, indices=indices))
    return works


def our_plan(work: DecodeWork, **hints: Any) -> Any:
    """The plan of the bundled kernels, from candidates on the device."""
    from attnconform.kernels import sparse_attention

    return sparse_attention.plan(**plan_arguments(work), **hints)


def plan_arguments(work: DecodeWork) -> dict[str, Any]:
    """What a batch is, as the bundled kernels ask for it."""
    from attnconform.kernels import sparse_attention

    s = work.shape
    candidates = sparse_attention.CandidateLists(
        granularity=s.granularity,
        block_size=s.block_size,
        sharing="kv_head",
        q_block_size=1,
        indptr=work.indptr,
        indices=work.indices,
    )
    return cache_arguments(work) | {"candidates": candidates}


def cache_arguments(work: DecodeWork) -> dict[str, Any]:
    """The same without candidates."""
    s, device = work.shape, work.q.device
    return geometry_of(work) | {
        "qo_indptr": torch.arange(s.batch + 1, device=device),
        "seqlen_kv": torch.full((s.batch,), s.seqlen_kv, device=device),
        "page_table": work.page_table,
    }


def dense_plan(work: DecodeWork) -> Any:
    """Every key of the same batch, by the same kernels."""
    from attnconform.kernels import sparse_attention

    return sparse_attention.plan(**cache_arguments(work))


def geometry_of(work: DecodeWork) -> dict[str, Any]:
    """Arguments that a plan and a tier share."""
    s = work.shape
    return {
        "page_size": s.page_size,
        "num_pages": work.k_cache.shape[0],
        "num_qo_heads": s.num_qo_heads,
        "num_kv_heads": s.num_kv_heads,
        "head_dim_qk": s.head_dim,
        "head_dim_vo": s.head_dim,
        "sm_scale": 1 / math.sqrt(s.head_dim),
        "dtype": s.dtype,
        "device": work.q.device,
    }
