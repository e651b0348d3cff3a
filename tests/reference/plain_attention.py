"""The contract once more, as scalar loops over every (request, head, query, key), for tests to hold the reference to.

Nothing here calls the reference: membership is asked of one key at a time, rotations are complex numbers, dropout's
words are Python integers. Only the numbers of a problem are read: its scales, and what rules it has registered.
"""

import cmath
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnconform.conformance.cases.structure import CandidateStructure, Structure
from attnconform.conformance.cases.values import Values
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.custom_rules import MASKS, SCORES
from attnconform.reference.dropout import Dropout
from attnconform.reference.epilogue import Activation, Cast, EpilogueStep, Gate
from attnconform.reference.quantization import Quantization
from attnconform.reference.rope import Rope
from attnconform.reference.rules import (
    Alibi,
    And,
    Causal,
    CustomMask,
    CustomScore,
    Document,
    HeadWindow,
    MaskRule,
    Or,
    PrefixLM,
    RelativeBias,
    ScoreRule,
    SoftCap,
    Window,
)

MANTISSA_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


def queries(structure: Structure) -> Iterator[tuple[int, int, int, int]]:
    """Row of q, request, row within the request and logical position of every query."""
    row = 0
    for n in range(len(structure.seqlens_kv)):
        if structure.q_offset is None:
            first = structure.seqlens_kv[n] - structure.seqlens_q[n]
        else:
            first = structure.q_offset[n]
        for r in range(structure.seqlens_q[n]):
            yield row, n, r, first + r
            row += 1


# -- which keys -----------------------------------------------------------------------------------------------------


def list_of(structure: Structure, lists: CandidateStructure, request: int, r: int, h: int) -> tuple[int, ...]:
    """The list a query head reads, found by counting every list before it."""
    at = 0
    for n in range(len(structure.seqlens_q)):
        for first in range(0, structure.seqlens_q[n], lists.q_block_size):
            for group in head_groups(structure, lists):
                if n == request and first <= r < first + lists.q_block_size and h in group:
                    return lists.lists[at]
                at += 1
    raise AssertionError(f"no list for request {request}, row {r}, head {h}")


def head_groups(structure: Structure, lists: CandidateStructure) -> list[list[int]]:
    """Which query heads share a list."""
    heads = list(range(structure.num_qo_heads))
    size = structure.num_qo_heads // structure.num_kv_heads
    if lists.sharing == "shared":
        return [heads]
    if lists.sharing == "kv_head":
        return [heads[i : i + size] for i in range(0, len(heads), size)]
    return [[h] for h in heads]


def is_listed(structure: Structure, request: int, r: int, i: int, h: int, j: int) -> bool:
    """Whether a row lists one key: by an entry, by the window or as a sink position."""
    lists = structure.candidates
    if lists is None:
        return True
    for entry in list_of(structure, lists, request, r, h):
        if entry != -1 and entry * lists.block_size <= j < (entry + 1) * lists.block_size:
            return True
    in_window = j <= i and i - j < lists.window
    return in_window or j < lists.num_sink_tokens


def document_at(starts: tuple[int, ...], position: int) -> int:
    """How many documents have begun at a position."""
    return sum(1 for start in starts if start <= position)


def is_near(left: int | None, right: int | None, i: int, j: int) -> bool:
    """Whether a window with these limits reaches from the query at i to the key at j."""
    return (left is None or i - j <= left) and (right is None or j - i <= right)


def is_allowed(rule: MaskRule | None, n: int, h: int, i: int, j: int) -> bool:
    """Whether a rule lets the query at i look at the key at j."""
    match rule:
        case None:
            return True
        case Causal():
            return j <= i
        case Window(left, right):
            return is_near(left, right, i, j)
        case HeadWindow(left, right):
            return is_near(left[h], right[h], i, j)
        case PrefixLM(prefix_len):
            return j < prefix_len[n] or j <= i
        case Document(starts):
            return document_at(starts[n], i) == document_at(starts[n], j)
        case CustomMask(name):
            return bool(MASKS[name](n, h, i, np.array([j]))[0])
        case And(rules):
            return all(is_allowed(part, n, h, i, j) for part in rules)
        case Or(rules):
            return any(is_allowed(part, n, h, i, j) for part in rules)


