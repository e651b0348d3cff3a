"""Random numbers that no library version changes: Philox4x32-10 words and our own transforms.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import numpy as np
import numpy.typing as npt

from attnconform.reference.coordinates import FloatArray

Words = npt.NDArray[np.uint32]
MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds on counters (..., 4) under one key; (..., 4) words.

    >>> [hex(w) for w in philox4x32(np.zeros(4, dtype=np.uint32), (0, 0)).tolist()]
    ['0x6627e8d5', '0xe169c58d', '0xbc57ac4c', '0x9b00dbd8']
    """
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    low = np.uint64(0xFFFFFFFF)
    for r in range(ROUNDS):
        k0, k1 = (np.uint64((k + r * w) & 0xFFFFFFFF) for k, w in zip(key, WEYL, strict=True))
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ k0,
            product1 & low,
            (product0 >> np.uint64(32)) ^ c3 ^ k1,
            product0 & low,
        )
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def words(seed: int, stream: int, count: int) -> Words:
    """`count` words of one stream of one 64-bit seed; (count,).

    The key is the seed; the counter is (block low, block high, stream low, stream high).
    """
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    counter = np.empty((len(blocks), 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1] = blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32)
    counter[:, 2], counter[:, 3] = stream & 0xFFFFFFFF, stream >> 32
    return philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)).ravel()[:count]


def uniform(seed: int, stream: int, shape: tuple[int, ...]) -> FloatArray:
    """Uniform numbers in (0, 1): (word + 1/2) / 2^32, exact in float64."""
    count = int(np.prod(shape))
    return ((words(seed, stream, count).astype(np.float64) + 0.5) / 2.0**32).reshape(shape)


def normal(seed: int, stream: int, shape: tuple[int, ...]) -> FloatArray:
    """Standard normal numbers by Box and Muller, two words each, rounded to 12 fractional bits.

    The rounding makes the numbers independent of a math library's last bits.
    """
    count = int(np.prod(shape))
    radius_word, angle_word = uniform(seed, stream, (2, count))
    gauss = np.sqrt(-2 * np.log(radius_word)) * np.cos(2 * np.pi * angle_word)
    return (np.rint(gauss * 2.0**12) / 2.0**12).reshape(shape)


def integers(seed: int, stream: int, shape: tuple[int, ...], *, low: int, high: int) -> npt.NDArray[np.int64]:
    """Integers in [low, high), by multiplying a word with the range; the bias is below range / 2^32."""
    count = int(np.prod(shape))
    scaled = (words(seed, stream, count).astype(np.uint64) * np.uint64(high - low)) >> np.uint64(32)
    return scaled.astype(np.int64).reshape(shape) + low


def permutation(seed: int, stream: int, size: int) -> npt.NDArray[np.int64]:
    """A permutation of range(size): the stable argsort of random words."""
    return np.argsort(words(seed, stream, size), kind="stable").astype(np.int64)
