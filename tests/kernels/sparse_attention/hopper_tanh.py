"""What a soft cap of Hopper's kernels makes of scores, alone: Gluon, so that only a test on a GPU imports it."""

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from attnconform.kernels.sparse_attention.hopper_scores import missing_of_cap, shares_of_cap, slope_of_cap


@jit
def tanh_kernel(x_ptr, tanh_ptr, factor, SIZE: gl.constexpr):
    """tanh of SIZE numbers a program, as one minus two shares; neighbours are a thread's."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i = gl.program_id(0) * SIZE + gl.arange(0, SIZE, layout=layout)
    gl.store(tanh_ptr + i, 1.0 - 2.0 * shares_of_cap(gl.load(x_ptr + i), factor))


@jit
def slope_kernel(x_ptr, tanh_ptr, slope_ptr, factor, SIZE: gl.constexpr):
    """Likewise as the backward has them: tanh, and its slope."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    i = gl.program_id(0) * SIZE + gl.arange(0, SIZE, layout=layout)
    missing = missing_of_cap(gl.load(x_ptr + i), factor)
    gl.store(tanh_ptr + i, 1.0 - missing)
    gl.store(slope_ptr + i, slope_of_cap(missing))
