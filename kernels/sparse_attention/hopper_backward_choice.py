"""Whether `hopper_backward` takes a backward: what its kernels can say, and how their boxes fit pages and lists.

Decided when a backward is planned, for dQ and for dK and dV apart; whether TMA can read the tensors of a call as they
lie is seen when it is launched, and there the other kernels take the same tasks.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

import torch

from attnconform.kernels.sparse_attention.backward_hints import BackwardHints
from attnconform.kernels.sparse_attention.backward_tasks import QueryLaunch
from attnconform.kernels.sparse_attention.backward_transpose import TransposedPlan
from attnconform.kernels.sparse_attention.candidates import enumerate_runs
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.hopper_backward_rows_choice import HopperRows, choose_rows
from attnconform.kernels.sparse_attention.hopper_backward_union_choice import HopperUnion, choose_union
from attnconform.kernels.sparse_attention.hopper_choice import HEAD_DIMS, LARGEST_SCALE, LARGEST_SLOPE, why_not_here
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.rules import ALIBI, SOFT_CAP
from attnconform.kernels.sparse_attention.tuning import SMALLEST_SCALE

PAIR_LANES = 64  # rows times heads of a pair
TASK_LANES = 128  # of a task of dQ
SLOT_TILE = 128
LEAST_BOX, LARGEST_BOX = 8, 64  # slots: of a swizzle's height, and a group's
LEAST_BIASED_SCALE = 2.0**-60  # of Alibi: lse and slopes of the product before sm_scale, whatever rows score
PAIR_HEADS = (1, 2, 4, 8)  # so that a pair has whole boxes of rows


class HopperKeys(NamedTuple):
    """What is compiled into the kernel of dK and dV."""

    box: int  # slots of a TMA box
    stages: int = 4  # pairs in shared memory: products hold two


class HopperQueries(NamedTuple):
    """What is compiled into the kernel of dQ."""

    box: int  # keys of a TMA box
    tile_kv: int = 64
    stages: int = 3  # tiles of keys in shared memory


class HopperChoice(NamedTuple):
    """What runs on Hopper's kernels, None where others run."""

    queries: HopperQueries | None = None  # of dQ
    keys: HopperKeys | None = None  # of dK and dV
    rows: HopperRows | None = None  # of dK and dV of lists per token
    union: HopperUnion | None = None  # of dQ of lists per token


def choose_hopper(
    plan: Plan, hints: BackwardHints, launches: tuple[QueryLaunch, ...], keys: TransposedPlan | None
) -> HopperChoice:
    """As hints.kernels says, or all that they take.

    Raises PlanError where they are asked for and can run neither dQ nor dK and dV.
    """
    if hints.kernels == "plain" or (hints.kernels is None and (hints.query_shape or hints.key_shape)):
        return HopperChoice()
    reason = why_not_here(plan.device) or why_not(plan)
    found = reason or choose_union(plan, hints)
    union = None if isinstance(found, str) else found
    rows = reason or choose_rows(plan, hints, keys)
    if not isinstance(rows, str):
        return HopperChoice(rows=rows, union=union)
    box = 0 if reason else box_size(plan)
    if not reason and box < LEAST_BOX:
        reason = f"pages and lists must be whole boxes of {LEAST_BOX} slots or more"
    no_queries = reason or why_not_queries(hints, launches)
    no_keys = reason or why_not_keys(keys)
    if hints.kernels == "hopper" and no_queries and no_keys and union is None:
        raise PlanError("SAFE-SHAPE", "kernels", hints.kernels, no_keys)
    # where a tile of keys takes long to find or to weigh, one more is under way
    stages = 4 if plan.list_indptr is not None or plan.score_codes == (int(SOFT_CAP),) else 3
    return HopperChoice(
        queries=None if no_queries else HopperQueries(box, stages=stages),
        keys=None if no_keys else HopperKeys(box),
        union=union,
    )


def why_not(plan: Plan) -> str | None:
    """What of a plan neither kernel can say, None where they can say all of it."""
    limits = (
        (plan.dtype.itemsize != 2, "its kernels take bfloat16 and float16"),
        (
            plan.head_dim_qk != plan.head_dim_vo or plan.head_dim_qk not in HEAD_DIMS,
            f"its kernels take head_dim {HEAD_DIMS[0]} or {HEAD_DIMS[1]} of K and V alike",
        ),
        (plan.dropout_words is not None, "its kernels drop no edges"),
        (plan.mask_fn is not None, "its kernels know no Custom mask"),
        (
            plan.score_codes not in ((), (int(ALIBI),), (int(SOFT_CAP),)),
            "its kernels know one Alibi or one SoftCap",
        ),
        (not plan.sm_scale >= SMALLEST_SCALE, "its kernels take an sm_scale above 0"),
        (not _fits_bias(plan), "its kernels divide slopes and lse by sm_scale, in float32"),
        (plan.list_indptr is not None and bool(plan.window), "its kernels read no window beside a list"),
    )
    return next((limit for is_outside, limit in limits if is_outside), None)


def _fits_bias(plan: Plan) -> bool:
    """Whether what a bias takes off a product before sm_scale has room in float32."""
    if plan.score_codes != (int(ALIBI),) or plan.score_params is None:
        return True
    largest = float(plan.score_params.abs().max()) if plan.score_params.numel() else 0.0
    return LEAST_BIASED_SCALE <= plan.sm_scale <= LARGEST_SCALE and largest <= LARGEST_SLOPE * plan.sm_scale


def why_not_queries(hints: BackwardHints, launches: tuple[QueryLaunch, ...]) -> str | None:
    """Likewise of the tasks of dQ."""
    if hints.mode != "kv_centric":
        return "its kernel of dQ adds to no dK and dV"
    if not any(launch.shape.tile_m == TASK_LANES for launch in launches):
        return f"its kernel of dQ takes tasks of {TASK_LANES} rows times heads"
    return None


def why_not_keys(keys: TransposedPlan | None) -> str | None:
    """Likewise of the pairs of dK and dV."""
    if keys is None:
        return "no page is gathered"
    pair = keys.pair_shape
    if keys.shape.tile_kv != SLOT_TILE or pair.is_packed or pair.rows_per_pair != PAIR_LANES:
        return f"its kernel of dK and dV takes {SLOT_TILE} slots, and {PAIR_LANES} rows times heads of one list"
    return None if pair.heads in PAIR_HEADS else f"its kernel of dK and dV takes groups of {PAIR_HEADS} heads"


def box_size(plan: Plan) -> int:
    """The most slots, up to a group's, that pages and the runs of lists are whole multiples of; 0 where none are."""
    size = gcd(plan.page_size, LARGEST_BOX)
    while size >= LEAST_BOX and not _lists_are_boxes(plan, size):
        size //= 2
    return size if size >= LEAST_BOX else 0


def _lists_are_boxes(plan: Plan, box: int) -> bool:
    """Whether every list is boxes of neighbouring slots, the last of them perhaps cut short."""
    if plan.list_indptr is None or plan.list_slots is None or plan.list_slots.numel() == 0:
        return True
    _, rank = enumerate_runs(plan.list_indptr.long().diff())
    place = rank % box
    entry = torch.arange(rank.numel(), device=rank.device)
    slots = plan.list_slots[: rank.numel()]
    return bool(((slots % box == place) & (slots[entry - place] == slots - place)).all())
