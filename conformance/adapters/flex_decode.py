"""FlexAttention's kernel for few queries, which splits the keys of a request among programs; on a GPU alone.

It packs the query heads of a KV head into one tile: their number must be a power of two, and one block list serves
all heads, so that membership is in mask_mod again. Longer requests are attended in several calls. [BLOCK-MEMBER]
"""

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from attnconform.conformance.adapters.flex import EXPRESSIBLE, FlexCompiled
from attnconform.conformance.adapters.gpu_package import require_gpu
from attnconform.conformance.adapters.per_request import Attended
from attnconform.conformance.backend import Capabilities, OneOf
from attnconform.conformance.views import ProblemView

ROWS = 29  # of a call, one of the padded lengths: it is for few queries, and its tile has a group's heads beside them


class FlexDecode(FlexCompiled):
    """flex_attention compiled with BACKEND="TRITON_DECODE"."""

    name = "flex-decode"
    kernel_options: ClassVar[dict[str, Any]] = {"BACKEND": "TRITON_DECODE"}

    def __init__(self, device: str = "cpu") -> None:
        require_gpu(self.name, device)
        super().__init__(device)
        self.capabilities = Capabilities(
            supported=EXPRESSIBLE | {"heads": OneOf(("2/2", "4/2", "4/1"))},
            has_backward=False,
            gradient_of_lse=False,
        )

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        parts = [
            self.attend_from(first, problem, request, q[:, first : first + ROWS], k, v)
            for first in range(0, q.shape[1], ROWS)
        ]
        lses = [part.lse for part in parts if part.lse is not None]
        path = next((part.path for part in parts if part.path != self.path), self.path)
        return Attended(torch.cat([part.out for part in parts], dim=1), torch.cat(lses, dim=1), path)

    def block_mask(
        self, problem: ProblemView, request: int, seqlen_q: int, seqlen_kv: int, first_row: int = 0
    ) -> BlockMask:
        """Blocks that any head attends, none of them whole for all."""
        by_head = super().block_mask(problem, request, seqlen_q, seqlen_kv, first_row)
        listed = by_head.to_dense().amax(dim=1, keepdim=True)
        return BlockMask.from_kv_blocks(
            listed.sum(dim=-1, dtype=torch.int32),
            listed.argsort(dim=-1, descending=True, stable=True).int(),
            BLOCK_SIZE=by_head.BLOCK_SIZE,
            mask_mod=by_head.mask_mod,
            seq_lengths=(seqlen_q, seqlen_kv),
        )
