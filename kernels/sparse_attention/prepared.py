"""A kernel launch whose grid and plan arguments are fixed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import triton
from torch import Tensor

from attnconform.kernels.sparse_attention.element_loads import compiled_for
from attnconform.kernels.sparse_attention.numerics import IS_INTERPRETED


class PreparedLaunch:
    """A kernel whose grid and plan arguments are fixed, called with the tensors of one run.

    Triton looks at every argument of every call to find the compiled kernel, which takes longer than a short kernel
    runs. All it could find different between two runs of a plan are the strides and the alignment of the run's tensors.
    The launch itself is given addresses: of every tensor it would ask the driver where it lies.
    """

    def __init__(
        self, kernel: triton.JITFunction, grid: tuple[int, int, int], fixed: dict[str, object], options: dict[str, int]
    ) -> None:
        self.kernel, self.grid, self.fixed, self.options = kernel, grid, fixed, options
        assert kernel.arg_names[-len(fixed) :] == list(fixed)
        self.fixed_values = addresses_of(fixed.values())
        self.compiled: dict[object, Callable[..., None]] = {}

    def __call__(self, tensors: tuple[object, ...], strides: tuple[tuple[int | None, ...] | None, ...]) -> None:
        addresses = addresses_of(tensors)
        # what is no tensor is None, or a descriptor: its address goes into it, and is aligned for TMA
        key = (strides, *[address % 16 if isinstance(address, int) else None for address in addresses])
        runner = self.compiled.get(key)
        if runner is not None:
            runner(*addresses, *strides, *self.fixed_values)
            return
        compiled = self.compile_and_launch(tensors, strides)
        if not IS_INTERPRETED:
            self.compiled[key] = compiled[self.grid]

    def compile_and_launch(
        self, tensors: tuple[object, ...], strides: tuple[tuple[int | None, ...] | None, ...]
    ) -> triton.compiler.CompiledKernel:
        """A launch through Triton, which compiles the kernel where nobody has yet."""
        with compiled_for(strides[:3]):  # of q, K and V, where the kernel multiplies
            return self.kernel[self.grid](*tensors, *strides, **self.fixed, **self.options)


def addresses_of(values: Iterable[object]) -> tuple[object, ...]:
    """The same with addresses in the place of tensors, which the caller keeps."""
    return tuple([value.data_ptr() if isinstance(value, Tensor) else value for value in values])
