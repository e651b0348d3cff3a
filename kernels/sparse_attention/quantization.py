"""A quantized KV cache: what a code and its scale stand for, and where the kernels multiply the scale in.

value = code * scale. Every code of int8, float8_e4m3 and float8_e5m2 is exact in float16 and float32, so products run
on the codes themselves, converted after the tile load, in registers; in float32 where q and out are float32, else in
float16, to which a code takes the fewest instructions. What meets a code is brought into float16's range by exact
powers of two:

    q   q * s, rounded once to float16, over its row's unit, the power of two at or below the row's largest |q * s|;
        s is K's scale per channel, else 1. Exact for s = 1, but for elements below 2^-14 of the row's largest, which
        keep the absolute accuracy 2^-25 of the unit. The scores take the unit back, in float32.
    P   P * t * 2^15, rounded once to float16; t is V's scale per page or token over the row's unit, the power of two at
        or below the largest such scale of the keys that the row has met, else 1. Where the accuracy ends to be relative
        it is 2^-40 of 1. The float32 sum takes unit and 2^-15 back, exactly.

Other scales: K per tensor or head goes into sm_scale, K per page or token into the float32 scores, a factor per column;
V per tensor, head or channel into the float32 sum of P V, after the loop. With float32 there are no units and no 2^15,
and everything stays in float32. lse and the denominator sum P before any of this. A scale of a slot that is not read is
not read either. [QUANT-VALUE, QUANT-GRANULARITY, QUANT-APART]

Codes are loaded two by two, as 16-bit numbers, which is how tensor cores' operands reach registers; the first of each
pair and the second make tiles of their own, of every other dimension, and a product over all dimensions is the sum of
two. Caches whose neighbours cannot be loaded so are loaded code by code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.numerics import IS_INTERPRETED, narrow

Format = Literal["int8", "float8_e4m3", "float8_e5m2"]
Granularity = Literal["tensor", "head", "page", "token", "channel"]
CODE_DTYPES = {"int8": torch.int8, "float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True)
class KVQuantization:
    """Codes of one cache and how far one scale reaches; the scales themselves come with each run, in float32.

    Their shapes: tensor (1,), head (num_kv_heads,), page (num_pages, num_kv_heads), token (num_slots, num_kv_heads),
    channel (num_kv_heads, head_dim).
    """

    format: Format
    granularity: Granularity

    def __post_init__(self) -> None:
        for name, allowed in (("format", get_args(Format)), ("granularity", get_args(Granularity))):
            if getattr(self, name) not in allowed:
                raise PlanError("QUANT-GRANULARITY", name, getattr(self, name), f"must be one of {', '.join(allowed)}")

    @property
    def dtype(self) -> torch.dtype:
        """What the cache holds."""
        return CODE_DTYPES[self.format]


def scale_shape(
    quant: KVQuantization, *, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """The shape of a cache's scales."""
    return {
        "tensor": (1,),
        "head": (num_kv_heads,),
        "page": (num_pages, num_kv_heads),
        "token": (num_pages * page_size, num_kv_heads),
        "channel": (num_kv_heads, head_dim),
    }[quant.granularity]


def code_bits(cache: Tensor, quant: KVQuantization | None) -> Tensor:
    """The cache as the kernels load it: pairs of codes, or single ones where pairs do not lie as 16-bit numbers do."""
    if quant is None:
        return cache
    strides = cache.stride()
    is_even = cache.shape[-1] % 2 == 0 and not any(stride % 2 for stride in strides[:-1]) and cache.data_ptr() % 2 == 0
    return cache.view(torch.uint16 if is_even and strides[-1] == 1 else torch.uint8)


def pair_assembly(quant: KVQuantization | None, dtype: torch.dtype, device: torch.device) -> tuple[str, str] | None:
    """PTX that converts the first codes of two pairs to float16, and the second ones, where the device can."""
    has_conversions = device.type == "cuda" and torch.version.hip is None and dtype != torch.float32
    if quant is None or not has_conversions or torch.cuda.get_device_capability(device) < (8, 9):
        return None
    return _PAIR_ASSEMBLY[quant.format]


