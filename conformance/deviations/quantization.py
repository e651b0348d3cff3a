"""Mistakes about caches of codes: which scale, of what, and how often. [QUANT]"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.gradients import BackwardCall, ChangesGradients
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.quantization import Quantization, dequantize
from attnconform.reference.results import Gradients
from attnconform.reference.steps import Steps

ZERO_POINT = 128.0


class ReadsCodes(Steps):
    """The reference with two hooks: the numbers that codes stand for, and what the codes are multiplied by."""

    def key_numbers(self, problem: AttentionProblem, slots: IntArray, kv_head: int, k: FloatArray) -> FloatArray:
        if problem.k_quant is None:
            return super().key_numbers(problem, slots, kv_head, k)
        return self.numbers(problem, problem.k_quant, slots, kv_head, k)

    def values(self, problem: AttentionProblem, slots: IntArray, kv_head: int, v: FloatArray) -> FloatArray:
        if problem.v_quant is None:
            return super().values(problem, slots, kv_head, v)
        return self.numbers(problem, problem.v_quant, slots, kv_head, v)

    def numbers(
        self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int, cache: FloatArray
    ) -> FloatArray:
        """Numbers of some slots, (n, head_dim)."""
        return np.asarray(cache[slots, kv_head] * self.scales(problem, quant, slots, kv_head))

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        """What codes are multiplied by."""
        return quant.scales_at(slots, kv_head, page_size=problem.cache.page_size)


@deviates("QUANT-VALUE", fault_class="A", report="article 1, 7.2: dequantization after the tile load")
class IgnoresTheKeysScale(Steps):
    """Codes of K are taken for numbers."""

    def key_numbers(self, problem: AttentionProblem, slots: IntArray, kv_head: int, k: FloatArray) -> FloatArray:
        return k[slots, kv_head]


@deviates("QUANT-VALUE", fault_class="A", report="no report: the output's scale forgotten in one path")
class IgnoresTheValuesScale(Steps):
    """Codes of V are taken for numbers."""

    def values(self, problem: AttentionProblem, slots: IntArray, kv_head: int, v: FloatArray) -> FloatArray:
        return super().values(replace(problem, v_quant=None), slots, kv_head, v)


@deviates("QUANT-VALUE", fault_class="A", report="no report: a scale taken for its inverse")
class DividesByTheScale(ReadsCodes):
    """Codes are divided by their scale."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        return 1 / super().scales(problem, quant, slots, kv_head)


@deviates("QUANT-VALUE", fault_class="A", report="no report: scaled in the tile and in the epilogue")
class ScalesTheCodesTwice(ReadsCodes):
    """The scale is applied to the tile and to the result."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        return super().scales(problem, quant, slots, kv_head) ** 2


@deviates("QUANT-VALUE", fault_class="Z", report="article 1, 6.1: FP8 scale boundary")
class FlushesSubnormalCodes(ReadsCodes):
    """Codes below the smallest normal number of their format become 0."""

    def numbers(
        self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int, cache: FloatArray
    ) -> FloatArray:
        smallest = {"int8": 0.0, "float8_e4m3": 2.0**-6, "float8_e5m2": 2.0**-14}[quant.format]
        flushed = np.where(np.abs(cache) < smallest, 0.0, cache)
        return super().numbers(problem, quant, slots, kv_head, flushed)


@deviates("QUANT-VALUE", fault_class="Z", report="article 1, 6.1: FP8 scale boundary; -128 has no counterpart")
class SaturatesAtTheLargestPositiveCode(ReadsCodes):
    """Codes are clipped to a symmetric range one step too small."""

    def numbers(
        self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int, cache: FloatArray
    ) -> FloatArray:
        largest = {"int8": 127.0, "float8_e4m3": 240.0, "float8_e5m2": 448.0}[quant.format]
        return super().numbers(problem, quant, slots, kv_head, np.clip(cache, -largest, largest))


@deviates("QUANT-VALUE", fault_class="Q", report="no report: an 8-bit cache that is declared unsigned")
class ReadsSignedCodesAsUnsigned(ReadsCodes):
    """int8 codes below 0 are 256 too large."""

    def numbers(
        self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int, cache: FloatArray
    ) -> FloatArray:
        return super().numbers(problem, quant, slots, kv_head, unsigned(cache) if quant.format == "int8" else cache)


@deviates("QUANT-VALUE", fault_class="Q", report="no report: codes without a zero point read as codes that have one")
class SubtractsAZeroPoint(ReadsCodes):
    """int8 codes are read as unsigned ones around a zero point of 128."""

    def numbers(
        self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int, cache: FloatArray
    ) -> FloatArray:
        codes = unsigned(cache) - ZERO_POINT if quant.format == "int8" else cache
        return super().numbers(problem, quant, slots, kv_head, codes)


def unsigned(codes: FloatArray) -> FloatArray:
    """The bytes of int8 codes as numbers from 0 to 255."""
    return np.where(codes < 0, codes + 2 * ZERO_POINT, codes)


@deviates("QUANT-VALUE", fault_class="Q", report="no report: e4m3 with and without a negative zero have other biases")
class ReadsAnotherE4m3(ReadsCodes):
    """e4m3 codes are read with an exponent bias one larger, which halves every number."""

    def numbers(
        self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int, cache: FloatArray
    ) -> FloatArray:
        return super().numbers(problem, quant, slots, kv_head, cache / 2 if quant.format == "float8_e4m3" else cache)


@deviates("QUANT-VALUE", fault_class="Q", report="no report: scales stored as exponents alone")
class RoundsScalesToPowersOfTwo(ReadsCodes):
    """A scale is rounded to the nearest power of two."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        return np.asarray(np.exp2(np.rint(np.log2(super().scales(problem, quant, slots, kv_head)))))


