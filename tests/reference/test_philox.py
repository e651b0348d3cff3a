"""Philox4x32-10 against the vectors its authors publish, and our transforms of its words."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import philox_words

from attnconform.conformance.cases import profiles
from attnconform.reference import philox

profiles.load_profile()

SEEDS, STREAMS = st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)

# kat_vectors of Random123, philox4x32 with ten rounds: counter, key, words
KNOWN_ANSWERS = [
    pytest.param((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8), id="zeros"),
    pytest.param((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD), id="ones"),
    pytest.param(
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        id="pi",
    ),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_words_are_the_published_ones(counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]) -> None:
    assert tuple(philox.philox4x32(np.array(counter, dtype=np.uint32), key).tolist()) == want


@settings(max_examples=profiles.examples(100))
@given(SEEDS, STREAMS, st.integers(1, 13))
def test_a_stream_counts_blocks_in_the_low_half_and_names_itself_in_the_high_half(
    seed: int, stream: int, count: int
) -> None:
    low = 2**32 - 1
    want = [
        word
        for block in range(-(-count // 4))
        for word in philox_words([block, 0, stream & low, stream >> 32], [seed & low, seed >> 32])
    ]
    assert philox.words(seed, stream, count).tolist() == want[:count]


@settings(max_examples=profiles.examples(100))
@given(SEEDS, STREAMS, st.integers(0, 40), st.integers(0, 40))
def test_a_shorter_call_gives_the_start_of_a_longer_one(seed: int, stream: int, count: int, more: int) -> None:
    assert philox.words(seed, stream, count).tolist() == philox.words(seed, stream, count + more)[:count].tolist()
    uniform = philox.uniform(seed, stream, (count + more,))
    assert philox.uniform(seed, stream, (count,)).tolist() == uniform[:count].tolist()


SHAPED: list[Callable[[tuple[int, ...]], np.ndarray]] = [
    lambda shape: philox.uniform(7, 3, shape),
    lambda shape: philox.normal(7, 3, shape),
    lambda shape: philox.integers(7, 3, shape, low=-4, high=9),
]


@pytest.mark.parametrize("draw", SHAPED, ids=["uniform", "normal", "integers"])
@pytest.mark.parametrize("shape", [(24,), (2, 12), (2, 3, 4), (24, 1), (1, 24, 1)])
def test_the_shape_of_a_call_changes_no_number(draw: Callable[..., np.ndarray], shape: tuple[int, ...]) -> None:
    got = draw(shape)
    assert got.shape == shape
    assert got.ravel().tolist() == draw((24,)).tolist()


@pytest.mark.parametrize("draw", SHAPED, ids=["uniform", "normal", "integers"])
def test_no_numbers_can_be_asked_for(draw: Callable[..., np.ndarray]) -> None:
    assert draw((0, 3)).shape == (0, 3)


COUNT = 1 << 16


def test_uniform_numbers_fill_the_open_unit_interval_evenly() -> None:
    x = philox.uniform(1, 2, (COUNT,))
    assert 0 < x.min() < x.max() < 1
    counts = np.histogram(x, bins=64, range=(0, 1))[0]
    chi2 = ((counts - COUNT / 64) ** 2 / (COUNT / 64)).sum()
    assert 30 < chi2 < 110  # 63 degrees of freedom: outside with probability 1e-4 either way


def test_normal_numbers_have_the_moments_and_tails_of_a_normal() -> None:
    x = philox.normal(1, 2, (COUNT,))
    sigma = COUNT**-0.5
    assert abs(x.mean()) < 4 * sigma
    assert abs((x**2).mean() - 1) < 4 * 2**0.5 * sigma
    assert abs((x**3).mean()) < 4 * 15**0.5 * sigma
    assert abs((x**4).mean() - 3) < 4 * 96**0.5 * sigma
    for limit, mass in ((1.0, 0.317311), (2.0, 0.045500), (3.0, 0.002700)):
        assert abs((np.abs(x) > limit).mean() - mass) < 4 * (mass * COUNT) ** 0.5 / COUNT + 1e-4
    np.testing.assert_array_equal(x * 2**12, np.rint(x * 2**12))


def test_integers_reach_both_ends_evenly_and_never_pass_them() -> None:
    x = philox.integers(1, 2, (COUNT,), low=-3, high=5)
    counts = np.bincount(x + 3)
    assert len(counts) == 8
    assert ((counts - COUNT / 8) ** 2 / (COUNT / 8)).sum() < 30  # 7 degrees of freedom, probability 1e-4


@settings(max_examples=profiles.examples(100))
@given(SEEDS, STREAMS, st.integers(0, 60))
def test_a_permutation_holds_every_index_once(seed: int, stream: int, size: int) -> None:
    assert sorted(philox.permutation(seed, stream, size).tolist()) == list(range(size))


def test_streams_and_seeds_are_unrelated() -> None:
    base = philox.normal(5, 1, (COUNT,))
    for seed, stream in ((5, 2), (6, 1), (5 + 2**32, 1), (5, 1 + 2**32)):
        assert abs(np.corrcoef(base, philox.normal(seed, stream, (COUNT,)))[0, 1]) < 5 * COUNT**-0.5


def test_the_numbers_of_a_seed_are_those_of_every_version() -> None:
    drawn = (
        philox.words(0x5EED, 1, 9),
        philox.uniform(0x5EED, 2, (5,)),
        philox.normal(0x5EED, 3, (50,)),
        philox.integers(0x5EED, 4, (9,), low=-7, high=1000),
        philox.permutation(0x5EED, 5, 31),
    )
    digest = hashlib.sha256(
        b"".join(np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<")).tobytes() for x in drawn)
    )
    assert digest.hexdigest()[:16] == "608b0c98de92853e"
