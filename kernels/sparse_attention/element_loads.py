"""Kernels that load element by element multiply by mma.sync, whose operands lie in registers, and not by wgmma.

ptxas 12.8, which Triton 3.6 brings, can take a descriptor of wgmma from a uniform register that holds something else by
then, where a loop addresses many single elements: an access outside shared memory, seen with heads of 96 and of 64 and
32 dimensions in rows of 104 and 72 elements, 32 keys a step. Of the same code ptxas 12.9 makes the right one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import triton
from torch import Tensor

VECTOR = 16  # what Triton asks of a stride: whether it is a multiple of this, and loads can be wide
NO_WGMMA = "DISABLE_MMA_V3"  # Triton's; a part of the key of its compile cache


def loads_elements(strides: Sequence[Sequence[int | None] | None]) -> bool:
    """Whether rows of some tensor lie so that nothing wider than an element can be loaded, as Triton sees it."""
    return any(stride not in (None, 1) and stride % VECTOR for axes in strides for stride in axes or ())


@contextmanager
def compiled_for(strides: Sequence[Sequence[int | None] | None]) -> Iterator[None]:
    """Around a launch of a kernel that multiplies tiles of tensors with these strides, in elements."""
    before = os.environ.get(NO_WGMMA)
    if loads_elements(strides):
        os.environ[NO_WGMMA] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(NO_WGMMA, None)
        else:
            os.environ[NO_WGMMA] = before


def launcher(kernel: triton.JITFunction, grid: tuple[int, ...], *tensors: Tensor) -> Callable[..., None]:
    """kernel[grid], where it multiplies tiles of these tensors."""

    def launch(*args: object, **constants: object) -> None:
        with compiled_for([tensor.stride() for tensor in tensors]):
            kernel[grid](*args, **constants)

    return launch
