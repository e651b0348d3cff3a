"""The block mask of a window and documents, built on the device beside create_block_mask."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from attnconform.conformance.bench.blocks import Block, Taken, blocks
from attnconform.conformance.bench.figures import Figures
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.flex import BLOCK, block_mask_of
from attnconform.conformance.bench.peers.peer import PeerBench, PeerRun
from attnconform.conformance.bench.prefill_work import PrefillWork, works
from attnconform.conformance.bench.row import BenchRow

STAGE = "block mask"
PARTIAL, FULL = 1.0, 2.0


def block_mask_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """One row: which blocks hold an edge, and which hold nothing else."""
    work = next(w for w in works(machine) if w.documents)
    taken, peer, errors = Taken(), PeerBench(options.peer, machine), list[float]()
    for block in blocks(machine):
        errors += time_block(work, block, taken, peer, options)
    samples, peers = taken.joined()[STAGE], peer.by_stage()
    yield BenchRow(
        suite="prefill",
        phase="prefill",
        work=work.name,
        stage=STAGE,
        ours=samples.timing,
        figures=Figures(recompiles=samples.recompiles),
        peer=peers.get(STAGE, peers.get("")),
        rate=work.rate,
        error=errors[0],
        path="sparse_attention.block_mask.build_block_mask",
    )


def time_block(work: PrefillWork, block: Block, taken: Taken, peer: PeerBench, options: BenchOptions) -> list[float]:
    """Ours, then the peer's; in the first block, the share of blocks to which ours gives a wrong kind."""
    machine = block.machine
    taken.add(STAGE, block.measure(partial(our_block_mask, work, machine), options.seconds))
    if options.peer is None and not block.is_first:
        return []
    kinds = our_kinds(our_block_mask(work, machine))
    if options.peer is not None:
        peer.time(block, lambda: created(work, machine), (kinds, None), seconds=options.seconds)
    return [float((kinds != wanted_kinds(work, machine)).float().mean())] if block.is_first else []


def our_block_mask(work: PrefillWork, machine: Machine) -> Any:
    """As a caller builds it, from a rule."""
    from attnconform.kernels.sparse_attention.block_mask import Extent, build_block_mask

    extent = Extent(seqlen_q=work.seqlen, seqlen_kv=work.seqlen, q_block_size=BLOCK, kv_block_size=BLOCK)
    return build_block_mask(work.mask_rule(), extent, device=machine.device)


def our_kinds(mask: Any) -> torch.Tensor:
    """Kind of every (block of rows, block of keys): 0 where it has no edge."""
    partly, whole = (listed(table.counts[0], table.indices[0]) for table in (mask.partial, mask.full))
    return PARTIAL * partly + FULL * whole


def created(work: PrefillWork, machine: Machine) -> PeerRun:
    return PeerRun(
        name="create_block_mask",
        stages={STAGE: [partial(block_mask_of, work, machine)]},
        answer=lambda: (their_kinds(block_mask_of(work, machine)), None),
        outputs="lists of partial and of full blocks, and both transposed",
    )


def their_kinds(mask: Any) -> torch.Tensor:
    """The same of a BlockMask of FlexAttention."""
    partly = listed(mask.kv_num_blocks[0, 0], mask.kv_indices[0, 0])
    whole = listed(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0])
    return PARTIAL * partly + FULL * whole


def listed(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Lists of columns as a matrix of 0 and 1; entries past a row's count mean nothing."""
    is_meant = torch.arange(indices.shape[-1], device=indices.device) < counts[:, None]
    matrix = torch.zeros(indices.shape, device=indices.device)
    rows, places = is_meant.nonzero(as_tuple=True)
    matrix[rows, indices[rows, places].long()] = 1.0
    return matrix


def wanted_kinds(work: PrefillWork, machine: Machine) -> torch.Tensor:
    """What the mask itself says, block row by block row; a ragged last block is full where every pair of it is kept."""
    kv_idx = torch.arange(work.seqlen, device=machine.device)
    width = -(-work.seqlen // BLOCK)
    rows = []
    for first in range(0, work.seqlen, BLOCK):
        kept = work.keeps(None, None, kv_idx[first : first + BLOCK, None], kv_idx)
        owner = kv_idx // BLOCK
        edges = torch.zeros(width, device=machine.device).index_add_(0, owner, kept.sum(0).float())
        pairs = kept.shape[0] * torch.bincount(owner, minlength=width)
        rows.append(PARTIAL * (edges > 0) + (FULL - PARTIAL) * (edges == pairs))
    return torch.stack(rows)
