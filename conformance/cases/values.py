"""The numbers of a case: designed so that the fault a case is there to catch moves an output visibly."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from attnconform.conformance.cases.structure import Case, Dtype, ValueKind
from attnconform.reference import philox
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.quantization import QuantFormat, Quantization, quantize
from attnconform.reference.rule_values import mask_allows

NUMPY_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
EXTREME_SCORE = 5e4
FAR_SCORE = -524288.0
LANE_SCORE = -20.0  # a zero-filled lane would outweigh every real key by e^20
Q_STREAM, K_STREAM, V_STREAM, DOUT_STREAM, DLSE_STREAM = range(1, 6)
CODE_STREAM = 7
# codes on which conversions differ: the largest and smallest, subnormals, zero, one
CODE_EDGES: dict[QuantFormat, tuple[float, ...]] = {
    "int8": (-128.0, -127.0, -1.0, 0.0, 1.0, 64.0, 127.0),
    "float8_e4m3": (-448.0, -(2.0**-6), -(2.0**-9), 0.0, 2.0**-9, 7 * 2.0**-9, 1.0, 240.0, 448.0),
    "float8_e5m2": (-57344.0, -(2.0**-14), -(2.0**-16), 0.0, 2.0**-16, 3 * 2.0**-16, 1.0, 448.0, 57344.0),
}


@dataclass(frozen=True)
class Values:
    """Inputs in float64, each exactly representable in the case's dtype; k and v by slot."""

    q: FloatArray  # (total_q, num_qo_heads, head_dim_qk)
    k: FloatArray  # (num_slots, num_kv_heads, head_dim_qk); codes where the cache is quantized
    v: FloatArray  # (num_slots, num_kv_heads, head_dim_vo)
    dout: FloatArray  # (total_q, num_qo_heads, head_dim_vo)
    dlse: FloatArray  # (total_q, num_qo_heads)


def round_to(values: FloatArray, dtype: Dtype) -> FloatArray:
    """The nearest numbers that dtype holds, as float64."""
    return values.astype(NUMPY_DTYPES[dtype]).astype(np.float64)


def build_values(case: Case, problem: AttentionProblem) -> Values:
    """The inputs of a case, from its recipe and seed alone."""
    rows, slots = problem.total_q, problem.cache.num_slots
    q = philox.normal(case.seed, Q_STREAM, (rows, problem.num_qo_heads, problem.head_dim_qk))
    k = philox.normal(case.seed, K_STREAM, (slots, problem.num_kv_heads, problem.head_dim_qk))
    v = philox.normal(case.seed, V_STREAM, (slots, problem.num_kv_heads, problem.head_dim_vo))
    q, k, v = shape_values(case.values, problem, q, k, v)
    dout = philox.normal(case.seed, DOUT_STREAM, (rows, problem.num_qo_heads, problem.head_dim_vo))
    dlse = philox.normal(case.seed, DLSE_STREAM, (rows, problem.num_qo_heads))
    if case.values == "summed_out":  # what out.sum() sends back
        dout, dlse = np.ones_like(dout), np.zeros_like(dlse)
    dtype = case.structure.dtype
    q, dout = round_to(q, dtype), round_to(dout, dtype)
    k, v = (stored_numbers(case, problem, quant, x) for quant, x in ((problem.k_quant, k), (problem.v_quant, v)))
    return Values(q, k, v, dout, round_to(dlse, "float32"))


def stored_numbers(
    case: Case, problem: AttentionProblem, quant: Quantization | None, numbers: FloatArray
) -> FloatArray:
    """What a cache holds: numbers of the case's dtype, or the nearest codes of a quantized one."""
    if quant is None:
        return round_to(numbers, case.structure.dtype)
    if case.values == "code_edges":
        edges = np.array(CODE_EDGES[quant.format])
        return edges[philox.integers(case.seed, CODE_STREAM, numbers.shape, low=0, high=len(edges))]
    slots = np.arange(problem.cache.num_slots)
    codes = np.empty_like(numbers)
    for head in range(numbers.shape[1]):
        scales = quant.scales_at(slots, head, page_size=problem.cache.page_size)
        codes[:, head] = quantize(numbers[:, head], scales, quant.format)
    return codes


