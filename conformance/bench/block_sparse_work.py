"""Long prompts whose blocks of query rows each read chosen blocks of keys: shapes, choices, and the bundled plan."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.prefill_work import Inputs
from attnconform.reference.cost.traffic import kv_bytes, step_bytes


@dataclass(frozen=True)
class BlockSparseShape:
    """One request; every block of query rows has one list for all heads."""

    seqlen: int = 32_768
    rows: int | None = None  # query rows, the last of the request; None: all of them
    rate: float = 1 / 8  # of the blocks that a row may read
    block_size: int = 128
    is_causal: bool = False
    num_qo_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def seqlen_q(self) -> int:
        return self.seqlen if self.rows is None else self.rows

    @property
    def num_blocks(self) -> int:
        """Of keys."""
        return self.seqlen // self.block_size

    @property
    def first_block(self) -> int:
        """The block of keys that the first block of rows is."""
        return (self.seqlen - self.seqlen_q) // self.block_size

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads

    @property
    def name(self) -> str:
        causal = ", causal" if self.is_causal else ""
        return f"random {self.rate:.1%} of {self.block_size}x{self.block_size} blocks{causal}, T {self.seqlen}"


TINY_BLOCKS = BlockSparseShape(
    48, rate=1 / 3, block_size=16, num_qo_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32
)


@dataclass(frozen=True, eq=False)
class BlockSparseWork:
    """Inputs and choices of one prompt."""

    shape: BlockSparseShape
    inputs: Inputs  # pages of a block
    chosen: torch.Tensor  # (blocks of rows, num_blocks) bool: which blocks of keys each block of rows reads

    @property
    def counts(self) -> torch.Tensor:
        """Listed blocks of every block of rows."""
        return self.chosen.sum(-1)

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """Keys that every row sees: in its own block of a causal prompt, those up to itself."""
        s = self.shape
        lengths = (self.counts.cpu().numpy().astype(np.int64) * s.block_size).repeat(s.block_size)
        if s.is_causal:
            lengths -= s.block_size - 1 - np.arange(s.seqlen_q) % s.block_size
        return lengths

    @property
    def edges(self) -> int:
        """(query head, query, key) triples."""
        return int(self.row_lengths.sum()) * self.shape.num_qo_heads

    @property
    def rate(self) -> float:
        """Of the pairs of a dense pass."""
        s = self.shape
        pairs = s.seqlen_q * s.seqlen
        if s.is_causal:
            pairs -= s.seqlen_q * (s.seqlen_q - 1) // 2
        return float(self.row_lengths.sum()) / pairs

    @property
    def bytes(self) -> int:
        """Keys and values once, queries, ids, outputs. [COST-BYTES]"""
        s, width = self.shape, self.shape.dtype.itemsize
        kv = kv_bytes(s.seqlen, head_dim_qk=s.head_dim, num_kv_heads=s.num_kv_heads, k_bytes=width, v_bytes=width)
        moved = step_bytes(
            kv, num_rows=s.seqlen_q * s.num_qo_heads, head_dim_qk=s.head_dim, head_dim_vo=s.head_dim,
            index_read=4 * int(self.counts.sum()), element_bytes=width,
        )  # fmt: skip
        return int(moved)

    def sees(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which of these keys each of these rows reads, (rows, keys)."""
        s = self.shape
        seen = self.chosen[rows[:, None] // s.block_size, keys // s.block_size]
        return seen & (keys <= s.seqlen - s.seqlen_q + rows[:, None]) if s.is_causal else seen

    def dense(self) -> "BlockSparseWork":
        """Every block that a row may read."""
        blocks = torch.ones_like(self.chosen)
        return BlockSparseWork(
            self.shape, self.inputs, blocks.tril(self.shape.first_block) if self.shape.is_causal else blocks
        )


def make_blocks(shape: BlockSparseShape, machine: Machine) -> BlockSparseWork:
    """Random data; equally many random blocks a row, or of a causal prompt its own and a share of those before."""
    q = torch.randn(shape.seqlen_q, shape.num_qo_heads, shape.head_dim, dtype=shape.dtype, device=machine.device)
    pages = (shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    k, v = (torch.randn(pages, dtype=shape.dtype, device=machine.device) for _ in range(2))
    return BlockSparseWork(shape, (q, k, v), choose_blocks(shape, machine.device))


def choose_blocks(shape: BlockSparseShape, device: str) -> torch.Tensor:
    """A block of rows takes those of its candidates that a random order puts first."""
    n, first = shape.num_blocks, shape.first_block
    own = torch.arange(first, n, device=device)[:, None]
    score = torch.rand(n - first, n, device=device)
    candidates = torch.full_like(own, n)
    if shape.is_causal:
        number = torch.arange(n, device=device)
        score = torch.where(number == own, -1.0, torch.where(number > own, 2.0, score))
        candidates = own + 1
    wanted = (shape.rate * candidates).round().clamp_min(1)
    return score.argsort(-1).argsort(-1) < wanted


def block_plan(work: BlockSparseWork, **hints: Any) -> Any:
    """The bundled plan of the lists; of a causal prompt, with the rule that its own blocks need."""
    from attnconform.kernels import sparse_attention
    from attnconform.kernels.sparse_attention import rules

    s, q = work.shape, work.inputs[0]
    return sparse_attention.plan(
        qo_indptr=torch.tensor([0, s.seqlen_q], device=q.device),
        seqlen_kv=torch.tensor([s.seqlen], device=q.device),
        page_table=torch.arange(s.num_blocks, device=q.device).int()[None],
        page_size=s.block_size,
        num_pages=s.num_blocks,
        num_qo_heads=s.num_qo_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim_qk=s.head_dim,
        head_dim_vo=s.head_dim,
        sm_scale=1 / math.sqrt(s.head_dim),
        dtype=s.dtype,
        device=q.device,
        mask_rule=rules.Causal() if s.is_causal else None,
        candidates=sparse_attention.CandidateLists(
            granularity="block",
            block_size=s.block_size,
            sharing="shared",
            q_block_size=s.block_size,
            indptr=torch.cat([work.counts.new_zeros(1), work.counts.cumsum(0)]).int(),
            indices=work.chosen.nonzero()[:, 1].int(),
        ),
        **hints,
    )
