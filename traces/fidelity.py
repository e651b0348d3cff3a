"""How near synthesized rows come to the recorded ones, and how far uniformly random ones stay.

Each statistic is compared by the largest difference of the two cumulative distributions (Kolmogorov and Smirnov's
distance, 0 to 1) at the ends of the recorded bins. Rows are drawn a tile at a time, at lengths distributed as recorded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from attnconform.traces.draws import draw
from attnconform.traces.selection_model import SelectionModel, quantile
from attnconform.traces.statistics import Events, SelectedRows, compute_statistics
from attnconform.traces.synthesize import CandidateRows, list_as_recorded, synthesize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnconform.traces.anonymize import Histogram
    from attnconform.traces.format import GroupKey, Trace
    from attnconform.traces.statistics import Ints, Key

    Drawer = Callable[[Trace, GroupKey, int, int], CandidateRows]  # trace, group, seed, seqlen_kv

THRESHOLD = 0.25
"""A synthesized statistic further than this from the recorded one is not faithful."""

LEAST_ROWS = 200
"""A statistic that fewer recorded rows have is too thin to compare."""

JUDGED = (
    *("candidates", "blocks", "holes", "duplicates", "overlap", "block_overlap", "gap", "block_gap"),
    *("distance", "block_distance", "relative_distance", "start_occupancy", "page_reuse"),
)
"""The statistics that a set of rows must reproduce; the others are inputs, or need scores."""


@dataclass(frozen=True)
class Fidelity:
    """Distances by statistic, of one group."""

    group: GroupKey
    distances: dict[str, float]

    @property
    def worst(self) -> tuple[str, float]:
        """The statistic that is furthest off, and how far."""
        return max(self.distances.items(), key=lambda item: item[1])

    @property
    def faithful(self) -> bool:
        """Whether every statistic is within the threshold."""
        return self.worst[1] <= THRESHOLD


def compare(trace: Trace, group: GroupKey, *, seed: int, num_tiles: int = 48) -> Fidelity:
    """The distances of rows that `synthesize` draws for a group."""
    return _compare(trace, group, seed, num_tiles, _synthesized)


def compare_uniform(trace: Trace, group: GroupKey, *, seed: int, num_tiles: int = 48) -> Fidelity:
    """The distances of rows with the recorded number of candidates, each anywhere that the row sees."""
    return _compare(trace, group, seed, num_tiles, _uniform)


def cumulative_distance(recorded: Histogram, events: Events) -> float:
    """The largest difference of the cumulative distributions, at the ends of the recorded bins and just below each."""
    order = np.argsort(events.values, kind="stable")
    values, weights = events.values[order], np.cumsum(events.weights[order])
    below = np.concatenate([[0], weights]) / weights[-1]
    want = np.concatenate([[0], np.cumsum(recorded.count)]) / recorded.total
    at_high = below[np.searchsorted(values, recorded.bin_high, side="right")]
    under_low = below[np.searchsorted(values, recorded.bin_low, side="left")]
    return float(max(np.abs(at_high - want[1:]).max(), np.abs(under_low - want[:-1]).max()))


def fidelity_table(trace: Trace, *, seed: int, num_tiles: int = 24) -> str:
    """A Markdown table over all groups of a trace: median and worst distance of synthesized rows, median of uniform."""
    names = [selector.name for selector in trace.header.selectors]
    lines = [f"| statistic | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    groups = {name: [group for group in trace.groups if group.selector == name] for name in names}
    drawn = {
        name: [compare(trace, g, seed=seed, num_tiles=num_tiles).distances for g in groups[name]] for name in names
    }
    uniform = {
        name: [compare_uniform(trace, g, seed=seed, num_tiles=num_tiles).distances for g in groups[name]]
        for name in names
    }
    for statistic in JUDGED:
        cells = [_cell(statistic, drawn[name], uniform[name]) for name in names]
        lines.append(f"| {statistic} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(statistic: str, drawn: list[dict[str, float]], uniform: list[dict[str, float]]) -> str:
    ours = [distances[statistic] for distances in drawn if statistic in distances]
    random = [distances[statistic] for distances in uniform if statistic in distances]
    return f"{np.median(ours):.2f}, {max(ours):.2f} / {np.median(random):.2f}" if ours else ""


def _judged(trace: Trace, group: GroupKey) -> list[Key]:
    """The statistics to compare: those that enough rows have."""
    recorded, tile_rows = trace.groups[group], trace.header.tile_rows
    keys = [(name, 0, 0) for name in JUDGED if (name, 0, 0) in recorded]
    rows = {key: int(recorded[key].num_rows.sum()) * (tile_rows if key[0] == "page_reuse" else 1) for key in keys}
    return [key for key in keys if rows[key] >= LEAST_ROWS]


def _compare(trace: Trace, group: GroupKey, seed: int, num_tiles: int, drawer: Drawer) -> Fidelity:
    recorded = trace.groups[group]
    # Lengths at even quantiles, so that few tiles stand for all lengths.
    lengths = quantile(recorded["length", 0, 0], (np.arange(num_tiles) + 0.5) / num_tiles)
    lengths = np.maximum(lengths, trace.header.tile_rows)
    drawn = [drawer(trace, group, seed + t, int(length)) for t, length in enumerate(lengths)]
    events = compute_statistics([_selected(trace, rows) for rows in drawn])
    events.update(_listing_events(drawn))
    return Fidelity(group, {key[0]: _distance(recorded, events, key) for key in _judged(trace, group)})


def _distance(recorded: Mapping[Key, Histogram], events: dict[Key, Events], key: Key) -> float:
    # Recorded but never drawn is as wrong as can be.
    return cumulative_distance(recorded[key], events[key]) if key in events else 1.0


def _synthesized(trace: Trace, group: GroupKey, seed: int, seqlen_kv: int) -> CandidateRows:
    return synthesize(
        trace,
        seed=seed,
        num_rows=trace.header.tile_rows,
        seqlen_kv=seqlen_kv,
        layer=group.layer,
        kv_head=group.kv_head,
        phase=group.phase,
        selector=group.selector,
        as_listed=True,
    )


def _uniform(trace: Trace, group: GroupKey, seed: int, seqlen_kv: int) -> CandidateRows:
    """Rows of as many candidates as recorded, repetitions and holes too, each anywhere that the row sees."""
    model = SelectionModel(trace.groups[group])
    granularity, block_size = trace.header.selector(group.selector).granularity, trace.header.block_size
    size = 1 if granularity == "token" else block_size
    window = trace.header.model.windows[group.layer]
    q_positions = np.arange(seqlen_kv - trace.header.tile_rows, seqlen_kv)
    rows = []
    for r, i in enumerate(q_positions.tolist()):
        first = 0 if window is None else max(0, i - window + 1) // size
        visible = np.argsort(draw(seed, "uniform", r, i // size - first + 1), kind="stable") + first
        count = model.value("candidates", draw(seed, "n", r, 1)[0], 1)
        rows.append(list_as_recorded(model, seed, r, np.sort(visible[:count])))
    return CandidateRows(
        seqlen_kv=seqlen_kv,
        q_positions=q_positions,
        indptr=np.concatenate([[0], np.cumsum([len(ids) for ids in rows])]).astype(np.int64),
        indices=np.concatenate(rows),
        granularity=granularity,
        block_size=block_size,
        layer=group.layer,
        kv_head=group.kv_head,
    )


def _selected(trace: Trace, rows: CandidateRows) -> SelectedRows:
    """The rows as a recording, for their statistics; the padding makes its holes meaningless."""
    window = trace.header.model.windows[rows.layer]
    q_positions = rows.q_positions
    first = np.zeros_like(q_positions) if window is None else (q_positions - window + 1).clip(min=0)
    lengths = np.diff(rows.indptr)
    listed = np.full((len(lengths), int(lengths.max())), -1, dtype=np.int64)
    listed[np.arange(listed.shape[1]) < lengths[:, None]] = rows.indices
    return SelectedRows(q_positions, first, listed, rows.granularity, rows.block_size)


def _listing_events(drawn: list[CandidateRows]) -> dict[Key, Events]:
    entries = [rows.row(r) for rows in drawn for r in range(len(rows.q_positions))]
    holes = np.array([(e < 0).sum() for e in entries])
    repeats = np.array([(e >= 0).sum() - len(np.unique(e[e >= 0])) for e in entries])
    rows: Ints = np.arange(len(entries))
    return {("holes", 0, 0): Events.of(holes, rows), ("duplicates", 0, 0): Events.of(repeats, rows)}
