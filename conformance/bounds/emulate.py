"""An honest kernel of any declared class, rounding by rounding: what a bound must never reject. [BOUND-OUT]

Tiled online softmax with splits, in numpy. Every value is a float64 array that holds numbers of the emulated format, so
each line's rounding is visible. Slow on purpose; for tens of rows and hundreds of keys.
"""

# numpy types a matrix product as Any.
# mypy: disable-error-code="no-any-return"

from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import numpy.typing as npt

from attnconform.conformance.bounds.block import Array, AttentionBlock
from attnconform.conformance.bounds.numerics import Numerics

DTYPES: dict[str, npt.DTypeLike] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "float8_e4m3": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}
ScoreRule = Callable[[Array], Array]


@dataclass(frozen=True)
class Schedule:
    """What a kernel is free to choose: none of it may carry an element past its bound."""

    tile: int = 16
    splits: int = 1
    key_order: tuple[int, ...] | None = None  # listing order; None is the natural one
    exp_bias: float = 0.0  # relative error of every exp, in units of U
    exp2: bool = False  # exp2(x c - m c) with a rounded m c, instead of exp(x - m); rescale factors where declared


@dataclass(frozen=True)
class EmulatedForward:
    out: Array
    lse: Array


@dataclass(frozen=True)
class EmulatedBackward:
    dq: Array
    dk: Array
    dv: Array
    dsink: Array  # per row
    ds: Array  # of the final scores, as they are stored: what a rule's parameters start from


@dataclass(frozen=True)
class Arithmetic:
    """Rounded elementary operations of one numerics class."""

    numerics: Numerics
    exp_bias: float = 0.0

    def compute(self, x: Array) -> Array:
        """Rounds to the compute precision."""
        return store(x, self.numerics.lse_dtype)

    def operand(self, x: Array, bits: int) -> Array:
        """x in so many bits, rounded or cut; 0 is as it is."""
        if not bits:
            return x
        mantissa, exponent = np.frexp(x)
        way = np.trunc if self.numerics.truncates else np.rint
        return np.ldexp(way(np.ldexp(mantissa, bits)), exponent - bits)

    def stored(self, x: Array, storage: str) -> Array:
        """x as it is read back from storage."""
        if storage in ("tf32", "tf32x3"):
            return self.operand(x, 11 if storage == "tf32" else 21)
        return self.compute(x) if storage == "none" else store(x, storage)

    def stored_p(self, p: Array) -> Array:
        """P as it is read back, scaled by a power of two where that is declared."""
        return self.stored(p * self.numerics.p_scale, self.numerics.p_storage) / self.numerics.p_scale

    def exp(self, x: Array) -> Array:
        """exp with the declared kind of error: flushes under the smallest normal, exact at 0."""
        value = np.exp(x) * np.where(x == 0, 1, 1 + self.exp_bias * self.numerics.u)
        return self.compute(np.where(value < self.numerics.tiny, 0, value))

    def accumulate(self, start: Array, left: Array, right: Array) -> Array:
        """start + left @ right, product by product or step by step."""
        if self.numerics.accumulation == "nearest":
            total = start
            for term in range(left.shape[1]):
                total = self.compute(total + left[:, term : term + 1] * right[term])
            return total
        total, width = start, self.numerics.products_per_step
        for first in range(0, left.shape[1], width):
            terms = left[:, first : first + width, None] * right[first : first + width]
            total = add_aligned(total, terms, self.numerics.extra_bits)
        return total

    def product(self, left: Array, right: Array) -> Array:
        """left @ right from zero."""
        return self.accumulate(np.zeros((len(left), right.shape[1])), left, right)

    def total(self, x: Array) -> Array:
        """Sum of each row, one addition after the other."""
        return np.cumsum(x.astype(DTYPES[self.numerics.lse_dtype]), axis=1)[:, -1:].astype(np.float64)


