"""What a candidate trace keeps of recorded selections: distributions, never positions.

A selection is reduced to events (a value, and the row it came from); `anonymize` bins them and `format` stores the
bins. Ids are token positions or block numbers, as the selector lists them; blocks are runs of block_size tokens.
Distances are measured from the row's own id backwards. The first block of the sequence is counted apart from the
distances: attention sinks live there, at a distance that only tells the length of the text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Sequence

Ints = NDArray[np.int64]
Granularity = Literal["token", "block"]
Key = tuple[str, int, int]
"""A statistic and the bounds of what it is given: (name, given_low, given_high); 0, 0 where given nothing."""

TILE_ROWS = 16  # consecutive rows that a recording keeps together; reuse is counted inside such a tile
FRACTION = 64  # fractions are stored as whole 64ths, so that every statistic is an integer

STATISTICS: dict[str, str] = {
    "length": "tokens up to and including the row",
    "candidates": "distinct ids of a row",
    "blocks": "distinct blocks that a row touches; also given the row's length",
    "holes": "entries of a list that are -1",
    "duplicates": "entries of a list that repeat an earlier id",
    "ties": "other ids whose score, as bfloat16, is the lowest selected one",
    "gqa_union": "64ths: ids selected by any query head of the group, over those of its first head",
    "overlap": "64ths: ids shared with the row before, over the row's ids",
    "block_overlap": "64ths: blocks shared with the row before, over the row's blocks",
    "gap": "differences of neighbouring ids of a row",
    "block_gap": "differences of neighbouring blocks of a row",
    "distance": "own id - id, first block apart",
    "visible_distance": "own id - id over every id the row sees, first block apart",
    "block_distance": "own block - block over the blocks touched, first block apart",
    "visible_block_distance": "own block - block over every block the row sees, first block apart",
    "relative_distance": "64ths: (own id - id) / (own id + 1)",
    "occupancy": "ids of a row in a block it touches, given the block's distance",
    "inner_gap": "differences of neighbouring ids in one block, given how many of its ids the row has",
    "start_occupancy": "ids of a row in the first block",
    "start": "offset of an id in the first block",
    "page_reuse": "rows of a tile that touch a block, over the blocks touched by any of them",
    "return": "1 if an id that the row before lacks was selected earlier in the tile, 0 if it is new",
    "block_return": "likewise for blocks",
}

# Wide statistics have two bins to an octave from 8 on; the others keep every integer apart.
OCTAVE_LOWS: Ints = np.array([*range(8), *(m << e for e in range(2, 40) for m in (2, 3))], dtype=np.int64)
IN_OCTAVES = frozenset(
    {"length", "ties", "gap", "inner_gap", "block_gap", "distance", "visible_distance", "block_distance"}
    | {"visible_block_distance", "occupancy", "start_occupancy", "start"}
)
ROW_BITS = 40  # a row and an id share one integer: row << ROW_BITS | id


@dataclass(frozen=True)
class SelectedRows:
    """What a selector listed for consecutive rows of one layer and KV head."""

    q_positions: Ints  # (rows,)
    first_visible: Ints  # (rows,) the first token each row may see
    listed: Ints  # (rows, width) token positions or blocks, -1 for a hole
    granularity: Granularity
    block_size: int
    ties: Ints | None = None  # (rows,)
    union: Ints | None = None  # (rows,) distinct ids selected by any query head of the group alone
    private: Ints | None = None  # (rows,) distinct ids selected by its first query head alone

    def __post_init__(self) -> None:
        if self.granularity not in ("token", "block"):
            raise ValueError(f"granularity is {self.granularity!r}, want 'token' or 'block'")
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}, want at least 1")
        if np.any(np.diff(self.q_positions) != 1):
            raise ValueError(f"q_positions {self.q_positions.tolist()} are not consecutive")
        limit = self.own_ids[:, None]
        bad = np.argwhere((self.listed < -1) | (self.listed > limit))
        if len(bad):
            row, entry = bad[0]
            raise ValueError(f"listed[{row}, {entry}] is {self.listed[row, entry]}, want -1 to {self.own_ids[row]}")

    @property
    def id_size(self) -> int:
        """Tokens of one id."""
        return 1 if self.granularity == "token" else self.block_size

    @property
    def own_ids(self) -> Ints:
        """The id that holds each row's own position."""
        return self.q_positions // self.id_size


@dataclass(frozen=True)
class Events:
    """Values of one statistic, how often each occurred, and the row (or tile) that each came from."""

    values: Ints
    sources: Ints
    weights: Ints

    @classmethod
    def of(cls, values: Ints, sources: Ints) -> Events:
        """Events that occurred once each."""
        return cls(values.astype(np.int64), sources.astype(np.int64), np.ones(len(values), np.int64))


def bin_bounds(statistic: str, values: Ints) -> tuple[Ints, Ints]:
    """The inclusive bounds of the bin of each value, before any bins are merged."""
    if statistic not in IN_OCTAVES:
        return values, values
    return octave_bounds(values)


