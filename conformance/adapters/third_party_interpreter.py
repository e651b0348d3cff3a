"""What other projects' Triton kernels need to run in Triton's interpreter, and nothing that changes their answers.

An autotuner times its configurations, and without a GPU there is no clock to do it with: the first is taken. A product
of bfloat16 operands multiplies their bit patterns, silently: operands are widened first. Arithmetic on bfloat16 other
than loads, stores, casts and products stays wrong, so an adapter declares bfloat16 only for kernels that have none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np

from attnconform.conformance.adapters.quickened_interpreter import quicken

BFLOAT16_SHIFT = 16  # a bfloat16 is the upper half of a float32


@dataclass(frozen=True)
class Widened:
    """An operand as create_dot reads it."""

    data: Any
    dtype: Any


@contextmanager
def third_party_kernels() -> Iterator[None]:
    """Triton's interpreter as other projects' kernels need it."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.interpreter import InterpreterBuilder

    quicken()
    widening = widen_first(InterpreterBuilder.create_dot)
    with (
        mock.patch.object(Autotuner, "_bench", return_value=[1.0]),
        mock.patch.object(InterpreterBuilder, "create_dot", widening),
    ):
        yield


def widen_first(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """create_dot on operands that numpy can multiply."""

    def create_dot_of_widened(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(builder, widened(a), widened(b), *rest)

    return create_dot_of_widened


def widened(operand: Any) -> Any:
    """A bfloat16 operand as float32; any other as it is."""
    import triton.language as tl

    if operand.dtype.scalar != tl.bfloat16:
        return operand
    bits = operand.data.view(np.uint16).astype(np.uint32) << BFLOAT16_SHIFT
    return Widened(bits.view(np.float32), tl.float32)
