"""SGLang's block-sparse attention of MiniMax models: a list of whole blocks a row and KV head, keys by a map of slots.

Lists hold what a row may see and end in -1, as its own selection of blocks gives them: blocks past the row's own are
struck.
"""

import importlib.metadata
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnconform.conformance.adapters.fla_nsa import listed_blocks
from attnconform.conformance.adapters.minimax_numerics import merged_in_parts
from attnconform.conformance.adapters.per_request import requests_with_rows
from attnconform.conformance.adapters.placement import causal_places, rows_of_calls
from attnconform.conformance.adapters.sglang_kernels import load_kernels
from attnconform.conformance.adapters.third_party_interpreter import third_party_kernels
from attnconform.conformance.adapters.triton_kernels import interpreting
from attnconform.conformance.backend import Backend, Capabilities, Domain, Forward, OneOf, Tensors
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics
from attnconform.conformance.views import ProblemView


class SglangBlocks(Backend):
    """A module's kernel, interpreted where there is no GPU. Subclasses name the module and call it."""

    module: ClassVar[str]
    head_dim: ClassVar[Domain]

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        interpreted = interpreting(device)
        self.context = third_party_kernels if interpreted else nullcontext
        self.kernels = load_kernels(f"minimax_sparse.{self.module}")
        self.capabilities = Capabilities(
            supported={
                "dtype": OneOf(("bfloat16", "float16")),
                "head_dim": self.head_dim,
                "granularity": OneOf(("dense", "block")),
                "sharing": OneOf(("kv_head", "shared")),
                "listing": OneOf(("sorted", "shuffled", "duplicates")),
                "local": OneOf(("none",)),
                "mask": OneOf(("none", "causal")),
                "score": OneOf(("none",)),
                "sink": OneOf(("none",)),  # its sink is a key that a head's query is multiplied with
                "refusal": OneOf(()),
            },
            numerics=self.numerics("" if interpreted else "-hopper"),
            returns_lse=False,
            has_backward=False,
            gradient_of_lse=False,
        )

    def numerics(self, variant: str) -> dict[str, Numerics]:
        """P is stored in the values' dtype, everything else in float32."""
        return {name: NUMERICS_CLASSES[cls + variant] for name, cls in (("bfloat16", "bf16"), ("float16", "fp16"))}

    def versions(self) -> dict[str, str]:
        return super().versions() | {"sglang": importlib.metadata.version("sglang")}


class SglangBlocksDecode(SglangBlocks):
    """flash_decode_with_gqa_share_sparse: a row is a request of its own."""

    name = "sglang-msa-decode"
    module = "decode.topk_sparse"
    head_dim = OneOf(("64/64", "128/128", "80/80", "96/96", "256/256"))

    def numerics(self, variant: str) -> dict[str, Numerics]:
        return merged_in_parts(super().numerics(variant))

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        for n in requests_with_rows(problem):
            rows, places = problem.q_rows(n), causal_places(problem, n)
            lists, size = blocks_in_reach(problem, n, places)
            with self.context():
                tensors.out[rows] = self.kernels.flash_decode_with_gqa_share_sparse(
                    tensors.q[rows],
                    None,
                    *(problem.by_slot(cache) for cache in (tensors.k_cache, tensors.v_cache)),
                    problem.slots(n).int()[None],
                    torch.tensor(places, dtype=torch.int32, device=lists.device) + 1,
                    torch.zeros(len(places), dtype=torch.int32, device=lists.device),
                    size,
                    lists,
                    problem.spec.sm_scale,
                )
        return Forward(tensors.out, None, path="msa-decode")


class SglangBlocksPrefill(SglangBlocks):
    """flash_prefill_with_gqa_share_sparse: always causal, so that rows that do not stand side by side are requests."""

    name = "sglang-msa-prefill"
    module = "prefill.topk_sparse"
    head_dim = OneOf(("64/64", "128/128", "80/80", "96/96", "256/256", "64/32"))

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        for n in requests_with_rows(problem):
            rows, places = problem.q_rows(n), causal_places(problem, n)
            lists, size = blocks_in_reach(problem, n, places)
            calls = rows_of_calls(places)
            indptr = torch.tensor([0, *(call.stop for call in calls)], dtype=torch.int32, device=lists.device)
            first = torch.tensor([places[call.start] for call in calls], dtype=torch.int32, device=lists.device)
            with self.context():
                tensors.out[rows] = self.kernels.flash_prefill_with_gqa_share_sparse(
                    tensors.q[rows],
                    *(problem.by_slot(cache) for cache in (tensors.k_cache, tensors.v_cache)),
                    None,
                    problem.slots(n).int()[None],
                    torch.zeros_like(first),
                    lists,
                    block_size_q=1,
                    block_size_k=size,
                    cu_seqlens=indptr,
                    seq_lens=torch.full_like(first, int(problem.spec.seqlen_kv[n])),
                    prefix_lens=first,
                    max_seqlen_q=int(indptr.diff().max()),
                    sm_scale=problem.spec.sm_scale,
                )
        return Forward(tensors.out, None, path="msa-prefill")


def blocks_in_reach(problem: ProblemView, request: int, places: list[int]) -> tuple[Tensor, int]:
    """(num_kv_heads, rows, width) blocks up to each row's own, as listed, then -1; and the size of a block."""
    lists, size = listed_blocks(problem, request)
    rows = [
        of_head[(of_head >= 0) & (of_head <= place // size)]
        for of_row, place in zip(lists, places, strict=True)
        for of_head in of_row
    ]
    padded = pad_sequence([*rows, lists.new_zeros(1)], batch_first=True, padding_value=-1)[:-1]
    return padded.unflatten(0, lists.shape[:2]).transpose(0, 1).contiguous().int(), size
