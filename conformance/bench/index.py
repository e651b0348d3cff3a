"""Suite index: 512 lists of 272 pages, in any order and partly twice, to sorted unique tokens with slots and tasks."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from attnconform.conformance.bench.bundled import TierRun, path_of
from attnconform.conformance.bench.decode_work import TINY, DecodeShape, DecodeWork, make_work
from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.peer import PeerRun, time_peer
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import measure

REPEATED = 8  # pages of a list that both the selector and the window name


def listed_twice(work: DecodeWork) -> DecodeWork:
    """The lists shuffled, with some entries repeated, as a selector joined with a window gives them."""
    ids = work.indices.view(work.shape.num_lists, -1)
    repeated = min(REPEATED, ids.shape[1])
    entries = torch.cat([ids, ids[:, :repeated]], dim=1)
    order = torch.rand(entries.shape, device=ids.device).argsort(-1)
    shuffled = torch.gather(entries, 1, order).contiguous()
    indptr = torch.arange(0, shuffled.numel() + 1, shuffled.shape[1], device=ids.device, dtype=torch.int32)
    return replace(work, indptr=indptr, indices=shuffled.reshape(-1))


def torch_index(work: DecodeWork) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with torch operations and no synchronization: sorted page of every entry, -1 for a repetition; slots."""
    s = work.shape
    ids = work.indices.view(s.num_lists, -1).sort(dim=-1).values
    is_new = torch.ones_like(ids, dtype=torch.bool)
    is_new[:, 1:] = ids[:, 1:] != ids[:, :-1]
    table = work.page_table.repeat_interleave(s.num_kv_heads, dim=0)
    pages = torch.gather(table, 1, ids.long())
    slots = pages.long()[:, :, None] * s.page_size + torch.arange(s.page_size, device=ids.device)
    return torch.where(is_new, ids, -1), slots


def index_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Our index of a batch beside torch's operations."""
    shape = DecodeShape(batch=64) if machine.is_real else TINY
    work = make_work(shape, machine)
    listed = listed_twice(work)
    tier = TierRun(work, capacity=shape.candidates)
    taken = measure(lambda: tier.index(listed), machine, seconds=options.seconds)
    tier.tier.raise_if_refused()
    ours = tier.tier.plan.list_slots.view(shape.num_lists, -1).sort(-1).values
    error = float((ours != sorted_slots(work)).sum())

    def build() -> PeerRun:
        return PeerRun(
            name="torch operations, pages only",
            stages={"index": [lambda: torch_index(listed)]},
            answer=lambda: (unique_slots(listed), None),
            outputs="pages and slots, no tasks",
        )

    peer = time_peer("torch operations", build, machine, (ours, None), seconds=options.seconds)
    entries = listed.indices.numel()
    per_list, distinct = (w.indices.numel() // shape.num_lists for w in (listed, work))
    tokens = int(work.list_lengths.sum())
    yield BenchRow(
        suite="index",
        phase="decode",
        work=f"{shape.num_lists} lists of {per_list} pages, {per_list - distinct} of them twice",
        stage="index",
        ours=taken.timing,
        figures=Figures(
            bytes_ideal=entries * 4 + tokens * (8 + 4),
            workspace_reserved=tier.reserved_bytes,
            workspace_used=tier.reserved_bytes,
            recompiles=taken.recompiles,
        ),
        peer=peer.get("index", peer.get("")),
        rate=work.rate,
        error=error,
        path=path_of(tier.tier.plan),
    )


def unique_slots(listed: DecodeWork) -> torch.Tensor:
    """The slots that torch's operations found, repetitions left out, sorted in every list."""
    ids, slots = torch_index(listed)
    return slots[ids >= 0].view(listed.shape.num_lists, -1).sort(-1).values


def sorted_slots(work: DecodeWork) -> torch.Tensor:
    """The slots of every list, sorted, (lists, tokens): what an index has to hold in some order."""
    return work.slots.view(work.shape.num_lists, -1).sort(-1).values
