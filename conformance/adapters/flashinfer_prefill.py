"""FlashInfer's paged prefill with one bit of mask for each (row, key): page tables as they are, and any rule."""

from typing import Any

import torch
from torch import Tensor

from attnconform.conformance.adapters.flashinfer_package import HeadGroup, heads_of, soft_cap
from attnconform.conformance.adapters.flashinfer_plans import FlashInferPaged
from attnconform.conformance.adapters.flashinfer_rows import request_pages
from attnconform.conformance.backend import Tensors
from attnconform.conformance.views import ProblemView


class FlashInferPrefill(FlashInferPaged):
    """BatchPrefillWithPagedKVCacheWrapper with custom_mask, which its FA2 kernels alone have."""

    name = "flashinfer-prefill"

    def caches(self, problem: ProblemView, tensors: Tensors, group: HeadGroup) -> tuple[Tensor, Tensor]:
        layout = problem.spec.cache.layout
        return heads_of(tensors.k_cache, group, layout), heads_of(tensors.v_cache, group, layout)

    def wrapper(self, problem: ProblemView, group: HeadGroup, for_graph: bool) -> Any:
        buffers = {}
        if for_graph:
            lists, mask = request_pages(problem), flat_mask(problem, group)
            buffers = {
                "qo_indptr_buf": torch.empty_like(lists.indptr),
                "paged_kv_indptr_buf": torch.empty_like(lists.indptr),
                "paged_kv_indices_buf": torch.empty_like(lists.pages),
                "paged_kv_last_page_len_buf": torch.empty_like(lists.last_page_len),
                # eight bits a byte, and each request begins a byte of its own
                "custom_mask_buf": torch.empty(len(mask) // 8 + lists.num_lists, dtype=torch.uint8, device=self.device),
                "mask_indptr_buf": torch.empty_like(lists.indptr),
            }
        return self.flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self.workspace, problem.spec.cache.layout, use_cuda_graph=for_graph, backend="fa2", **buffers
        )

    def fill(self, wrapper: Any, problem: ProblemView, group: HeadGroup, dtype: torch.dtype) -> None:
        lists, spec = request_pages(problem), problem.spec
        wrapper.plan(
            problem.tensor(spec.qo_indptr),
            lists.indptr,
            lists.pages,
            lists.last_page_len,
            group.num_qo_heads,
            group.num_kv_heads,
            spec.head_dim_qk,
            spec.cache.page_size,
            custom_mask=flat_mask(problem, group),
            logits_soft_cap=soft_cap(spec),
            q_data_type=dtype,
            kv_data_type=dtype,
            o_data_type=dtype,
            sm_scale=spec.sm_scale,
        )


def flat_mask(problem: ProblemView, group: HeadGroup) -> Tensor:
    """Every request's (row, key) pairs of the group's heads, row-major, one request after the other."""
    return torch.cat([mask[group.qo_heads.start].flatten() for mask in problem.masks])