@deviates("QUANT-VALUE", fault_class="A", report="no report: a scale of K moved behind a soft cap or a bias")
class ScalesKeysAfterTheRules(Steps):
    """Score rules see dot products of codes, and what comes out of them is multiplied by K's scale."""

    def key_numbers(self, problem: AttentionProblem, slots: IntArray, kv_head: int, k: FloatArray) -> FloatArray:
        self.k_scales: FloatArray | float = 1.0
        quant = problem.k_quant
        if quant is None or quant.granularity == "channel":  # channels lie inside the product
            return super().key_numbers(problem, slots, kv_head, k)
        self.k_scales = quant.scales_at(slots, kv_head, page_size=problem.cache.page_size)[:, 0]
        return k[slots, kv_head]

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        scores, slope = super().scores(problem, where, qo_head, positions, dot)
        return scores * self.k_scales, slope * self.k_scales


@deviates("QUANT-GRANULARITY", fault_class="T", report="article 1, 7.2: page scales follow the physical page")
class ReadsPageScalesOfTheNextPage(ReadsCodes):
    """A page's scale is looked up one page off."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        if quant.granularity != "page":
            return super().scales(problem, quant, slots, kv_head)
        page_size = problem.cache.page_size
        return super().scales(problem, quant, (slots + page_size) % problem.cache.num_slots, kv_head)


@deviates("QUANT-GRANULARITY", fault_class="T", report="no report: one scale for a page where each token has its own")
class TakesTheScaleOfThePagesFirstToken(ReadsCodes):
    """Scales of tokens are read once a page."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        if quant.granularity != "token":
            return super().scales(problem, quant, slots, kv_head)
        page_size = problem.cache.page_size
        return super().scales(problem, quant, slots // page_size * page_size, kv_head)


@deviates("QUANT-GRANULARITY", fault_class="G", report="no report: scales per head read with head 0's index")
class TakesTheFirstHeadsScale(ReadsCodes):
    """Every KV head uses the scale of head 0."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        return super().scales(problem, quant, slots, 0)


@deviates("QUANT-GRANULARITY", fault_class="D", report="no report: a scale per channel broadcast from the first")
class TakesTheFirstChannelsScale(ReadsCodes):
    """A scale per channel is read once a head."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        return super().scales(problem, quant, slots, kv_head)[:, :1]


@deviates(
    "QUANT-GRANULARITY", fault_class="A", report="BR-107 vllm-project/vllm#51363: descales of a finer kind dropped"
)
class TakesOneScaleForTheTensor(ReadsCodes):
    """The first scale serves the whole cache, whatever scales belong to."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        return np.full_like(super().scales(problem, quant, slots, kv_head), quant.scale.flat[0])


@deviates("QUANT-GRANULARITY", fault_class="T", report="no report: a stride of 0 along the pages of a scale tensor")
class TakesTheScaleOfTheFirstPage(ReadsCodes):
    """Every page uses the scale of page 0."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        own = quant.granularity != "page"
        return super().scales(problem, quant, slots if own else np.zeros_like(slots), kv_head)


@deviates("QUANT-GRANULARITY", fault_class="T", report="no report: a slot where its page is meant")
class ReadsPageScalesBySlot(ReadsCodes):
    """The number of a slot is used as the index of its page's scale, and wraps around."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        if quant.granularity != "page":
            return super().scales(problem, quant, slots, kv_head)
        return quant.scale[slots % problem.cache.num_pages, kv_head][:, None]


@deviates("QUANT-GRANULARITY", fault_class="T", report="no report: a page where a slot is meant")
class ReadsTokenScalesByPage(ReadsCodes):
    """The number of a page is used as the index of its tokens' scales."""

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        own = quant.granularity != "token"
        return super().scales(problem, quant, slots if own else slots // problem.cache.page_size, kv_head)


@deviates("QUANT-GRANULARITY", fault_class="G", report="BR-107 vllm-project/vllm#51363: per-head descales")
class ReadsScalesByTheQueryHead(ReadsCodes):
    """The scale is that of the KV head with the query head's number, modulo their count."""

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        self.qo_head = qo_head
        return super().kv_head(problem, qo_head)

    def scales(self, problem: AttentionProblem, quant: Quantization, slots: IntArray, kv_head: int) -> FloatArray:
        return super().scales(problem, quant, slots, self.qo_head % problem.num_kv_heads)


@deviates("QUANT-GRANULARITY", fault_class="T", report="article 1, 7.2: logical page for physical page")
class ReadsPageScalesByLogicalPage(ReadsCodes):
    """Scales of K are looked up by the logical page of a key."""

    def keys(
        self, problem: AttentionProblem, positions: Positions, slots: IntArray, kv_head: int, k: FloatArray
    ) -> FloatArray:
        self.logical = positions.values
        return super().keys(problem, positions, slots, kv_head, k)

    def key_numbers(self, problem: AttentionProblem, slots: IntArray, kv_head: int, k: FloatArray) -> FloatArray:
        if problem.k_quant is None or problem.k_quant.granularity not in ("page", "token"):
            return super().key_numbers(problem, slots, kv_head, k)
        return k[slots, kv_head] * self.scales(problem, problem.k_quant, self.logical, kv_head)


@deviates("QUANT-APART", fault_class="A", report="article 1, 7.2: K and V may have different formats")
class UsesTheKeysScalesForValues(Steps):
    """V is dequantized with the scales of K where those fit."""

    def values(self, problem: AttentionProblem, slots: IntArray, kv_head: int, v: FloatArray) -> FloatArray:
        k_quant, v_quant = problem.k_quant, problem.v_quant
        if k_quant is None or v_quant is None or problem.head_dim_qk != problem.head_dim_vo:
            return super().values(problem, slots, kv_head, v)
        return dequantize(v[slots, kv_head], k_quant, slots, kv_head, page_size=problem.cache.page_size)


@deviates("QUANT-APART", fault_class="A", report="article 1, 7.2: K and V may have different formats")
class UsesTheValuesScalesForKeys(Steps):
    """K is dequantized with the scales of V where those fit."""

    def key_numbers(self, problem: AttentionProblem, slots: IntArray, kv_head: int, k: FloatArray) -> FloatArray:
        k_quant, v_quant = problem.k_quant, problem.v_quant
        if k_quant is None or v_quant is None or problem.head_dim_qk != problem.head_dim_vo:
            return super().key_numbers(problem, slots, kv_head, k)
        return dequantize(k[slots, kv_head], v_quant, slots, kv_head, page_size=problem.cache.page_size)


@deviates("QUANT-APART", fault_class="A", report="no report: a cache of codes taken for a pair of them")
class ScalesPlainValuesByTheKeysScales(Steps):
    """V is multiplied by the scales of K where K alone is quantized."""

    def values(self, problem: AttentionProblem, slots: IntArray, kv_head: int, v: FloatArray) -> FloatArray:
        both = problem if problem.v_quant is not None else replace(problem, v_quant=problem.k_quant)
        return super().values(both, slots, kv_head, v)


@deviates("QUANT-APART", fault_class="A", report="no report: a cache of codes taken for a pair of them, the other way")
class ScalesPlainKeysByTheValuesScales(Steps):
    """K is multiplied by the scales of V where V alone is quantized."""

    def key_numbers(self, problem: AttentionProblem, slots: IntArray, kv_head: int, k: FloatArray) -> FloatArray:
        both = problem if problem.k_quant is not None else replace(problem, k_quant=problem.v_quant)
        return super().key_numbers(both, slots, kv_head, k)


@deviates("QUANT-APART", fault_class="A", report="no report: one flag for both caches")
class ScalesValuesOnlyWhereKeysAreQuantized(Steps):
    """Whether V holds codes is decided by K."""

    def values(self, problem: AttentionProblem, slots: IntArray, kv_head: int, v: FloatArray) -> FloatArray:
        known = problem if problem.k_quant is not None else replace(problem, v_quant=None)
        return super().values(known, slots, kv_head, v)


@deviates("QUANT-SCALE", fault_class="A", report="no report: a scale of 0 from a page that was never written")
class AcceptsAScaleOfZero(Steps):
    """Scales are not checked."""

    def refuse(self, problem: AttentionProblem) -> None:
        super().refuse(replace(problem, k_quant=None, v_quant=None))


@deviates("QUANT-GRAD", fault_class="R", report="no report: the chain rule through the scale, once too often")
class GivesTheGradientOfTheCodes(ChangesGradients):
    """dk and dv are multiplied by the scales."""

    def change(self, call: BackwardCall, right: Gradients) -> Gradients:
        problem = call.problem
        grown = []
        for gradient, quant in ((right.dk, problem.k_quant), (right.dv, problem.v_quant)):
            grown.append(gradient.copy())
            for head in range(problem.num_kv_heads if quant is not None else 0):
                assert quant is not None
                grown[-1][:, head] *= quant.scales_at(right.slots, head, page_size=problem.cache.page_size)
        return replace(right, dk=grown[0], dv=grown[1])
