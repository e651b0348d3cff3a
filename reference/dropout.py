"""Dropout by counter: whether an edge is kept depends on its own coordinates, never on an order. [DROPOUT-COUNTER]"""

from dataclasses import dataclass

import numpy as np

from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.philox import philox4x32


@dataclass(frozen=True)
class Dropout:
    """Each edge is dropped with probability `rate`; a kept one weighs 1 / (1 - rate) in the numerator."""

    rate: float  # in [0, 1)
    seed: int  # 64 bits, not negative

    @property
    def threshold(self) -> int:
        """A word below it drops its edge."""
        return int(self.rate * 2.0**32)

    @property
    def factor(self) -> float:
        """What a kept probability is multiplied by. [DROPOUT-NUMERATOR]"""
        return 1 / (1 - self.rate)


def kept_edges(dropout: Dropout, request: int, qo_head: int, q_idx: int, kv_idx: IntArray) -> BoolArray:
    """True where an edge of one row and query head is kept, (n,). [DROPOUT-COUNTER]

    Word 0 of Philox4x32-10 with counter (request, query head, query position, key position) and the seed as key,
    compared with rate * 2^32. Positions are taken modulo 2^32.

    >>> kept_edges(Dropout(0.5, seed=7), 0, 1, 4, np.arange(6))
    array([False, False,  True,  True,  True, False])
    """
    counter = np.empty((len(kv_idx), 4), dtype=np.uint32)
    for i, coordinate in enumerate((request, qo_head, q_idx, kv_idx)):
        counter[:, i] = np.asarray(coordinate) & 0xFFFFFFFF
    words = philox4x32(counter, (dropout.seed & 0xFFFFFFFF, dropout.seed >> 32))[:, 0]
    return np.asarray(words >= np.uint32(dropout.threshold))


def check_dropout(dropout: Dropout) -> None:
    """Refuses a rate outside [0, 1) and a seed outside 64 bits. [DROPOUT-RATE]"""
    if not 0 <= dropout.rate < 1:
        raise RefusedInput("DROPOUT-RATE", "dropout.rate", dropout.rate, "must be at least 0 and below 1")
    if not 0 <= dropout.seed < 2**64:
        raise RefusedInput("DROPOUT-RATE", "dropout.seed", dropout.seed, "must fit 64 bits")
