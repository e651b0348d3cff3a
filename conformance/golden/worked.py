"""Worked examples of the source articles as vectors."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from attnconform.conformance.golden.vector import Array, Vector, to_array
from attnconform.reference import philox
from attnconform.reference.attention import effective_sets
from attnconform.reference.block_mask import build_block_mask
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import Candidates
from attnconform.reference.coordinates import Positions
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.rules import And, Causal, Window
from attnconform.reference.states import PartialState, merge, merge_all

Numbers = Mapping[str, Any]


def as_vector(slug: str, clause: str, fault: str, effect: str, given: Numbers, expected: Numbers) -> Vector:
    """A worked vector; its numbers are exact, so it has no bound."""

    def arrays(named: Numbers) -> dict[str, Array]:
        return {name: to_array(np.asarray(value, dtype=np.float64)) for name, value in named.items()}

    return Vector(
        path=f"vectors/worked-{slug}.json",
        kind="worked",
        clause=clause,
        fault_class=fault,
        effect=effect,
        given=arrays(given),
        expected=arrays(expected),
    )


def worked_vectors() -> Iterator[Vector]:
    """Slots, merges, denominators, block masks, sets and random words."""
    yield slots_vector()
    yield merge_vector()
    yield denominator_vector()
    yield block_mask_vector()
    yield set_vector()
    yield philox_vector()


def slots_vector() -> Vector:
    """Candidates (1, 2, 63, 64, 65, 127) on pages of 64 with page table (41, 7)."""
    positions, table = np.array([1, 2, 63, 64, 65, 127]), np.array([[41, 7]])
    cache = PagedCache(page_size=64, num_pages=64, page_table=table)
    slots = cache.slots(0, Positions(positions)).values
    effect = "a physical page number used as a logical one reads another page"
    given = {"positions": positions, "page_table": table[0], "page_size": 64}
    return as_vector("slots", "COORD-SLOT", "divides-a-slot-by-the-page-size", effect, given, {"slots": slots})


def merge_vector() -> Vector:
    """States (m, l, o) = (2, 3, 6) and (1, 4, 8): l is 4.472, o is 8.943, the output 2."""
    a, b = PartialState(2.0, 3.0, np.array([6.0])), PartialState(1.0, 4.0, np.array([8.0]))
    c = merge(a, b)
    effect = "adding o and l without rescaling gives 14 / 7, or 4 where the outputs are added"
    given = {"m": [2.0, 1.0], "l": [3.0, 4.0], "o": [6.0, 8.0]}
    expected = {"m": c.m, "l": c.l, "o": c.o, "out": c.o / c.l}
    return as_vector("merge", "MERGE-DISJOINT", "adds-normalized-outputs", effect, given, expected)


def denominator_vector() -> Vector:
    """Four splits with maxima (8, 7, 9, 6) and sums (12, 18, 10, 20)."""
    maxima, sums = (8.0, 7.0, 9.0, 6.0), (12.0, 18.0, 10.0, 20.0)
    total = merge_all([PartialState(m, s, np.zeros(1)) for m, s in zip(maxima, sums, strict=True)], 1)
    effect = "adding the sums as they are gives 60"
    given = {"m": maxima, "l": sums}
    return as_vector(
        "denominator", "MERGE-SPLIT", "adds-sums-of-different-maxima", effect, given, {"m": total.m, "l": total.l}
    )


def block_mask_vector() -> Vector:
    """Eight tokens, causal, window of 4: 26 edges in 9 of 16 blocks of 2 by 2."""
    idx = np.arange(8)
    mask = mask_allows(And((Causal(), Window(left=3))), 0, idx[:, None], idx[None, :])
    blocks = build_block_mask(mask[None], q_block_size=2, kv_block_size=2)
    effect = "treating partial blocks as full admits 36 edges"
    given = {"seqlen": 8, "window": 4, "block_size": 2}
    expected = {
        "mask": mask,
        "num_edges": mask.sum(),
        "full_indptr": blocks.full.indptr,
        "full_indices": blocks.full.indices,
        "partial_indptr": blocks.partial.indptr,
        "partial_indices": blocks.partial.indices,
    }
    return as_vector("block-mask", "BLOCK-FULL", "partial-blocks-as-full", effect, given, expected)


def set_vector() -> Vector:
    """D = (5, -1, 2, 5), window 2, one sink position, query at 7 of 8 tokens."""
    cache = PagedCache(page_size=4, num_pages=2, page_table=np.array([[1, 0]]))
    lists = Candidates(indptr=np.array([0, 4]), indices=np.array([5, -1, 2, 5]), window=2, num_sink_tokens=1)
    problem = AttentionProblem(
        qo_indptr=np.array([0, 1]),
        seqlen_kv=np.array([8]),
        q_offset=np.array([7]),
        num_qo_heads=1,
        num_kv_heads=1,
        head_dim_qk=1,
        head_dim_vo=1,
        cache=cache,
        sm_scale=1.0,
        candidates=lists,
    )
    positions, slots = effective_sets(problem).of(0, 0)
    effect = "a repeated position adds ln 2 to its score"
    given = {
        "dynamic": [5, -1, 2, 5],
        "window": 2,
        "num_sink_tokens": 1,
        "q_idx": 7,
        "seqlen_kv": 8,
        "page_table": [1, 0],
    }
    return as_vector(
        "set", "SET-DUPLICATE", "counts-a-duplicate-twice", effect, given, {"positions": positions, "slots": slots}
    )


def philox_vector() -> Vector:
    """The first words of seed 0x123456789, stream 1, and the normal numbers made from them."""
    seed, stream = 0x123456789, 1
    effect = "tensors of a case are not those of the suite"
    expected = {"words": philox.words(seed, stream, 8), "normal": philox.normal(seed, stream, (4,))}
    given = {"seed_low": seed & 0xFFFFFFFF, "seed_high": seed >> 32, "stream": stream}
    return as_vector("philox", "SET-IDENTITY", "other-random-numbers", effect, given, expected)
