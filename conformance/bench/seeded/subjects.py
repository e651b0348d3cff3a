"""What a diagnosis takes apart: index, attention and a whole step of one way to run a batch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from attnconform.conformance.bench.bundled import TierRun
from attnconform.conformance.bench.decode_work import DecodeWork, geometry_of
from attnconform.conformance.bench.evidence import FixedCost
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.seeded.batch import usual_capacity

SPLITS = 16  # of every list: a long row is then shorter than a processor's share of this batch


class Subject:
    """A tier that is large enough for every batch, and splits long rows: nothing is wrong with it."""

    name = "healthy"
    splits = SPLITS

    def __init__(self, batches: list[DecodeWork], machine: Machine) -> None:
        self.machine = machine
        self.counts: Counter[str] = Counter()
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.runner = TierRun(batches[0], self.capacity(batches, machine), hints={"num_kv_splits": self.splits})

    def capacity(self, batches: list[DecodeWork], machine: Machine) -> int:
        """Tokens that a list may have."""
        return max(int(work.list_lengths.max()) for work in batches)

    def index(self, work: DecodeWork) -> None:
        self.runner.index(work)

    def attend(self, work: DecodeWork) -> None:
        """Attention over the lists that were indexed last."""
        self.runner.attend(work)

    def step(self, work: DecodeWork) -> None:
        """From candidates to output, as one graph where there is a GPU."""
        if self.machine.is_real:
            self.graph_of(work).replay()
        else:
            self.step_eagerly(work)

    def step_eagerly(self, work: DecodeWork) -> None:
        self.index(work)
        self.attend(work)

    def graph_of(self, work: DecodeWork) -> torch.cuda.CUDAGraph:
        """The step of one input set, captured when it is first seen."""
        if id(work) not in self.graphs:
            self.step_eagerly(work)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.step_eagerly(work)
            self.graphs[id(work)] = graph
        return self.graphs[id(work)]

    def answer(self, work: DecodeWork) -> torch.Tensor:
        self.step(work)
        return self.runner.out

    @property
    def plan(self) -> Any:
        """Whose task table says how work is dealt out; of the batch indexed last."""
        return self.runner.tier.plan

    @property
    def fixed(self) -> FixedCost:
        """What was counted around the kernels so far."""
        return FixedCost(replans=self.counts["replans"], graph_exits=self.counts["graph exits"])


class OneProgramPerRow(Subject):
    """A long row is one program: most processors are done while a few go on."""

    name = "one program per row"
    splits = 1


class GathersPerQueryHead(Subject):
    """Every query head copies its group's keys and values to a scratch cache of its own, and attends over that."""

    name = "a copy per query head"

    def __init__(self, batches: list[DecodeWork], machine: Machine) -> None:
        super().__init__(batches, machine)
        self.scratches: dict[bytes, Scratch] = {}  # by the lengths of a batch's lists
        self.slots: dict[int, torch.Tensor] = {}
        self.last: Scratch | None = None

    def attend(self, work: DecodeWork) -> None:
        """The copy is made here, whatever the tier has indexed."""
        key = work.list_lengths.tobytes()
        if key not in self.scratches:
            self.scratches[key] = Scratch(work)
        if id(work) not in self.slots:
            self.slots[id(work)] = scratch_slots(work)
        self.last = self.scratches[key]
        self.last.copy_and_attend(work, self.slots[id(work)])

    def step(self, work: DecodeWork) -> None:
        self.step_eagerly(work)  # each copy has a scratch of its own, too large to keep one in every graph

    def answer(self, work: DecodeWork) -> torch.Tensor:
        self.step(work)
        assert self.last is not None
        return self.last.out

    @property
    def plan(self) -> Any:
        assert self.last is not None
        return self.last.plan


def row_lengths(work: DecodeWork) -> torch.Tensor:
    """Tokens of every request's lists, which are equal over its heads."""
    return torch.as_tensor(work.list_lengths, device=work.q.device)[:: work.shape.num_kv_heads]


