"""What the backward suite differentiates: long prompts, chosen blocks, chosen blocks per token, and a hot page."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnconform.conformance.bench.backward_reference import ScoreRule, SomeGradients, some_gradients
from attnconform.conformance.bench.block_sparse_work import TINY_BLOCKS, BlockSparseShape, block_plan, make_blocks
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.nsa_work import make_nsa, nsa_plan
from attnconform.conformance.bench.nsa_work import shapes as nsa_shapes
from attnconform.conformance.bench.peers.fla_backward import fla_nsa_backward, fla_public_backward
from attnconform.conformance.bench.peers.flex_backward import flex_backward, flex_blocks_backward
from attnconform.conformance.bench.peers.peer import PeerRun
from attnconform.conformance.bench.peers.sdpa_backward import sdpa_backward
from attnconform.conformance.bench.prefill import OurPrefill
from attnconform.conformance.bench.prefill_work import make_inputs, works

PeerBuild = Callable[[], PeerRun]


@dataclass(eq=False)
class Subject:
    """A forward that was run, and what its backward starts from."""

    name: str
    plan: Any
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    edges: int  # (row, query head, key) triples
    bytes: int  # that the forward must move
    lengths: NDArray[np.int64]  # keys of every row or list
    rule: ScoreRule
    peers: dict[str, Callable[[torch.Tensor], PeerRun]]  # from dout

    def __post_init__(self) -> None:
        from attnconform.kernels.sparse_attention import run

        self.out, self.lse = run(self.plan, *self.inputs)
        self.dout = torch.randn_like(self.out)

    @property
    def saved(self) -> tuple[torch.Tensor, ...]:
        """What a backward is given."""
        return (*self.inputs, self.out, self.lse, self.dout)

    @cached_property
    def want(self) -> SomeGradients:
        """Some gradients in float32."""
        return some_gradients(self.saved, self.rule)


Make = Callable[[], Subject]


def subjects(machine: Machine) -> Iterator[Make]:
    """All of them, each made when its turn comes."""
    yield from prompts(machine)
    yield lambda: chosen_blocks(machine)
    for shape in nsa_shapes(machine):
        yield partial(blocks_per_token, shape, machine)
    hot = HotShape() if machine.is_real else TINY_HOT
    yield partial(hot_pages, machine, hot)
    yield partial(hot_pages, machine, replace(hot, num_cold=0))


def prompts(machine: Machine) -> Iterator[Make]:
    """The window alone, and with each rule; and one causal batch."""
    for work in works(machine):
        yield partial(prompt, work, machine)


def prompt(work: Any, machine: Machine) -> Subject:
    inputs = make_inputs(work, machine)
    return Subject(
        name=work.name,
        plan=OurPrefill(work, inputs).plan,
        inputs=inputs,
        edges=work.edges * work.num_qo_heads,
        bytes=work.bytes,
        lengths=np.asarray(work.row_lengths),
        rule=prompt_rule(work),
        peers={
            "flex": lambda dout: flex_backward(work, inputs, dout, machine),
            "sdpa": lambda dout: sdpa_backward(work, inputs, dout, machine),
        },
    )


def prompt_rule(work: Any) -> ScoreRule:
    """The work's mask, its requests apart, and its score rules."""

    def sees(rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        row = rows[:, None]
        is_own = row // work.seqlen == keys // work.seqlen
        seen: torch.Tensor = is_own & work.keeps(None, None, row % work.seqlen, keys % work.seqlen)
        return seen[:, None]

    return ScoreRule(sees, slopes=tuple(work.slopes()) if work.alibi else None, soft_cap=work.soft_cap)


def chosen_blocks(machine: Machine) -> Subject:
    """Random blocks, a list for every block of rows."""
    work = make_blocks(BlockSparseShape() if machine.is_real else TINY_BLOCKS, machine)
    return Subject(
        name=work.shape.name,
        plan=block_plan(work),
        inputs=work.inputs,
        edges=work.edges,
        bytes=work.bytes,
        lengths=work.row_lengths,
        rule=ScoreRule(lambda rows, keys: work.sees(rows, keys)[:, None]),
        peers={"flex": lambda dout: flex_blocks_backward(work, dout, machine)},
    )


def blocks_per_token(shape: Any, machine: Machine) -> Subject:
    """Lists of every token and KV head."""
    work = make_nsa(shape, machine.device)
    inputs, lengths = (work.q, work.k, work.v), work.row_lengths
    return Subject(
        name=shape.name,
        plan=nsa_plan(work),
        inputs=inputs,
        edges=int(lengths.sum()) * shape.group_size,
        bytes=sum(x.nbytes for x in inputs) + work.q.nbytes,
        lengths=lengths,
        rule=ScoreRule(work.sees),
        peers={
            "fla": lambda dout: fla_nsa_backward(work, dout, machine),
            "fla-public": lambda dout: fla_public_backward(work, dout, machine),
        },
    )


@dataclass(frozen=True)
class HotShape:
    """Rows that all select the same pages, and some of their own."""

    rows: int = 4_096
    num_hot: int = 16  # pages that every row selects
    num_cold: int = 16  # further pages of every row, at random among those left
    pages: int = 1_024
    page_size: int = 64
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        own = f", {self.num_cold} of each row's own" if self.num_cold else ""
        return f"{self.num_hot} pages of {self.page_size} that all {self.rows} rows select{own}"


TINY_HOT = HotShape(8, 1, 1, 4, 16, 4, 2, 16, torch.float32)


def hot_pages(machine: Machine, s: HotShape) -> Subject:
    """One list a row for all heads; no mask, so that every selected key is an edge."""
    from attnconform.kernels import sparse_attention

    device, length = machine.device, s.pages * s.page_size
    own = torch.rand(s.rows, s.pages - s.num_hot, device=device).topk(s.num_cold, dim=1).indices + s.num_hot
    blocks = torch.cat([torch.arange(s.num_hot, device=device).expand(s.rows, -1), own], dim=1)
    width = s.num_hot + s.num_cold
    plan = sparse_attention.plan(
        qo_indptr=[0, s.rows], seqlen_kv=[length], page_table=torch.arange(s.pages, device=device).int()[None],
        page_size=s.page_size, num_pages=s.pages, num_qo_heads=s.num_qo_heads, num_kv_heads=s.num_kv_heads,
        head_dim_qk=s.head_dim, head_dim_vo=s.head_dim, sm_scale=1 / math.sqrt(s.head_dim), dtype=s.dtype,
        device=device,
        candidates=sparse_attention.CandidateLists(
            granularity="block", block_size=s.page_size, sharing="shared",
            indptr=torch.arange(0, (s.rows + 1) * width, width, device=device), indices=blocks.flatten(),
        ),
    )  # fmt: skip
    q = torch.randn(s.rows, s.num_qo_heads, s.head_dim, dtype=s.dtype, device=device)
    k, v = (torch.randn(s.pages, s.page_size, s.num_kv_heads, s.head_dim, device=device).to(s.dtype) for _ in range(2))
    keys = width * s.page_size
    return Subject(
        name=s.name,
        plan=plan,
        inputs=(q, k, v),
        edges=s.rows * s.num_qo_heads * keys,
        bytes=2 * q.nbytes + k.nbytes + v.nbytes,
        lengths=np.full(s.rows, keys, dtype=np.int64),
        rule=ScoreRule(lambda rows, keys: (blocks[rows][..., None] == keys // s.page_size).any(1)[:, None]),
        peers={},
    )
