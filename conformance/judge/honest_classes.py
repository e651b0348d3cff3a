"""Honest kernels by the arithmetic they declare: storage of P, accumulator, exponential, TF32, recipe of the cache."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from attnconform.conformance.bounds.emulate import Schedule
from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics
from attnconform.conformance.cases.structure import Dtype


@dataclass(frozen=True)
class HonestClass:
    """A declaration and a kernel that keeps to it."""

    base: str
    schedule: Schedule = field(default_factory=lambda: Schedule(tile=64))
    declared: dict[str, Any] = field(default_factory=dict)
    is_dequantized: bool = False  # keys and values have more bits than the dtype
    rounds_products: int = 0  # bits to which a code times its scale is rounded, where the recipe is declared

    @property
    def numerics(self) -> Numerics:
        """What its bounds are made from."""
        return msgspec.structs.replace(NUMERICS_CLASSES[self.base], **self.declared)

    @property
    def arithmetic(self) -> Numerics:
        """What it does: that of its declaration, where a product of a scale is a rounding of k and v."""
        if not self.rounds_products:
            return self.numerics
        return msgspec.structs.replace(self.numerics, kv_bits=self.rounds_products)


FLOAT32 = {
    "fma": HonestClass("fp32"),
    "fma, one tile": HonestClass("fp32", Schedule(tile=1 << 17)),
    "fma, 3 splits, exp2": HonestClass("fp32", Schedule(16, 3, exp2=True, exp_bias=3.0), {"num_splits": 3}),
    "fma, 8 splits": HonestClass("fp32", Schedule(128, 8, exp_bias=-3.0), {"num_splits": 8}),
    "fma, 4 splits stored in bfloat16": HonestClass(
        "fp32", Schedule(64, 4), {"num_splits": 4, "partial_storage": "bfloat16"}
    ),
    "fma, 3 splits, lse stored in float16": HonestClass(
        "fp32", Schedule(64, 3), {"num_splits": 3, "partial_lse_storage": "float16"}
    ),
    "fma, fused rescale": HonestClass("fp32", Schedule(32, exp2=True), {"fused_rescale": True}),
    "fma, fast exp": HonestClass("fp32", Schedule(64, exp_bias=900.0), {"eps": 1024.0, "exp_zero_exact": False}),
    "tf32": HonestClass("tf32"),
    "tf32x3": HonestClass("tf32x3"),
}


def low_classes(base: str, bits: int, own: str, other: str) -> dict[str, HonestClass]:
    """Those of bfloat16 or float16 with so many bits; P may be stored as the other, parts as their own."""
    return {
        "any tensor core": HonestClass(base),
        "hopper": HonestClass(f"{base}-hopper"),
        "hopper, 8 splits, exp2": HonestClass(
            f"{base}-hopper", Schedule(64, 8, exp2=True, exp_bias=3.0), {"num_splits": 8}
        ),
        "hopper, 8 splits, stored": HonestClass(
            f"{base}-hopper", Schedule(64, 8), {"num_splits": 8, "partial_storage": own, "partial_lse_storage": own}
        ),
        "P in float32": HonestClass(base, declared={"p_storage": "none", "ds_storage": "none"}),
        f"P in {other}": HonestClass(base, declared={"p_storage": other}),
        "P in e4m3": HonestClass(base, declared={"p_storage": "float8_e4m3", "p_scale": 256.0}),
        "l of stored P": HonestClass(base, Schedule(32, exp2=True), {"l_from_p": True}),
        "dS scaled, of stored P": HonestClass(base, declared={"ds_scaled": True, "ds_from_p": True}),
        "q prescaled": HonestClass(base, declared={"prescale": "q", "prescale_bits": bits}),
        "q prescaled, factor rounded": HonestClass(
            base, declared={"prescale": "q", "prescale_bits": bits, "factor_bits": bits}
        ),
        "cache, recipe unknown": HonestClass(base, declared={"kv_bits": bits}, is_dequantized=True),
        "cache, scale rounded": HonestClass(
            base, declared={"scale_bits": bits}, is_dequantized=True, rounds_products=bits
        ),
    }


HONEST_CLASSES: dict[Dtype, dict[str, HonestClass]] = {
    "float32": FLOAT32,
    "bfloat16": low_classes("bf16", 8, "bfloat16", "float16"),
    "float16": low_classes("fp16", 11, "float16", "bfloat16"),
}
