"""Mistakes about caches of codes: which scale, of what, and how often. [QUANT]"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.gradients import BackwardCall, ChangesGradients
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.quantization import Quantization, dequantize
from attnconform.reference.results import Gradients
from attnconform.reference.steps import Steps


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
