"""FlexAttention, eager and compiled: two backends, because one BlockMask means two things to them.

Compiled kernels visit the listed blocks and apply mask_mod; eager FlexAttention ignores the list and applies mask_mod
alone. Membership in the candidate sets is therefore always part of mask_mod here, and blocks only say what may be
skipped. [BLOCK-BIND, BLOCK-MEMBER]
"""

from typing import Any, ClassVar

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad

from attnconform.conformance.adapters.per_request import Attended, PerRequest
from attnconform.conformance.adapters.torch_rules import MaskMod, ScoreMod, captured, lower_mask, lower_score
from attnconform.conformance.backend import Capabilities, OneOf
from attnconform.conformance.bounds.numerics import Numerics, OutDtype
from attnconform.conformance.views import ProblemView

DTYPES: tuple[OutDtype, ...] = ("float32", "bfloat16", "float16")
EXPRESSIBLE = {
    "sink": OneOf(("none",)),
    # Lists and tables are checked by the suite's own views: none of these refusals would be FlexAttention's.
    "refusal": OneOf(()),
}
BLOCK_SIZE = {"cpu": 32, "cuda": 128}  # small enough for a short request to have several; the GPU templates' own
# Every problem is a structure of its own; past torch's default of 8 builds per function, flex_attention raises.
BUILDS = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}


def eager_numerics(dtype: OutDtype) -> Numerics:
    """Scores in float32; P is divided, then stored in the inputs' dtype for its product with V."""
    if dtype == "float32":
        return Numerics(out_dtype=dtype, norm_p=True, heads_low=True)
    return Numerics(
        out_dtype=dtype,
        p_storage=dtype,
        ds_storage=dtype,
        accumulation="tensor_core",
        norm_p=True,
        heads_low=True,
    )


def call_flex(
    q: Tensor,  # (1, num_qo_heads, seqlen_q, head_dim_qk)
    k: Tensor,
    v: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask,
    scale: float,
    with_lse: bool,
    kernel_options: Any = None,  # FlexKernelOptions
) -> tuple[Tensor, Tensor | None, bool]:
    """out, lse, and whether this very call was compiled: Dynamo folds the question to True, plain Python to False."""
    is_compiled = torch.compiler.is_dynamo_compiling()
    if not with_lse:
        out = flex_attention(q, k, v, score_mod, block_mask, scale, enable_gqa=True, kernel_options=kernel_options)
        return out, None, is_compiled
    out, aux = flex_attention(
        q, k, v, score_mod, block_mask, scale,
        enable_gqa=True, kernel_options=kernel_options, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    return out, aux.lse, is_compiled


def offset_of(problem: ProblemView, request: int) -> Tensor:
    """Logical position of a request's first query row, (1,)."""
    return captured([int(problem.spec.q_offset[request])], torch.int32, torch.device(problem.device))


def lower_membership(problem: ProblemView, request: int, seqlen_q: int, seqlen_kv: int, first_row: int = 0) -> MaskMod:
    """mask_mod of one request's rows from a first one on, False past its own lengths. [BLOCK-MEMBER, MASK-TAIL]"""
    listed = problem.candidate_masks[request][:, first_row : first_row + seqlen_q]
    member = pad(listed, (0, seqlen_kv - listed.shape[2], 0, seqlen_q - listed.shape[1]))
    allows = lower_mask(problem.spec.mask_rule, [request], offset_of(problem, request) + first_row)

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return member[h, q_idx, kv_idx] & allows(b, h, q_idx, kv_idx)

    return mask_mod


class Flex(PerRequest):
    """flex_attention on one request at a time, called or compiled."""

    path: ClassVar[str]  # what should run
    kernel_options: ClassVar[dict[str, Any] | None] = None

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.call = call_flex

    @property
    def is_on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def lengths(self, seqlen_q: int, seqlen_kv: int) -> tuple[int, int]:
        """Lengths a request is padded to; padding is masked."""
        return seqlen_q, max(seqlen_kv, 1)

    def block_mask(
        self, problem: ProblemView, request: int, seqlen_q: int, seqlen_kv: int, first_row: int = 0
    ) -> BlockMask:
        """What one request's rows attend, from a first one on."""
        mask_mod = lower_membership(problem, request, seqlen_q, seqlen_kv, first_row)
        size = BLOCK_SIZE[torch.device(problem.device).type]
        heads = problem.spec.num_qo_heads
        return create_block_mask(mask_mod, 1, heads, seqlen_q, seqlen_kv, device=problem.device, BLOCK_SIZE=size)

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        return self.attend_from(0, problem, request, q, k, v)

    def attend_from(
        self, first_row: int, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor
    ) -> Attended:
        """One call, for a request's rows from a first one on."""
        seqlen_q, seqlen_kv = self.lengths(q.shape[1], k.shape[1])
        padded_q = pad(q, (0, 0, 0, seqlen_q - q.shape[1])).contiguous()
        padded_k, padded_v = (pad(x, (0, 0, 0, seqlen_kv - x.shape[1])).contiguous() for x in (k, v))
        with torch._dynamo.config.patch(BUILDS):
            out, lse, is_compiled = self.call(
                padded_q[None],
                padded_k[None],
                padded_v[None],
                lower_score(problem.spec.score_rules, offset_of(problem, request) + first_row),
                self.block_mask(problem, request, seqlen_q, seqlen_kv, first_row),
                problem.spec.sm_scale,
                self.capabilities.returns_lse,
                self.kernel_options,
            )
        path = "compiled" if is_compiled else "eager"
        rows = slice(0, q.shape[1])
        return Attended(
            out=out[0, :, rows],
            lse=None if lse is None else lse[0, :, rows],
            path=path if path == self.path else f"fallback: {path}",
        )


class FlexEager(Flex):
    """flex_attention as called: scores as a whole matrix, block lists ignored."""

    name = "flex-eager"
    path = "eager"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.capabilities = Capabilities(
            supported=EXPRESSIBLE,
            numerics={dtype: eager_numerics(dtype) for dtype in DTYPES},
            has_backward=self.is_on_gpu,  # on a CPU neither form has one
        )


class FlexCompiled(Flex):
    """flex_attention compiled: a fused kernel that visits the listed blocks.

    One compile that raises makes later calls of the same function run eager without a word: the path says so. A build
    takes seconds, and dynamic shapes do not build reliably on a CPU (torch 2.13 renames size variables by prefix), so
    lengths are rounded up to a few.
    """

    name = "flex-compiled"
    path = "compiled"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.call = torch.compile(call_flex, dynamic=False, fullgraph=True)
        self.capabilities = Capabilities(
            supported=EXPRESSIBLE,
            returns_lse=self.is_on_gpu,  # on a CPU it has neither lse nor backward
            has_backward=self.is_on_gpu,
            gradient_of_lse=self.is_on_gpu,
        )

    def lengths(self, seqlen_q: int, seqlen_kv: int) -> tuple[int, int]:
        """1, 5, 13, 29, ... rows and 101, 229, 485, ... keys: never a whole number of blocks. [MASK-TAIL]"""
        return (1 if seqlen_q == 1 else round_up(seqlen_q, 8, 3)), round_up(seqlen_kv, 128, 27)


def round_up(length: int, step: int, short: int) -> int:
    """The least step * 2^i - short that length fits in."""
    while length > step - short:
        step *= 2
    return step - short
