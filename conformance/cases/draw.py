"""Deterministic draws for structures: one seed, one stream per draw, independent of any library's version."""

from collections.abc import Sequence
from typing import TypeVar

from attnconform.reference import philox

T = TypeVar("T")
STRUCTURE_STREAMS = 1 << 32  # the numbers of the tensors use the streams below


class Draw:
    """A sequence of draws; the n-th draw of a seed is always the same."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.stream = STRUCTURE_STREAMS

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]: the one that `integers` would begin with, without its arrays."""
        self.stream += 1
        return low + (first_word(self.seed, self.stream) * (high + 1 - low) >> 32)

    def integers(self, count: int, low: int, high: int) -> list[int]:
        """Integers in [low, high]."""
        self.stream += 1
        drawn = philox.integers(self.seed, self.stream, (count,), low=low, high=high + 1)
        return [int(i) for i in drawn]

    def shuffled(self, items: Sequence[T]) -> list[T]:
        """The items in another order."""
        self.stream += 1
        return [items[int(i)] for i in philox.permutation(self.seed, self.stream, len(items))]

    def subset(self, items: Sequence[T], count: int) -> list[T]:
        """`count` distinct items, in the order given."""
        chosen = sorted(self.shuffled(range(len(items)))[:count])
        return [items[i] for i in chosen]

    def choice(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.integer(0, len(items) - 1)]


def first_word(seed: int, stream: int) -> int:
    """The first word of philox.words, in plain integers: arrays of one word cost more than a case's other draws."""
    low = 0xFFFFFFFF
    c0, c1, c2, c3 = 0, 0, stream & low, stream >> 32
    k0, k1 = seed & low, seed >> 32
    first, second = (int(multiplier) for multiplier in philox.MULTIPLIERS)
    for _ in range(philox.ROUNDS):
        product0, product1 = first * c0, second * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & low, (product0 >> 32) ^ c3 ^ k1, product0 & low
        k0, k1 = (k0 + philox.WEYL[0]) & low, (k1 + philox.WEYL[1]) & low
    return c0
