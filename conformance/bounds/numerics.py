"""The arithmetic a backend declares, and the unit roundoffs that follow from it. [BOUND-OUT]

Notation, as in SPEC.md: u is a unit roundoff (the largest relative error of one rounding to nearest), eta half the
smallest step of a format (the largest absolute error where relative accuracy has run out), U the u of the arithmetic
itself: 2^-24, or 2^-53 for a backend that computes in float64.
"""

import math
from typing import Any, Literal, get_args

import msgspec

OutDtype = Literal["bfloat16", "float16", "float32", "float64"]
Storage = Literal["none", "bfloat16", "float16", "float32", "float64", "float8_e4m3", "float8_e5m2", "tf32", "tf32x3"]
Prescale = Literal["none", "q", "q_and_k"]
Accumulation = Literal["nearest", "tensor_core"]
Denominator = Literal["any", "tile", "lanes"]


class NumberFormat(msgspec.Struct, frozen=True):
    """One storage format: unit roundoff, half the smallest step, largest finite number."""

    u: float
    eta: float
    largest: float


# bf16, fp32 and tf32 kernels flush subnormals, so half the smallest step is taken as the smallest normal number.
FORMATS: dict[str, NumberFormat] = {
    "bfloat16": NumberFormat(2.0**-8, 2.0**-126, (2 - 2.0**-7) * 2.0**127),
    "float16": NumberFormat(2.0**-11, 2.0**-25, 65504.0),
    "float32": NumberFormat(2.0**-24, 2.0**-126, (2 - 2.0**-23) * 2.0**127),
    "float64": NumberFormat(2.0**-53, 2.0**-1022, (2 - 2.0**-52) * 2.0**1023),
    "float8_e4m3": NumberFormat(2.0**-4, 2.0**-10, 448.0),
    "float8_e5m2": NumberFormat(2.0**-3, 2.0**-17, 57344.0),
    "tf32": NumberFormat(2.0**-11, 2.0**-126, (2 - 2.0**-10) * 2.0**127),
    "tf32x3": NumberFormat(2.0**-21, 2.0**-126, (2 - 2.0**-23) * 2.0**127),
}


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend declares about its arithmetic; nothing here is tuned per case. [BOUND-OUT]

    A storage of "none" means that the value stays in the compute precision. Bits of 0 mean that operands are exact.
    """

    out_dtype: OutDtype

    # Where intermediate values are stored.
    p_storage: Storage = "none"
    p_scale: float = 1.0  # power of two by which P is multiplied before it is stored (e4m3)
    ds_storage: Storage = "none"
    score_storage: Storage = "none"  # unfused softmax: the score matrix
    dp_storage: Storage = "none"  # unfused softmax: dO.V^T
    d_storage: Storage = "none"  # D = dO.out
    partial_storage: Storage = "none"  # out of each split, between its own attention and the merge
    partial_lse_storage: Storage = "none"  # lse of each split, likewise

    # What happens to operands on the way into a product.
    operand_bits: int = 0  # q, k, v, dO: 11 for TF32, 21 for 3xTF32
    kv_bits: int = 0  # k, v only: 8 or 11 when the recipe of their dequantization is not declared
    scale_bits: int = 0  # of quantized caches: products of a scale with q, P, k or v are rounded to so many bits
    prescale: Prescale = "none"  # q times sm_scale (or sm_scale log2 e), or q and k times its root
    prescale_bits: int = 0  # to so many bits
    factor_bits: int = 0  # of the factor itself, which is rounded before; 0: as precise as the sums
    truncates: bool = False  # operands, P and dS are cut instead of rounded

    # Sums.
    accumulation: Accumulation = "nearest"
    extra_bits: int = 0  # kept beyond float32 while a tensor core aligns its terms
    products_per_step: int = 8
    min_tile: int = 16
    num_splits: int = 1
    denominator: Denominator = "any"
    denominator_tile: int = 128

    # Exponential and logarithm, in units of U.
    eps: float = 4.0  # relative error of exp and log
    tanh_eps: float = 8.0  # absolute error of a soft cap's tanh
    exp_zero_exact: bool = True
    lazy_rescale: float = 0.0  # nats by which the running maximum may lag
    fused_rescale: bool = False  # a rescale factor rounds m log2 e apart: 1 is missed by U|m|, in every tile

    # Choices that move a rounding from one place to another.
    l_from_p: bool = False  # the denominator sums the stored P
    norm_p: bool = False  # unfused softmax: P is stored after division, D is summed from P dP
    ds_scaled: bool = False  # dS is stored after multiplication by sm_scale
    ds_from_p: bool = False  # dS is computed from the stored P
    heads_low: bool = False  # dk, dv are rounded per query head before the sum over the group

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not one of {', '.join(choices)}")
        if self.prescale != "none" and not self.prescale_bits:
            raise ValueError(f"prescale is {self.prescale!r}, but prescale_bits is 0")
        if self.prescale == "none" and self.factor_bits:
            raise ValueError(f"factor_bits is {self.factor_bits}, but prescale is 'none': no factor")
        if self.p_scale <= 0 or math.frexp(self.p_scale)[0] != 0.5:
            raise ValueError(f"p_scale is {self.p_scale}, not a power of two")
        for name in _OF_PARTS:
            if getattr(self, name) != "none" and self.num_splits < 2:
                raise ValueError(f"{name} is {getattr(self, name)!r}, but num_splits is {self.num_splits}: no parts")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, less than {least}")

    @property
    def u(self) -> float:
        """U: unit roundoff of sums and products."""
        return 2.0**-53 if self.out_dtype == "float64" else 2.0**-24

    @property
    def tiny(self) -> float:
        """The number under which an exponential may vanish."""
        return FORMATS["float64" if self.out_dtype == "float64" else "float32"].eta

    @property
    def exp_error(self) -> float:
        """Relative error of exp and log."""
        return self.eps * self.u

    @property
    def tanh_error(self) -> float:
        """Absolute error of tanh."""
        return self.tanh_eps * self.u

    @property
    def cut_fraction(self) -> float:
        """2^-x: size of the cut of one aligned term, in units of the cut of the sum."""
        return 2.0**-self.extra_bits

    @property
    def merges(self) -> float:
        """1 where partial results are merged, else 0."""
        return float(self.num_splits > 1)

    @property
    def u_out(self) -> float:
        return FORMATS[self.out_dtype].u

    @property
    def eta_out(self) -> float:
        return FORMATS[self.out_dtype].eta

    @property
    def largest_out(self) -> float:
        return FORMATS[self.out_dtype].largest

    @property
    def u_p(self) -> float:
        return self._u_stored(self.p_storage)

    @property
    def eta_p(self) -> float:
        return self._format(self.p_storage).eta / self.p_scale

    @property
    def worst_u_p(self) -> float:
        """A cut loses up to a whole step, a rounding half of one."""
        return self.u_p * (1 + self.truncates)

    @property
    def reuses_p(self) -> bool:
        """dS is computed from a P that was rounded."""
        return (self.ds_from_p or self.norm_p) and self.u_p > 0

    @property
    def u_ds(self) -> float:
        return self._u_stored(self.ds_storage)

    @property
    def eta_ds(self) -> float:
        return self._format(self.ds_storage).eta

    @property
    def largest_ds(self) -> float:
        return self._format(self.ds_storage).largest

    @property
    def worst_u_ds(self) -> float:
        return self.u_ds * (1 + self.truncates)

    @property
    def u_score(self) -> float:
        return self._u_stored(self.score_storage)

    @property
    def u_dp(self) -> float:
        return self._u_stored(self.dp_storage)

    @property
    def u_d(self) -> float:
        return self._u_stored(self.d_storage)

    @property
    def u_part(self) -> float:
        return self._u_stored(self.partial_storage)

    @property
    def eta_part(self) -> float:
        return self._format(self.partial_storage).eta

    @property
    def largest_part(self) -> float:
        return self._format(self.partial_storage).largest

    @property
    def u_part_lse(self) -> float:
        return self._u_stored(self.partial_lse_storage)

    @property
    def eta_part_lse(self) -> float:
        return self._format(self.partial_lse_storage).eta

    @property
    def largest_part_lse(self) -> float:
        return self._format(self.partial_lse_storage).largest

    @property
    def lse_dtype(self) -> OutDtype:
        return "float64" if self.out_dtype == "float64" else "float32"

    def _format(self, storage: Storage) -> NumberFormat:
        return FORMATS[self.lse_dtype if storage == "none" else storage]

    def _u_stored(self, storage: Storage) -> float:
        # Storing in the compute precision or above is not a further rounding.
        u = self._format(storage).u
        return 0.0 if u <= self.u else u


_OF_PARTS = ("partial_storage", "partial_lse_storage")
_STORED = ("p_storage", "ds_storage", "score_storage", "dp_storage", "d_storage", *_OF_PARTS)
_CHOICES: dict[str, tuple[Any, ...]] = {
    "out_dtype": get_args(OutDtype),
    "prescale": get_args(Prescale),
    "accumulation": get_args(Accumulation),
    "denominator": get_args(Denominator),
    **dict.fromkeys(_STORED, get_args(Storage)),
}
_LEAST: dict[str, float] = {
    "operand_bits": 0,
    "kv_bits": 0,
    "scale_bits": 0,
    "prescale_bits": 0,
    "factor_bits": 0,
    "extra_bits": 0,
    "products_per_step": 1,
    "min_tile": 1,
    "num_splits": 1,
    "denominator_tile": 1,
    "eps": 0,
    "tanh_eps": 0,
    "lazy_rescale": 0,
}


def _fused_low(dtype: Literal["bfloat16", "float16"]) -> Numerics:
    """P and dS stored in the output's dtype, any tensor core."""
    return Numerics(out_dtype=dtype, p_storage=dtype, ds_storage=dtype, accumulation="tensor_core")


