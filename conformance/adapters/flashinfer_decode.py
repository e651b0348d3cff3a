"""FlashInfer's batch decode over candidates: every query row is a request, and its keys are that request's pages."""

from typing import Any, ClassVar

import torch
from msgspec.structs import replace
from torch import Tensor

from attnconform.conformance.adapters.flashinfer_package import (
    MAX_SPLITS,
    TANH_EPS,
    FlashInfer,
    HeadGroup,
    heads_of,
    soft_cap,
)
from attnconform.conformance.adapters.flashinfer_plans import FlashInferPaged
from attnconform.conformance.adapters.flashinfer_rows import row_pages
from attnconform.conformance.backend import Domain, OneOf, Tensors
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics
from attnconform.conformance.views import ProblemView

# A page that is listed twice is visited twice, and a hole is no page: only lists without either are FlashInfer's.
LISTING = OneOf(("sorted", "shuffled"))


class FlashInferDecode(FlashInferPaged):
    """Pages of one token on CUDA cores: an arbitrary list of tokens for each row."""

    name = "flashinfer-decode"
    use_tensor_cores: ClassVar[bool] = False
    # only where tokens lie before heads does a cache read as pages of one token
    supported: ClassVar[dict[str, Domain]] = {"listing": LISTING, "layout": OneOf(("NHD",))}

    def numerics(self) -> dict[str, Numerics]:
        """P is never stored; but what a split gives is, in out's dtype, before it is merged: as large an error."""
        return {
            dtype: replace(NUMERICS_CLASSES[name], accumulation="nearest", tanh_eps=TANH_EPS, num_splits=MAX_SPLITS)
            for dtype, name in (("bfloat16", "bf16"), ("float16", "fp16"))
        }

    def page_size(self, problem: ProblemView) -> int:
        """Tokens a page, as FlashInfer is told."""
        return 1

    def kv_layout(self, problem: ProblemView) -> str:
        return "NHD"

    def caches(self, problem: ProblemView, tensors: Tensors, group: HeadGroup) -> tuple[Tensor, Tensor]:
        k, v = (problem.by_slot(cache)[:, None, group.kv_heads] for cache in (tensors.k_cache, tensors.v_cache))
        return k, v

    def wrapper(self, problem: ProblemView, group: HeadGroup, for_graph: bool) -> Any:
        buffers = {}
        if for_graph:
            lists = row_pages(problem, group, self.page_size(problem))
            buffers = {
                "paged_kv_indptr_buffer": torch.empty_like(lists.indptr),
                "paged_kv_indices_buffer": torch.empty_like(lists.pages),
                "paged_kv_last_page_len_buffer": torch.empty_like(lists.last_page_len),
            }
        return self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self.workspace,
            self.kv_layout(problem),
            use_cuda_graph=for_graph,
            use_tensor_cores=self.use_tensor_cores,
            **buffers,
        )

    def fill(self, wrapper: Any, problem: ProblemView, group: HeadGroup, dtype: torch.dtype) -> None:
        lists = row_pages(problem, group, self.page_size(problem))
        wrapper.plan(
            lists.indptr,
            lists.pages,
            lists.last_page_len,
            group.num_qo_heads,
            group.num_kv_heads,
            problem.spec.head_dim_qk,
            self.page_size(problem),
            logits_soft_cap=soft_cap(problem.spec),
            q_data_type=dtype,
            kv_data_type=dtype,
            o_data_type=dtype,
            sm_scale=problem.spec.sm_scale,
        )


class FlashInferDecodeTensorCores(FlashInferDecode):
    """The same lists on tensor cores, by the kernels of the prefill."""

    name = "flashinfer-decode-tc"
    use_tensor_cores = True

    def numerics(self) -> dict[str, Numerics]:
        return FlashInfer.numerics(self)


class FlashInferDecodePages(FlashInferDecodeTensorCores):
    """Pages as the cache has them, read where they lie: lists of blocks that are whole pages."""

    name = "flashinfer-decode-pages"
    # blocks of the matrix have 16 tokens, and nothing may cut a page: no mask, no window, no sinks
    supported: ClassVar[dict[str, Domain]] = {
        "listing": LISTING, "granularity": OneOf(("block", "dense")), "page_size": OneOf(("1", "8", "16")),
        "mask": OneOf(("none",)), "local": OneOf(("none",)),
    }  # fmt: skip

    def page_size(self, problem: ProblemView) -> int:
        return problem.spec.cache.page_size

    def kv_layout(self, problem: ProblemView) -> str:
        return problem.spec.cache.layout

    def caches(self, problem: ProblemView, tensors: Tensors, group: HeadGroup) -> tuple[Tensor, Tensor]:
        layout = problem.spec.cache.layout
        return heads_of(tensors.k_cache, group, layout), heads_of(tensors.v_cache, group, layout)
