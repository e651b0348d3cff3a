"""FlexAttention over a paged cache, read where it lies: torch's PagedAttention with a page table of ours.

Rules and lists are written in logical positions; PagedAttention turns block lists, mask_mod and score_mod into
physical ones. It knows one logical place for each page of a request, so no page may serve two. [COORD-LOGICAL]
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from attnconform.conformance.adapters.flex import BUILDS, EXPRESSIBLE, call_flex, round_up
from attnconform.conformance.adapters.gpu_package import require_gpu
from attnconform.conformance.adapters.per_request import requests_with_rows
from attnconform.conformance.adapters.torch_rules import MaskMod, captured, lower_mask, lower_score
from attnconform.conformance.backend import Backend, Capabilities, Forward, OneOf, Tensors
from attnconform.conformance.views import ProblemView

Q_BLOCK = 128


class FlexPaged(Backend):
    """flex_attention compiled, all requests in one call."""

    name = "flex-paged"
    # tiles of keys must lie within a page, and have at least 16 of them; slots must be evenly apart
    capabilities = Capabilities(
        supported=EXPRESSIBLE
        | {
            "page_size": OneOf(("16", "32")),
            "layout": OneOf(("NHD",)),
            "pages": OneOf(("contiguous", "shuffled", "shared_prefix", "high")),
        },
        has_backward=False,
        gradient_of_lse=False,
    )

    def __init__(self, device: str = "cpu") -> None:
        require_gpu(self.name, device)
        super().__init__(device)
        self.call: Any = torch.compile(call_flex, dynamic=False, fullgraph=True)

    def pool(self, problem: ProblemView, cache: Tensor) -> Tensor:
        """(num_slots, num_kv_heads, head_dim), where it lies."""
        return problem.by_slot(cache)

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        requests = list(requests_with_rows(problem))
        if not requests:
            return Forward(tensors.out, tensors.lse)
        q = pad_sequence([tensors.q[problem.q_rows(n)] for n in requests], batch_first=True)
        q = pad(q, (0, 0, 0, 0, 0, round_up(q.shape[1], 8, 3) - q.shape[1])).transpose(1, 2).contiguous()
        k, v = (self.pool(problem, cache).transpose(0, 1)[None] for cache in (tensors.k_cache, tensors.v_cache))
        paged, offsets = page_table_of(problem, requests), q_offsets(problem, requests)
        lengths = captured([int(problem.spec.seqlen_kv[n]) for n in requests], torch.int32, q.device)
        score_mod = lower_score(problem.spec.score_rules, offsets)
        with config.patch(BUILDS):
            out, lse, is_compiled = self.call(
                q, k, v,
                None if score_mod is None else paged.get_score_mod(score_mod, lengths),
                paged.convert_logical_block_mask(logical_mask(problem, requests, q.shape[2], offsets), kv_len=lengths),
                problem.spec.sm_scale,
                True,
                {"BLOCK_M": 64, "BLOCK_N": problem.spec.cache.page_size},
            )  # fmt: skip
        for i, n in enumerate(requests):
            rows = problem.q_rows(n)
            tensors.out[rows] = out[i, :, : rows.stop - rows.start].transpose(0, 1)
            tensors.lse[rows] = lse[i, :, : rows.stop - rows.start].transpose(0, 1)
        return Forward(tensors.out, tensors.lse, path="paged" if is_compiled else "fallback: eager")


class FlexPagedCleared(FlexPaged):
    """The same over a copy of the pool, 0 where no request has a token, as a server that clears its pages has it.

    What lies there reaches the outputs otherwise, and would hide all else. [MASK-TAIL]
    """

    name = "flex-paged-cleared"

    def pool(self, problem: ProblemView, cache: Tensor) -> Tensor:
        slots = super().pool(problem, cache)
        cleared = torch.zeros_like(slots)
        for n in range(problem.spec.batch_size):
            owned = problem.slots(n)
            cleared[owned] = slots[owned]
        return cleared


def q_offsets(problem: ProblemView, requests: Sequence[int]) -> Tensor:
    """Logical position of each request's first query row."""
    return captured([int(problem.spec.q_offset[n]) for n in requests], torch.int32, torch.device(problem.device))


def page_table_of(problem: ProblemView, requests: Sequence[int]) -> PagedAttention:
    """torch's bookkeeping with the problem's own pages in place of those that it would hand out."""
    cache = problem.spec.cache
    paged = PagedAttention(cache.num_pages, cache.page_size, len(requests), device=problem.device)
    for i, n in enumerate(requests):
        pages = problem.tensor(
            cache.page_table[n, : -(-int(problem.spec.seqlen_kv[n]) // cache.page_size)], torch.int64
        )
        paged.page_table[i, : len(pages)] = pages
        paged.physical_to_logical[i, pages] = torch.arange(len(pages), device=problem.device)
    return paged


def logical_mask(problem: ProblemView, requests: Sequence[int], seqlen_q: int, offsets: Tensor) -> BlockMask:
    """What every row attends, by logical position, in blocks of a page."""
    page_size = problem.spec.cache.page_size
    seqlen_kv = max(*(-(-int(problem.spec.seqlen_kv[n]) // page_size) for n in requests), 1) * page_size
    return create_block_mask(
        lower_membership(problem, requests, seqlen_q, seqlen_kv, offsets),
        len(requests),
        problem.spec.num_qo_heads,
        seqlen_q,
        seqlen_kv,
        device=problem.device,
        BLOCK_SIZE=(Q_BLOCK, page_size),
    )


def lower_membership(
    problem: ProblemView, requests: Sequence[int], seqlen_q: int, seqlen_kv: int, offsets: Tensor
) -> MaskMod:
    """mask_mod of several requests, False for rows and keys past their own lengths. [BLOCK-MEMBER, MASK-TAIL]"""
    listed = [problem.candidate_masks[n] for n in requests]
    member = torch.stack([pad(each, (0, seqlen_kv - each.shape[2], 0, seqlen_q - each.shape[1])) for each in listed])
    allows = lower_mask(problem.spec.mask_rule, requests, offsets)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return member[b, h, q_idx, kv_idx] & allows(b, h, q_idx, kv_idx)

    return mask_mod
