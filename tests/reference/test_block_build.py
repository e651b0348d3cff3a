"""Block masks built from rules by interval ends, against an enumeration of every (head, query, key)."""

from collections.abc import Callable
from itertools import product

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.reference import rule_values
from attnconform.reference.block_mask import BlockMask, build_block_mask, check_block_mask, decode_block_mask
from attnconform.reference.blocks import build
from attnconform.reference.blocks.build import Extent, element_mask, generic_block_mask, rule_block_mask
from attnconform.reference.blocks.intervals import inner_intervals, is_interval_rule, outer_intervals
from attnconform.reference.blocks.reuse import same_lists
from attnconform.reference.coordinates import BoolArray, IntArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.rule_values import mask_allows
from attnconform.reference.rules import And, Causal, Document, MaskRule, Or, PrefixLM, Window

profiles.load_profile()

BLOCK = 4
LENGTHS = (1, 3, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 3)
RULES: tuple[MaskRule, ...] = (
    Causal(),
    Window(left=2),
    Window(left=3, right=0),
    Window(left=None, right=1),
    PrefixLM((3,)),
    Document(((0, 3, 4, 9),)),
)
PAIRS = [*RULES, *(kind(pair) for kind in (And, Or) for pair in product(RULES, RULES))]


def allows(rule: MaskRule | None, i: int, j: int) -> bool:
    """The rules of SPEC.md said again, for one element."""
    match rule:
        case None:
            return True
        case Causal():
            return j <= i
        case Window(left, right):
            return (left is None or i - j <= left) and (right is None or j - i <= right)
        case PrefixLM((prefix_len,)):
            return j < prefix_len or j <= i
        case Document((starts,)):
            return sum(s <= i for s in starts) == sum(s <= j for s in starts)
        case And(rules):
            return all(allows(r, i, j) for r in rules)
        case Or(rules):
            return any(allows(r, i, j) for r in rules)
    raise AssertionError(rule)


def enumerated(rule: MaskRule | None, extent: Extent) -> BoolArray:
    """Every (query, key), asked one by one."""
    mask = np.zeros((1, extent.seqlen_q, extent.seqlen_kv), dtype=bool)
    for row, j in np.ndindex(mask.shape[1:]):
        mask[0, row, j] = allows(rule, extent.q_offset + row, j)
    return mask


def assert_same(got: BlockMask, mask: BoolArray, extent: Extent) -> None:
    want = build_block_mask(mask, q_block_size=extent.q_block_size, kv_block_size=extent.kv_block_size)
    check_block_mask(got)
    assert same_lists(got, want), (got, want)


@pytest.mark.parametrize("rule", PAIRS, ids=str)
def test_every_pair_of_rules_gives_the_blocks_of_its_enumerated_mask(rule: MaskRule) -> None:
    for seqlen_q, seqlen_kv in product(LENGTHS, (1, BLOCK - 1, BLOCK + 1, 2 * BLOCK + 3)):
        for q_offset in {0, seqlen_kv - seqlen_q}:
            extent = Extent(
                seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, q_block_size=BLOCK, kv_block_size=2, q_offset=q_offset
            )
            assert is_interval_rule(rule)
            assert_same(rule_block_mask(rule, extent), enumerated(rule, extent), extent)


@st.composite
def rules(draw: st.DrawFn, depth: int = 3) -> MaskRule:
    """Compositions of any depth of the four rules, with parameters around the lengths used here."""
    kinds = ["causal", "window", "prefix", "document", *(["and", "or"] if depth else [])]
    match draw(st.sampled_from(kinds)):
        case "causal":
            return Causal()
        case "window":
            side = st.none() | st.integers(0, 14)
            return Window(draw(side), draw(side))
        case "prefix":
            return PrefixLM((draw(st.integers(0, 14)),))
        case "document":
            return Document((tuple(sorted({0, *draw(st.lists(st.integers(1, 14), max_size=4))})),))
        case composition:
            parts = tuple(draw(st.lists(rules(depth - 1), min_size=1, max_size=3)))
            return And(parts) if composition == "and" else Or(parts)


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    seqlen_q, seqlen_kv = draw(st.integers(0, 13)), draw(st.integers(0, 13))
    q_size, kv_size = (draw(st.sampled_from((1, 2, 3, 4, 8))) for _ in range(2))
    q_offset = draw(st.sampled_from((0, seqlen_kv - seqlen_q, 5, -3)))
    return Extent(seqlen_q=seqlen_q, seqlen_kv=seqlen_kv, q_block_size=q_size, kv_block_size=kv_size, q_offset=q_offset)