def attended(structure: Structure, n: int, r: int, i: int, h: int) -> list[int]:
    """E of one row and query head, ascending."""
    return [
        j
        for j in range(structure.seqlens_kv[n])
        if is_listed(structure, n, r, i, h, j) and is_allowed(structure.mask_rule, n, h, i, j)
    ]


def slot_of(structure: Structure, n: int, j: int, kv_head: int = 0) -> int:
    """Where one KV head's part of one token lies in the pool."""
    page, offset = divmod(j, structure.page_size)
    place = structure.page_table[n][page]
    if structure.head_pages is not None:
        place = structure.head_pages[place][kv_head]
    return place * structure.page_size + offset


# -- numbers --------------------------------------------------------------------------------------------------------


def scale_of(quant: Quantization | None, slot: int, kv_head: int, channel: int, page_size: int) -> float:
    """What one code is multiplied by."""
    if quant is None:
        return 1.0
    at: dict[str, tuple[int, ...]] = {
        "tensor": (0,),
        "head": (kv_head,),
        "page": (slot // page_size, kv_head),
        "token": (slot, kv_head),
        "channel": (kv_head, channel),
    }
    return float(quant.scale[at[quant.granularity]])


def dequantized(codes: FloatArray, quant: Quantization | None, page_size: int) -> FloatArray:
    """A whole pool, (num_slots, num_kv_heads, head_dim), one number after another."""
    numbers = codes.copy()
    for slot, head, channel in np.ndindex(*codes.shape):
        numbers[slot, head, channel] *= scale_of(quant, slot, head, channel, page_size)
    return numbers


def turned(x: list[float], position: int, rope: Rope | None) -> list[float]:
    """A vector whose pairs are complex numbers, each multiplied by e^(i position theta^(-2 p / rotary_dim))."""
    if rope is None or rope.k_position == "encoded":
        return x
    found, half = list(x), rope.rotary_dim // 2
    for p in range(half):
        a, b = (2 * p, 2 * p + 1) if rope.interleaved else (p, p + half)
        z = complex(x[a], x[b]) * cmath.exp(1j * position * rope.theta ** (-2 * p / rope.rotary_dim))
        found[a], found[b] = z.real, z.imag
    return found


def ruled(rule: ScoreRule, score: float, h: int, i: int, j: int) -> float:
    """One score after one rule."""
    match rule:
        case Alibi(slopes):
            return score + slopes[h] * (j - i)
        case RelativeBias(tables):
            reach = (len(tables[h]) - 1) // 2
            return score + tables[h][reach + min(max(j - i, -reach), reach)]
        case SoftCap(cap):
            return cap * math.tanh(score / cap)
        case CustomScore(name):
            return float(SCORES[name].apply(np.array([score]), h, i, np.array([j]))[0])


def ranked(structure: Structure, n: int, r: int, h: int, j: int) -> float:
    """What a key's place in its list adds."""
    lists = structure.candidates
    if lists is None or lists.form != "sequence" or lists.rank_bias is None:
        return 0.0
    return lists.rank_bias[list_of(structure, lists, n, r, h).index(j)]


def philox_words(counter: list[int], key: list[int]) -> list[int]:
    """Four words by ten rounds in Python integers, as the paper prints them."""
    low = 2**32 - 1
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(second >> 32) ^ counter[1] ^ key[0], second & low, (first >> 32) ^ counter[3] ^ key[1], first & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def weight_of(dropout: Dropout | None, n: int, h: int, i: int, j: int) -> float:
    """What dropout multiplies one edge's probability by."""
    if dropout is None:
        return 1.0
    word = philox_words([n, h, i % 2**32, j], [dropout.seed % 2**32, dropout.seed // 2**32])[0]
    return 0.0 if word < math.floor(dropout.rate * 2**32) else 1 / (1 - dropout.rate)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def rounded(x: float, dtype: str) -> float:
    """The nearest number with the mantissa of a dtype, ties to even; neither tiny nor too large for it."""
    mantissa, exponent = math.frexp(x)
    scale = 2 ** MANTISSA_BITS[dtype]
    return math.ldexp(round(mantissa * scale) / scale, exponent)


def stepped(step: EpilogueStep, x: float, h: int) -> float:
    """One component of an output after one step of the epilogue."""
    match step:
        case Activation("relu"):
            return x if x > 0 else 0.0
        case Activation():
            return x * sigmoid(x)
        case Gate(logits):
            return x * sigmoid(logits[h])
        case Cast(dtype):
            return rounded(x, dtype)


# -- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainResult:
    """Outputs before and after the epilogue, lse, and Σ p |v| that errors of out are measured by."""

    out: FloatArray
    merged: FloatArray
    lse: FloatArray
    condition: FloatArray


def plain_attention(
    structure: Structure, k_quant: Quantization | None, v_quant: Quantization | None, values: Values
) -> PlainResult:
    """Attention of every row and head, term by term."""
    shape = (sum(structure.seqlens_q), structure.num_qo_heads)
    merged, condition = np.zeros((*shape, structure.head_dim_vo)), np.zeros((*shape, structure.head_dim_vo))
    out, lse = np.zeros(merged.shape), np.full(shape, -math.inf)
    k = dequantized(values.k, k_quant, structure.page_size)
    v = dequantized(values.v, v_quant, structure.page_size)
    for row, n, r, i in queries(structure):
        for h in range(structure.num_qo_heads):
            kv_head = h * structure.num_kv_heads // structure.num_qo_heads
            keys = attended(structure, n, r, i, h)
            slots = [slot_of(structure, n, j, kv_head) for j in keys]
            query = turned(values.q[row, h].tolist(), i, structure.rope)
            scores = [
                plain_score(structure, (n, r, i, h, j), query, k[slot, kv_head].tolist())
                for j, slot in zip(keys, slots, strict=True)
            ]
            top, terms, total = exponentials(
                scores, None if structure.sink_logits is None else structure.sink_logits[h]
            )
            if total:
                lse[row, h] = top + math.log(total)
            weights = [t / total * weight_of(structure.dropout, n, h, i, j) for t, j in zip(terms, keys, strict=True)]
            for c in range(structure.head_dim_vo):
                products = [w * float(v[slot, kv_head, c]) for w, slot in zip(weights, slots, strict=True)]
                x = merged[row, h, c] = math.fsum(products)
                condition[row, h, c] = math.fsum(map(abs, products))
                for step in structure.epilogue:
                    x = stepped(step, x, h)
                out[row, h, c] = x
    return PlainResult(out, merged, lse, condition)


def plain_score(structure: Structure, edge: tuple[int, int, int, int, int], q: list[float], key: list[float]) -> float:
    """The final score of one edge: (request, row, query position, query head, key position)."""
    n, r, i, h, j = edge
    score = structure.sm_scale * math.fsum(a * b for a, b in zip(q, turned(key, j, structure.rope), strict=True))
    for rule in structure.score_rules:
        score = ruled(rule, score, h, i, j)
    return score + ranked(structure, n, r, h, j)


def exponentials(scores: list[float], sink: float | None) -> tuple[float, list[float], float]:
    """The largest score, every key's exponential below it, and their sum with the sink's."""
    top = max([*scores, *([] if sink is None else [sink])], default=-math.inf)
    terms = [math.exp(s - top) for s in scores]
    return top, terms, math.fsum([*terms, *([] if sink is None else [math.exp(sink - top)])])
