"""FlashInfer's CUDA merge kernels: partial states come from torch, in as many splits as the problem hints at."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from attnconform.conformance.adapters.flashinfer_package import FlashInfer
from attnconform.conformance.adapters.per_request import Attended, PerRequest
from attnconform.conformance.backend import Domain, OneOf
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.views import ProblemView


class FlashInferCudaMerge(FlashInfer, PerRequest):
    """merge_state of two states and merge_states of any other number; only they are FlashInfer's here."""

    name = "flashinfer-merge-cuda"
    supported: ClassVar[dict[str, Domain]] = {"score": OneOf(("none",)), "dtype": OneOf(("float16",))}

    def numerics(self) -> dict[str, Numerics]:
        """States in float32, given to the merge in float16.

        One rounding of a state is declared. As many states as rows, or more, go through a kernel whose threads merge
        some each and store what comes of it in float16 once more: no class has that, and it may show.
        """
        return {"float16": Numerics(out_dtype="float16", norm_p=True, partial_storage="float16", num_splits=8)}

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        splits = problem.hints.num_kv_splits or 1
        k, v = (x.repeat_interleave(problem.spec.group_size, dim=0) for x in (k, v))
        parts = (x.tensor_split(splits, dim=dim) for x, dim in ((problem.masks[request], 2), (k, 1), (v, 1)))
        states = [partial_state(q, problem.spec.sm_scale, mask, k, v) for mask, k, v in zip(*parts, strict=True)]
        if splits == 2:
            (out_a, lse_a), (out_b, lse_b) = states
            out, lse = self.flashinfer.merge_state(out_a, lse_a, out_b, lse_b)
        else:
            outs, lses = (torch.stack(several, dim=1) for several in zip(*states, strict=True))
            out, lse = self.flashinfer.merge_states(outs, lses)
        return Attended(out.transpose(0, 1), lse.transpose(0, 1), self.name)


def partial_state(q: Tensor, sm_scale: float, mask: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out (seqlen_q, num_qo_heads, head_dim) and base-2 lse over some of the keys; no key gives 0 and -inf."""
    scores = (q.float() @ k.float().transpose(1, 2) * sm_scale).masked_fill(~mask, float("-inf"))
    lse = scores.logsumexp(dim=2)
    weights = (scores - lse[..., None]).exp().masked_fill(~mask, 0.0)
    out = (weights @ v.float()).to(q.dtype)
    return out.transpose(0, 1).contiguous(), (lse / math.log(2)).transpose(0, 1).contiguous()
