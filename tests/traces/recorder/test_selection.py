"""The recorder's selectors list what their definitions say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attnconform.traces.recorder import selection

HEADS, DIM = 4, 8


@pytest.fixture(autouse=True)
def small_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 tokens and budgets to match."""
    monkeypatch.setattr(selection, "BLOCK_SIZE", 4)
    monkeypatch.setattr(selection, "BLOCK_BUDGET", {"global": 3, "local": 2})
    monkeypatch.setattr(selection, "TOKEN_BUDGET", {"global": 6, "local": 3})
    monkeypatch.setattr(selection, "WINDOW", 5)
    monkeypatch.setattr(selection, "SINKS", 2)


def rows(first: int, window: int | None = None, seed: int = 0) -> selection.Rows:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS, 4, DIM, generator=generator)
    k = torch.randn(first + 4, DIM, generator=generator)
    return selection.Rows(q, k, torch.arange(first, first + 4), window)


def merged(scores: np.ndarray) -> np.ndarray:
    """Sum over heads of the softmax of scaled scores, one row: (heads, ids) -> (ids,)."""
    e = np.exp(scores / np.sqrt(DIM))
    return (e / e.sum(1, keepdims=True)).sum(0)


@pytest.mark.parametrize("window", [None, 7])
def test_token_topk_lists_the_largest_merged_probabilities(window: int | None) -> None:
    given = rows(20, window)
    got = selection.select_token_topk(given)
    budget = 6 if window is None else 3
    for r, i in enumerate(range(20, 24)):
        low = 0 if window is None else i - window + 1
        p = merged(given.q[:, r].double().numpy() @ given.k[low : i + 1].double().numpy().T)
        assert set(got.listed[r].tolist()) == set((np.argsort(-p)[:budget] + low).tolist())


def test_block_topk_lists_the_largest_blocks_and_the_own_block_last() -> None:
    given = rows(21)
    got = selection.select_block_topk(given)
    for r, i in enumerate(range(21, 25)):
        own = i // 4
        means = np.stack([given.k[4 * b : min(4 * b + 4, i + 1)].double().mean(0).numpy() for b in range(own + 1)])
        p = merged(given.q[:, r].double().numpy() @ means.T)
        assert set(got.listed[r, :3].tolist()) == set(np.argsort(-p)[:3].tolist())
        assert got.listed[r, 3] == own


def test_a_block_score_never_sees_the_future() -> None:
    given = rows(20)
    changed = selection.Rows(given.q, given.k.clone(), given.q_positions, None)
    changed.k[22:] += 100
    assert np.array_equal(
        selection.select_block_topk(given).listed[:2], selection.select_block_topk(changed).listed[:2]
    )


def test_window_sink_lists_the_last_and_the_first() -> None:
    got = selection.select_window_sink(rows(10))
    assert got.listed[0].tolist() == [10, 9, 8, 7, 6, 0, 1]
    assert selection.select_window_sink(rows(3)).listed[0].tolist() == [3, 2, 1, 0, -1, 0, 1]


def test_too_few_visible_ids_leave_holes() -> None:
    got = selection.select_token_topk(rows(0))
    assert (got.listed[0] >= 0).sum() == 1
    assert got.listed[0, 0] == 0


def test_ties_are_counted_after_rounding_to_bfloat16() -> None:
    scores = torch.tensor([[0.5, 0.25, 0.25 + 1e-6, 0.1]])
    _, threshold = selection.top_ids(scores, 2)
    assert selection.count_ties(scores, threshold).tolist() == [1]
    assert selection.count_ties(scores, torch.tensor([torch.nan])).tolist() == [0]


def test_the_union_of_heads_is_at_least_one_heads_selection() -> None:
    got = selection.select_token_topk(rows(40))
    assert got.union is not None
    assert got.private is not None
    assert np.all(got.union >= got.private)
    assert np.all(got.union <= HEADS * got.private)
