"""Every random number of the synthesizer: a counter in, uniforms out, the same on any machine and version."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def draw(seed: int, stream: str, row: int, size: int) -> Floats:
    """Uniforms in [0, 1) that depend on the arguments alone: raw Philox4x64 words, their top 53 bits."""
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}, want 0 to 2**64 - 1")
    key = np.array([seed, int.from_bytes(stream.encode()[:8], "little")], dtype=np.uint64)
    counter = np.array([0, row, 0, 0], dtype=np.uint64)
    words: NDArray[np.uint64] = np.random.Philox(key=key, counter=counter).random_raw(size)
    return np.asarray((words >> np.uint64(11)) * 2.0**-53, dtype=np.float64)


def walk(seed: int, stream: str, num_rows: int, step: float) -> Floats:
    """A quantile per row that moves at most `step` between rows and is uniform in the long run."""
    start, moves = draw(seed, stream, 0, 1), draw(seed, stream, 1, max(num_rows - 1, 0))
    path = np.concatenate([start, start + np.cumsum((2 * moves - 1) * step)])[:num_rows]
    # Folding at 0 and 1 keeps a uniform start uniform.
    folded = np.abs(path) % 2
    return np.asarray(np.minimum(np.where(folded > 1, 2 - folded, folded), 1 - 2.0**-53), dtype=np.float64)