def scratch_slots(work: DecodeWork) -> torch.Tensor:
    """Slot of every scratch token, of each KV head: a request's tokens in order, requests after each other."""
    s, lengths = work.shape, row_lengths(work)
    _, owner = work.positions
    every = torch.as_tensor(work.list_lengths, device=owner.device)
    rank = torch.arange(owner.numel(), device=owner.device) - (every.cumsum(0) - every)[owner]
    first_of_request = lengths.cumsum(0) - lengths
    slots = torch.empty(int(lengths.sum()), s.num_kv_heads, dtype=torch.int64, device=owner.device)
    slots[first_of_request[owner // s.num_kv_heads] + rank, owner % s.num_kv_heads] = work.slots
    return slots


class Scratch:
    """A cache with a KV head for each query head, and a plan over all of it, for batches of the same lengths."""

    def __init__(self, work: DecodeWork) -> None:
        s, device, lengths = work.shape, work.q.device, row_lengths(work)
        self.head_of = torch.arange(s.num_qo_heads, device=device) // s.group_size
        shape = (int(lengths.sum()) // s.page_size, s.page_size, s.num_qo_heads, s.head_dim)
        self.k, self.v = (torch.empty(shape, dtype=s.dtype, device=device) for _ in range(2))
        self.out = torch.full_like(work.q, float("nan"))
        self.lse = torch.full(work.q.shape[:2], float("nan"), device=device)
        self.plan = self.make_plan(work, lengths)

    def make_plan(self, work: DecodeWork, lengths: torch.Tensor) -> Any:
        """Every key of the scratch cache."""
        from attnconform.kernels import sparse_attention

        s, device = work.shape, work.q.device
        pages = lengths // s.page_size
        number = torch.arange(int(pages.max()), device=device)
        first = pages.cumsum(0) - pages
        table = torch.where(number < pages[:, None], first[:, None] + number, -1).int()
        geometry = geometry_of(work) | {"num_pages": self.k.shape[0], "num_kv_heads": s.num_qo_heads}
        return sparse_attention.plan(
            qo_indptr=torch.arange(s.batch + 1, device=device), seqlen_kv=lengths, page_table=table, **geometry
        )

    def copy_and_attend(self, work: DecodeWork, slots: torch.Tensor) -> None:
        from attnconform.kernels.sparse_attention import run

        s = work.shape
        for scratch, cache in ((self.k, work.k_cache), (self.v, work.v_cache)):
            by_slot = cache.view(-1, s.num_kv_heads, s.head_dim)
            scratch.view(-1, s.num_qo_heads, s.head_dim).copy_(by_slot[slots[:, self.head_of], self.head_of])
        run(self.plan, work.q, self.k, self.v, out=self.out, lse=self.lse)


class OutgrowsTier(Subject):
    """A tier for usual lists; a longer list leaves the graph, waits, and plans a tier of its own."""

    name = "outgrows its tier"

    def capacity(self, batches: list[DecodeWork], machine: Machine) -> int:
        return usual_capacity(machine)

    def index(self, work: DecodeWork) -> None:
        if self.fits(work):
            super().index(work)

    def fits(self, work: DecodeWork) -> bool:
        return int(work.list_lengths.max()) <= self.runner.capacity

    def step(self, work: DecodeWork) -> None:
        if self.fits(work):
            super().step(work)
        else:
            self.run_outside(work)

    def run_outside(self, work: DecodeWork) -> None:
        """Memory is given back first, as where a tier and its successor do not fit side by side."""
        self.counts["graph exits"] += 1
        self.counts["replans"] += 1
        self.machine.synchronize()
        self.machine.release()
        larger = TierRun(work, int(work.list_lengths.max()), hints={"num_kv_splits": self.splits})
        larger.from_candidates(work)
        larger.tier.raise_if_refused()
        self.runner.out.copy_(larger.out)
        self.runner.lse.copy_(larger.lse)


SUBJECTS: dict[str, type[Subject]] = {
    "healthy": Subject,
    "gather": GathersPerQueryHead,
    "long-row": OneProgramPerRow,
    "tier": OutgrowsTier,
}
