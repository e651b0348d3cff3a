"""Dropout of edges by counter: whether an edge is kept depends on the edge and the seed alone. [DROPOUT-COUNTER]

An edge is kept when word 0 of Philox4x32-10 on the counter (request, query head, query position, key position) under
the seed is at least floor(rate * 2^32). No tile, split or order has a say in that, and the backward draws the same
words. Kept edges weigh 1 / (1 - rate) in the numerator; the denominator and lse know of no dropout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnconform.kernels.sparse_attention.errors import PlanError


@dataclass(frozen=True)
class Dropout:
    """The share of edges that is dropped, and the 64-bit seed that says which."""

    rate: float
    seed: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.rate < 1.0:
            raise PlanError("DROPOUT-RATE", "rate", self.rate, "must lie in [0, 1)")
        if not 0 <= self.seed < 2**64:
            raise PlanError("DROPOUT-COUNTER", "seed", self.seed, "must be a 64-bit number")

    @property
    def keep_scale(self) -> float:
        """What a kept edge weighs."""
        return 1.0 / (1.0 - self.rate)

    def words(self, device: torch.device) -> Tensor:
        """Low and high word of the seed, and the threshold, as the kernels read them; (3,) int32 of those bits."""
        words = (self.seed & 0xFFFFFFFF, self.seed >> 32, math.floor(self.rate * 2**32))
        signed = [word - 2**32 if word >= 2**31 else word for word in words]
        return torch.tensor(signed, dtype=torch.int32, device=device)


@triton.jit
def is_kept(
    words_ptr,  # as Dropout.words
    request, heads, q_idx, kv_idx,  # integers, of shapes that broadcast to the edges'
):  # fmt: skip
    """Which edges are kept, in the shape of the edges. [DROPOUT-COUNTER]"""
    low = tl.load(words_ptr).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words_ptr + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    threshold = tl.load(words_ptr + 2).to(tl.uint32, bitcast=True)
    # Triton's own rounds, counter words and key are those of the paper, in the paper's order.
    word, _, _, _ = tl.philox(
        (high << 32) | low, request.to(tl.int32), heads.to(tl.int32), q_idx.to(tl.int32), kv_idx.to(tl.int32)
    )
    return word >= threshold