def store(x: Array, storage: str) -> Array:
    """Rounds to nearest, ties to even."""
    with np.errstate(over="ignore"):
        return np.asarray(x).astype(DTYPES[storage]).astype(np.float64)


def add_aligned(total: Array, terms: Array, extra_bits: int) -> Array:
    """One tensor-core step: aligned to the largest exponent, each term cut toward zero, then the sum."""
    largest = np.maximum(np.abs(total), np.abs(terms).max(1))
    step = np.ldexp(1.0, np.frexp(largest)[1] - 24 - extra_bits)
    kept = np.trunc(terms / step[:, None]).sum(1) + np.trunc(total / step)
    mantissa, exponent = np.frexp(kept * step)
    return np.ldexp(np.trunc(np.ldexp(mantissa, 24)), exponent - 24)


def emulate_forward(
    block: AttentionBlock, numerics: Numerics, schedule: Schedule, rule: ScoreRule | None = None
) -> EmulatedForward:
    """out and lse of an honest kernel; rule maps sm_scale q.k to the score. [BOUND-OUT] [BOUND-LSE]

    Raises ValueError for an unfused class.
    """
    if numerics.norm_p:
        raise ValueError("norm_p is True, but unfused kernels are not emulated")
    arithmetic = Arithmetic(numerics, schedule.exp_bias)
    scores = emulate_scores(block, arithmetic, rule)
    order = np.array(schedule.key_order if schedule.key_order is not None else range(len(block.k)), dtype=int)
    parts = [
        attend_split(block, arithmetic, schedule, scores, keys, with_sink=index == 0)
        for index, keys in enumerate(np.array_split(order, schedule.splits))
    ]
    out, lse = parts[0] if len(parts) == 1 else merge_splits(store_parts(parts, arithmetic), arithmetic)
    return EmulatedForward(store(out, numerics.out_dtype), store(lse, numerics.lse_dtype)[:, 0])


def emulate_scores(block: AttentionBlock, arithmetic: Arithmetic, rule: ScoreRule | None) -> Array:
    """Final scores, masked ones -inf."""
    c = arithmetic.numerics
    q, k = arithmetic.operand(block.q, c.operand_bits), arithmetic.operand(block.k, c.kv_bits or c.operand_bits)
    scale = float(arithmetic.compute(np.asarray(block.sm_scale)))
    if c.prescale == "none":
        scores = arithmetic.compute(arithmetic.product(q, k.T) * scale)
    elif c.prescale == "q":
        factor = arithmetic.operand(np.asarray(scale), c.factor_bits)
        q = arithmetic.operand(arithmetic.compute(block.q * factor), c.prescale_bits)
        scores = arithmetic.product(q, k.T)
    else:
        factor = arithmetic.operand(np.asarray(scale**0.5), c.factor_bits)
        q, k = (arithmetic.operand(arithmetic.compute(x * factor), c.prescale_bits) for x in (block.q, block.k))
        scores = arithmetic.product(q, k.T)
    scores = arithmetic.stored(scores, c.score_storage)
    if rule is not None:
        scores = arithmetic.stored(arithmetic.compute(rule(scores)), c.score_storage)
    return np.where(block.mask, scores, -np.inf)


