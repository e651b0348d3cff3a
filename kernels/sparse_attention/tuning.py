"""Every choice that only speed depends on: tiles, warps, stages, splits, programs of the index. None moves an answer.

Figures beside a choice are from one H200. A measured choice of one shape and one machine comes as a `Choice`, from
`autotune`; what it leaves open, and every call without one, is decided here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

MIN_TILE_M = 16  # the least a tensor core takes
SMALL_TILE_M = 32  # decode: up to here a tile is a stream of loads
LARGE_TILE_M = 256

# of `hopper`: what two groups of warps hold in registers, and two tiles of K and V in shared memory
HOPPER_TILE_M = 128
HOPPER_TILE_KV = 128
HOPPER_STAGES = 2
HOPPER_CAPPED_TILE_KV = 64  # of a cap: the scores of two tiles, and q, are in registers
HOPPER_CAPPED_STAGES = 4

SMALLEST_SCALE = 2.0**-126  # below it a scale may be 0 in float32, which makes NaN of a masked score

PROGRAMS_PER_PROCESSOR = 2
WARPS_PER_PROCESSOR = 8  # of decode tasks that run at once
MIN_TILES_PER_SPLIT = 4
MIN_LONG_TILES_PER_SPLIT = 3  # of decode tiles of so many keys:
LONG_TILE_KV = 128
MAX_SPLITS = 64
MAX_TIER_SPLITS = 64

# the merge of a tile's chunks by its last program: lanes and chunks read at once
MERGE_REGISTERS = 64  # of a thread, for what is read at once
MERGE_SPLITS = 16
MERGE_LAUNCH_SPLITS = 8  # where a launch of its own merges, a lane a program

INDEX_STEP = 1024  # blocks of a row of a mask, from ids, that a program handles at once

# The index of a tier: entries, units or tokens that a program handles at once. 512 lists of 272 pages are one wave of
# an H200 and took 12.3 us by 8 warps and 512 of each, 11.2 by 4 warps and 256 tokens. As many lists of tokens, which
# need a page each, took 38.1 us by 512 tokens, 37.5 by 1,024 and 41.2 by 16 warps.
LIST_STEP = 512
TOKEN_STEP = 1024  # tokens, where each needs its page
SHORT_LIST_STEP = 256  # tokens of a short list, of which there are many
INDEX_WARPS = 8
SHORT_LIST_WARPS = 4
TILE_WORDS, LONG_TILE_WORDS = 128, 512  # bitmap words read at once, 32 ids each
MAX_INDEX_PARTS = 16
MIN_TOKENS_PER_PART = 256
SHORT_LIST = 8192  # tokens, of pages: 4,224 took 7.9 us by one program, and 8.7 to 9.4 by more

GATHER_ENTRIES = 32  # entries of lists that a program copies

# block masks
BLOCK_COLUMNS = 256  # columns of a row that a program handles at once
BLOCK_ELEMENTS = 1 << 12  # elements of a block looked at at once
BLOCK_WARPS = 8

# Rows that may share a union tile, and what decides between them: reading a byte against multiplying. Measured over 16
# blocks of 64 for each of 131,072 lists of 16 heads, random and clustered: rows apart took 8.3 ms, whatever the lists;
# tiles of 2, 4 and 8 rows 14.7, 14.1 and 22.7 ms, and where neighbours shared three blocks of four, 10.3, 7.5 and 10.2.
UNION_ROWS = (1, 2, 4, 8)
UNION_TILE_KV = 64
LARGEST_UNION_TILE_M = 128
BYTES_PER_SECOND_APART = 8.1e12  # out of L2
BYTES_PER_SECOND_UNITED = 4.0e12
FLOPS_PER_SECOND = 2.5e14

# of `hopper_union`: three groups of 64 lanes; 7.7 ms over the random lists above, and 3.8 over the clustered ones
HOPPER_UNION_GROUPS = 3
HOPPER_UNION_LANES = 64
HOPPER_UNION_ROWS = 24  # of a tile at most: an entry has a bit for each
HOPPER_UNION_STAGES = 4
HOPPER_UNION_BYTES_PER_SECOND = 6.5e12
HOPPER_UNION_FLOPS_PER_SECOND = 5.0e14

# tasks of a request, and of a processor's share, from which rows stay in order; see `order_tasks`
MANY_TASKS = 16


@dataclass(frozen=True)
class TileShape:
    """What is compiled in: rows and heads of a tile, keys per step, and how the GPU runs them."""

    tile_q: int  # query rows per tile
    heads_per_tile: int
    tile_m: int  # tile_q * heads_per_tile, padded to a power of two
    tile_kv: int
    num_warps: int
    num_stages: int
    box: int = 0  # keys that TMA copies at once where `hopper` runs; 0: attend_kernel


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A measured choice; None leaves a field to this module."""

    tile_kv: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    num_kv_splits: int | None = None
    forward: Literal["hopper", "plain"] | None = None  # which kernel; hopper is refused where it cannot run


