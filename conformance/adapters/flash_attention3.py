"""FlashAttention 3 over a paged cache, as the tokenspeed-fa3 wheel carries it: forward only, without soft cap.

A page that is listed twice is visited twice, and a hole is no page: lists must be canonical.
"""

import importlib.metadata
from typing import ClassVar

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from attnconform.conformance.adapters.flashinfer_package import head_groups
from attnconform.conformance.adapters.flashinfer_rows import row_pages
from attnconform.conformance.adapters.gpu_package import load_gpu_package
from attnconform.conformance.adapters.vllm_dense import Piece, pieces_of
from attnconform.conformance.backend import Backend, Capabilities, Domain, Forward, OneOf, Tensors
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES
from attnconform.conformance.views import ProblemView

INSTALL = "pip install 'attnconform[fa3]'"
MAX_SPLITS = 64
# its sinks are of bfloat16, its build has no soft cap, and it takes no other score
COMMON: dict[str, Domain] = {
    "dtype": OneOf(("bfloat16", "float16")),
    "head_dim": OneOf(("64/64", "80/80", "96/96", "128/128", "256/256")),
    "score": OneOf(("none",)),
    "sink": OneOf(("none",)),
    "refusal": OneOf(()),  # tables are not checked
}


class FlashAttention3(Backend):
    """flash_attn_with_kvcache; subclasses say what a sequence is to it."""

    supported: ClassVar[dict[str, Domain]]  # beside COMMON

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.package = load_gpu_package(self.name, device, "flash_attn_interface", "tokenspeed-fa3", INSTALL)
        self.capabilities = Capabilities(
            supported=COMMON | self.supported,
            numerics={
                dtype: replace(NUMERICS_CLASSES[f"{name}-hopper"], num_splits=MAX_SPLITS)
                for dtype, name in (("bfloat16", "bf16"), ("float16", "fp16"))
            },
            has_backward=False,
            gradient_of_lse=False,
        )

    def versions(self) -> dict[str, str]:
        return super().versions() | {"tokenspeed-fa3": importlib.metadata.version("tokenspeed-fa3")}


class FlashAttention3Tokens(FlashAttention3):
    """Pages of one token: every row is a sequence, its list the sequence's page table."""

    name = "fa3-tokens"
    # only where tokens lie before heads does a cache read as pages of one token
    supported: ClassVar[dict[str, Domain]] = {"listing": OneOf(("sorted", "shuffled")), "layout": OneOf(("NHD",))}

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        for group in head_groups(problem.spec):
            lists = row_pages(problem, group, 1)
            lengths = lists.indptr.diff()
            k, v = (problem.by_slot(x)[:, None, group.kv_heads] for x in (tensors.k_cache, tensors.v_cache))
            out, lse, *_ = self.package.flash_attn_with_kvcache(
                tensors.q[:, None, group.qo_heads],
                k,
                v,
                cache_seqlens=lengths,
                page_table=pad(pad_sequence(lists.pages.split(lengths.tolist()), batch_first=True), (0, 1)),
                softmax_scale=problem.spec.sm_scale,
                num_splits=problem.hints.num_kv_splits or 1,
                return_softmax_lse=True,
            )
            tensors.out[:, group.qo_heads], tensors.lse[:, group.qo_heads] = out[:, 0], lse[:, :, 0]
        return Forward(tensors.out, tensors.lse, path=self.name)


class FlashAttention3Pages(FlashAttention3):
    """The cache and its page table as they lie, causal at the bottom right, with a window to the left."""

    name = "fa3-pages"
    supported: ClassVar[dict[str, Domain]] = {
        "granularity": OneOf(("dense",)),
        "mask": OneOf(("none", "causal", "causal_window")),
    }

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        pieces = list(pieces_of(problem))
        for left in dict.fromkeys(piece.left for piece in pieces):
            self.attend(problem, tensors, [piece for piece in pieces if piece.left == left], left)
        return Forward(tensors.out, tensors.lse, path=self.name)

    def attend(self, problem: ProblemView, tensors: Tensors, pieces: list[Piece], left: int | None) -> None:
        """One call, whose sequences are pieces with one window."""
        spec, starts = problem.spec, np.cumsum([0, *(piece.num_rows for piece in pieces)])
        k, v = (x if spec.cache.layout == "NHD" else x.transpose(1, 2) for x in (tensors.k_cache, tensors.v_cache))
        out, lse, *_ = self.package.flash_attn_with_kvcache(
            torch.cat([pad(tensors.q[piece.rows], (0, 0, 0, 0, 0, piece.rows_after)) for piece in pieces]),
            k,
            v,
            cache_seqlens=problem.tensor(np.asarray([piece.seqlen_kv for piece in pieces])),
            page_table=table_of(problem, pieces),
            cu_seqlens_q=problem.tensor(starts),
            max_seqlen_q=max(piece.num_rows for piece in pieces),
            softmax_scale=spec.sm_scale,
            causal=spec.mask_rule is not None,
            window_size=(-1, -1) if left is None else (left, 0),
            num_splits=problem.hints.num_kv_splits or 1,
            return_softmax_lse=True,
        )
        for piece, start in zip(pieces, starts, strict=False):
            rows = slice(start, start + piece.num_rows - piece.rows_after)
            tensors.out[piece.rows], tensors.lse[piece.rows] = out[rows], lse[:, rows].transpose(0, 1)


def table_of(problem: ProblemView, pieces: list[Piece]) -> Tensor:
    """(pieces, width) page table, page 0 where a request has none."""
    rows = problem.spec.cache.page_table[[piece.request for piece in pieces]]
    return pad(problem.tensor(rows).clamp(min=0), (0, 1))