def attend_split(
    block: AttentionBlock,
    arithmetic: Arithmetic,
    schedule: Schedule,
    scores: Array,
    keys: npt.NDArray[np.intp],
    *,
    with_sink: bool,
) -> tuple[Array, Array]:
    """Normalised out and lse over some keys, tile by tile."""
    c, rows = arithmetic.numerics, len(scores)
    row_max, row_sum = np.full((rows, 1), -np.inf), np.zeros((rows, 1))
    if with_sink and block.sink is not None:
        row_max, row_sum = block.sink[:, None], np.where(np.isfinite(block.sink), 1.0, 0.0)[:, None]
    acc = np.zeros((rows, block.v.shape[1]))
    v = arithmetic.operand(block.v, c.kv_bits or c.operand_bits)
    for first in range(0, len(keys), schedule.tile):
        tile = keys[first : first + schedule.tile]
        new_max = np.maximum(row_max, scores[:, tile].max(1, keepdims=True))
        safe_max = np.where(np.isfinite(new_max), new_max, 0.0)
        p = exponentiate(arithmetic, scores[:, tile], safe_max, exp2=schedule.exp2)
        rescale = exponentiate(arithmetic, row_max, safe_max, exp2=schedule.exp2 and c.fused_rescale)
        dropped = p if block.dropout is None else arithmetic.compute(p * block.dropout[:, tile])
        row_sum = arithmetic.compute(row_sum * rescale)
        row_sum = arithmetic.compute(row_sum + arithmetic.total(arithmetic.stored_p(p) if c.l_from_p else p))
        acc = arithmetic.accumulate(arithmetic.compute(acc * rescale), arithmetic.stored_p(dropped), v[tile])
        row_max = new_max
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(row_sum > 0, arithmetic.compute(acc / row_sum), 0.0)
        lse = np.where(row_sum > 0, arithmetic.compute(row_max + arithmetic.compute(np.log(row_sum))), -np.inf)
    return out, lse


def exponentiate(arithmetic: Arithmetic, x: Array, row_max: Array, *, exp2: bool) -> Array:
    """exp(x - m), or the fused form that rounds m log2 e on its own."""
    if not exp2:
        return arithmetic.exp(arithmetic.compute(x - row_max))
    log2_e = float(arithmetic.compute(np.asarray(np.log2(np.e))))
    fused = arithmetic.compute(x * log2_e - arithmetic.compute(row_max * log2_e))
    return arithmetic.exp(fused * np.log(2.0))


def store_parts(parts: list[tuple[Array, Array]], arithmetic: Arithmetic) -> list[tuple[Array, Array]]:
    """out and lse of each split as the merge reads them back."""
    c = arithmetic.numerics
    return [
        (arithmetic.stored(out, c.partial_storage), arithmetic.stored(lse, c.partial_lse_storage)) for out, lse in parts
    ]


def merge_splits(parts: list[tuple[Array, Array]], arithmetic: Arithmetic) -> tuple[Array, Array]:
    """Weights exp(lse_s - lse), which need not sum to 1."""
    tops = np.max([lse for _, lse in parts], axis=0)
    top = np.where(np.isfinite(tops), tops, 0.0)
    total = np.zeros_like(top)
    for _, lse in parts:
        total = arithmetic.compute(total + arithmetic.exp(arithmetic.compute(lse - top)))
    with np.errstate(divide="ignore"):
        merged = arithmetic.compute(top + arithmetic.compute(np.log(total)))
    safe = np.where(np.isfinite(merged), merged, 0.0)
    out = np.zeros_like(parts[0][0])
    for part, lse in parts:
        weight = arithmetic.exp(arithmetic.compute(lse - safe))
        out = arithmetic.compute(out + arithmetic.compute(weight * part))
    return out, merged


def emulate_backward(
    block: AttentionBlock,
    do: Array,
    numerics: Numerics,
    schedule: Schedule,
    forward: EmulatedForward,
    rule: ScoreRule | None = None,
    dlse: Array | None = None,
) -> EmulatedBackward:
    """Gradients from a recomputed P, the rounded out and the stored lse. [BOUND-GRAD]"""
    arithmetic, c = Arithmetic(numerics, schedule.exp_bias), numerics
    scores = emulate_scores(block, arithmetic, rule)
    bits, kv_bits = c.operand_bits, c.kv_bits or c.operand_bits
    q, k, upstream = (arithmetic.operand(x, n) for x, n in ((block.q, bits), (block.k, kv_bits), (do, bits)))
    lse = np.where(np.isfinite(forward.lse), forward.lse, 0.0)[:, None]
    p = arithmetic.exp(arithmetic.compute(scores - lse))
    keep = np.ones_like(p) if block.dropout is None else block.dropout
    row_term = emulate_row_term(arithmetic, do, forward, dlse)
    dp = arithmetic.compute(arithmetic.product(upstream, arithmetic.operand(block.v, kv_bits).T) * keep)
    reused = arithmetic.stored_p(p) if c.ds_from_p else p
    to_scores = arithmetic.compute(reused * arithmetic.compute(dp - row_term))
    stored, rest = store_score_gradient(block, arithmetic, to_scores, scores)
    dv_weights = arithmetic.stored_p(arithmetic.compute(p * keep))
    return EmulatedBackward(
        dq=store(arithmetic.compute(arithmetic.product(stored, k) * rest), c.out_dtype),
        dk=store(sum_heads(block, arithmetic, stored, q, rest), c.out_dtype),
        dv=store(sum_heads(block, arithmetic, dv_weights, upstream, 1.0), c.out_dtype),
        dsink=emulate_sinks(block, arithmetic, lse, row_term),
        ds=arithmetic.stored(to_scores, c.ds_storage),
    )


