"""Quantized caches: a cache holds codes, and a number is its code times a scale. [QUANT-VALUE]"""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.rounding import nearest

QuantFormat = Literal["int8", "float8_e4m3", "float8_e5m2"]
ScaleGranularity = Literal["tensor", "head", "page", "token", "channel"]
# bits behind the leading one, and the exponent below which numbers are subnormal
FRACTIONS: dict[QuantFormat, tuple[int, int]] = {"float8_e4m3": (3, -6), "float8_e5m2": (2, -14)}
LARGEST: dict[QuantFormat, float] = {"int8": 127.0, "float8_e4m3": 448.0, "float8_e5m2": 57344.0}


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """How one cache, K or V, is stored. Scales are float32 numbers held in float64. [QUANT-GRANULARITY]

    Shapes of scale: tensor (1,), head (num_kv_heads,), page (num_pages, num_kv_heads), token (num_slots,
    num_kv_heads), channel (num_kv_heads, head_dim). Pages and slots are physical: a scale moves with its page.
    """

    format: QuantFormat
    granularity: ScaleGranularity
    scale: FloatArray

    def scales_at(self, slots: IntArray, kv_head: int, *, page_size: int) -> FloatArray:
        """Scale of each of some slots for one KV head, (n, 1), or (n, head_dim) where channels differ."""
        match self.granularity:
            case "tensor":
                scales = np.broadcast_to(self.scale[0], (len(slots), 1))
            case "head":
                scales = np.broadcast_to(self.scale[kv_head], (len(slots), 1))
            case "page":
                scales = self.scale[slots // page_size, kv_head][:, None]
            case "token":
                scales = self.scale[slots, kv_head][:, None]
            case "channel":
                scales = np.broadcast_to(self.scale[kv_head], (len(slots), self.scale.shape[1]))
        return np.asarray(scales, dtype=np.float64)


def dequantize(
    codes: FloatArray,  # (n, head_dim) of some slots and one KV head, as the numbers that the codes stand for
    quantization: Quantization | None,
    slots: IntArray,  # (n,)
    kv_head: int,
    *,
    page_size: int,
) -> FloatArray:
    """The numbers that attention computes with; the codes themselves where nothing is quantized. [QUANT-VALUE]

    >>> per_head = Quantization(format="int8", granularity="head", scale=np.array([0.5, 0.25]))
    >>> dequantize(np.array([[-128.0, 3.0]]), per_head, np.array([7]), 1, page_size=4)
    array([[-32.  ,   0.75]])
    """
    if quantization is None:
        return codes
    return codes * quantization.scales_at(slots, kv_head, page_size=page_size)


def quantize(numbers: FloatArray, scales: FloatArray, code_format: QuantFormat) -> FloatArray:
    """The nearest codes, saturated at the largest of the format: what a writer of the cache does. [QUANT-VALUE]

    >>> quantize(np.array([0.24, 1.3, -900.0]), np.array(0.5), "int8")
    array([   0.,    3., -127.])
    """
    largest = LARGEST[code_format]
    ratio = np.clip(numbers / scales, -largest, largest)
    if code_format == "int8":
        return np.asarray(np.rint(ratio))
    fraction_bits, least_exponent = FRACTIONS[code_format]
    return nearest(ratio, fraction_bits=fraction_bits, least_exponent=least_exponent)


def scale_shape(
    granularity: ScaleGranularity, *, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
) -> tuple[int, ...]:
    """Shape of a scale tensor. [QUANT-GRANULARITY]"""
    return {
        "tensor": (1,),
        "head": (num_kv_heads,),
        "page": (num_pages, num_kv_heads),
        "token": (num_pages * page_size, num_kv_heads),
        "channel": (num_kv_heads, head_dim),
    }[granularity]


def check_quantization(
    name: str, quantization: Quantization, *, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int
) -> None:
    """Refuses unknown formats, scales of another shape, and scales that are not finite and above 0. [QUANT-SCALE]"""
    for field, choices in (("format", QuantFormat), ("granularity", ScaleGranularity)):
        value = getattr(quantization, field)
        if value not in get_args(choices):
            raise RefusedInput("QUANT-GRANULARITY", f"{name}.{field}", value, f"one of {', '.join(get_args(choices))}")
    scale = quantization.scale
    sizes = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    shape = scale_shape(quantization.granularity, **sizes)
    if scale.shape != shape:
        limit = f"must be {shape} for a scale per {quantization.granularity}"
        raise RefusedInput("QUANT-GRANULARITY", f"{name}.scale.shape", scale.shape, limit)
    bad = np.argwhere(~(np.isfinite(scale) & (scale > 0)))
    if len(bad):
        at = tuple(int(i) for i in bad[0])
        raise RefusedInput("QUANT-SCALE", f"{name}.scale", float(scale[at]), "must be finite and above 0", at)
