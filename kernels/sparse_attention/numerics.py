"""Conversions and products that give the same arithmetic on a GPU and in the Triton interpreter.

The interpreter multiplies bfloat16 operands as if their bits were integers, and cuts where a GPU rounds to nearest
even (seen in Triton 3.6.0 and 3.9.0); both would pass unseen as a result of another accuracy class.
"""

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def widen(x):
    """x in float32, exactly."""
    if IS_INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Float32 x rounded to nearest even in dtype."""
    if IS_INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet_nan = (bits >> 16) | 0x40
        return tl.where(x == x, rounded, quiet_nan).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b, summed in float32; float32 operands are not cut to TF32."""
    if IS_INTERPRETED:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def reciprocal(x):
    """1 / x of float32 x from 1 on, to a unit in its last place; it does not look for the ends of a range."""
    if IS_INTERPRETED:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
