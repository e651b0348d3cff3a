"""fla-core's block-selected attention of NSA; without a GPU in Triton's interpreter.

A list per query and KV head of whole blocks, always causal. Groups are padded with heads of zeros to a power of two
from 16 up, as it asks for. Lists keep order, holes and repeated blocks, and are filled up with -1 to a power of two,
which the backward needs and no documentation says.
"""

import dataclasses
import importlib.metadata
from contextlib import nullcontext
from typing import ClassVar

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn.functional import pad

from attnconform.conformance.adapters.per_request import Attended, PerRequest
from attnconform.conformance.adapters.placement import causal_places, rows_of_calls
from attnconform.conformance.adapters.third_party_interpreter import third_party_kernels, untuned_kernels
from attnconform.conformance.adapters.triton_kernels import interpreting
from attnconform.conformance.backend import Backward, Capabilities, Forward, OneOf, Tensors, Unavailable
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics
from attnconform.conformance.views import ProblemView

BLOCK_SIZE = 16  # where nothing is listed
GROUP = 16  # query heads of a KV head, at least


def numerics_of(dtype: str, interpreted: bool) -> Numerics:
    """q times the scale is rounded to the inputs' dtype, and P and dS before their products.

    The interpreter rounds the scale as well, a GPU does not.
    """
    name = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}[dtype]
    bits = {"float32": 24, "float16": 11, "bfloat16": 8}[dtype]
    suffix = "" if interpreted else "-hopper"
    return replace(
        NUMERICS_CLASSES[name + suffix],
        prescale="q",
        prescale_bits=bits,
        factor_bits=bits if interpreted else 0,
        min_tile=16,
    )


