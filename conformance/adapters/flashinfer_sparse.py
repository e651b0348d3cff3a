"""FlashInfer's block-sparse wrappers, one request at a time: blocks of one size with bits inside, or of any sizes."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnconform.conformance.adapters.flashinfer_package import (
    SHARED_BY_A_GROUP,
    FlashInfer,
    HeadGroup,
    head_groups,
    soft_cap,
)
from attnconform.conformance.adapters.per_request import Attended, PerRequest
from attnconform.conformance.backend import Domain, Forward, OneOf, Tensors
from attnconform.conformance.views import ProblemView
from attnconform.reference.candidates import HOLE

# Neither wrapper plans for no keys at all.
WITH_KEYS: dict[str, Domain] = {"lengths": OneOf(("one", "page_edge", "tile_edge", "long_and_short"))}
Q_BLOCK, KV_BLOCK = 2, 1  # of problems without lists; lists have blocks of 1 or 4 rows, and of 1 or 16 keys


@dataclass(frozen=True)
class Tiles:
    """A dense mask as blocks, ragged ends filled up with False."""

    indptr: Tensor  # (num_q_blocks + 1,) int32
    indices: Tensor  # (num_blocks,) int32
    members: Tensor  # (num_blocks, q_block_size, kv_block_size) bool


def tiles_of(mask: Tensor, q_block_size: int, kv_block_size: int) -> Tiles:
    """Blocks of (seqlen_q, seqlen_kv) with anything in them, in CSR."""
    blocks = blocks_of(mask, q_block_size, kv_block_size)
    listed = blocks.any(dim=3).any(dim=2)
    indptr = pad(listed.sum(dim=1).cumsum(dim=0), (1, 0))
    return Tiles(indptr.int(), listed.nonzero()[:, 1].int(), blocks[listed])


def blocks_of(mask: Tensor, q_block_size: int, kv_block_size: int) -> Tensor:
    """(seqlen_q, seqlen_kv) as (num_q_blocks, num_kv_blocks, q_block_size, kv_block_size), filled up with False."""
    rows, keys = mask.shape
    filled = pad(mask, (0, -keys % kv_block_size, 0, -rows % q_block_size))
    return filled.unflatten(1, (-1, kv_block_size)).unflatten(0, (-1, q_block_size)).transpose(1, 2)


class FlashInferBlockSparse(FlashInfer, PerRequest):
    """BlockSparseAttentionWrapper: blocks of the lists' own size, with a mask of elements where one is not whole."""

    name = "flashinfer-bsr"
    supported: ClassVar[dict[str, Domain]] = WITH_KEYS

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for group in head_groups(problem.spec):
            heads = group.qo_heads
            part_out, part_lse = self.attend_group(
                problem, group, self.tiles(problem, request, group), q[heads], k[group.kv_heads], v[group.kv_heads]
            )
            out[heads], lse[heads] = part_out.transpose(0, 1), part_lse.transpose(0, 1)
        return Attended(out, lse, self.name)

    def tiles(self, problem: ProblemView, request: int, group: HeadGroup) -> Tiles:
        """What a group's heads attend."""
        return tiles_of(problem.masks[request][group.qo_heads.start], *block_sizes(problem))

    def attend_group(
        self, problem: ProblemView, group: HeadGroup, tiles: Tiles, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """out (seqlen_q, heads, head_dim) and lse of heads that attend alike."""
        rows, (q_block, kv_block) = q.shape[1], block_sizes(problem)
        q, k, v = (filled(x, size) for x, size in ((q, q_block), (k, kv_block), (v, kv_block)))
        wrapper = self.flashinfer.BlockSparseAttentionWrapper(self.workspace, backend="fa2")
        wrapper.plan(
            tiles.indptr,
            tiles.indices,
            len(q),
            len(k),
            q_block,
            kv_block,
            group.num_qo_heads,
            group.num_kv_heads,
            problem.spec.head_dim_qk,
            mask=None if tiles.members.all() else tiles.members,
            logits_soft_cap=soft_cap(problem.spec),
            sm_scale=problem.spec.sm_scale,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
            o_data_type=q.dtype,
        )
        out, lse = wrapper.run(q, k, v, return_lse=True)
        return out[:rows], lse[:rows]


def block_sizes(problem: ProblemView) -> tuple[int, int]:
    """Rows and keys a block has."""
    lists = problem.spec.candidates
    return (Q_BLOCK, KV_BLOCK) if lists is None else (lists.q_block_size, lists.block_size)


class FlashInferListedBlocks(FlashInferBlockSparse):
    """The lists as they are, whose range the package checks itself; a rule cuts blocks by a mask of elements.

    The matrix's own refusals are of float32, which the package has no kernels of: they stay undeclared.
    """

    name = "flashinfer-bsr-lists"
    refusals = (ValueError,)
    supported: ClassVar[dict[str, Domain]] = WITH_KEYS | {
        "granularity": OneOf(("block",)),
        "listing": OneOf(("sorted", "shuffled")),  # it documents neither holes nor repeated blocks
        "local": OneOf(("none",)),
    }

    def tiles(self, problem: ProblemView, request: int, group: HeadGroup) -> Tiles:
        spec, lists = problem.spec, problem.spec.candidates
        assert lists is not None
        rows = [row for row in spec.rows() if row.request == request][:: lists.q_block_size]
        given = [lists.entries(spec.list_index(row, group.qo_heads.start)) for row in rows]
        entries = [listed[listed != HOLE] for listed in given]  # a row that lists nothing may hold one
        counts, indices = [len(listed) for listed in entries], problem.tensor(np.concatenate(entries))
        # the rule's own mask: that of the problem would not be made where a list is out of range
        rule = replace(problem, spec=replace(spec, candidates=None)).masks[request][group.qo_heads.start]
        blocks = blocks_of(pad(rule, (0, lists.block_size)), *block_sizes(problem))
        of_row = torch.arange(len(rows), device=rule.device).repeat_interleave(problem.tensor(np.asarray(counts)))
        return Tiles(problem.tensor(np.cumsum([0, *counts])), indices, blocks[of_row, indices.long()])

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        """Outputs are written once every request has been planned: a list of the last may be refused."""
        apart = replace(tensors, out=tensors.out.clone(), lse=tensors.lse.clone())
        done = super().forward(problem, apart)
        return Forward(tensors.out.copy_(apart.out), tensors.lse.copy_(apart.lse), path=done.path)


def filled(x: Tensor, size: int) -> Tensor:
    """(heads, tokens, head_dim) as tokens before heads, and as many tokens as whole blocks have."""
    return pad(x, (0, 0, 0, -x.shape[1] % size)).transpose(0, 1).contiguous()


class FlashInferVariableBlocks(FlashInfer, PerRequest):
    """VariableBlockSparseAttentionWrapper: a pattern for each KV head, in blocks as large as the mask lets them be."""

    name = "flashinfer-variable-bsr"
    supported: ClassVar[dict[str, Domain]] = WITH_KEYS | SHARED_BY_A_GROUP

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        spec = problem.spec
        mask = problem.masks[request][:: spec.group_size]  # (num_kv_heads, seqlen_q, seqlen_kv)
        rows, row_sizes = runs(mask, dim=1)
        columns, column_sizes = runs(mask, dim=2)
        wrapper = self.flashinfer.VariableBlockSparseAttentionWrapper(self.workspace, backend="fa2")
        wrapper.plan(
            mask[:, rows][:, :, columns],
            row_sizes.expand(spec.num_kv_heads, -1).contiguous(),
            column_sizes.expand(spec.num_kv_heads, -1).contiguous(),
            spec.num_qo_heads,
            spec.num_kv_heads,
            spec.head_dim_qk,
            logits_soft_cap=soft_cap(spec),
            sm_scale=spec.sm_scale,
            q_data_type=q.dtype,
            kv_data_type=q.dtype,
        )
        out, lse = wrapper.run(q.contiguous(), k.contiguous(), v.contiguous(), return_lse=True)
        return Attended(out, lse, self.name)


def runs(mask: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Where runs of equal slices along a dimension start, and how long they are, int32."""
    slices = mask.movedim(dim, 0).flatten(1)
    changes = (slices[1:] != slices[:-1]).any(dim=1).nonzero()[:, 0] + 1
    starts = pad(changes, (1, 0))
    return starts, torch.diff(starts, append=starts.new_tensor([len(slices)])).int()