@settings(max_examples=profiles.examples(300))
@given(rules(), extents())
def test_any_composition_gives_the_blocks_of_its_dense_mask(rule: MaskRule, extent: Extent) -> None:
    mask = element_mask(rule, extent)
    np.testing.assert_array_equal(mask, enumerated(rule, extent))
    assert_same(rule_block_mask(rule, extent), mask, extent)


@settings(max_examples=profiles.examples(200))
@given(rules(), st.integers(-4, 16))
def test_what_a_composition_allows_one_query_is_one_interval_around_it(rule: MaskRule, i: int) -> None:
    outer, inner = (f(rule, 0, np.array([i])) for f in (outer_intervals, inner_intervals))
    allowed = {j for j in range(-30, 40) if j >= 0 and allows(rule, i, j)}
    interval = set(range(max(int(outer.lo[0]), 0), min(int(outer.hi[0]), 39) + 1))
    assert allowed == interval
    assert outer.lo[0] <= i <= outer.hi[0]
    assert (inner.lo[0], inner.hi[0]) == (outer.lo[0], outer.hi[0])


class EveryThird(msgspec.Struct, frozen=True, tag=True):
    """A rule that no interval describes."""


def with_thirds(rule: object, request: int, q_idx: IntArray | int, kv_idx: IntArray, qo_head: int = 0) -> BoolArray:
    """mask_allows that knows one more rule."""
    match rule:
        case EveryThird():
            return np.asarray((q_idx + kv_idx) % 3 == 0)
        case And(parts):
            return np.logical_and.reduce([with_thirds(r, request, q_idx, kv_idx) for r in parts])
        case Or(parts):
            return np.logical_or.reduce([with_thirds(r, request, q_idx, kv_idx) for r in parts])
    return mask_allows(rule, request, q_idx, kv_idx, qo_head)  # type: ignore[arg-type]


@pytest.fixture
def knows_thirds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "mask_allows", with_thirds)
    assert rule_values.mask_allows is mask_allows


COMPOSED_WITH_THIRDS = [
    EveryThird(),
    And((Causal(), EveryThird())),
    Or((Window(left=2, right=0), EveryThird())),
    And((Or((EveryThird(), Document(((0, 3),)))), Window(left=4))),
    Or((And((EveryThird(), Causal())), PrefixLM((5,)))),
]


@pytest.mark.usefixtures("knows_thirds")
@pytest.mark.parametrize("rule", COMPOSED_WITH_THIRDS, ids=str)
@pytest.mark.parametrize(("seqlen", "size"), [(1, 2), (9, 2), (11, 4), (12, 3)])
def test_a_rule_without_intervals_is_bounded_by_those_it_has_and_then_settled(
    rule: MaskRule, seqlen: int, size: int
) -> None:
    extent = Extent(seqlen_q=seqlen, seqlen_kv=seqlen, q_block_size=size, kv_block_size=2)
    dense = element_mask(rule, extent)
    assert not is_interval_rule(rule)
    assert_same(rule_block_mask(rule, extent), dense, extent)
    loose = rule_block_mask(rule, extent, settle=False)
    np.testing.assert_array_equal(decode_block_mask(loose, dense), dense)


