"""What attention and its backward give."""

from dataclasses import dataclass

import numpy as np

from attnconform.reference.coordinates import FloatArray, IntArray


@dataclass(frozen=True)
class AttentionResult:
    """Forward result in float64."""

    out: FloatArray  # (total_q, num_qo_heads, head_dim_vo)
    lse: FloatArray  # (total_q, num_qo_heads) natural log; -inf for a row that sees no key
    merged: FloatArray | None = None  # out before the epilogue; None where there is none

    @property
    def before_epilogue(self) -> FloatArray:
        """The complete rows' outputs, before anything is done to them. [MERGE-EPILOGUE]"""
        return self.out if self.merged is None else self.merged


@dataclass(frozen=True)
class Gradients:
    """Backward result in float64; dk and dv keep only the slots that some row attended. [GRAD-ZERO]"""

    dq: FloatArray  # (total_q, num_qo_heads, head_dim_qk)
    slots: IntArray  # (n,) ascending
    dk: FloatArray  # (n, num_kv_heads, head_dim_qk) at those slots; exactly 0 everywhere else
    dv: FloatArray  # (n, num_kv_heads, head_dim_vo)
    dsink: FloatArray | None  # (num_qo_heads,)
    dscore: tuple[FloatArray, ...] = ()  # one per score rule, in the shape of its parameters [GRAD-RULE]

    def in_pool(self, num_slots: int) -> tuple[FloatArray, FloatArray]:
        """dk and dv over the whole pool, (num_slots, num_kv_heads, head_dim)."""
        dk, dv = (np.zeros((num_slots, *compact.shape[1:])) for compact in (self.dk, self.dv))
        dk[self.slots], dv[self.slots] = self.dk, self.dv
        return dk, dv
