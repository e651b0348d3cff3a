"""Every choice of the backward that only speed depends on: mode, tiles, warps, workspace. None of them moves an edge.

A field of `BackwardHints` that is None is decided here, from the shape of the plan, by registers and shared memory as
compiled for sm_90; the bench's suite `backward-tuning` times what stands beside them. The numbers of programs wanted
are constants and no property of the device, since the order in which parts are summed must not depend on where they
are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.plan import Plan

Mode = Literal["atomic", "hybrid", "kv_centric"]
MODES: tuple[Mode, ...] = get_args(Mode)
KERNELS = (None, "hopper", "plain")
REPEATABLE_MODES: tuple[Mode, ...] = ("kv_centric",)  # bit for bit, whatever the order of programs

MIN_TILE = 16  # the least a tensor core takes
SMALL_TILE_M = 32  # decode: rows times heads of a block that is a stream of keys
MAX_TILE_KV = 128
# Loops that mask hold masks too, and with further stages would spill.
MAX_MASKED_STAGES = 2
NUM_TASKS_WANTED = 1024
MIN_STEPS_PER_TASK = 16
MAX_CHUNKS = 64
NUM_ITEMS_WANTED = 1024
MIN_ROWS_PER_ITEM = 4096
PARTS_AT_ONCE = 8  # parts of a sum that are read together and added as a tree
PART_BYTES = 64 << 20  # of dK and dV, at most, that wait for their sum
TABLE_BYTES = 64 << 20  # of the rows' own bias tables at a time
REUSE_THRESHOLD = 16  # adds that may meet at a page before it is gathered instead


class QueryShape(NamedTuple):
    """Of a query-centric program: rows times heads, keys per step, and how the GPU runs them."""

    tile_m: int
    tile_kv: int
    num_warps: int
    num_stages: int


class KeyShape(NamedTuple):
    """Of a KV-centric program: slots, rows times heads per step, and how the GPU runs them."""

    tile_kv: int
    tile_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, kw_only=True)
class BackwardHints:
    """How dK and dV are summed, how the work is cut, and which kernels run it.

    `kernels`: None takes Hopper's kernels for dQ, and for dK and dV, where each can say the plan, lists of a row's own
    overlap enough for it, and no shape is asked for; "hopper" asks for them, whatever overlaps and beside shapes too,
    and is refused with PlanError [SAFE-SHAPE] where neither can run; "plain" never takes them. What they can say is in
    `hopper_backward_choice`.
    """

    mode: Mode = "kv_centric"
    reuse_threshold: int = REUSE_THRESHOLD  # hybrid: pages where so many adds would meet are gathered per slot
    query_shape: QueryShape | None = None
    key_shape: KeyShape | None = None
    steps_per_task: int | None = None  # of a query tile's keys; None: so that no task is much longer than others
    rows_per_item: int | None = None  # of a slot tile's readers; None: likewise
    kernels: Literal["hopper", "plain"] | None = None
    part_bytes: int = PART_BYTES  # what parts of dK and dV may take; items are longer where they would take more

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise PlanError("SAFE-SHAPE", "mode", self.mode, f"must be {', '.join(MODES[:-1])} or {MODES[-1]}")
        if self.kernels not in KERNELS:
            raise PlanError("SAFE-SHAPE", "kernels", self.kernels, "must be None, hopper or plain")
        for name, shape in (("query_shape", self.query_shape), ("key_shape", self.key_shape)):
            _check_tiles(name, shape)
        for name in ("reuse_threshold", "steps_per_task", "rows_per_item", "part_bytes"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise PlanError("SAFE-SHAPE", name, size, "must be at least 1")


def _check_tiles(name: str, shape: QueryShape | KeyShape | None) -> None:
    for field in ("tile_m", "tile_kv") if shape else ():
        size = getattr(shape, field)
        if size < MIN_TILE or size & (size - 1):
            raise PlanError("SAFE-SHAPE", f"{name}.{field}", size, f"must be a power of two from {MIN_TILE} up")


def choose_query_shape(plan: Plan, lanes: int, *, is_added: bool) -> QueryShape:
    """For blocks of up to `lanes` rows times heads: a step holds K and V, two score tiles and dQ.

    Where dK and dV are added it holds those too, and with 64 keys would spill: as compiled for sm_90 by Triton 3.6,
    560 bytes at 128 rows and 2,104 at 16, against 12 and none with 32 keys.
    """
    # float32 products run without tensor cores, from registers, so that a float counts twice.
    held = _widest_dim(plan) * plan.dtype.itemsize**2 // 4
    tile_m, tile_kv = (128, 64) if held <= 128 else (64, 32) if held <= 256 else (32, 16)
    # A float32 tile of few rows holds its queries in registers whole.
    tile_m = min(tile_m, MIN_TILE) if plan.dtype.itemsize > 2 else tile_m
    tile_m = max(MIN_TILE, min(tile_m, 1 << (lanes - 1).bit_length()))
    is_large = tile_m > 64 or plan.dtype.itemsize > 2 or held > 256
    num_warps = 8 if is_large else 4 if tile_m > 32 else 2
    if is_added:
        tile_kv, num_warps = min(tile_kv, 32), max(num_warps, 4)
    # With two stages a tile of keys is asked for at the end of a step and waited for at the start of the next. A third
    # fits beside 128 rows, of which a multiprocessor holds one tile.
    return QueryShape(tile_m, tile_kv, num_warps, 3 if tile_m == 128 and plan.dtype.itemsize <= 2 else 2)


def choose_key_shape(plan: Plan, run: int) -> KeyShape:
    """Slots as wide as `run` neighbouring ones, the mean, are selected together, and as registers allow.

    128 slots halve what is read of q and dout, which every tile of slots reads anew. As compiled for sm_90 by Triton
    3.6 the loop of full pairs over 128 slots has 473 instructions, 1 of them a spill; over 64 slots and 64 rows 581 and
    17, over 64 slots and 32 rows 353 and none.
    """
    is_small = _widest_dim(plan) <= 128 and plan.dtype.itemsize <= 2
    is_wide = is_small and run >= MAX_TILE_KV
    # Sums over 1,024 lanes of 32 slots would fill more registers than there are.
    is_vast = _widest_dim(plan) > 256
    narrow = min(1 << (run - 1).bit_length(), 64 if is_small else MIN_TILE if is_vast else 32)
    tile_kv = MAX_TILE_KV if is_wide else max(MIN_TILE, narrow)
    # A row of q and one of dout, in float32, are 4 KiB each, and 32 of both twice are more than shared memory.
    is_full = is_vast and plan.dtype.itemsize > 2
    tile_m = 16 if plan.device.type == "cpu" or is_full else 64 if is_wide else 32
    num_warps = 8 if is_wide or is_vast or plan.dtype.itemsize > 2 else 4
    return KeyShape(tile_kv, tile_m, num_warps, 3 if is_small else 2)


def pack_pairs(shape: KeyShape) -> KeyShape:
    """The shape where a step has several pairs, whose addresses take registers: 128 slots would spill 400 bytes."""
    if shape.tile_kv == MAX_TILE_KV:
        shape = KeyShape(MAX_TILE_KV // 2, min(shape.tile_m, 32), 4, shape.num_stages)
    return shape._replace(num_stages=shape.num_stages - 1)


def _widest_dim(plan: Plan) -> int:
    """The larger head dimension, as a power of two that a tensor core takes."""
    return max(MIN_TILE, 1 << (max(plan.head_dim_qk, plan.head_dim_vo) - 1).bit_length())
