"""One KV head of one request: the exact data that its bounds are made of. [BOUND-OUT]"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class AttentionBlock:
    """Float64 data of one KV head and all query rows that read it.

    The rows of the num_heads query heads of its group are stacked, head after head, in equal chunks.
    What lies outside the mask may be anything, NaN included.
    """

    q: Array  # (rows, head_dim_qk)
    k: Array  # (seqlen_kv, head_dim_qk)
    v: Array  # (seqlen_kv, head_dim_vo)
    mask: Mask  # (rows, seqlen_kv), True where a row attends a key
    scores: Array  # (rows, seqlen_kv), after sm_scale and score rules: what softmax sees
    sm_scale: float
    added: Array | None = None  # (rows, seqlen_kv), sum of |bias| that score rules added
    slope: Array | None = None  # (rows, seqlen_kv), d score / d (sm_scale q.k): 1 - tanh^2 of a soft cap
    cap: float | None = None  # logits_soft_cap
    sink: Array | None = None  # (rows,), sink logit: one more key with v = 0
    dropout: Array | None = None  # (rows, seqlen_kv), keep mask / (1 - rate), applied to P in the numerator
    # absolute error, in the declared arithmetic's own float32, of operands made on the way: turned or dequantized ones
    q_error: Array | None = None  # (rows, head_dim_qk)
    k_error: Array | None = None  # (seqlen_kv, head_dim_qk)
    v_error: Array | None = None  # (seqlen_kv, head_dim_vo)
    num_heads: int = 1

    def __post_init__(self) -> None:
        rows, keys = self.mask.shape
        for name, length in (("q", rows), ("k", keys), ("v", keys)):
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} has {len(getattr(self, name))} rows, but mask is {rows} by {keys}")
        if self.q.shape[1] != self.k.shape[1]:
            raise ValueError(f"q has head_dim {self.q.shape[1]}, k has {self.k.shape[1]}")
        for name in ("scores", "added", "slope", "dropout"):
            value = getattr(self, name)
            if value is not None and value.shape != (rows, keys):
                raise ValueError(f"{name} has shape {value.shape}, not that of mask, {(rows, keys)}")
        for name, operand in (("q_error", self.q), ("k_error", self.k), ("v_error", self.v)):
            error = getattr(self, name)
            if error is not None and error.shape != operand.shape:
                raise ValueError(f"{name} has shape {error.shape}, not {operand.shape}")
        if self.sink is not None and self.sink.shape != (rows,):
            raise ValueError(f"sink has shape {self.sink.shape}, not {(rows,)}")
        if self.num_heads < 1 or rows % self.num_heads:
            raise ValueError(f"{rows} rows do not divide into {self.num_heads} heads")
        if self.cap is not None and self.cap <= 0:
            raise ValueError(f"cap is {self.cap}, not positive")
        if not np.isfinite(self.scores[self.mask]).all():
            raise ValueError("scores has a non-finite value inside the mask")