def _unfused_low(dtype: Literal["bfloat16", "float16"]) -> Numerics:
    """Every matrix of the textbook formula stored in the output's dtype."""
    return msgspec.structs.replace(
        _fused_low(dtype),
        score_storage=dtype,
        dp_storage=dtype,
        prescale="q_and_k",
        prescale_bits=8 if dtype == "bfloat16" else 11,
        norm_p=True,
        heads_low=True,
    )


def _hopper(numerics: Numerics) -> Numerics:
    """What was measured on an H200: 2 extra bits, 16 products a step; tiles of at least 64, denominator per tile."""
    return msgspec.structs.replace(numerics, extra_bits=2, products_per_step=16, min_tile=64, denominator="tile")


def _through_tf32(storage: Literal["tf32", "tf32x3"], bits: int) -> Numerics:
    """float32 through TF32 tensor cores, which cut their operands."""
    return Numerics(
        out_dtype="float32",
        p_storage=storage,
        ds_storage=storage,
        operand_bits=bits,
        truncates=True,
        accumulation="tensor_core",
    )


NUMERICS_CLASSES: dict[str, Numerics] = {
    "fp32": Numerics(out_dtype="float32"),
    "bf16": _fused_low("bfloat16"),
    "fp16": _fused_low("float16"),
    "bf16-hopper": _hopper(_fused_low("bfloat16")),
    "fp16-hopper": _hopper(_fused_low("float16")),
    "tf32": _through_tf32("tf32", 11),
    "tf32x3": _through_tf32("tf32x3", 21),
    "fp32-unfused": Numerics(out_dtype="float32", norm_p=True, heads_low=True),
    "bf16-unfused": _unfused_low("bfloat16"),
    "fp16-unfused": _unfused_low("float16"),
    "float64": Numerics(out_dtype="float64"),
}
