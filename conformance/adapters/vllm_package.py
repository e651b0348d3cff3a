"""vLLM's Triton kernels, each of an installed or unpacked package's own module, without the serving engine."""

import importlib.metadata
import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from attnconform.conformance.adapters.single_module import load_module
from attnconform.conformance.adapters.third_party_interpreter import third_party_kernels
from attnconform.conformance.adapters.triton_kernels import interpreting
from attnconform.conformance.backend import Backend, Capabilities, Domain, OneOf
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics

INSTALL = "pip install --no-deps vllm==0.33.0"
LN_2, LOG2_E = 0.6931471805599453, 1.4426950408889634


def major_capability() -> int:
    """The GPU's generation; 0 without one."""
    return torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0


def engine() -> dict[str, dict[str, Any]]:
    """What the modules ask of vLLM: which GPU this is, and switches, none of them set."""
    import triton

    platform = SimpleNamespace(
        is_rocm=lambda: False,
        is_device_capability_family=lambda family: major_capability() * 10 == family,
        is_arch_support_pdl=lambda: major_capability() >= 9,
        fp8_dtype=lambda: torch.float8_e4m3fn,
    )
    modes = SimpleNamespace(NONE=0, INT8_PER_TOKEN_HEAD=2, FP8_PER_TOKEN_HEAD=3, INT4_PER_TOKEN_HEAD=4)
    return {
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"triton": triton, "tl": triton.language, "LOG2E": LOG2_E, "LOGE2": LN_2},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": modes},
    }


class VllmKernels(Backend):
    """One module, whose kernels are interpreted where there is no GPU. Subclasses name it and call it."""

    module: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16", "float16")
    supported: ClassVar[dict[str, Domain]]
    returns_lse: ClassVar[bool] = False

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.interpreted = interpreting(device)
        self.context = third_party_kernels if self.interpreted else nullcontext
        self.kernels = load_module(self.module, engine, INSTALL)
        # a product of float32 goes through TF32 on a GPU
        dtypes = self.dtypes if self.interpreted else ("bfloat16", "float16")
        self.capabilities = Capabilities(
            supported={"dtype": OneOf(dtypes), "refusal": OneOf(()), **self.supported},
            numerics=self.numerics(),
            returns_lse=self.returns_lse,
            has_backward=False,
            gradient_of_lse=False,
        )

    def numerics(self) -> dict[str, Numerics]:
        """P is stored in the values' dtype, everything else in float32."""
        low = "" if self.interpreted else "-hopper"
        names = {"float32": "fp32", "bfloat16": f"bf16{low}", "float16": f"fp16{low}"}
        return {dtype: NUMERICS_CLASSES[name] for dtype, name in names.items()}

    def versions(self) -> dict[str, str]:
        return super().versions() | {"vllm": importlib.metadata.version("vllm")}
