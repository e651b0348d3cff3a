"""A small recording with recency, sinks and hot blocks, made from random scores: no model, no text."""

from __future__ import annotations

import numpy as np
import pytest

from attnconform.traces import (
    GroupKey,
    Model,
    SelectedRows,
    Selector,
    Source,
    Trace,
    TraceHeader,
    anonymize,
    compute_statistics,
    write_trace,
)
from attnconform.traces.statistics import STATISTICS, TILE_ROWS, Granularity

BLOCK_SIZE = 16
WINDOW = 128


def select_rows(
    start: int, *, granularity: Granularity, window: int | None, hot: np.ndarray, budget: int
) -> SelectedRows:
    """The largest of scores that favour near, first and hot ids; the row's own block is listed once more."""
    size = 1 if granularity == "token" else BLOCK_SIZE
    rng = np.random.Generator(np.random.Philox(key=start))
    q_positions = np.arange(start, start + TILE_ROWS)
    first_visible = np.zeros_like(q_positions) if window is None else (q_positions - window + 1).clip(min=0)
    own, first = q_positions // size, first_visible // size
    ids = np.arange(own[-1] + 1)
    drift = np.cumsum(rng.normal(0, 0.2, (TILE_ROWS, len(ids))), 0) + 4 * hot[ids * size // BLOCK_SIZE]
    scores = drift - np.log2(1 + np.maximum(own[:, None] - ids, 0) * size / BLOCK_SIZE) + 8 * (ids == 0)
    scores[(ids > own[:, None]) | (ids < first[:, None])] = -np.inf
    order = np.argsort(-scores, axis=1, kind="stable")[:, :budget]
    listed = np.full((TILE_ROWS, budget), -1)
    listed[:, : order.shape[1]] = np.where(np.isfinite(np.take_along_axis(scores, order, 1)), order, -1)
    if granularity == "block":
        listed = np.concatenate([listed, own[:, None]], 1)
    taken = (listed >= 0).sum(1)
    return SelectedRows(
        q_positions, first_visible, listed, granularity, BLOCK_SIZE, ties=taken * 0, union=taken * 2, private=taken
    )


def record(granularity: Granularity, window: int | None, seed: int) -> list[SelectedRows]:
    """Sixty-four tiles over 2,048 tokens."""
    rng = np.random.Generator(np.random.Philox(key=seed))
    hot = rng.random(2048 // BLOCK_SIZE)
    budget = 40 if granularity == "token" else 6
    starts = np.arange(64) * 32 + rng.integers(0, 16, 64)
    return [select_rows(int(s), granularity=granularity, window=window, hot=hot, budget=budget) for s in starts]


def build_header() -> TraceHeader:
    """Two layers, one of them with a window."""
    source = Source("random scores", "none", "none", "0" * 64, {"prefill": 2048, "decode": 0}, {"prefill": 1.0})
    selectors = [Selector("block_topk", "block", {"global": {"blocks": 6}}), Selector("token_topk", "token", {})]
    return TraceHeader(
        version=1,
        name="small",
        source=source,
        model=Model("none", "none", "0" * 64, 2, 1, 16, [None, WINDOW]),
        selectors=selectors,
        block_size=BLOCK_SIZE,
        tile_rows=TILE_ROWS,
        k=20,
        statistics=STATISTICS,
    )


@pytest.fixture(scope="session")
def selections() -> dict[GroupKey, list[SelectedRows]]:
    """What was selected, before anonymization."""
    return {
        GroupKey(layer, 0, "prefill", f"{granularity}_topk"): record(granularity, window, layer)
        for layer, window in enumerate([None, WINDOW])
        for granularity in ("block", "token")
    }


@pytest.fixture(scope="session")
def trace(selections: dict[GroupKey, list[SelectedRows]], tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The anonymized trace of those selections."""
    groups = {key: anonymize(compute_statistics(tiles)) for key, tiles in selections.items()}
    return write_trace(tmp_path_factory.mktemp("small"), build_header(), groups)
