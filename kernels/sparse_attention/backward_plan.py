"""All that a backward needs beside the forward's plan: tasks, transposed lists, cold pages, and its workspace. [PLAN]

Built once and used by every layer and step that uses the plan. Only the hot part of the lists is transposed, and only
cold pages have float32 sums: of a hybrid each costs what it serves. The workspace is known before anything runs, and
bounded whatever the lists hold.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.backward_hints import NUM_TASKS_WANTED, TABLE_BYTES, BackwardHints
from attnconform.kernels.sparse_attention.backward_query import ColdSums
from attnconform.kernels.sparse_attention.backward_reuse import ColdPages, choose_cold_pages, count_page_adds
from attnconform.kernels.sparse_attention.backward_scores import lay_out_sums
from attnconform.kernels.sparse_attention.backward_tasks import QueryLaunch, build_query_launches
from attnconform.kernels.sparse_attention.backward_transpose import (
    TransposedPlan,
    entries_of_pages,
    list_entries,
    transpose_plan,
)
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.hopper_backward_choice import HopperKeys, HopperQueries, choose_hopper
from attnconform.kernels.sparse_attention.hopper_backward_rows_choice import HopperRows
from attnconform.kernels.sparse_attention.hopper_backward_union_choice import HopperUnion
from attnconform.kernels.sparse_attention.plan import Plan

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class BackwardPlan:
    """Valid as long as the plan is. One backward at a time may use its buffers, any number may use it."""

    hints: BackwardHints
    launches: tuple[QueryLaunch, ...]
    keys: TransposedPlan | None  # None where no page is gathered
    cold: ColdPages | None  # None where no page is added to
    hopper_queries: HopperQueries | None  # None where backward_query's kernel runs
    hopper_keys: HopperKeys | None  # None where backward_keys' does, or that of rows
    hopper_rows: HopperRows | None  # None where another kernel runs
    hopper_union: HopperUnion | None  # None where dQ goes by launches
    workspace: dict[str, tuple[Shape, ...]]  # float32 buffers of a call, by what they are for

    @property
    def workspace_bytes(self) -> dict[str, int]:
        """What a call allocates beside its gradients, by what it is for."""
        return {name: 4 * sum(prod(shape) for shape in shapes) for name, shapes in self.workspace.items()}

    @property
    def order_spread(self) -> float:
        """How far apart two runs' dK and dV may be, as a share of their terms' absolute values; 0: bit for bit.

        Two orders of n float32 additions differ by at most 2 (n - 1) 2^-24 of it, before the result is rounded.
        """
        return 0.0 if self.cold is None else 2 * max(0, self.cold.most_adds - 1) * 2.0**-24


def plan_backward(plan: Plan, hints: BackwardHints | None = None) -> BackwardPlan:
    """The backward's own work of a plan; hints never change which edges count. [GRAD-SET]

    Reads sizes back from the device. Raises PlanError where the plan's lists change in place, as a tier's do.
    """
    hints = hints or BackwardHints()
    _refuse_tier(plan)
    launches = build_query_launches(plan, hints)
    cold, keys = None, None
    entries = list_entries(plan)
    if hints.mode != "kv_centric":
        adds = count_page_adds(plan, launches, entries)
        cold = choose_cold_pages(adds, hints)
        if cold is not None and not cold.num_rows:
            # Programs that add nothing need no room for what they would add.
            launches = build_query_launches(plan, replace(hints, mode="kv_centric"))
        entries = entries_of_pages(plan, entries, (adds > 0) & (cold.rows < 0))
    if hints.mode != "atomic":
        keys = transpose_plan(plan, hints, entries=entries)
    hopper = choose_hopper(plan, hints, launches, keys)
    return BackwardPlan(hints, launches, keys, cold, *hopper, _workspace_of(plan, launches, keys, cold))


def _refuse_tier(plan: Plan) -> None:
    if plan.is_tier:
        raise PlanError("PLAN", "plan", "of a tier", "a backward needs lists that stay: make them with plan(...)")


def _workspace_of(
    plan: Plan, launches: tuple[QueryLaunch, ...], keys: TransposedPlan | None, cold: ColdPages | None
) -> dict[str, tuple[Shape, ...]]:
    """Shapes of every float32 buffer."""
    dims = (plan.head_dim_qk, plan.head_dim_vo)
    # As the kernels read them: the heads of a group together, so that a tile's rows are one run.
    rows = (plan.num_kv_heads, plan.total_q, plan.group_size)
    return {
        "lse and delta": (rows, rows),
        "parts of dq": tuple((*launch.partial_rows, plan.head_dim_qk) for launch in launches),
        "parts of dk and dv": () if keys is None else tuple((*keys.partial_rows, dim) for dim in dims),
        "sums of cold pages": () if cold is None else tuple((cold.num_rows, plan.page_size, dim) for dim in dims),
    }


def workspace_bound(plan: Plan, hints: BackwardHints | None = None) -> int:
    """Bytes that no lists can make a call exceed, where the hints leave the cutting of work open."""
    hints = hints or BackwardHints()
    rows = 8 * plan.total_q * plan.num_qo_heads
    tile_m = hints.query_shape.tile_m if hints.query_shape else 128
    # A tile is cut only where it is far longer than the mean, so that chunks are at most half of the tasks wanted, of
    # each of two shapes.
    dq_parts = 4 * NUM_TASKS_WANTED * tile_m * plan.head_dim_qk
    pool = 4 * plan.num_pages * plan.page_size * plan.num_kv_heads * (plan.head_dim_qk + plan.head_dim_vo)
    by_mode = {"kv_centric": hints.part_bytes, "atomic": pool, "hybrid": hints.part_bytes + pool}
    return rows + dq_parts + by_mode[hints.mode]


def score_workspace_bytes(plan: Plan, work: BackwardPlan) -> int:
    """What gradients of the score rules take on top, where they are asked for."""
    if not plan.score_codes:
        return 0
    layout = lay_out_sums(plan)
    lanes = plan.total_q * plan.num_qo_heads + sum(prod(launch.partial_rows) for launch in work.launches)
    row_tables = 4 * plan.num_qo_heads * layout.width
    return 4 * lanes * layout.num_sums + min(max(TABLE_BYTES, row_tables), row_tables * max(1, plan.total_q))


@dataclass(frozen=True, eq=False)
class Buffers:
    """The workspace of one call; `sums` are to be cleared first, the rest is written before it is read."""

    lse_log2: Tensor  # (num_kv_heads, total_q, group_size)
    delta: Tensor  # (num_kv_heads, total_q, group_size)
    dq_parts: tuple[Tensor, ...]  # one for each query launch
    parts: tuple[Tensor, Tensor] | None
    sums: ColdSums | None


def allocate_buffers(plan: Plan, work: BackwardPlan) -> Buffers:
    """Float32 memory of exactly the planned shapes."""
    rows, dq_parts, parts, sums = (
        tuple(torch.empty(shape, dtype=torch.float32, device=plan.device) for shape in shapes)
        for shapes in work.workspace.values()
    )
    return Buffers(rows[0], rows[1], dq_parts, parts or None, ColdSums(*sums) if sums else None)