def shape_values(
    kind: ValueKind, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Normal numbers bent into one of the designed families."""
    match kind:
        case "normal" | "summed_out":
            return q, k, v
        case "near_ties":  # every key nearly the same, so that which score is the largest hangs on a rounding
            return q, k[:1] + k / 64, v
        case "last_visible" | "first_hidden":
            return along_first_axis(
                problem, q, k, slots=edge_slots(problem, kind), first_key_score=half_mass_score(problem), v=v
            )
        case "code_edges":  # large codes make scores of thousands, where one key takes all: a small query spreads them
            return q / 64, k, v
        case "peaked":
            return 4 * q, k, v
        case "zero_q":
            return 0 * q, k, v
        case "equal_keys":
            return q, np.broadcast_to(k[:1], k.shape), v
        case "integers":
            return np.rint(q), np.rint(k), np.rint(2 * v)
        case "v_mean":
            return q, k, 1 + v / 8
        case "half_mass":
            return along_first_axis(problem, q, k, first_key_score=half_mass_score(problem), v=v)
        case "far_key":
            return along_first_axis(problem, q, k, first_key_score=FAR_SCORE, v=v)
        case "zero_lane":
            return along_first_axis(problem, q, k, first_key_score=LANE_SCORE, other_score=LANE_SCORE, v=v)
        case "extreme":
            signs = np.where(k[:, :, :1] > 0, 1.0, -1.0)
            return along_first_axis(
                problem, q, k, first_key_score=EXTREME_SCORE, other_score=EXTREME_SCORE * signs[..., 0], v=v
            )


def half_mass_score(problem: AttentionProblem) -> float:
    """The score with which one key of the longest request weighs as much as all others, whose scores are 0."""
    return float(np.log(max(int(problem.seqlen_kv.max(initial=1)), 2)))


def edge_slots(problem: AttentionProblem, kind: ValueKind) -> IntArray:
    """(num_marked, num_kv_heads) where the keys lie that the middle row of each request just sees, or just does not.

    Of what its mask leaves, the first and the last key; or the one before the first and the one after the last.
    """
    marked: list[IntArray] = [np.empty((0, problem.num_kv_heads), dtype=np.int64)]
    for where in middle_rows(problem):
        length = int(problem.seqlen_kv[where.request])
        allowed = np.flatnonzero(mask_allows(problem.mask_rule, where.request, where.q_idx, np.arange(length), 0))
        if allowed.size:
            step = int(kind == "first_hidden")
            ends = np.array([allowed[0] - step, allowed[-1] + step])
            slots = problem.cache.slots(where.request, Positions(ends[(ends >= 0) & (ends < length)]))
            of_head = [problem.cache.head_slots(slots, head).values for head in range(problem.num_kv_heads)]
            marked.append(np.stack(of_head, axis=1))
    return np.concatenate(marked)


def middle_rows(problem: AttentionProblem) -> list[QueryRow]:
    """One query row of each request that has any."""
    rows: dict[int, list[QueryRow]] = {}
    for where in problem.rows():
        rows.setdefault(where.request, []).append(where)
    return [of_request[len(of_request) // 2] for of_request in rows.values()]


def first_slots(problem: AttentionProblem) -> IntArray:
    """(num_marked, num_kv_heads) where the first key of each request lies."""
    pages = [problem.cache.page_table[n, 0] for n in np.flatnonzero(problem.seqlen_kv > 0)]
    slots = np.array(pages, dtype=np.int64) * problem.cache.page_size
    return np.repeat(slots[:, None], problem.num_kv_heads, axis=1)


def along_first_axis(
    problem: AttentionProblem,
    q: FloatArray,
    k: FloatArray,
    *,
    first_key_score: float,
    slots: IntArray | None = None,  # (num_marked, num_kv_heads) that get it; None: the first of every request
    other_score: float | FloatArray = 0.0,  # a number, or (num_slots, num_kv_heads)
    v: FloatArray,
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Scores set by hand: q's first component alone decides them, and small noise rides on the second.

    The marked slots get `first_key_score`, every other one `other_score`.
    """
    along = np.sqrt(np.abs(first_key_score) / problem.sm_scale) if first_key_score else 1.0
    new_q, new_k = np.zeros_like(q), np.zeros_like(k)
    new_q[..., 0], new_q[..., 1] = along, q[..., 1]
    new_k[..., 0], new_k[..., 1] = np.asarray(other_score) / (problem.sm_scale * along), k[..., 1]
    marked = first_slots(problem) if slots is None else slots
    new_k[marked, np.arange(problem.num_kv_heads), 0] = first_key_score / (problem.sm_scale * along)
    return new_q, new_k, v
