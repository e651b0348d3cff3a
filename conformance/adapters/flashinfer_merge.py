"""FlashInfer's Triton kernels that merge partial states; without a GPU in Triton's interpreter.

Its Python wrappers insist on a Hopper GPU: the kernels are launched as the wrappers launch them, from their own file,
which asks for nothing else of the package.
"""

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnconform.conformance.adapters.merged_parts import LN_2, MergedParts
from attnconform.conformance.backend import Unavailable

KERNELS = Path("triton", "kernels", "cascade.py")


def load_kernels() -> Any:
    """The module of the kernels. Raises Unavailable where FlashInfer is not installed."""
    package = importlib.util.find_spec("flashinfer")
    if package is None or package.origin is None:
        raise Unavailable("FlashInfer is not here: pip install 'attnconform[flashinfer]'")
    found = importlib.util.spec_from_file_location("flashinfer_cascade", Path(package.origin).parent / KERNELS)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class FlashInferMerge(MergedParts):
    """merge_state, pair after pair; logarithms of base 2."""

    name = "flashinfer-merge"
    unit = LN_2

    def load(self) -> Any:
        return load_kernels()

    def merge(self, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        rows, states, heads, head_dim = v.shape
        out, lse = v[:, 0].contiguous(), s[:, 0].contiguous()
        for i in range(1, states):
            a, b, other, other_lse = out, lse, v[:, i].contiguous(), s[:, i].contiguous()
            out, lse = torch.empty_like(a), torch.empty_like(b)
            kernel = self.kernels.merge_state_kernel[(rows,)]
            kernel(a, b, other, other_lse, out, lse, heads, head_dim, bdx=head_dim, bdy=heads)
        return out, lse

    def versions(self) -> dict[str, str]:
        return super().versions() | {"flashinfer-python": importlib.metadata.version("flashinfer-python")}


class FlashInferMergeStates(FlashInferMerge):
    """merge_states, all at once."""

    name = "flashinfer-merge-states"

    def merge(self, v: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        rows, states, heads, head_dim = v.shape
        out, lse = torch.empty_like(v[:, 0]), torch.empty_like(s[:, 0])
        kernel = self.kernels.merge_states_kernel[(rows,)]
        kernel(v, s, out, lse, states, heads, head_dim, bdx=head_dim, bdy=heads)
        return out, lse
