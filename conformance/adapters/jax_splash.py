"""JAX's splash attention, a Pallas kernel for TPUs, which a CPU interprets.

A mask is an array for each query head, of which it visits the tiles that hold anything. Requests are filled up to whole
tiles: with keys that are masked, and with queries that see the first key and are thrown away.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from attnconform.conformance.adapters.attn_gym import sinks_of
from attnconform.conformance.adapters.jax_attention import library, to_jax, to_torch
from attnconform.conformance.adapters.per_request import Attended, PerRequest, gather, requests_with_rows
from attnconform.conformance.backend import Backward, Capabilities, Forward, OneOf, Tensors
from attnconform.conformance.bounds.numerics import Numerics, OutDtype
from attnconform.conformance.views import ProblemView
from attnconform.reference.rules import SoftCap

TILE = 128  # queries and keys a tile
BITS: dict[OutDtype, int] = {"float32": 24, "bfloat16": 8, "float16": 11}


def splash_numerics(dtype: OutDtype) -> Numerics:
    """The caller scales q, in the inputs' dtype, in which gradients multiply P and dS; the forward's P is float32."""
    low = "none" if dtype == "float32" else dtype
    return Numerics(
        out_dtype=dtype, prescale="q", prescale_bits=BITS[dtype], p_storage=low, ds_storage=low, min_tile=TILE,
        denominator_tile=TILE, accumulation="nearest" if dtype == "float32" else "tensor_core",
    )  # fmt: skip


def kernel(mask: Tensor, cap: float | None, interpret: bool, with_lse: bool) -> Any:
    """The kernel of a mask, (num_qo_heads, rows, keys) in whole tiles."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    heads = splash_attention_mask.MultiHeadMask([splash_attention_mask.NumpyMask(x.cpu().numpy()) for x in mask])
    return splash_attention_kernel.make_splash_mha_single_device(
        heads, attn_logits_soft_cap=cap, interpret=interpret, save_residuals=with_lse
    )


class Differentiable(torch.autograd.Function):
    """Splash attention and its own gradients; none reach or leave through the lse."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: tuple[Tensor, float | None, bool]
    ) -> tuple[Tensor, Tensor]:
        ctx.inputs, ctx.options = [None if x is None else to_jax(x) for x in (q, k, v, sinks)], options
        with library().default_matmul_precision("highest"):
            *inputs, sinks = ctx.inputs
            out, (lse,) = kernel(*options, True)(*inputs, sinks=sinks)
        ctx.mark_non_differentiable(lse := to_torch(lse))
        return to_torch(out), lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        mask, cap, interpret = ctx.options
        attend, given = kernel(mask, cap, interpret, False), [x for x in ctx.inputs if x is not None]
        with library().default_matmul_precision("highest"):
            found = library().vjp(lambda q, k, v, *sinks: attend(q, k, v, None, *sinks), *given)[1](to_jax(dout))
        return (*map(to_torch, found), *(None for _ in range(5 - len(given))))


class JaxSplash(PerRequest):
    """make_splash_mha_single_device with one mask a query head."""

    name = "jax-splash"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        library()
        self.capabilities = Capabilities(
            supported={"score": OneOf(("none", "softcap")), "refusal": OneOf(())},
            numerics={dtype: splash_numerics(dtype) for dtype in BITS},
            gradient_of_lse=False,
        )

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        return self.attend_with(sinks_of(problem), problem, request, q, k, v)

    def attend_with(
        self, sinks: Tensor | None, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Attended:
        """Attention of one request with its heads' sink logits, (num_qo_heads,)."""
        rows, keys = q.shape[1], k.shape[1]
        more_rows, more_keys = -rows % TILE, -keys % TILE or (TILE if keys == 0 else 0)
        mask = pad(problem.masks[request], (0, more_keys, 0, more_rows))
        mask[:, rows:, 0] = True
        cap = next((rule.cap for rule in problem.spec.score_rules if isinstance(rule, SoftCap)), None)
        filled = (pad(x, (0, 0, 0, more)) for x, more in ((q, more_rows), (k, more_keys), (v, more_keys)))
        q, k, v = filled
        out, lse = Differentiable.apply(  # type: ignore[no-untyped-call]
            q * problem.spec.sm_scale, k, v, sinks, (mask, cap, self.device == "cpu")
        )
        return Attended(out[:, :rows], lse[:, :rows], "splash")

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: Tensor, dlse: Tensor | None
    ) -> Backward:
        found, sinks = super().backward(problem, tensors, forward, dout, None), sinks_of(problem)
        if sinks is None:
            return found
        dsink = torch.zeros_like(sinks)
        for n in requests_with_rows(problem):
            leaf = sinks.clone().requires_grad_()
            attended = self.attend_with(leaf, problem, n, *gather(problem, tensors, n))
            dsink += torch.autograd.grad(attended.out, leaf, dout[problem.q_rows(n)].transpose(0, 1))[0]
        return replace(found, dsink=dsink)

    def versions(self) -> dict[str, str]:
        return {"jax": library().__version__}