def _float8_assembly(code_type: str, part: int) -> str:
    """The codes of two pairs are sorted, first ones below second ones; two are then converted at once."""
    return (
        "{ .reg .b16 h0, h1; .reg .b32 t;"
        " prmt.b32 t, $1, 0, 0x3120; mov.b32 {h0, h1}, t;"
        f" cvt.rn.f16x2.{code_type} $0, h{part}; }}"
    )


def _int8_assembly(part: int) -> str:
    """The code plus 128 becomes the mantissa of a float16 that is 1024 and more; then 1152 goes off."""
    selector = "0x4341" if part else "0x4240"
    return (
        "{ .reg .b32 t, high, bias; mov.b32 high, 0x64646464; mov.b32 bias, 0xE480E480;"
        f" xor.b32 t, $1, 0x80808080; prmt.b32 t, t, high, {selector}; add.rn.f16x2 $0, t, bias; }}"
    )


_PAIR_ASSEMBLY = {
    "int8": (_int8_assembly(0), _int8_assembly(1)),
    "float8_e4m3": (_float8_assembly("e4m3x2", 0), _float8_assembly("e4m3x2", 1)),
    "float8_e5m2": (_float8_assembly("e5m2x2", 0), _float8_assembly("e5m2x2", 1)),
}


def scale_strides(scale: Tensor | None) -> tuple[int, int] | None:
    """Strides of page, slot or head, and of head or channel; a scale for all has none."""
    if scale is None:
        return None
    strides = scale.stride()
    return (strides[0], strides[1]) if len(strides) == 2 else (0, strides[0])


