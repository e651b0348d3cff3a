"""FlashInfer's block-sparse wrappers, one request at a time: blocks of one size with bits inside, or of any sizes."""

from dataclasses import dataclass
from typing import ClassVar

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
from attnconform.conformance.backend import Domain, OneOf
from attnconform.conformance.views import ProblemView

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
    rows, keys = mask.shape
    filled = pad(mask, (0, -keys % kv_block_size, 0, -rows % q_block_size))
    blocks = filled.unflatten(1, (-1, kv_block_size)).unflatten(0, (-1, q_block_size)).transpose(1, 2)
    listed = blocks.any(dim=3).any(dim=2)
    indptr = pad(listed.sum(dim=1).cumsum(dim=0), (1, 0))
    return Tiles(indptr.int(), listed.nonzero()[:, 1].int(), blocks[listed])


class FlashInferBlockSparse(FlashInfer, PerRequest):
    """BlockSparseAttentionWrapper: blocks of the lists' own size, with a mask of elements where one is not whole."""

    name = "flashinfer-bsr"
    supported: ClassVar[dict[str, Domain]] = WITH_KEYS

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        for group in head_groups(problem.spec):
            heads = group.qo_heads
            part_out, part_lse = self.attend_group(
                problem, group, problem.masks[request][heads.start], q[heads], k[group.kv_heads], v[group.kv_heads]
            )
            out[heads], lse[heads] = part_out.transpose(0, 1), part_lse.transpose(0, 1)
        return Attended(out, lse, self.name)

    def attend_group(
        self, problem: ProblemView, group: HeadGroup, mask: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """out (seqlen_q, heads, head_dim) and lse of heads that attend alike."""
        lists, rows = problem.spec.candidates, q.shape[1]
        q_block, kv_block = (Q_BLOCK, KV_BLOCK) if lists is None else (lists.q_block_size, lists.block_size)
        tiles = tiles_of(mask, q_block, kv_block)
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