def octave_bounds(values: Ints) -> tuple[Ints, Ints]:
    """Bounds of the half-octave bins that hold the values."""
    idx = np.searchsorted(OCTAVE_LOWS, values, side="right") - 1
    return OCTAVE_LOWS[idx], OCTAVE_LOWS[idx + 1] - 1


def compute_statistics(tiles: Sequence[SelectedRows]) -> dict[Key, Events]:
    """Events of every statistic that the tiles can tell; all of one layer, KV head, phase and selector."""
    flat = _Flat.of(tiles)
    return {key: events for key, events in _all_events(flat, tiles) if len(events.values)}


@dataclass(frozen=True)
class _Flat:
    """All rows of all tiles in a line."""

    q_positions: Ints  # (rows,)
    own_ids: Ints
    first_ids: Ints  # the first id each row may see
    tile: Ints
    offset: Ints  # of the row in its tile
    ids: Ints  # sorted row << ROW_BITS | id, each once
    blocks: Ints  # sorted row << ROW_BITS | block, each once
    ids_per_block: int

    @classmethod
    def of(cls, tiles: Sequence[SelectedRows]) -> _Flat:
        starts = np.concatenate([[0], np.cumsum([len(t.q_positions) for t in tiles])])
        listed = [_keys(t.listed, first) for t, first in zip(tiles, starts[:-1], strict=True)]
        ids = np.unique(np.concatenate(listed))
        ids_per_block = tiles[0].block_size // tiles[0].id_size
        rows, plain = _split(ids)
        return cls(
            q_positions=np.concatenate([t.q_positions for t in tiles]),
            own_ids=np.concatenate([t.own_ids for t in tiles]),
            first_ids=np.concatenate([t.first_visible // t.id_size for t in tiles]),
            tile=np.repeat(np.arange(len(tiles)), np.diff(starts)),
            offset=np.concatenate([np.arange(len(t.q_positions)) for t in tiles]),
            ids=ids,
            blocks=np.unique(rows << ROW_BITS | plain // ids_per_block),
            ids_per_block=ids_per_block,
        )

    @property
    def own_blocks(self) -> Ints:
        return self.own_ids // self.ids_per_block

    @property
    def first_blocks(self) -> Ints:
        return self.first_ids // self.ids_per_block

    @property
    def num_rows(self) -> int:
        return len(self.q_positions)


def _keys(listed: Ints, first_row: int) -> Ints:
    rows = np.broadcast_to(np.arange(len(listed))[:, None] + first_row, listed.shape)
    kept = listed >= 0
    return rows[kept] << ROW_BITS | listed[kept]


def _split(keys: Ints) -> tuple[Ints, Ints]:
    return keys >> ROW_BITS, keys & ((1 << ROW_BITS) - 1)


def _all_events(flat: _Flat, tiles: Sequence[SelectedRows]) -> list[tuple[Key, Events]]:
    plain = [
        *_row_events(flat, tiles),
        ("overlap", _overlap(flat, flat.ids)),
        ("block_overlap", _overlap(flat, flat.blocks)),
        ("gap", _gaps(flat.ids)),
        ("block_gap", _gaps(flat.blocks)),
        ("distance", _distances(flat, flat.ids, flat.own_ids, flat.ids_per_block)),
        ("visible_distance", _visible(flat.own_ids, flat.first_ids, flat.ids_per_block)),
        ("block_distance", _distances(flat, flat.blocks, flat.own_blocks, 1)),
        ("visible_block_distance", _visible(flat.own_blocks, flat.first_blocks, 1)),
        ("relative_distance", _relative_distances(flat)),
        ("page_reuse", _page_reuse(flat)),
        ("return", _returns(flat, flat.ids)),
        ("block_return", _returns(flat, flat.blocks)),
    ]
    of_tokens = _inside_blocks(flat) if flat.ids_per_block > 1 else []
    by_length = _given("blocks", dict(plain)["blocks"], flat.q_positions + 1)
    return [((name, 0, 0), events) for name, events in plain] + by_length + of_tokens


def _row_events(flat: _Flat, tiles: Sequence[SelectedRows]) -> list[tuple[str, Events]]:
    """Statistics that every row has once."""
    rows, ids = _split(flat.ids)
    counts = _per_row(flat, rows)
    in_start = _per_row(flat, rows[ids < flat.ids_per_block])
    holes = np.concatenate([(t.listed < 0).sum(1) for t in tiles])
    width = np.concatenate([np.full(len(t.q_positions), t.listed.shape[1]) for t in tiles])
    sees_start = (flat.first_blocks == 0) & (flat.own_blocks > 0)
    everywhere = np.arange(flat.num_rows)
    out = [
        ("length", flat.q_positions + 1),
        ("candidates", counts),
        ("blocks", _per_row(flat, _split(flat.blocks)[0])),
        ("holes", holes),
        ("duplicates", width - holes - counts),
    ]
    events = [(name, Events.of(values, everywhere)) for name, values in out]
    events.append(("start_occupancy", Events.of(in_start[sees_start], everywhere[sees_start])))
    if all(t.ties is not None for t in tiles):
        events.append(("ties", Events.of(np.concatenate([t.ties for t in tiles if t.ties is not None]), everywhere)))
    if all(t.union is not None and t.private is not None for t in tiles):
        union = np.concatenate([t.union for t in tiles if t.union is not None])
        private = np.concatenate([t.private for t in tiles if t.private is not None])
        some = private > 0
        ratio = np.rint(union[some] * FRACTION / private[some])
        events.append(("gqa_union", Events.of(ratio, everywhere[some])))
    return events


def _per_row(flat: _Flat, rows: Ints) -> Ints:
    return np.bincount(rows, minlength=flat.num_rows).astype(np.int64)


def _overlap(flat: _Flat, keys: Ints) -> Events:
    rows, ids = _split(keys)
    shared = _per_row(flat, rows[np.isin((rows - 1) << ROW_BITS | ids, keys)])
    counts = _per_row(flat, rows)
    some = (flat.offset > 0) & (counts > 0)
    return Events.of(np.rint(shared[some] * FRACTION / counts[some]), np.flatnonzero(some))


def _gaps(keys: Ints) -> Events:
    rows, ids = _split(keys)
    same_row = rows[1:] == rows[:-1]
    return Events.of(np.diff(ids)[same_row], rows[1:][same_row])


def _distances(flat: _Flat, keys: Ints, own: Ints, start: int) -> Events:
    """Distances of the ids that are not in the first `start` ids."""
    rows, ids = _split(keys)
    rows, ids = rows[ids >= start], ids[ids >= start]
    return Events.of(own[rows] - ids, rows)


def _visible(own: Ints, first: Ints, start: int) -> Events:
    """How many ids of each distance bin the rows see: what makes a density of the distances selected."""
    farthest = own - np.maximum(first, start)
    lows, highs = OCTAVE_LOWS[:-1], OCTAVE_LOWS[1:] - 1
    counts = (np.minimum(highs, farthest[:, None]) - lows + 1).clip(min=0)
    rows, bins = np.nonzero(counts)
    return Events(lows[bins], rows.astype(np.int64), counts[rows, bins])


def _relative_distances(flat: _Flat) -> Events:
    rows, ids = _split(flat.ids)
    own = flat.own_ids[rows]
    return Events.of((own - ids) * FRACTION // (own + 1), rows)


def _starts(flat: _Flat) -> Events:
    rows, ids = _split(flat.ids)
    inside = (ids < flat.ids_per_block) & (flat.own_blocks[rows] > 0)
    return Events.of(ids[inside], rows[inside])


def _page_reuse(flat: _Flat) -> Events:
    rows, blocks = _split(flat.blocks)
    pages, reuse = np.unique(flat.tile[rows] << ROW_BITS | blocks, return_counts=True)
    return Events.of(reuse, _split(pages)[0])


def _returns(flat: _Flat, keys: Ints) -> Events:
    """Only rows of the second half of a tile: they have as many rows before them to return from."""
    rows, ids = _split(keys)
    _, first, which = np.unique(flat.tile[rows] << ROW_BITS | ids, return_index=True, return_inverse=True)
    entered = (flat.offset[rows] >= TILE_ROWS // 2) & ~np.isin((rows - 1) << ROW_BITS | ids, keys)
    seen = rows[first][which] < rows
    return Events.of(seen[entered].astype(np.int64), rows[entered])


def _inside_blocks(flat: _Flat) -> list[tuple[Key, Events]]:
    """How ids lie in the blocks that a row touches; of the first block, where the ids are."""
    rows, ids = _split(flat.ids)
    blocks, which, counts = np.unique(
        rows << ROW_BITS | ids // flat.ids_per_block, return_inverse=True, return_counts=True
    )
    together = which[1:] == which[:-1]
    gaps = Events.of(np.diff(ids)[together], rows[1:][together])
    block_rows, plain = _split(blocks)
    later = plain > 0
    distances = (flat.own_blocks[block_rows] - plain)[later]
    occupancy = Events.of(counts[later], block_rows[later])
    return [
        (("start", 0, 0), _starts(flat)),
        *_given("occupancy", occupancy, distances),
        *_given("inner_gap", gaps, counts[which[1:][together]]),
    ]


def _given(name: str, events: Events, condition: Ints) -> list[tuple[Key, Events]]:
    """The events apart for each half-octave bin of a condition."""
    lows, highs = octave_bounds(condition)
    out = []
    for low in np.unique(lows):
        inside = lows == low
        part = Events(events.values[inside], events.sources[inside], events.weights[inside])
        out.append(((name, int(low), int(highs[inside][0])), part))
    return out
