"""What an implementation under judgement looks like to the suite: a backend, what it declares, what it returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec
import torch

from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics
from attnconform.conformance.lifecycle import Lifecycle
from attnconform.conformance.structures import Structures
from attnconform.conformance.views import ProblemView
from attnconform.reference.errors import RefusedInput

Determinism = Literal["none", "run_to_run", "batch_invariant"]  # each promises what the one before does


class OneOf(msgspec.Struct, frozen=True, tag=True):
    """A domain that is a list of values."""

    values: tuple[str | int | bool, ...]

    def holds(self, value: str | int | bool) -> bool:
        return str(value) in map(str, self.values)  # the matrix names every value by a text, 16 by "16"


class Span(msgspec.Struct, frozen=True, tag=True):
    """A domain of integers: low, low + step, ... up to high."""

    low: int
    high: int
    step: int = 1

    def holds(self, value: str | int | bool) -> bool:
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        return isinstance(number, int) and self.low <= number <= self.high and (number - self.low) % self.step == 0


class Whole(msgspec.Struct, frozen=True, tag=True):
    """A domain that leaves nothing out."""

    def holds(self, value: str | int | bool) -> bool:
        return True


Domain = OneOf | Span | Whole


# features that a backend has only where it says so: axis -> the value that means "not used"
OPTIONAL_AXES = {
    "quant": "none", "dropout": "none", "rope": "none", "epilogue": "none", "head_pages": "none", "form": "set",
}  # fmt: skip


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend declares. An axis not named in `supported` is supported whole, OPTIONAL_AXES not at all."""

    supported: Mapping[str, Domain] = {}  # axis name -> values it runs
    fallback: Mapping[str, Domain] = {}  # axis name -> further values it runs on another path, which it then reports
    # dtype, or dtype/codes where V is quantized -> declared arithmetic; the class of the dtype's name if absent
    numerics: Mapping[str, Numerics] = {}
    returns_lse: bool = True
    lse_base: Literal["e", "2"] = "e"
    has_backward: bool = True
    gradient_of_lse: bool = True  # backward takes dlse
    score_gradients: bool = False  # backward gives gradients of the score rules' parameters
    quantized_backward: bool = False  # backward takes quantized caches
    tolerates_nonfinite: bool = False  # NaN in owned slots that no row selects has no influence
    determinism: Determinism = "run_to_run"
    live_indices: bool = False  # a plan reads index arrays when it runs, and the caller leaves them alone until then
    checks_owner: bool = False  # refuses another request's page where the problem says who owns what

    def declares(self, axis: str, value: str) -> bool:
        """Whether inputs with this value of an axis may be sent."""
        if axis in self.fallback and self.fallback[axis].holds(value):
            return True
        if axis in self.supported:
            return self.supported[axis].holds(value)
        return value == OPTIONAL_AXES.get(axis, value)

    def numerics_of(self, dtype: str, *, of_codes: bool = False) -> Numerics:
        """Declared arithmetic for inputs of one dtype; of_codes: V is quantized."""
        for name in (f"{dtype}/codes", dtype) if of_codes else (dtype,):
            if name in self.numerics:
                return self.numerics[name]
        return NUMERICS_CLASSES[{"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "float64"}[dtype]]


@dataclass(frozen=True)
class Tensors:
    """Inputs and outputs of one call, on the backend's device.

    `out` and `lse` arrive poisoned, with guard bands around them and, where strides are asked for, between their rows.
    A backend writes into them, or returns tensors of its own.
    """

    q: torch.Tensor  # (total_q, num_qo_heads, head_dim_qk)
    k_cache: (
        torch.Tensor
    )  # (num_pages, page_size, num_kv_heads, head_dim_qk) NHD, or heads before tokens HND; any strides
    v_cache: torch.Tensor  # likewise, head_dim_vo
    out: torch.Tensor  # (total_q, num_qo_heads, head_dim_vo); the last axis without gaps, else any strides
    lse: torch.Tensor  # (total_q, num_qo_heads) float32; any strides
    # float32 scales of a quantized cache, whose tensor then holds int8 or float8 codes; shapes as in Quantization
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None


@dataclass(frozen=True)
class Forward:
    """What a forward call gave."""

    out: torch.Tensor  # (total_q, num_qo_heads, head_dim_vo)
    lse: torch.Tensor | None  # (total_q, num_qo_heads); None where not returned
    path: str = "native"  # which code ran; anything that starts with "fallback" is one
    saved: Any = field(default=None, repr=False)  # what the backend's own backward needs


@dataclass(frozen=True)
class Backward:
    """What a backward call gave."""

    dq: torch.Tensor  # (total_q, num_qo_heads, head_dim_qk)
    dk: torch.Tensor  # in the cache's shape
    dv: torch.Tensor
    dsink: torch.Tensor | None = None  # (num_qo_heads,)
    dscore: tuple[torch.Tensor, ...] | None = None  # one per score rule, in the shape of its parameters


class Backend(Structures, Lifecycle):
    """An implementation under judgement. Subclasses set `name` and `capabilities` and write `forward`."""

    name: ClassVar[str] = "unnamed"
    capabilities: Capabilities = Capabilities()
    refusals: tuple[type[Exception], ...] = (RefusedInput,)  # what it raises to refuse an input

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        """Attention of every row; refuses by raising one of `refusals` before anything is written."""
        raise NotImplementedError

    def backward(
        self,
        problem: ProblemView,
        tensors: Tensors,
        forward: Forward,  # of the same problem and tensors
        dout: torch.Tensor,  # (total_q, num_qo_heads, head_dim_vo)
        dlse: torch.Tensor | None,  # (total_q, num_qo_heads)
    ) -> Backward:
        """Gradients with respect to q, the caches and the sink logits."""
        raise NotImplementedError

    def close(self) -> None:
        """Releases what the backend holds."""

    def versions(self) -> dict[str, str]:
        """Versions that a report should name."""
        return {"torch": torch.__version__}


class Unavailable(Exception):
    """A backend that cannot run here; the message says what to install."""
