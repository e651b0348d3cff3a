"""Candidate lists written as CSR and at fixed width."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnconform.conformance.cases import profiles
from attnconform.reference.formats import csr_to_fixed_width, fixed_width_to_csr

profiles.load_profile()

ENTRIES = st.lists(st.integers(0, 99), max_size=6)


def csr(lists: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    indptr = np.concatenate([[0], np.cumsum([len(entries) for entries in lists], dtype=np.int64)]).astype(np.int64)
    return indptr, np.array([i for entries in lists for i in entries], dtype=np.int64)


@settings(max_examples=profiles.examples(200))
@given(st.lists(ENTRIES, max_size=6), st.integers(0, 3))
def test_lists_come_back_from_fixed_width_in_their_order_with_their_duplicates(
    lists: list[list[int]], spare: int
) -> None:
    indptr, indices = csr(lists)
    width = max((len(entries) for entries in lists), default=0) + spare
    fixed = csr_to_fixed_width(indptr, indices, width)
    assert fixed.shape == (len(lists), width)
    assert [[i for i in row if i != -1] for row in fixed.tolist()] == lists
    assert all(
        row == entries + [-1] * (width - len(entries)) for row, entries in zip(fixed.tolist(), lists, strict=True)
    )
    back = fixed_width_to_csr(fixed)
    assert back[0].tolist() == indptr.tolist()
    assert back[1].tolist() == indices.tolist()


@settings(max_examples=profiles.examples(200))
@given(st.integers(0, 5).flatmap(lambda width: st.lists(st.lists(st.integers(-1, 9), min_size=width, max_size=width))))
def test_holes_drop_out_wherever_they_stand(fixed: list[list[int]]) -> None:
    width = len(fixed[0]) if fixed else 0
    indptr, indices = fixed_width_to_csr(np.array(fixed, dtype=np.int64).reshape(len(fixed), width))
    rows = [indices[indptr[i] : indptr[i + 1]].tolist() for i in range(len(fixed))]
    assert rows == [[i for i in row if i != -1] for row in fixed]


def test_a_list_longer_than_the_width_is_refused_by_name() -> None:
    indptr, indices = csr([[1], [2, 3, 4], [5]])
    with pytest.raises(ValueError, match=r"^len\(list\)\[1\] is 3, but width is 2 \[FORMAT-WIDTH\]$"):
        csr_to_fixed_width(indptr, indices, 2)
