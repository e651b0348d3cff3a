"""torch.nn.functional.scaled_dot_product_attention with a dense mask: the composite, and the CPU's flash kernel.

Both read gathered keys and values, one request at a time. They differ in arithmetic and in what they return, so they
are two backends: a mixed one would have no numerics to declare. Soft caps and sink logits cannot be expressed.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from attnconform.conformance.adapters.per_request import Attended, PerRequest
from attnconform.conformance.backend import Capabilities, OneOf, Unavailable
from attnconform.conformance.bounds.numerics import Numerics, OutDtype
from attnconform.conformance.views import ProblemView
from attnconform.reference.rules import Alibi, RelativeBias

DTYPES: tuple[OutDtype, ...] = ("float32", "bfloat16", "float16")
EXPRESSIBLE = {
    "score": OneOf(("none", "alibi", "relative")),
    "sink": OneOf(("none",)),
    # What a dense mask is built from is checked by the suite's own views: none of it would be SDPA's refusal.
    "refusal": OneOf(()),
}


def composite_numerics(dtype: OutDtype) -> Numerics:
    """Low precision is widened first: everything is float32, and only results are rounded.

    q and k are multiplied by the root of the scale, P is divided before it meets V, and gradients of K and V are
    rounded for each request that reads a slot.
    """
    return Numerics(out_dtype=dtype, prescale="q_and_k", prescale_bits=24, norm_p=True, heads_low=True)


def flash_numerics(dtype: OutDtype) -> Numerics:
    """The CPU's flash kernel; in low precision its exponential is off by up to 900 units and exp(0) is not 1."""
    if dtype == "float32":
        return Numerics(out_dtype=dtype, heads_low=True)
    return Numerics(
        out_dtype=dtype,
        p_storage=dtype,
        ds_storage=dtype,
        accumulation="tensor_core",
        eps=2.0**-14 / 2.0**-24,
        exp_zero_exact=False,
        heads_low=True,
    )


def additive_mask(problem: ProblemView, request: int) -> Tensor:
    """Biases of the score rules where a row attends and -inf elsewhere, (num_qo_heads, seqlen_q, seqlen_kv)."""
    spec, mask = problem.spec, problem.masks[request]
    bias = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
    q_pos = torch.arange(mask.shape[1], device=mask.device) + int(spec.q_offset[request])
    distance = torch.arange(mask.shape[2], device=mask.device) - q_pos[:, None]
    for rule in spec.score_rules:
        if isinstance(rule, Alibi):
            bias += torch.tensor(rule.slopes, dtype=torch.float32, device=mask.device)[:, None, None] * distance
        else:
            assert isinstance(rule, RelativeBias)  # rules that do not add are not declared
            farthest = len(rule.tables[0]) // 2
            tables = torch.tensor(rule.tables, dtype=torch.float32, device=mask.device)
            bias += tables[:, distance.clamp(-farthest, farthest) + farthest]
    return bias.masked_fill(~mask, float("-inf"))


class Sdpa(PerRequest):
    """The composite ("math") implementation, which runs on any device and for any head_dim."""

    name = "sdpa"
    capabilities = Capabilities(
        supported=EXPRESSIBLE,
        numerics={dtype: composite_numerics(dtype) for dtype in DTYPES},
        returns_lse=False,
        gradient_of_lse=False,
    )

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        mask = additive_mask(problem, request) if problem.spec.score_rules else problem.masks[request]
        with sdpa_kernel(SDPBackend.MATH):
            out = scaled_dot_product_attention(
                q[None], k[None], v[None], attn_mask=mask[None], scale=problem.spec.sm_scale, enable_gqa=True
            )
        return Attended(out[0], None, "math")


class SdpaFlashCpu(PerRequest):
    """What scaled_dot_product_attention runs on a CPU where head_dim_qk equals head_dim_vo, with its lse."""

    name = "sdpa-lse"
    capabilities = Capabilities(
        supported=EXPRESSIBLE | {"head_dim": OneOf(("64/64", "128/128", "80/80", "96/96", "256/256"))},
        numerics={dtype: flash_numerics(dtype) for dtype in DTYPES},
        gradient_of_lse=False,
    )

    def __init__(self, device: str = "cpu") -> None:
        if device != "cpu":
            raise Unavailable(f"sdpa-lse is a kernel of the CPU, but device is {device!r}")
        super().__init__(device)

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        # The kernel divides by the number of keys, and the process ends: a request without any gets one that is masked.
        room = int(k.shape[1] == 0)
        keys, values = (pad(x, (0, 0, 0, room)).repeat_interleave(problem.spec.group_size, dim=0) for x in (k, v))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None],
            keys[None],
            values[None],
            attn_mask=pad(additive_mask(problem, request), (0, room), value=float("-inf"))[None],
            scale=problem.spec.sm_scale,
        )
        return Attended(out[0], lse[0], "flash")