NO_CHOICE = Choice()


@dataclass(frozen=True)
class Geometry:
    """What the shape of a tile depends on."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    element_size: int
    sharing: str | None  # None: no lists
    tile_kv: int | None
    num_kv_splits: int | None
    num_processors: int
    has_score_rules: bool = False
    is_quantized: bool = False  # either cache
    choice: Choice = NO_CHOICE
    box: int = 0  # keys of a TMA box, 0 where attend_kernel runs, from `hopper_choice`

    @property
    def head_dim(self) -> int:
        """The larger of the two."""
        return max(self.head_dim_qk, self.head_dim_vo)


def largest_tile_m(geometry: Geometry) -> int:
    """As many rows as registers hold; float32 products have no tensor core and keep whole rows of q in registers."""
    if geometry.box:
        return HOPPER_TILE_M
    if geometry.element_size > 2:
        return MIN_TILE_M
    if geometry.head_dim > 128:
        return LARGE_TILE_M // 4
    # a rule's own values are as large as the scores, and would be spilled
    return LARGE_TILE_M // 2 if geometry.has_score_rules or geometry.is_quantized else LARGE_TILE_M


def choose_shape(max_rows: int, cap: int, heads: int, geometry: Geometry, num_blocks: int) -> TileShape:
    """Tile sizes for `num_blocks` blocks of up to `max_rows` rows."""
    tile_q = max(1, min(max_rows, cap // heads))
    tile_m = max(MIN_TILE_M, 1 << (tile_q * heads - 1).bit_length())
    if runs_on_hopper(tile_m, geometry):
        return TileShape(tile_q, heads, HOPPER_TILE_M, HOPPER_TILE_KV, num_warps=8, num_stages=2, box=geometry.box)
    num_tiles = num_blocks * geometry.num_qo_heads // heads
    tile_kv, num_warps, num_stages = _steps(tile_m, num_tiles, geometry)
    shape = TileShape(tile_q, heads, tile_m, geometry.tile_kv or tile_kv, num_warps, num_stages)
    return apply_choice(shape, geometry.choice)


def runs_on_hopper(tile_m: int, geometry: Geometry) -> bool:
    """Whether a tile of so many rows is one of `hopper`; smaller ones only where that is asked for."""
    return geometry.box > 0 and (tile_m >= HOPPER_TILE_M or geometry.choice.forward == "hopper")


def apply_choice(shape: TileShape, choice: Choice) -> TileShape:
    """The shape with what was measured in place of what was guessed."""
    measured = {name: getattr(choice, name) for name in ("tile_kv", "num_warps", "num_stages")}
    return replace(shape, **{name: value for name, value in measured.items() if value is not None})


def _steps(tile_m: int, num_tiles: int, geometry: Geometry) -> tuple[int, int, int]:
    """tile_kv, warps and stages, measured over all three; a decode tile is a stream of loads, and deep stages hide
    them."""
    if geometry.element_size > 2:
        tile_kv = geometry.tile_kv or (32 if geometry.head_dim <= 256 else 16)
        return tile_kv, 4 if tile_kv == 16 else 8, 1
    if geometry.head_dim > 256:
        # K and V of one step are 68 KiB in shared memory at 576 and 512
        return 32, 4 if tile_m <= SMALL_TILE_M else 8, 2
    if tile_m <= SMALL_TILE_M:
        return _decode_steps(num_tiles, geometry)
    return 32 if geometry.head_dim > 128 else 64, 8 if tile_m >= LARGE_TILE_M // 2 else 4, 2


def _decode_steps(num_tiles: int, geometry: Geometry) -> tuple[int, int, int]:
    """tile_kv, warps and stages of a decode tile, by how many tiles share the processors."""
    if geometry.head_dim > 128:
        return 32, 4, 3
    if num_tiles * 16 <= geometry.num_processors:
        # 14 chunks of a tile's 66 steps took 18.7 us so, and 19.8 by four stages, of which K and V have one buffer
        return 64, 8, 8
    if num_tiles * 2 <= geometry.num_processors:
        # 16 tiles of 4,224 keys took 23.3 us so, and 24.4 by the steps above
        return LONG_TILE_KV, 4, 2
    # Streams are long: short steps of few warps ask for the next one sooner, and more tasks fit side by side. 256 tiles
    # of 33 pages of 128 keys took 146 us, and 171 by steps of 128 keys; 96 of 4,224 keys 69 us, and 73 in 192 tasks.
    # codes are half as many bytes, so that one more stage keeps as many in flight
    return 64, 2, 5 if geometry.is_quantized else 4


def union_tile_m(geometry: Geometry) -> int:
    """The largest union tile, in rows times heads."""
    return min(LARGEST_UNION_TILE_M, largest_tile_m(geometry))


def choose_union_shape(rows: int, heads: int, geometry: Geometry) -> TileShape:
    """The tile of `rows` rows whose lists are united."""
    tile_m = max(MIN_TILE_M, power_of_two_from(rows * heads))
    tile_kv = geometry.tile_kv or (UNION_TILE_KV if geometry.head_dim <= 128 and geometry.element_size == 2 else 16)
    # 64 rows over 16 random blocks of 64 a row: 14.4 ms with two stages, where more share a processor, 17.2 with three
    num_warps, num_stages = (8, 3) if tile_m >= 128 else (4, 2)
    shape = TileShape(rows, heads, tile_m, tile_kv, num_warps, num_stages)
    return apply_choice(shape, geometry.choice)


def union_cost(num_entries: int, rows: int, heads: int, geometry: Geometry) -> float:
    """Seconds of a block's token in every union, up to a factor that all row counts share."""
    dims = geometry.head_dim_qk + geometry.head_dim_vo
    tile_m = max(MIN_TILE_M, power_of_two_from(rows * heads))
    read = dims * geometry.element_size / (BYTES_PER_SECOND_APART if rows == 1 else BYTES_PER_SECOND_UNITED)
    # products of rows apart are under the loads
    multiply = 2 * tile_m * dims / FLOPS_PER_SECOND if tile_m > MIN_TILE_M else 0.0
    return num_entries * max(read, multiply)