def emulate_row_term(arithmetic: Arithmetic, do: Array, forward: EmulatedForward, dlse: Array | None) -> Array:
    """D, a column, from the rounded out."""
    row_term = arithmetic.total(arithmetic.compute(do * forward.out))
    if dlse is not None:
        row_term = arithmetic.compute(row_term - dlse[:, None])
    return arithmetic.stored(row_term, arithmetic.numerics.d_storage)


def store_score_gradient(
    block: AttentionBlock, arithmetic: Arithmetic, to_scores: Array, scores: Array
) -> tuple[Array, float]:
    """dS of q.k as it is stored, behind a soft cap's slope, and the factor that its products still lack."""
    ds, c, scale = to_scores, arithmetic.numerics, float(arithmetic.compute(np.asarray(block.sm_scale)))
    if block.cap is not None:
        tanh = arithmetic.compute(np.where(block.mask, scores, 0.0) / block.cap)
        ds = arithmetic.compute(ds * arithmetic.compute(1 - arithmetic.compute(tanh * tanh)))
    if c.ds_scaled:
        return arithmetic.stored(arithmetic.compute(ds * scale), c.ds_storage), 1.0
    return arithmetic.stored(ds, c.ds_storage), scale


def emulate_sinks(block: AttentionBlock, arithmetic: Arithmetic, lse: Array, row_term: Array) -> Array:
    """A sink's gradient, per row."""
    if block.sink is None:
        return np.zeros(len(lse))
    p = arithmetic.exp(arithmetic.compute(block.sink - lse[:, 0]))
    return arithmetic.compute(-p * row_term[:, 0])


def emulate_parameters(
    ds: Array,
    coefficients: Array,  # (rows, keys), as a kernel computes them
    parameter: npt.NDArray[np.intp],  # (rows, keys), which parameter an edge counts towards
    num_parameters: int,
    arithmetic: Arithmetic,
) -> Array:
    """Gradients of a rule's parameters: each row's edges one after the other, then the rows. [BOUND-RULE]"""
    products = arithmetic.compute(ds * coefficients)
    rows = np.zeros((len(ds), num_parameters), dtype=DTYPES[arithmetic.numerics.lse_dtype])
    np.add.at(rows, (np.arange(len(ds))[:, None], parameter), products.astype(rows.dtype))
    return np.cumsum(rows, axis=0)[-1].astype(np.float64)


def sum_heads(block: AttentionBlock, arithmetic: Arithmetic, left: Array, right: Array, scale: float) -> Array:
    """left^T right over all rows, head by head, each head rounded where that is declared."""
    total = np.zeros((left.shape[1], right.shape[1]))
    for rows in np.array_split(np.arange(len(left)), block.num_heads):
        part = arithmetic.compute(arithmetic.product(left[rows].T, right[rows]) * scale)
        if arithmetic.numerics.heads_low:
            part = store(part, arithmetic.numerics.out_dtype)
        total = arithmetic.compute(total + part)
    return total
