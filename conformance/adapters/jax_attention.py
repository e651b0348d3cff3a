"""JAX: the attention of jax.nn as XLA compiles it, and Pallas' paged decode kernel, which a CPU interprets."""

from functools import cache
from typing import Any

import torch
import torch.utils.dlpack
from torch import Tensor
from torch.nn.functional import pad

from attnconform.conformance.adapters.per_request import Attended, PerRequest
from attnconform.conformance.adapters.placement import causal_places
from attnconform.conformance.adapters.sdpa import additive_mask
from attnconform.conformance.backend import Backend, Capabilities, Forward, OneOf, Tensors, Unavailable
from attnconform.conformance.bounds.numerics import Numerics, OutDtype
from attnconform.conformance.views import ProblemView
from attnconform.reference.rules import SoftCap

DTYPES: tuple[OutDtype, ...] = ("float32", "bfloat16", "float16")
SAME_HEAD_DIM = OneOf(("64/64", "128/128", "80/80", "96/96", "256/256"))
POWER_OF_TWO = OneOf(("64/64", "128/128", "256/256"))
SPLITS, PAGES_A_STEP = 2, 2  # of the paged kernel; tables are filled up to a multiple of both


def library() -> Any:
    """jax. Raises Unavailable where it is missing."""
    try:
        import jax
    except ModuleNotFoundError as error:
        raise Unavailable("JAX is not here: pip install 'attnconform[jax]'") from error
    return jax


def to_jax(x: Tensor) -> Any:
    """The same numbers; copied, since JAX may keep what it is given."""
    return library().numpy.from_dlpack(x.detach().clone().contiguous())


def to_torch(x: Any) -> Tensor:
    return torch.utils.dlpack.from_dlpack(x).clone()


def xla_numerics(dtype: OutDtype) -> Numerics:
    """Scores in float32; P is divided, then stored in the inputs' dtype for its product with V."""
    if dtype == "float32":
        return Numerics(out_dtype=dtype, norm_p=True, heads_low=True)
    return Numerics(
        out_dtype=dtype, p_storage=dtype, ds_storage=dtype, dp_storage=dtype, accumulation="tensor_core", norm_p=True,
        heads_low=True,
    )  # fmt: skip


@cache
def compiled(scale: float) -> tuple[Any, Any]:
    """out and lse, and the gradients of out: functions of q, k, v, bias, mask, and for the second dout."""
    jax = library()

    def attend(q: Any, k: Any, v: Any, bias: Any, mask: Any) -> Any:
        given = {"scale": scale, "return_residual": True, "implementation": "xla"}
        return jax.nn.dot_product_attention(q, k, v, bias, mask, **given)

    def pull(q: Any, k: Any, v: Any, bias: Any, mask: Any, dout: Any) -> Any:
        return jax.vjp(lambda q, k, v: attend(q, k, v, bias, mask), q, k, v, has_aux=True)[1](dout)

    return jax.jit(attend), jax.jit(pull)


class Differentiable(torch.autograd.Function):
    """JAX's attention and its own gradients; none reach or leave through the lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Any, mask: Any, scale: float) -> tuple[Tensor, Tensor]:
        ctx.inputs, ctx.scale = (*map(to_jax, (q, k, v)), bias, mask), scale
        out, lse = map(to_torch, compiled(scale)[0](*ctx.inputs))
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*map(to_torch, compiled(ctx.scale)[1](*ctx.inputs, to_jax(dout))), None, None, None)


class JaxXla(PerRequest):
    """jax.nn.dot_product_attention with a boolean mask."""

    name = "jax-xla"
    capabilities = Capabilities(
        supported={
            "head_dim": SAME_HEAD_DIM,
            "score": OneOf(("none", "alibi", "relative")),
            "sink": OneOf(("none",)),
            "refusal": OneOf(()),
        },
        numerics={dtype: xla_numerics(dtype) for dtype in DTYPES},
        gradient_of_lse=False,
    )

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        library()

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        room = int(k.shape[1] == 0)  # it takes no request without keys: one that is masked
        mask = to_jax(pad(problem.masks[request], (0, room))[None])
        rules = problem.spec.score_rules
        bias = to_jax(pad(additive_mask(problem, request), (0, room)).nan_to_num(neginf=0)[None]) if rules else None
        by_token = (x.transpose(0, 1)[None] for x in (q, *(pad(x, (0, 0, 0, room)) for x in (k, v))))
        out, lse = Differentiable.apply(  # type: ignore[no-untyped-call]
            *by_token, bias, mask, problem.spec.sm_scale
        )
        return Attended(out[0].transpose(0, 1), lse[0].transpose(0, 1).float(), "xla")

    def versions(self) -> dict[str, str]:
        return {"jax": library().__version__}


class JaxPaged(Backend):
    """Pallas' paged attention: a row is a request of its own, whose length ends where the row may look last."""

    name = "jax-paged"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        library()
        from jax.experimental.pallas.ops.gpu import paged_attention

        self.attention, self.interpret = paged_attention.paged_attention, device == "cpu"
        self.capabilities = Capabilities(
            supported={
                "head_dim": POWER_OF_TWO,
                "granularity": OneOf(("dense",)),
                "mask": OneOf(("none", "causal")),
                "score": OneOf(("none", "softcap")),
                "sink": OneOf(("none",)),
                "refusal": OneOf(()),
            },
            returns_lse=False,
            has_backward=False,
            gradient_of_lse=False,
        )

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        places = [causal_places(problem, n) for n in range(problem.spec.batch_size)]
        lengths = torch.tensor([place + 1 for of_request in places for place in of_request]).int()
        requests = torch.tensor([n for n, of_request in enumerate(places) for _ in of_request])
        table = problem.tensor(problem.spec.cache.page_table)
        steps = max(1, -(-table.shape[1] // (SPLITS * PAGES_A_STEP)))  # requests without keys may have no page at all
        table = pad(table, (0, steps * SPLITS * PAGES_A_STEP - table.shape[1]), value=-1)
        table = torch.where(table < 0, table[:, :1], table).clamp(min=0)[requests]  # never a page of nobody's
        cap = next((rule.cap for rule in problem.spec.score_rules if isinstance(rule, SoftCap)), None)
        out = self.attention(
            to_jax(tensors.q * problem.spec.sm_scale),
            *(to_jax(self.pages(problem, cache)) for cache in (tensors.k_cache, tensors.v_cache)),
            to_jax(table),
            to_jax(lengths),
            k_splits=SPLITS,
            pages_per_compute_block=PAGES_A_STEP,
            attn_logits_soft_cap=cap,
            interpret=self.interpret,
        )
        return Forward(tensors.out.copy_(to_torch(out)), None, path="pallas")

    def pages(self, problem: ProblemView, cache: Tensor) -> Tensor:
        """(num_kv_heads, num_pages, page_size, head_dim)."""
        spec = problem.spec.cache
        return problem.by_slot(cache).unflatten(0, (spec.num_pages, spec.page_size)).permute(2, 0, 1, 3)

    def versions(self) -> dict[str, str]:
        return {"jax": library().__version__}
