"""Backends that are a merge of partial states: attention over parts of the keys, in float32, then somebody's merge."""

import math
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from attnconform.conformance.adapters.per_request import Attended, PerRequest
from attnconform.conformance.adapters.sdpa import additive_mask
from attnconform.conformance.adapters.third_party_interpreter import third_party_kernels
from attnconform.conformance.adapters.triton_kernels import interpreting
from attnconform.conformance.backend import Capabilities, OneOf
from attnconform.conformance.bounds.numerics import Numerics
from attnconform.conformance.views import ProblemView

LN_2 = math.log(2)


def partial_state(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *, scale: float, unit: float) -> tuple[Tensor, Tensor]:
    """(rows, heads, head_dim) out and (rows, heads) lse of some keys, in units of so many nats."""
    scores = torch.einsum("hqd,hkd->hqk", q, k) * scale + bias
    lse = torch.logsumexp(scores, dim=2)
    weights = torch.where(lse[..., None].isneginf(), 0.0, torch.exp(scores - lse[..., None]))
    out = torch.einsum("hqk,hkd->qhd", weights, v)
    return out.contiguous(), (lse / unit).T.contiguous()


class MergedParts(PerRequest):
    """So many parts as splits are asked for, and two at least. Subclasses load and call the merge."""

    unit: ClassVar[float]  # of the lse that the merge takes, in nats: 1 or ln 2

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.context = third_party_kernels if interpreting(device) else nullcontext
        self.kernels = self.load()
        self.capabilities = Capabilities(
            supported={
                "dtype": OneOf(("float32",)),
                "score": OneOf(("none", "alibi", "relative")),
                "sink": OneOf(("none",)),
                "refusal": OneOf(()),
            },
            numerics={"float32": Numerics(out_dtype="float32", norm_p=True, num_splits=8)},
            lse_base="e" if self.unit == 1 else "2",
            has_backward=False,
            gradient_of_lse=False,
        )

    def load(self) -> Any:
        """The module with the merge. Raises Unavailable where it is not installed."""
        raise NotImplementedError

    def merge(
        self,
        v: Tensor,  # (rows, states, heads, head_dim)
        s: Tensor,  # (rows, states, heads)
    ) -> tuple[Tensor, Tensor]:
        """One state out of all."""
        raise NotImplementedError

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        k, v = (x.repeat_interleave(problem.spec.group_size, dim=0) for x in (k, v))
        splits = max(problem.hints.num_kv_splits or 1, 2)
        scale, bias = problem.spec.sm_scale, additive_mask(problem, request)
        parts = [torch.tensor_split(x, splits, dim=dim) for x, dim in ((k, 1), (v, 1), (bias, 2))]
        states = [partial_state(q, *part, scale=scale, unit=self.unit) for part in zip(*parts, strict=True)]
        with self.context():
            out, lse = self.merge(torch.stack([out for out, _ in states], 1), torch.stack([s for _, s in states], 1))
        return Attended(out.transpose(0, 1), lse.T, self.name)
