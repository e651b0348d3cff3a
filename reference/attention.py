"""What SPEC.md means, as functions: float64 attention, its gradients, and the keys each row attends."""

from dataclasses import dataclass

import numpy as np

from attnconform.reference.coordinates import FloatArray, IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.steps import AttentionResult, Gradients, Steps


def attention(problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
    """Attention output and lse of every query row and head, in float64.

    q is (total_q, num_qo_heads, head_dim_qk), k and v are (num_slots, num_kv_heads, head_dim), by slot.
    Raises RefusedInput where the problem breaks the contract or a tensor does not fit it.
    """
    check_tensors(problem, q, k, v)
    return Steps().forward(problem, q, k, v)


def attention_gradients(
    problem: AttentionProblem,
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    dout: FloatArray,  # (total_q, num_qo_heads, head_dim_vo)
    dlse: FloatArray | None = None,  # (total_q, num_qo_heads)
) -> Gradients:
    """dQ, dK, dV and dsink of attention, in float64. [GRAD-FORMULA]"""
    check_tensors(problem, q, k, v)
    steps = Steps()
    return steps.backward(problem, q, k, v, steps.forward(problem, q, k, v), dout, dlse)


@dataclass(frozen=True)
class EffectiveSets:
    """E of every row and query head: which keys a right kernel attends, and where they lie."""

    indptr: IntArray  # (total_q * num_qo_heads + 1,) row-major over (row, query head)
    positions: IntArray  # (num_edges,) logical, ascending within a row and head
    slots: IntArray  # (num_edges,) physical
    num_qo_heads: int

    def of(self, row: int, qo_head: int) -> tuple[IntArray, IntArray]:
        """Positions and slots one row and head attends."""
        i = row * self.num_qo_heads + qo_head
        edges = slice(int(self.indptr[i]), int(self.indptr[i + 1]))
        return self.positions[edges], self.slots[edges]

    def counts(self) -> IntArray:
        """Number of keys, (total_q, num_qo_heads)."""
        return np.diff(self.indptr).reshape(-1, self.num_qo_heads)


def effective_sets(problem: AttentionProblem) -> EffectiveSets:
    """E of every row and query head. [SET-IDENTITY, MASK-BEFORE-MAX]"""
    steps = Steps()
    steps.refuse(problem)
    positions, slots = [], []
    for where in problem.rows():
        for h in range(problem.num_qo_heads):
            kept = steps.effective(problem, where, h)
            positions.append(kept.values)
            slots.append(steps.head_slots(problem, steps.slots(problem, where, kept), steps.kv_head(problem, h)))
    none = np.empty(0, dtype=np.int64)
    indptr = np.concatenate([[0], np.cumsum([len(p) for p in positions], dtype=np.int64)]).astype(np.int64)
    return EffectiveSets(
        indptr, np.concatenate([none, *positions]), np.concatenate([none, *slots]), problem.num_qo_heads
    )


def check_tensors(problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> None:
    """Refuses a tensor that does not fit the problem. [SAFE-SHAPE]"""
    slots, heads = problem.cache.num_slots, problem.num_kv_heads
    want = {
        "q": (problem.total_q, problem.num_qo_heads, problem.head_dim_qk),
        "k": (slots, heads, problem.head_dim_qk),
        "v": (slots, heads, problem.head_dim_vo),
    }
    for (name, shape), tensor in zip(want.items(), (q, k, v), strict=True):
        if tensor.shape != shape:
            raise RefusedInput("SAFE-SHAPE", f"{name}.shape", tensor.shape, f"the problem has {shape}")
