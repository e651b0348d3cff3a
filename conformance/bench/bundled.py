"""The bundled kernels as calls: a plan's run, and a tier that takes new candidates again and again."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from attnconform.conformance.bench.decode_work import DecodeWork, dense_plan, geometry_of, our_plan


@dataclass(eq=False)
class PlanRun:
    """The launch of a plan made before, and its outputs."""

    work: DecodeWork
    plan: Any
    out: torch.Tensor = field(init=False)
    lse: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.out = torch.full_like(self.work.q, float("nan"))
        self.lse = torch.full(self.work.q.shape[:2], float("nan"), device=self.work.q.device)

    @classmethod
    def sparse(cls, work: DecodeWork, **hints: Any) -> "PlanRun":
        return cls(work, our_plan(work, **hints))

    @classmethod
    def dense(cls, work: DecodeWork) -> "PlanRun":
        return cls(work, dense_plan(work))

    def __call__(self) -> None:
        from attnconform.kernels.sparse_attention import run

        run(self.plan, self.work.q, self.work.k_cache, self.work.v_cache, out=self.out, lse=self.lse)


@dataclass(eq=False)
class TierRun:
    """Index and attention of one tier for any of some sets that share shape, cache and page table."""

    first: DecodeWork
    capacity: int
    hints: dict[str, Any] = field(default_factory=dict)
    out: torch.Tensor = field(init=False)
    lse: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.out = torch.full_like(self.first.q, float("nan"))
        self.lse = torch.full(self.first.q.shape[:2], float("nan"), device=self.first.q.device)
        shape = self.first.shape
        self.seqlen_kv = torch.full((shape.batch,), shape.seqlen_kv, device=self.first.q.device, dtype=torch.int32)

    @cached_property
    def tier(self) -> Any:
        from attnconform.kernels.sparse_attention.tier import plan_tier

        shape = self.first.shape
        return plan_tier(
            batch_size=shape.batch,
            capacity=self.capacity,
            max_seqlen_kv=shape.seqlen_kv,
            granularity=shape.granularity,
            block_size=shape.block_size,
            **geometry_of(self.first),
            **self.hints,
        )

    def index(self, work: DecodeWork) -> None:
        """Candidates to sorted unique tokens, slots and tasks."""
        self.tier.update(seqlen_kv=self.seqlen_kv, page_table=work.page_table, indptr=work.indptr, indices=work.indices)

    def attend(self, work: DecodeWork) -> None:
        from attnconform.kernels.sparse_attention import run

        run(self.tier.plan, work.q, work.k_cache, work.v_cache, out=self.out, lse=self.lse)

    def from_candidates(self, work: DecodeWork) -> None:
        """Index and attention as one step."""
        self.tier.step(
            work.q, work.k_cache, work.v_cache, out=self.out, lse=self.lse, seqlen_kv=self.seqlen_kv,
            page_table=work.page_table, indptr=work.indptr, indices=work.indices,
        )  # fmt: skip

    def launched(self, work: DecodeWork) -> None:
        """The same, launch by launch, as on tensors that no graph was captured for."""
        self.index(work)
        self.attend(work)

    @property
    def reserved_bytes(self) -> int:
        """All that the tier holds, for lists of its full capacity."""
        tensors = [v for v in self.tier.fixed.values() if isinstance(v, torch.Tensor)]
        return self.tier.plan.workspace_bytes + sum(t.nbytes for t in tensors)


def path_of(plan: Any) -> str:
    """Which code a plan's launches run, with what was compiled in."""
    shapes = [launch.shape for launch in plan.launches]
    tiles = ", ".join(f"{s.tile_m}x{s.tile_kv} warps {s.num_warps} stages {s.num_stages}" for s in shapes)
    merges = sum(launch.merges.shape[0] for launch in plan.launches)
    return f"sparse_attention.run [{tiles}]{', merge' if merges else ''}"


def has_merge(plan: Any) -> bool:
    """Whether partial states of some rows are merged."""
    return any(launch.merges.shape[0] for launch in plan.launches)
