"""Long prompts whose every token selects blocks per KV head: shapes, selections, and the bundled kernels' plan."""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attnconform.conformance.bench.machine import Machine


@dataclass(frozen=True)
class NsaShape:
    """One request of seqlen rows."""

    seqlen: int = 32_768
    num_qo_heads: int = 64
    num_kv_heads: int = 4
    head_dim: int = 128
    block_size: int = 64
    blocks_per_row: int = 16
    dtype: torch.dtype = torch.bfloat16
    kept: float = 0.0  # share of a row's blocks that it has from the row before

    @property
    def name(self) -> str:
        kind = f"{self.kept:.0%} kept from row to row" if self.kept else "random"
        return (
            f"{self.blocks_per_row} blocks of {self.block_size} a row and KV head, {kind}, T {self.seqlen}, heads "
            f"{self.num_qo_heads}/{self.num_kv_heads}"
        )

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads


TINY_NSA = NsaShape(
    16, num_qo_heads=4, num_kv_heads=2, head_dim=16, block_size=2, blocks_per_row=4, dtype=torch.float32
)
KEPT = (0.0, 0.75)


def shapes(machine: Machine) -> list[NsaShape]:
    """Random selections, and clustered ones."""
    base = NsaShape() if machine.is_real else TINY_NSA
    return [replace(base, kept=kept) for kept in KEPT]


@dataclass(frozen=True, eq=False)
class NsaWork:
    """Inputs and selections of one prompt."""

    shape: NsaShape
    q: torch.Tensor  # (seqlen, num_qo_heads, head_dim)
    k: torch.Tensor  # (blocks, block_size, num_kv_heads, head_dim), in order
    v: torch.Tensor
    blocks: torch.Tensor  # (seqlen, num_kv_heads, blocks_per_row) int32, -1 where a row has fewer

    @property
    def row_lengths(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Keys that every (row, KV head) sees."""
        s = self.shape
        row = torch.arange(s.seqlen, device=self.q.device)[:, None, None]
        seen = (row - self.blocks * s.block_size + 1).clamp(0, s.block_size)
        return torch.where(self.blocks >= 0, seen, 0).sum(-1).flatten().cpu().numpy().astype(np.int64)

    def sees(self, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which of these keys each of these rows selects, (rows, num_kv_heads, keys)."""
        listed = torch.zeros(len(rows), self.shape.num_kv_heads, len(keys), dtype=torch.bool, device=keys.device)
        for blocks in self.blocks[rows].unbind(-1):
            listed |= blocks[..., None] == keys // self.shape.block_size
        return listed & (keys <= rows[:, None])[:, None]


def make_nsa(shape: NsaShape, device: str) -> NsaWork:
    """Each row's own block, and others before it."""
    q = torch.randn(shape.seqlen, shape.num_qo_heads, shape.head_dim, dtype=shape.dtype, device=device)
    pages = (shape.seqlen // shape.block_size, shape.block_size, shape.num_kv_heads, shape.head_dim)
    k, v = (torch.randn(pages, dtype=shape.dtype, device=device) for _ in range(2))
    return NsaWork(shape, q, k, v, draw_blocks(shape, device))


def draw_blocks(shape: NsaShape, device: str) -> torch.Tensor:
    """Blocks of every (row, KV head), ascending, holes last: its own, and one of every class of those before it.

    Block ids are in classes by their remainder, so that no two draws meet. A draw serves neighbouring rows, as many as
    `kept` says, and every class begins at a row of its own: so many classes change from one row to the next.
    """
    classes, rows_of_draw = shape.blocks_per_row - 1, round(1 / (1 - shape.kept))
    row, number = torch.arange(shape.seqlen, device=device)[:, None], torch.arange(classes, device=device)
    own = row // shape.block_size
    u = torch.rand((shape.seqlen + classes) // rows_of_draw + 1, shape.num_kv_heads, classes, device=device)
    drawn = u[(row + number) // rows_of_draw, :, number]  # (seqlen, classes, num_kv_heads)
    members = ((own - number + classes - 1) // classes).clamp_min(0)[..., None]  # ids of a class before the own block
    ids = number[:, None] + classes * (drawn * members).long()
    none = shape.seqlen // shape.block_size
    ids = torch.where(members > 0, ids, none).transpose(1, 2)
    own = own[..., None].expand(-1, shape.num_kv_heads, 1)
    chosen = torch.cat([ids, own], dim=-1).sort(-1).values
    return torch.where(chosen < none, chosen, -1).int()


def nsa_plan(work: NsaWork, **hints: Any) -> Any:
    """Lists per row and KV head, and the causal rule for the row's own block."""
    from attnconform.kernels import sparse_attention
    from attnconform.kernels.sparse_attention import rules

    s, device = work.shape, work.q.device
    lists, width = s.seqlen * s.num_kv_heads, work.blocks.shape[-1]
    return sparse_attention.plan(
        qo_indptr=torch.tensor([0, s.seqlen], device=device),
        seqlen_kv=torch.tensor([s.seqlen], device=device),
        page_table=torch.arange(work.k.shape[0], device=device).int()[None],
        page_size=s.block_size,
        num_pages=work.k.shape[0],
        num_qo_heads=s.num_qo_heads,
        num_kv_heads=s.num_kv_heads,
        head_dim_qk=s.head_dim,
        head_dim_vo=s.head_dim,
        sm_scale=1 / math.sqrt(s.head_dim),
        dtype=s.dtype,
        device=device,
        mask_rule=rules.Causal(),
        candidates=sparse_attention.CandidateLists(
            granularity="block",
            block_size=s.block_size,
            sharing="kv_head",
            q_block_size=1,
            indptr=torch.arange(0, (lists + 1) * width, width, device=device, dtype=torch.int32),
            indices=work.blocks.reshape(-1),
        ),
        **hints,
    )