class FlaNsa(PerRequest):
    """parallel_nsa_fwd, and ParallelNSAFunction where gradients are asked for."""

    name = "fla-nsa"
    fills_lists: ClassVar[bool] = True

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        interpreted = interpreting(device)
        try:
            from fla.ops.nsa import parallel
        except ModuleNotFoundError as error:
            raise Unavailable("fla-core is not here: pip install 'attnconform[fla]'") from error
        self.nsa, self.kernels = parallel, third_party_kernels if interpreted else nullcontext
        # float32 goes through TF32 on a GPU; bfloat16 arithmetic is not interpreted
        dtypes = ("float32", "float16") if interpreted else ("bfloat16", "float16")
        self.capabilities = Capabilities(
            supported={
                "dtype": OneOf(dtypes),
                "head_dim": OneOf(("64/64", "128/128", "80/80", "96/96", "64/32")),
                "granularity": OneOf(("dense", "block")),
                "sharing": OneOf(("kv_head", "shared")),
                "local": OneOf(("none",)),
                "mask": OneOf(("none", "causal")),
                "score": OneOf(("none",)),
                "sink": OneOf(("none",)),
                "refusal": OneOf(()),  # it checks no list
            },
            numerics={dtype: numerics_of(dtype, interpreted) for dtype in dtypes},
            gradient_of_lse=False,
        )

    def attend(self, problem: ProblemView, request: int, q: Tensor, k: Tensor, v: Tensor) -> Attended:
        lists, size = listed_blocks(problem, request)
        if self.fills_lists:
            lists = filled_up(lists)
        places = causal_places(problem, request)
        # a row before the first key stands at it, and lists nothing
        lists = lists.masked_fill(torch.tensor(places, device=lists.device)[:, None, None] < 0, -1)
        places = [max(place, 0) for place in places]
        k, v = (pad(x, (0, 0, 0, max(1 - x.shape[1], 0))) for x in (k, v))
        parts = [
            self.attend_rows(q[:, rows], k, v, lists[rows], size, places[rows.stop - 1] + 1, problem.spec.sm_scale)
            for rows in rows_of_calls(places)
        ]
        lses = [lse for _, lse in parts if lse is not None]
        return Attended(torch.cat([out for out, _ in parts], dim=1), torch.cat(lses, dim=1) if lses else None, "nsa")

    def attend_rows(
        self, q: Tensor, k: Tensor, v: Tensor, lists: Tensor, size: int, seqlen_kv: int, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Rows that end at the last of so many keys; out and lse, heads first. No lse where gradients are asked for."""
        heads, rows, width = q.shape[0], q.shape[1], lists.shape[-1]
        group = heads // k.shape[0]
        by_group = pad(q.unflatten(0, (-1, group)), (0, 0, 0, 0, 0, padded_group(group) - group))
        k, v = (x[:, :seqlen_kv].to(q.dtype) for x in (k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (by_group.flatten(0, 1), k, v))
        given = (lists[None].contiguous(), width, size, scale)
        if q.requires_grad:  # its backward takes as many queries as keys: those in front list nothing
            ahead = seqlen_kv - rows
            lists = pad(given[0], (0, 0, 0, 0, ahead, 0), value=-1)
            out = self.nsa.ParallelNSAFunction.apply(pad(q, (0, 0, 0, 0, ahead, 0)), k, v, lists, *given[1:], None)
            out, lse = out[:, ahead:], None
        else:
            out, lse = self.nsa.parallel_nsa_fwd(q, k, v, *given)
        return without_padding(out, group), None if lse is None else without_padding(lse, group)

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        with self.kernels():
            return super().forward(problem, tensors)

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: Tensor, dlse: Tensor | None
    ) -> Backward:
        # the gradients of a request's calls, each rounded by the package, add up in float32
        wide = dataclasses.replace(tensors, k_cache=tensors.k_cache.float(), v_cache=tensors.v_cache.float())
        with self.kernels():
            return super().backward(problem, wide, forward, dout, dlse)

    def versions(self) -> dict[str, str]:
        import fla

        return super().versions() | {"fla-core": fla.__version__}


class FlaNsaAnyWidth(FlaNsa):
    """The same with lists as long as the longest, whatever number that is. [SAFE-PATH]"""

    name = "fla-nsa-any-width"
    fills_lists = False


class FlaNsaPlainInterpreter(FlaNsa):
    """The same in bfloat16, in Triton's interpreter as it is: what it makes of that dtype. [BOUND-OUT]"""

    name = "fla-nsa-plain-interpreter"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        if not interpreting(device):
            raise Unavailable(f"{self.name} is of Triton's interpreter, but device is {device!r}")
        self.kernels = untuned_kernels
        self.capabilities = replace(
            self.capabilities,
            supported={**self.capabilities.supported, "dtype": OneOf(("bfloat16",))},
            numerics={"bfloat16": numerics_of("bfloat16", interpreted=True)},
        )

    def versions(self) -> dict[str, str]:
        return super().versions() | {"triton": importlib.metadata.version("triton")}


def filled_up(lists: Tensor) -> Tensor:
    """(seqlen_q, num_kv_heads, width) lists with -1 behind them, up to a power of two."""
    width = lists.shape[-1]
    return pad(lists, (0, power_of_two(width) - width), value=-1)


def power_of_two(number: int) -> int:
    """The least that is no less than a number."""
    return 1 << max(number - 1, 0).bit_length()


def padded_group(group: int) -> int:
    """Query heads of a KV head that its kernels are given."""
    return max(GROUP, power_of_two(group))


def without_padding(x: Tensor, group: int) -> Tensor:
    """(num_qo_heads, rows, ...) of what a kernel gave for padded groups, (1, rows, padded heads, ...)."""
    return x[0].transpose(0, 1).unflatten(0, (-1, padded_group(group)))[:, :group].flatten(0, 1)


def listed_blocks(problem: ProblemView, request: int) -> tuple[Tensor, int]:
    """(seqlen_q, num_kv_heads, width) blocks that rows list, as given, and the size of a block."""
    spec, lists = problem.spec, problem.spec.candidates
    rows = [where for where in spec.rows() if where.request == request]
    if lists is None:
        every = torch.arange(-(-int(spec.seqlen_kv[request]) // BLOCK_SIZE), device=problem.device)
        return every.expand(len(rows), spec.num_kv_heads, -1), BLOCK_SIZE
    heads = range(0, spec.num_qo_heads, spec.group_size)
    index = torch.tensor([[spec.list_index(where, head) for head in heads] for where in rows], device=problem.device)
    return problem.fixed_width_candidates.long()[index], lists.block_size
