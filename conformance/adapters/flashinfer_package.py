"""What the FlashInfer adapters share: the package, its workspace, what its kernels take, and how they compute.

FlashInfer's metadata name no query head, so heads that attend differently go in calls of their own. Its lse is of
base 2, and a page that is listed twice is visited twice: lists must be canonical.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from msgspec.structs import replace
from torch import Tensor

from attnconform.conformance.adapters.gpu_package import require_gpu
from attnconform.conformance.backend import Backend, Capabilities, Domain, OneOf, Unavailable
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rules import And, CustomMask, HeadWindow, MaskRule, Or, SoftCap

INSTALL = "pip install 'attnconform[flashinfer]'"
WORKSPACE_BYTES = 128 << 20  # what its documentation recommends
TANH_EPS = 2.0**13  # tanh.approx.f32 is off by up to 2^-11
MAX_SPLITS = 64

EXPRESSIBLE: dict[str, Domain] = {
    "dtype": OneOf(("bfloat16", "float16")),
    "head_dim": OneOf(("64/64", "128/128", "256/256")),
    # its ALiBi slopes follow from the number of heads and cannot be given
    "score": OneOf(("none", "softcap")),
    "sink": OneOf(("none",)),
    # tables and lists are checked by the suite's own views
    "refusal": OneOf(()),
}
SHARED_BY_A_GROUP: dict[str, Domain] = {
    "sharing": OneOf(("kv_head", "shared")),
    "mask": OneOf(
        ("none", "causal", "window", "causal_window", "prefix", "document", "causal_or_document"),
    ),
}


def load_flashinfer(name: str, device: str) -> Any:
    """The package. Raises Unavailable where it, or a GPU, is missing."""
    try:
        import flashinfer
    except ModuleNotFoundError as error:
        raise Unavailable(f"{name} needs the package {error.name}: {INSTALL}") from error
    require_gpu(name, device)
    return flashinfer


def tensor_core_numerics() -> dict[str, Numerics]:
    """The FA2 kernels: the denominator sums the stored P."""
    return {
        dtype: replace(NUMERICS_CLASSES[name], l_from_p=True, tanh_eps=TANH_EPS, num_splits=MAX_SPLITS)
        for dtype, name in (("bfloat16", "bf16"), ("float16", "fp16"))
    }


class FlashInfer(Backend):
    """The package with a workspace that all of a backend's calls share, as serving engines have it."""

    capabilities: Capabilities
    supported: ClassVar[dict[str, Domain]] = {}  # beside EXPRESSIBLE

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.flashinfer = load_flashinfer(self.name, device)
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.capabilities = Capabilities(
            supported=EXPRESSIBLE | self.supported,
            numerics=self.numerics(),
            lse_base="2",
            has_backward=False,
            gradient_of_lse=False,
        )

    def numerics(self) -> dict[str, Numerics]:
        return tensor_core_numerics()

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "flashinfer": version("flashinfer-python")}


@dataclass(frozen=True)
class HeadGroup:
    """Query heads that attend alike, and the KV heads that they read."""

    qo_heads: slice
    kv_heads: slice

    @property
    def num_qo_heads(self) -> int:
        return int(self.qo_heads.stop - self.qo_heads.start)

    @property
    def num_kv_heads(self) -> int:
        return int(self.kv_heads.stop - self.kv_heads.start)


def head_groups(spec: AttentionProblem) -> Iterator[HeadGroup]:
    """All heads at once, a KV head's, or each alone, as lists and rules have it. [GQA-LISTS, GQA-MAP]"""
    size = spec.group_size
    if differs_by_head(spec.mask_rule) or (spec.candidates is not None and spec.candidates.sharing == "query_head"):
        yield from (HeadGroup(slice(h, h + 1), slice(h // size, h // size + 1)) for h in range(spec.num_qo_heads))
    elif spec.candidates is not None and spec.candidates.sharing == "kv_head":
        yield from (HeadGroup(slice(h * size, (h + 1) * size), slice(h, h + 1)) for h in range(spec.num_kv_heads))
    else:
        yield HeadGroup(slice(0, spec.num_qo_heads), slice(0, spec.num_kv_heads))


def differs_by_head(rule: MaskRule | None) -> bool:
    """Whether two query heads may be allowed different positions."""
    if isinstance(rule, And | Or):
        return any(differs_by_head(part) for part in rule.rules)
    return isinstance(rule, HeadWindow | CustomMask)


def soft_cap(spec: AttentionProblem) -> float | None:
    """The cap, as FlashInfer takes it; no other score rule is declared."""
    caps = [rule.cap for rule in spec.score_rules if isinstance(rule, SoftCap)]
    return caps[0] if caps else None


def heads_of(cache: Tensor, group: HeadGroup, layout: str) -> Tensor:
    """A paged cache with the KV heads of a group alone, its strides kept."""
    return cache[:, :, group.kv_heads] if layout == "NHD" else cache[:, group.kv_heads]