@pytest.mark.usefixtures("knows_thirds")
def test_only_blocks_in_doubt_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[tuple[int, int]] = []

    def count(rule: object, request: int, q_idx: IntArray, kv_idx: IntArray, qo_head: int) -> BoolArray:
        looked.append((int(q_idx[0, 0]), int(kv_idx[0])))
        return with_thirds(rule, request, q_idx, kv_idx)

    monkeypatch.setattr(build, "mask_allows", count)
    extent = Extent(seqlen_q=8, seqlen_kv=8, q_block_size=4, kv_block_size=4)
    rule_block_mask(And((Causal(), EveryThird())), extent)  # type: ignore[arg-type]
    assert sorted(looked) == [(0, 0), (4, 0), (4, 4)]


@settings(max_examples=profiles.examples(100))
@given(extents(), st.integers(1, 2), st.integers(0, 2**32))
def test_the_generic_builder_takes_any_mask(extent: Extent, num_heads: int, seed: int) -> None:
    dense = np.random.default_rng(seed).random((num_heads, extent.seqlen_q, extent.seqlen_kv)) < 0.6
    dense[:, : extent.q_block_size, : extent.kv_block_size] = True

    def element(head: int, q_idx: IntArray, kv_idx: IntArray) -> BoolArray:
        return np.asarray(dense[head, q_idx - extent.q_offset, kv_idx])

    assert_same(generic_block_mask(element, extent, num_heads=num_heads), dense, extent)


def work_of(build_one: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> int:
    """Elements that a build asks the rule for."""
    asked = 0

    def count(rule: MaskRule | None, request: int, q_idx: IntArray, kv_idx: IntArray, qo_head: int) -> BoolArray:
        nonlocal asked
        asked += np.broadcast(q_idx, kv_idx).size
        return mask_allows(rule, request, q_idx, kv_idx, qo_head)

    monkeypatch.setattr(build, "mask_allows", count)
    build_one()
    return asked


def test_a_window_over_a_million_tokens_is_built_from_its_listed_blocks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    extent = Extent(seqlen_q=1_000_000, seqlen_kv=1_000_000, q_block_size=128, kv_block_size=128)
    rule = And((Causal(), Window(left=4095), Document((tuple(range(0, 1_000_000, 50_000)),))))
    built = rule_block_mask(rule, extent)
    lengths = np.diff(built.full.indptr) + np.diff(built.partial.indptr)
    assert extent.num_q_blocks == 7813
    assert lengths.max() == 33  # 1 + (4095 + 128) / 128, rounded up where the block row cuts a block
    assert work_of(lambda: rule_block_mask(rule, extent), monkeypatch) == 0


def test_queries_4_to_7_with_window_4_have_key_4_in_common_and_no_full_block() -> None:
    rule = And((Causal(), Window(left=3)))
    ends = np.array([4, 7])
    intervals = outer_intervals(rule, 0, ends)
    assert (intervals.lo[0], intervals.hi[1]) == (1, 7)
    assert (intervals.lo[1], intervals.hi[0]) == (4, 4)
    extent = Extent(seqlen_q=4, seqlen_kv=8, q_block_size=4, kv_block_size=2, q_offset=4)
    built = rule_block_mask(rule, extent)
    assert built.full.indices.size == 0
    assert built.partial.of(0).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["q_block_size", "kv_block_size"])
def test_a_block_size_below_1_is_refused_by_name(name: str) -> None:
    sizes = {"q_block_size": 2, "kv_block_size": 2, name: 0}
    with pytest.raises(RefusedInput, match=rf"^{name} is 0, but must be at least 1 \[BLOCK-EXTENT\]$"):
        rule_block_mask(Causal(), Extent(seqlen_q=2, seqlen_kv=2, **sizes))


def test_heads_of_a_rule_that_does_not_see_them_have_equal_lists() -> None:
    extent = Extent(seqlen_q=5, seqlen_kv=5, q_block_size=2, kv_block_size=2)
    assert_same(rule_block_mask(Causal(), extent, num_heads=3), np.repeat(element_mask(Causal(), extent), 3, 0), extent)
