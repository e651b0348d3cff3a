"""Suite index: 512 lists of 272 pages, in any order and partly twice, to sorted unique tokens with slots and tasks."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.blocks import Block, Taken, blocks
from attnconform.conformance.bench.bundled import TierRun, path_of
from attnconform.conformance.bench.decode_work import TINY, DecodeShape, DecodeWork, make_sets, make_work
from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.peer import PeerBench, PeerRun
from attnconform.conformance.bench.row import BenchRow
from attnconform.conformance.bench.timing import Samples

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
    taken, peer, rows = Taken(), PeerBench("torch operations", machine), list[BenchRow]()
    for block in blocks(machine):
        rows += time_block(make_sets(make_work(shape, machine), machine), block, taken, peer, options)
    samples, peers = taken.joined()["index"], peer.by_stage()
    figures = replaced(rows[0].figures, recompiles=samples.recompiles)
    yield replaced(rows[0], ours=samples.timing, figures=figures, peer=peers.get("index", peers.get("")))


def time_block(
    sets: list[DecodeWork], block: Block, taken: Taken, peer: PeerBench, options: BenchOptions
) -> list[BenchRow]:
    """Ours, then torch's; in the first block, the row, whose times are those of this block."""
    listed = [listed_twice(work) for work in sets]
    tier = TierRun(sets[0], capacity=sets[0].shape.candidates)
    samples = taken.add("index", block.measure([partial(tier.index, one) for one in listed], options.seconds))
    tier.index(listed[0])
    tier.tier.raise_if_refused()
    ours = listed_slots(tier, sets[0])
    peer.time(block, lambda: torch_run(listed), (ours, None), seconds=options.seconds)
    error = float((ours != sorted_slots(sets[0])).sum())
    return [index_row(sets, listed, tier, samples, error)] if block.is_first else []


def torch_run(listed: list[DecodeWork]) -> PeerRun:
    """As far as torch's operations come without waiting for the device."""
    return PeerRun(
        name="torch operations, pages only",
        stages={"index": [partial(torch_index, one) for one in listed]},
        answer=lambda: (unique_slots(listed[0]), None),
        outputs="pages and slots, no tasks",
    )


def index_row(
    sets: list[DecodeWork], listed: list[DecodeWork], tier: TierRun, samples: Samples, error: float
) -> BenchRow:
    work, shape = sets[0], sets[0].shape
    entries = listed[0].indices.numel()
    per_list, distinct = (w.indices.numel() // shape.num_lists for w in (listed[0], work))
    return BenchRow(
        suite="index",
        phase="decode",
        work=f"{shape.num_lists} lists of {per_list} pages, {per_list - distinct} of them twice",
        stage="index",
        ours=samples.timing,
        figures=Figures(
            bytes_ideal=entries * 4 + int(work.list_lengths.sum()) * tier.tier.plan.list_slots.element_size(),
            workspace_reserved=tier.reserved_bytes,
            workspace_used=tier.reserved_bytes,
        ),
        rate=work.rate,
        error=error,
        path=path_of(tier.tier.plan),
        sets=len(sets),
    )


def listed_slots(tier: TierRun, work: DecodeWork) -> torch.Tensor:
    """The slots that a tier lists, sorted in every list: a hint chooses in which order it has them."""
    return tier.tier.plan.list_slots.view(work.shape.num_lists, -1).sort(-1).values


def unique_slots(listed: DecodeWork) -> torch.Tensor:
    """The slots that torch's operations found, repetitions left out, sorted in every list."""
    ids, slots = torch_index(listed)
    return slots[ids >= 0].view(listed.shape.num_lists, -1).sort(-1).values


def sorted_slots(work: DecodeWork) -> torch.Tensor:
    """The slots of every list, sorted, (lists, tokens): what an index has to hold in some order."""
    return work.slots.view(work.shape.num_lists, -1).sort(-1).values
