"""What other projects' Triton kernels need to run in Triton's interpreter, and nothing that changes their answers.

An autotuner times its configurations, and without a GPU there is no clock to do it with: the first is taken. A product
of bfloat16 operands, of tiles or element by element, is taken of their bit patterns, silently: operands are widened
first. float32 is cut to bfloat16, where a GPU rounds it to nearest: it is rounded. One answer of yes or no, spread over
a tile, becomes a tile of numbers, which no load takes for a mask: it stays what it is. Sums and functions of bfloat16
stay wrong, so an adapter declares bfloat16 only for kernels that have none.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from attnconform.conformance.adapters.quickened_interpreter import quicken

BFLOAT16_SHIFT = 16  # a bfloat16 is the upper half of a float32


@dataclass(frozen=True)
class Widened:
    """An operand as create_dot reads it."""

    data: Any
    dtype: Any


@contextmanager
def untuned_kernels() -> Iterator[None]:
    """Triton's interpreter as it is, but for the clock that an autotuner asks for."""
    from triton.runtime.autotuner import Autotuner

    with mock.patch.object(Autotuner, "_bench", return_value=[1.0]):
        yield


@contextmanager
def third_party_kernels() -> Iterator[None]:
    """Triton's interpreter as other projects' kernels need it."""
    from triton.runtime.interpreter import InterpreterBuilder

    quicken()
    widening = widen_first(InterpreterBuilder.create_dot)
    with (
        untuned_kernels(),
        mock.patch.object(InterpreterBuilder, "create_dot", widening),
        mock.patch.object(InterpreterBuilder, "cast_impl", to_nearest(InterpreterBuilder.cast_impl)),
        mock.patch.object(InterpreterBuilder, "binary_op", rounded_after(InterpreterBuilder.binary_op)),
        mock.patch.object(InterpreterBuilder, "create_splat", spread_alike(InterpreterBuilder.create_splat)),
    ):
        yield


def widen_first(create_dot: Callable[..., Any]) -> Callable[..., Any]:
    """create_dot on operands that numpy can multiply."""

    def create_dot_of_widened(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(builder, widened(a), widened(b), *rest)

    return create_dot_of_widened


def to_nearest(cast_impl: Callable[..., Any]) -> Callable[..., Any]:
    """cast_impl, which rounds float32 to the nearest bfloat16."""

    def cast_to_nearest(builder: Any, src: Any, dst_type: Any) -> Any:
        import triton.language as tl

        found = cast_impl(builder, src, dst_type)
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            found.data = src.data.astype(ml_dtypes.bfloat16).view(np.uint16)
        return found

    return cast_to_nearest


def rounded_after(binary_op: Callable[..., Any]) -> Callable[..., Any]:
    """binary_op on operands that numpy can add, multiply and compare; a number is rounded to bfloat16 again."""

    def binary_op_of_widened(builder: Any, a: Any, b: Any, op: Any) -> Any:
        import triton.language as tl

        found = binary_op(builder, widened(a), widened(b), op)
        is_number = a.dtype.scalar == tl.bfloat16 and found.data.dtype != np.bool_
        return builder.cast_impl(found, tl.bfloat16) if is_number else found

    return binary_op_of_widened


def spread_alike(create_splat: Callable[..., Any]) -> Callable[..., Any]:
    """create_splat, whose tile of yes and no is one of yes and no."""

    def create_splat_of_answers(builder: Any, ret_ty: Any, arg: Any) -> Any:
        tile = create_splat(builder, ret_ty, arg)
        if arg.data.dtype == np.bool_:
            tile.data = tile.data.astype(np.bool_)
        return tile

    return create_splat_of_answers


def widened(operand: Any) -> Any:
    """A bfloat16 operand as float32; any other as it is."""
    import triton.language as tl

    if operand.dtype.scalar != tl.bfloat16:
        return operand
    bits = operand.data.view(np.uint16).astype(np.uint32) << BFLOAT16_SHIFT
    return Widened(bits.view(np.float32), tl.float32)