def hopper_union_rows(heads: int) -> int:
    """Rows of a union tile of `hopper_union`, of which each has so many heads in it."""
    return min(HOPPER_UNION_GROUPS * HOPPER_UNION_LANES // heads, HOPPER_UNION_ROWS)


def hopper_union_shape(heads: int, box: int) -> TileShape:
    """The tile of `hopper_union`."""
    return TileShape(
        tile_q=hopper_union_rows(heads),
        heads_per_tile=heads,
        tile_m=HOPPER_UNION_GROUPS * HOPPER_UNION_LANES,
        tile_kv=UNION_TILE_KV,
        num_warps=4 * HOPPER_UNION_GROUPS,
        num_stages=HOPPER_UNION_STAGES,
        box=box,
    )


def rows_of_group(group: int, heads: int, rows: int) -> range:
    """Rows of a union tile, which has so many, of which a group has a head in its lanes."""
    first, past = group * HOPPER_UNION_LANES, (group + 1) * HOPPER_UNION_LANES
    return range(min(first // heads, rows), min((past - 1) // heads + 1, rows))


def row_bits_of_groups(shape: TileShape) -> list[int]:
    """For every group of a union tile, a bit for each row of which it has a head."""
    groups = range(shape.tile_m // HOPPER_UNION_LANES)
    return [sum(1 << row for row in rows_of_group(group, shape.heads_per_tile, shape.tile_q)) for group in groups]


def hopper_union_cost(num_entries: int, num_group_entries: int, geometry: Geometry) -> float:
    """Seconds as of union_cost; entries are read once, and multiplied by every group that has a row listing them."""
    dims = geometry.head_dim_qk + geometry.head_dim_vo
    read = num_entries * dims * geometry.element_size / HOPPER_UNION_BYTES_PER_SECOND
    return max(read, num_group_entries * 2 * HOPPER_UNION_LANES * dims / HOPPER_UNION_FLOPS_PER_SECOND)


def union_unit(block_size: int) -> int:
    """Keys of a tile of `hopper_union` that lie in one block: a tile is a part of a block, or has a few small ones."""
    return gcd(block_size, UNION_TILE_KV)


def merges_in_launch(shape: TileShape) -> bool:
    """Whether the last program of a cut tile merges its chunks, so that no launch follows.

    A decode tile has few rows, whose merge is over before another launch would have begun; the rows of a prefill tile
    are merged sooner by many programs.
    """
    return shape.tile_m <= SMALL_TILE_M


def lanes_of_merge(head_dim_vo: int, num_warps: int) -> int:
    """Rows of a tile merged at once, so that their states stay in registers."""
    elements = MERGE_REGISTERS * 32 * num_warps // MERGE_SPLITS
    return max(1, min(4, elements // power_of_two_from(head_dim_vo)))


def programs_at_once(shape: TileShape, geometry: Geometry) -> int:
    """Decode tasks that the processors run side by side; one more would start when the first have ended.

    64 tiles of 33 steps took 52.9 us in 256 tasks of 4 warps, and 59.7 in 320.
    """
    return geometry.num_processors * max(1, WARPS_PER_PROCESSOR // shape.num_warps)


def least_steps(shape: TileShape) -> int:
    """Steps of a chunk below which cutting does not pay."""
    is_long = shape.tile_kv >= LONG_TILE_KV and shape.tile_m <= SMALL_TILE_M
    return MIN_LONG_TILES_PER_SPLIT if is_long else MIN_TILES_PER_SPLIT


def count_tier_splits(num_tiles: int, capacity: int, shape: TileShape, geometry: Geometry) -> int:
    """As asked, or so that all processors are busy and no chunk is a few steps only. [MERGE-SPLIT]"""
    asked = geometry.num_kv_splits or geometry.choice.num_kv_splits
    if asked is not None:
        return asked
    wanted = programs_at_once(shape, geometry) // num_tiles
    most = capacity // (shape.tile_kv * least_steps(shape))
    return max(1, min(wanted, most, MAX_TIER_SPLITS))


@dataclass(frozen=True)
class IndexShape:
    """What is compiled into the index of a tier, and its programs a list."""

    parts: int
    step: int  # entries handled at once
    expand_step: int  # units or tokens
    tile_words: int
    num_warps: int


def choose_index_shape(num_lists: int, capacity: int, num_words: int, num_processors: int, unit: int) -> IndexShape:
    """Few lists are shared out among programs; a long bitmap is read in larger tiles; `unit` tokens have one page."""
    has_units = unit > 1
    is_short = has_units and capacity <= SHORT_LIST and num_lists >= num_processors
    tokens_per_part = SHORT_LIST if has_units else MIN_TOKENS_PER_PART
    parts = min(num_processors // num_lists, capacity // tokens_per_part, MAX_INDEX_PARTS)
    tile_words = TILE_WORDS if num_words <= TILE_WORDS else LONG_TILE_WORDS
    expand_step = SHORT_LIST_STEP if is_short else LIST_STEP if has_units else TOKEN_STEP
    most = power_of_two_from(max(capacity, 32))
    return IndexShape(
        parts=max(1, parts),
        step=min(LIST_STEP, most),
        expand_step=min(expand_step, most),
        tile_words=min(tile_words, power_of_two_from(num_words)),
        num_warps=SHORT_LIST_WARPS if is_short else INDEX_WARPS,
    )


def power_of_two_from(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << max(size - 1, 0).bit_length()
