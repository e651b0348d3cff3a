"""Pages whose parts lie apart, one place for each KV head."""

from dataclasses import replace

import numpy as np
from feature_structures import FEATURES, SMALL, featured_cases, with_features
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.conformance.cases.structure import Case, build_problem
from attnconform.conformance.cases.values import build_values
from attnconform.reference.attention import attention, attention_gradients, effective_sets
from attnconform.reference.cache import PagedCache
from attnconform.reference.coordinates import FloatArray, Slots

profiles.load_profile()

# a scale per page or token lies where the part lies, and would have to move with it
OTHERS = tuple(name for name in FEATURES if name not in ("head_pages", "k_quant", "v_quant"))
CASES = featured_cases(with_features(SMALL, features=OTHERS))


@settings(max_examples=profiles.examples(100))
@given(st.integers(1, 6), st.integers(1, 5), st.data())
def test_a_slot_keeps_its_offset_and_takes_its_heads_page(num_pages: int, page_size: int, data: st.DataObject) -> None:
    ids = st.integers(0, num_pages - 1)
    table = np.array(data.draw(st.lists(st.tuples(ids, ids), min_size=num_pages, max_size=num_pages)))
    cache = PagedCache(page_size=page_size, num_pages=num_pages, page_table=np.array([[0]]), head_pages=table)
    slots = np.arange(num_pages * page_size)
    for head in range(2):
        want = [table[s // page_size][head] * page_size + s % page_size for s in slots.tolist()]
        assert cache.head_slots(Slots(slots), head).values.tolist() == want


def test_slots_past_two_to_the_31_do_not_wrap() -> None:
    pages = np.full((3, 1), 2**28, dtype=np.int32)
    cache = PagedCache(page_size=16, num_pages=2**28 + 1, page_table=np.array([[0]]), head_pages=pages)  # type: ignore[arg-type]
    assert cache.head_slots(Slots(np.array([17])), 0).values.tolist() == [2**32 + 1]


def apart(pool: FloatArray, pages: np.ndarray, page_size: int) -> FloatArray:
    """The same numbers, each head's part of page p written at pages[p, head]."""
    moved = np.full_like(pool, np.nan)
    for page, head in np.ndindex(*pages.shape):
        to = pages[page, head] * page_size
        moved[to : to + page_size, head] = pool[page * page_size : (page + 1) * page_size, head]
    return moved


@settings(max_examples=profiles.examples(60))
@given(CASES, st.randoms(use_true_random=False))
def test_parts_that_lie_apart_give_the_bits_of_parts_that_lie_together(case: Case, random: object) -> None:
    problem = build_problem(case.structure)
    values = build_values(case, problem)
    pages = np.tile(np.arange(problem.cache.num_pages)[:, None], (1, problem.num_kv_heads))
    for head in range(problem.num_kv_heads):
        random.shuffle(pages[:, head])  # type: ignore[attr-defined]
    moved = replace(problem, cache=replace(problem.cache, head_pages=pages))
    size, slots = problem.cache.page_size, problem.cache.num_slots
    k, v = apart(values.k, pages, size), apart(values.v, pages, size)
    want, got = attention(problem, values.q, values.k, values.v), attention(moved, values.q, k, v)
    assert np.array_equal(got.out, want.out)
    assert np.array_equal(got.lse, want.lse)
    owed = attention_gradients(problem, values.q, values.k, values.v, values.dout, values.dlse)
    found = attention_gradients(moved, values.q, k, v, values.dout, values.dlse)
    assert np.array_equal(found.dq, owed.dq)
    for one, other in zip(found.in_pool(slots), owed.in_pool(slots), strict=True):
        assert np.array_equal(one, apart(other, pages, size))


@settings(max_examples=profiles.examples(40))
@given(CASES)
def test_every_part_at_its_own_page_changes_nothing(case: Case) -> None:
    problem = build_problem(case.structure)
    own = np.tile(np.arange(problem.cache.num_pages)[:, None], (1, problem.num_kv_heads))
    same = replace(problem, cache=replace(problem.cache, head_pages=own))
    assert np.array_equal(effective_sets(same).slots, effective_sets(problem).slots)
