"""Backends made of a function that attends one request: its queries, and its keys and values in logical order."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnconform.conformance.backend import Backend, Backward, Forward, Tensors
from attnconform.conformance.views import ProblemView


@dataclass(frozen=True)
class Attended:
    """What attending one request gave."""

    out: Tensor  # (num_qo_heads, seqlen_q, head_dim_vo)
    lse: Tensor | None  # (num_qo_heads, seqlen_q)
    path: str


class PerRequest(Backend):
    """Gathers each request, attends it, and scatters its gradients back by slot."""

    def attend(
        self,
        problem: ProblemView,
        request: int,
        q: Tensor,  # (num_qo_heads, seqlen_q, head_dim_qk)
        k: Tensor,  # (num_kv_heads, seqlen_kv, head_dim_qk)
        v: Tensor,  # (num_kv_heads, seqlen_kv, head_dim_vo)
    ) -> Attended:
        """Attention of one request."""
        raise NotImplementedError

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        lse = tensors.lse if self.capabilities.returns_lse else None
        path = "native"
        for n in requests_with_rows(problem):
            rows = problem.q_rows(n)
            attended = self.attend(problem, n, *gather(problem, tensors, n))
            tensors.out[rows] = attended.out.transpose(0, 1)
            if lse is not None and attended.lse is not None:
                lse[rows] = attended.lse.transpose(0, 1)
            # A fallback of one request is a fallback of the call.
            path = path if path.startswith("fallback") else attended.path
        return Forward(tensors.out, lse, path=path)

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: Tensor, dlse: Tensor | None
    ) -> Backward:
        """Autograd through each request; a slot that several requests or positions name takes the sum. [GRAD-SUM]"""
        dq = torch.zeros_like(tensors.q)
        dk, dv = (zeros_by_slot(problem, cache) for cache in (tensors.k_cache, tensors.v_cache))
        for n in requests_with_rows(problem):
            rows, slots = problem.q_rows(n), problem.slots(n)
            inputs = [x.detach().requires_grad_() for x in gather(problem, tensors, n)]
            attended = self.attend(problem, n, *inputs)
            outputs, gradients = [attended.out], [dout[rows].transpose(0, 1)]
            if dlse is not None and attended.lse is not None:
                outputs.append(attended.lse)
                gradients.append(dlse[rows].transpose(0, 1))
            to_q, to_k, to_v = torch.autograd.grad(outputs, inputs, gradients)
            dq[rows] = to_q.transpose(0, 1)
            dk.index_add_(0, slots, to_k.transpose(0, 1).float())
            dv.index_add_(0, slots, to_v.transpose(0, 1).float())
        # Each request's part has been rounded already; rounding their sum again would be the adapter's own error.
        return Backward(dq=dq, dk=problem.to_cache(dk), dv=problem.to_cache(dv))


def requests_with_rows(problem: ProblemView) -> Iterator[int]:
    """Requests that have query rows."""
    return (n for n in range(problem.spec.batch_size) if problem.q_rows(n).stop > problem.q_rows(n).start)


def gather(problem: ProblemView, tensors: Tensors, request: int) -> tuple[Tensor, Tensor, Tensor]:
    """A request's q, k and v, heads before tokens."""
    q = tensors.q[problem.q_rows(request)]
    k, v = (problem.gathered(cache, request) for cache in (tensors.k_cache, tensors.v_cache))
    return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)


def zeros_by_slot(problem: ProblemView, cache: Tensor) -> Tensor:
    """Where the gradients of all requests are summed, in float32."""
    shape = problem.by_slot(cache).shape
    return torch.zeros(shape, dtype=torch.float32, device=cache.device)
