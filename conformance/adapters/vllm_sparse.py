"""vLLM's sparse attention: MiniMax-M3's over lists of blocks, and latent attention over lists of tokens.

MiniMax-M3's cache holds keys and values side by side in pages that are its blocks. Their 128 keys are a constant of the
module, which is set to the size that a problem's blocks have; the cache is laid out anew, request by request.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from attnconform.conformance.adapters.fla_nsa import listed_blocks
from attnconform.conformance.adapters.latent_keys import latent_queries_and_keys, slot_lists
from attnconform.conformance.adapters.minimax_numerics import merged_in_parts
from attnconform.conformance.adapters.per_request import requests_with_rows
from attnconform.conformance.adapters.placement import causal_places, rows_of_calls
from attnconform.conformance.adapters.vllm_package import VllmKernels
from attnconform.conformance.backend import Domain, Forward, OneOf, Tensors
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.views import ProblemView

INDEX_STEP = 16  # the latent kernel's lists are filled up to a multiple of it


class VllmMiniMax(VllmKernels):
    """A list of whole blocks a row and KV head, always causal. Subclasses call the kernel."""

    module = "vllm.models.minimax_m3.common.ops.sparse_attn"
    supported: ClassVar[dict[str, Domain]] = {
        "head_dim": OneOf(("64/64", "128/128", "80/80", "96/96", "256/256")),
        "granularity": OneOf(("dense", "block")),
        "sharing": OneOf(("kv_head", "shared")),
        "local": OneOf(("none",)),
        "mask": OneOf(("none", "causal")),
        "score": OneOf(("none",)),
        "sink": OneOf(("none",)),
    }

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        for n in requests_with_rows(problem):
            lists, size = listed_blocks(problem, n)
            self.kernels.SPARSE_BLOCK_SIZE = size
            k, v = (blocks_of(problem.gathered(cache, n), size) for cache in (tensors.k_cache, tensors.v_cache))
            rows, places = problem.q_rows(n), causal_places(problem, n)
            with self.context():
                self.attend(problem, tensors.q[rows], torch.cat([k, v], dim=3), lists, places, tensors.out[rows])
        return Forward(tensors.out, None, path="minimax-m3")

    def attend(
        self,
        problem: ProblemView,
        q: Tensor,  # (rows, num_qo_heads, head_dim)
        cache: Tensor,  # (num_blocks, num_kv_heads, block_size, 2 * head_dim)
        lists: Tensor,  # (rows, num_kv_heads, width)
        places: list[int],  # of each row its last key
        out: Tensor,  # like q
    ) -> None:
        """Attention of one request's rows."""
        raise NotImplementedError


class VllmMiniMaxDecode(VllmMiniMax):
    """minimax_m3_sparse_attn_decode: a row is a request of its own; lists go over as they are, -1 included."""

    name = "vllm-m3-decode"

    def numerics(self) -> dict[str, Numerics]:
        return merged_in_parts(super().numerics())

    def attend(
        self, problem: ProblemView, q: Tensor, cache: Tensor, lists: Tensor, places: list[int], out: Tensor
    ) -> None:
        self.kernels.minimax_m3_sparse_attn_decode(
            q,
            cache,
            lists.transpose(0, 1).contiguous(),
            every_block(cache).expand(len(q), -1),
            torch.tensor(places, dtype=torch.int32, device=q.device) + 1,
            problem.spec.num_kv_heads,
            problem.spec.sm_scale,
            out,
            decode_query_len=1,
        )


class VllmMiniMaxPrefill(VllmMiniMax):
    """minimax_m3_sparse_attn: lists hold no -1, and end where the width or the row's own block does.

    Blocks past a row's own are struck, as its selection of blocks does. Where a row then lists fewer, each is a call.
    """

    name = "vllm-m3-prefill"
    supported: ClassVar[dict[str, Domain]] = VllmMiniMax.supported | {
        "listing": OneOf(("sorted", "shuffled", "duplicates"))
    }

    def attend(
        self, problem: ProblemView, q: Tensor, cache: Tensor, lists: Tensor, places: list[int], out: Tensor
    ) -> None:
        group, ends = problem.spec.group_size, [place // cache.shape[2] for place in places]
        for head in range(cache.shape[1]):
            rows = [row[(row >= 0) & (row <= end)] for row, end in zip(lists[:, head], ends, strict=True)]
            width = max(len(row) for row in rows)
            filled = all(len(row) == min(width, end + 1) for row, end in zip(rows, ends, strict=True))
            for part in rows_of_calls(places, together=filled):
                attended = out[part, head * group : (head + 1) * group]
                starts = torch.tensor([0, len(attended)], device=q.device)
                self.kernels.minimax_m3_sparse_attn(
                    q[part, head * group : (head + 1) * group],
                    cache[:, head : head + 1],
                    pad_sequence(rows[part], batch_first=True)[None].int(),
                    every_block(cache),
                    starts.int(),
                    starts[1:].int() + places[part.stop - 1],
                    starts[:1].int() + places[part.start],
                    len(attended),
                    1,
                    problem.spec.sm_scale,
                    attended,
                )


class VllmSparseLatent(VllmKernels):
    """triton_bf16_mla_sparse_interface, one query head at a time."""

    name = "vllm-mla-sparse"
    module = "vllm.v1.attention.ops.xpu_mla_sparse"
    returns_lse = True
    supported: ClassVar[dict[str, Domain]] = {
        "dtype": OneOf(("bfloat16",)),
        # a list of slots cannot tell a position listed twice from two positions of one slot
        "listing": OneOf(("sorted", "shuffled", "holes")),
        "local": OneOf(("none",)),
        "score": OneOf(("none",)),
        "sink": OneOf(("none",)),
    }

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        spec = problem.spec
        position_dim = 1 << (spec.head_dim_qk - 1).bit_length()
        q, keys = latent_queries_and_keys(problem, tensors, position_dim)
        for heads in (slice(h, h + 1) for h in range(spec.num_qo_heads)):
            kv_head = heads.start // spec.group_size
            with self.context():
                out, _, lse = self.kernels.triton_bf16_mla_sparse_interface(
                    q[:, heads],
                    keys[:, kv_head : kv_head + 1],
                    slot_lists(problem, heads.start, INDEX_STEP),
                    spec.sm_scale,
                    block_dpe=position_dim,
                )
            tensors.out[:, heads], tensors.lse[:, heads] = out[..., : spec.head_dim_vo], lse
        return Forward(tensors.out, tensors.lse, path="latent")


def every_block(cache: Tensor) -> Tensor:
    """(1, num_blocks) table of a request whose pages lie in order."""
    return torch.arange(len(cache), dtype=torch.int32, device=cache.device)[None]


def blocks_of(x: Tensor, size: int) -> Tensor:
    """A request's keys or values in blocks, (num_blocks, num_kv_heads, block_size, head_dim); zeros fill the last."""
    return pad(x, (0, 0, 0, 0, 0, -len(x) % size)).unflatten(0, (-1, size)).transpose(1, 2)
