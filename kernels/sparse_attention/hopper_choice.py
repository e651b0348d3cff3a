"""Whether `hopper` takes a call: what its kernel can say, and how its boxes fit pages and blocks.

Decided when a plan is made, from shapes, rules and the device alone; whether TMA can read the caches of a run as they
lie is seen when it is launched, and there `attend_kernel` takes the same tasks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from math import gcd

import torch

from attnconform.kernels.sparse_attention.candidates import CandidateLists
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.numerics import IS_INTERPRETED
from attnconform.kernels.sparse_attention.rules import Alibi, ScoreRule, SoftCap
from attnconform.kernels.sparse_attention.tuning import HOPPER_CAPPED_TILE_KV, HOPPER_TILE_KV, SMALLEST_SCALE, Geometry

FORWARDS = (None, "hopper", "plain")
HEAD_DIMS = (64, 128)
LEAST_BOX = 16  # keys; a smaller one is more to issue than to read
LARGEST_SLOPE, LARGEST_SCALE = 2.0**100, 2.0**60  # of Alibi: slopes of the product before sm_scale, and sm_scale
KERNEL_MODULE = "attnconform.kernels.sparse_attention.hopper_kernel"


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a plan is asked for beside its geometry."""

    page_size: int
    sm_scale: float
    has_custom_mask: bool
    has_dropout: bool
    score_rules: tuple[ScoreRule, ...]
    candidates: CandidateLists | None
    has_local: bool  # a window or sink tokens beside the candidates
    order: str  # of the entries of lists


def choose_box(geometry: Geometry, call: Call, device: torch.device) -> int:
    """Keys of a TMA box, 0 where attend_kernel runs: as choice.forward says, or by what the kernel takes.

    Raises PlanError where it is asked for and cannot run.
    """
    wanted = geometry.choice.forward
    if wanted not in FORWARDS:
        raise PlanError("SAFE-SHAPE", "choice.forward", wanted, "must be None, hopper or plain")
    if wanted == "plain" or (wanted is None and has_hints(geometry)):
        return 0
    reason = why_not_here(device) or why_not(geometry, call)
    if reason is None:
        return box_size(call)
    if wanted == "hopper":
        raise PlanError("SAFE-SHAPE", "choice.forward", wanted, reason)
    return 0


def has_hints(geometry: Geometry) -> bool:
    """Whether tiles are chosen for attend_kernel."""
    choice = geometry.choice
    return any(x is not None for x in (geometry.tile_kv, choice.tile_kv, choice.num_warps, choice.num_stages))


def why_not_here(device: torch.device) -> str | None:
    """What the device or this Triton lacks, None where the kernel can run."""
    if IS_INTERPRETED.value or device.type != "cuda":
        return f"its kernel runs on a GPU, not on {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return f"its kernel is of compute capability 9.0, and {device} has {'.'.join(map(str, capability))}"
    return None if has_gluon() else "this Triton has no Gluon, or another one"


@cache
def has_gluon() -> bool:
    """Whether the kernel's module imports."""
    try:
        import_module(KERNEL_MODULE)
    except (ImportError, AttributeError):
        return False
    return True


def why_not(geometry: Geometry, call: Call) -> str | None:
    """What of a call the kernel cannot say, None where it can say all of it."""
    lists = call.candidates
    limits = (
        (geometry.element_size != 2, "its kernel takes bfloat16 and float16"),
        (
            geometry.head_dim_qk != geometry.head_dim_vo or geometry.head_dim_qk not in HEAD_DIMS,
            f"its kernel takes head_dim {HEAD_DIMS[0]} or {HEAD_DIMS[1]} of K and V alike",
        ),
        (geometry.is_quantized, "its kernel reads no codes"),
        (call.has_dropout, "its kernel drops no edges"),
        (call.has_custom_mask, "its kernel knows no Custom mask"),
        (not _takes_scores(call), "its kernel knows one Alibi, without lists, or one SoftCap"),
        (not call.sm_scale >= SMALLEST_SCALE, "its kernel takes an sm_scale above 0"),
        (not _fits_slopes(call), "its kernel divides slopes by sm_scale, in float32"),
        (lists is not None and lists.granularity != "block", "its kernel reads lists of blocks"),
        (lists is not None and call.has_local, "its kernel reads no window and no sink tokens beside a list"),
        (lists is not None and call.order != "position", "its kernel reads lists by position"),
        (box_size(call) < LEAST_BOX, f"pages and blocks must be whole boxes of {LEAST_BOX} keys or more"),
    )
    return next((limit for is_outside, limit in limits if is_outside), None)


def _takes_scores(call: Call) -> bool:
    match call.score_rules:
        case ():
            return True
        case (SoftCap(),):
            return True
        case (Alibi(),):
            # positions out of a list, of every key, are more than a group's registers hold
            return call.candidates is None
    return False


def _fits_slopes(call: Call) -> bool:
    """Whether slopes before sm_scale are numbers whose products with a tile's keys have room in float32."""
    slopes = [abs(slope) for rule in call.score_rules if isinstance(rule, Alibi) for slope in rule.slopes]
    return not slopes or (call.sm_scale <= LARGEST_SCALE and max(slopes) <= LARGEST_SLOPE * call.sm_scale)


def box_size(call: Call) -> int:
    """The most keys, up to a tile's, that pages and listed blocks are whole multiples of."""
    is_capped = any(isinstance(rule, SoftCap) for rule in call.score_rules)
    size = gcd(call.page_size, HOPPER_CAPPED_TILE_KV if is_capped else HOPPER_TILE_KV)
    return size if call.candidates is None else gcd(size, max(1, call.candidates.block_size))