@triton.jit
def load_code_tile(
    ptr,
    starts,  # of the keys, in elements of ptr: [1, TILE_KV] or [TILE_KV, 1]
    is_read,  # likewise
    pair,  # numbers of pairs on the other axis
    stride_dim,
    dtype: tl.constexpr,
    FORMAT: tl.constexpr,
    ASSEMBLY: tl.constexpr,
    IS_WHOLE: tl.constexpr,  # every key is read
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Codes of even and of odd dimensions of a tile's keys, decoded, as two tiles; 0 where not read."""
    if ptr.dtype.element_ty == tl.uint16:
        ptrs = ptr + starts + pair.to(tl.int64) * stride_dim
        # A mask that is known to be true is left out: it would keep loads from being wide.
        if HEAD_DIM != PADDED_DIM:
            pairs = tl.load(ptrs, mask=is_read & (pair < HEAD_DIM // 2), other=0)
        elif IS_WHOLE:
            pairs = tl.load(ptrs)
        else:
            pairs = tl.load(ptrs, mask=is_read, other=0)
        return decode_pairs(pairs, dtype, FORMAT, ASSEMBLY, 0), decode_pairs(pairs, dtype, FORMAT, ASSEMBLY, 1)
    else:
        pair = pair.to(tl.int64)
        even = tl.load(ptr + starts + 2 * pair * stride_dim, mask=is_read & (2 * pair < HEAD_DIM), other=0)
        odd = tl.load(ptr + starts + (2 * pair + 1) * stride_dim, mask=is_read & (2 * pair + 1 < HEAD_DIM), other=0)
        return decode_codes(even, dtype, FORMAT), decode_codes(odd, dtype, FORMAT)


@triton.jit
def decode_pairs(pairs, dtype: tl.constexpr, FORMAT: tl.constexpr, ASSEMBLY: tl.constexpr, PART: tl.constexpr):
    """The first (PART 0) or second code of every pair, decoded."""
    if ASSEMBLY is None:
        return decode_codes(((pairs >> (8 * PART)) & 0xFF).to(tl.uint8), dtype, FORMAT)
    else:
        return tl.inline_asm_elementwise(
            asm=ASSEMBLY[PART], constraints="=r,r", args=[pairs], dtype=tl.float16, is_pure=True, pack=2
        )


@triton.jit
def decode_codes(codes, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """The numbers that codes, given as uint8, stand for before scaling, in dtype, exactly."""
    if FORMAT == "int8":
        return narrow(codes.to(tl.int8, bitcast=True).to(tl.float32), dtype)
    elif IS_INTERPRETED:
        return narrow(decode_bits(codes.to(tl.uint32), FORMAT), dtype)
    elif FORMAT == "float8_e4m3":
        return codes.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        return codes.to(tl.float8e5, bitcast=True).to(dtype)


@triton.jit
def decode_bits(bits, FORMAT: tl.constexpr):
    """Float32 of 8-bit floats by integer arithmetic: the interpreter's own conversion misreads infinities and NaN.

    Exponent and mantissa are put where float32 has them, which is right up to a power of two, subnormals included.
    """
    magnitude = bits & 0x7F
    if FORMAT == "float8_e4m3":
        value = (magnitude << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^(127 - 7)
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    else:
        value = (magnitude << 21).to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2^(127 - 15)
        value = tl.where(magnitude == 0x7C, float("inf"), value)
        value = tl.where(magnitude > 0x7C, float("nan"), value)
    return tl.where(bits >= 0x80, -value, value)


@triton.jit
def load_whole_scale(scale_ptr, strides, kv_head, GRANULARITY: tl.constexpr):
    """The one scale of everything a program reads, or 1 where scales are finer than that."""
    if GRANULARITY == "tensor":
        return tl.load(scale_ptr)
    elif GRANULARITY == "head":
        return tl.load(scale_ptr + kv_head * strides[1])
    else:
        return 1.0


@triton.jit
def load_key_scales(
    scale_ptr, strides, kv_head,
    page, slot, is_read,  # [TILE_KV] int64, int64, bool
    GRANULARITY: tl.constexpr,
):  # fmt: skip
    """A scale per key, [TILE_KV]; only where scales go by page or token."""
    place = page if GRANULARITY == "page" else slot
    return tl.load(scale_ptr + place * strides[0] + kv_head * strides[1], mask=is_read, other=0.0)


@triton.jit
def load_channel_scales(scale_ptr, strides, kv_head, dim, HEAD_DIM: tl.constexpr):  # dim: [DIMS]
    """The scales of some channels, [DIMS], 0 past the last."""
    ptrs = scale_ptr + kv_head * strides[0] + dim.to(tl.int64) * strides[1]
    return tl.load(ptrs, mask=dim < HEAD_DIM, other=0.0)


@triton.jit
def power_of_two(x):
    """The largest power of two that is at most x, and its inverse; 1 for 0 and subnormals, 2^126 for 2^127 and more."""
    bits = tl.minimum(x.to(tl.uint32, bitcast=True), 0x7EFFFFFF) & 0x7F800000
    bits = tl.where(bits == 0, 0x3F800000, bits)
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def normalize_query(even, odd):
    """q of even and odd dimensions, [TILE_M, DIMS] float32, in float16 over the row's unit, and the units, [TILE_M]."""
    largest = tl.maximum(tl.max(tl.abs(even), axis=1), tl.max(tl.abs(odd), axis=1))
    unit, inverse = power_of_two(largest)
    return (even * inverse[:, None]).to(tl.float16), (odd * inverse[:, None]).to(tl.float16), unit


@triton.jit
def weigh_by_key_scales(
    weights,  # [TILE_M, TILE_KV] float32
    scales,  # [TILE_KV], 0 where not read
    admitted,  # [ROWS or 1, TILE_KV], not looked at where IS_UNMASKED
    unit,  # [TILE_M] of every row's keys so far, 0 for none
    IS_UNMASKED: tl.constexpr,
):  # fmt: skip
    """Weights times scales over the row's unit, the unit, and the old unit over it.

    A row's unit never falls, and asks nothing of scales that the row does not admit. [MASK-INTERFERE]
    """
    if IS_UNMASKED:
        largest = tl.maximum(tl.max(tl.abs(scales), axis=0), unit)
    else:
        largest = tl.maximum(tl.max(tl.where(admitted, tl.abs(scales)[None, :], 0.0), axis=1), unit)
    new_unit, inverse = power_of_two(largest)
    weights = weights * scales[None, :] * inverse[:, None]
    return weights, tl.where(largest == 0, 0.0, new_unit), unit * inverse
