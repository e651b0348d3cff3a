"""What a time is made of: bytes, FLOPs, tiles, programs, memory; counted, not timed."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from attnconform.reference.blocks.statistics import nearest_rank
from attnconform.reference.cost.tiles import tile_efficiency
from attnconform.reference.cost.traffic import transaction_utilization

LINE = 128  # bytes of a memory transaction
MEASURED = (
    "bytes_dram", "bytes_written_dram", "l2_hit_rate", "tensor_core_share", "processors_busy", "registers",
)  # fmt: skip
Ints = NDArray[np.int64]


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per list, or work per program."""

    mean: float = 0.0
    p50: int = 0
    p95: int = 0
    p99: int = 0
    max: int = 0

    @classmethod
    def of(cls, values: Ints) -> "Lengths":
        if not len(values):
            return cls()
        p50, p95, p99 = (nearest_rank(values, percent) for percent in (50, 95, 99))
        return cls(mean=float(values.mean()), p50=p50, p95=p95, p99=p99, max=int(values.max()))


class Bin(msgspec.Struct, frozen=True):
    """Programs whose work lies in low <= keys < high."""

    low: int
    high: int
    programs: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Counts beside a time."""

    bytes_ideal: int = 0  # keys and values once, queries, ids, outputs
    bytes_physical: int = 0  # what the programs of the launch ask for
    bytes_dram: int | None = None  # measured, read and written; None where there is no profiler
    bytes_written_dram: int | None = None
    l2_hit_rate: float | None = None
    tensor_core_share: float | None = None  # of the cycles
    processors_busy: float | None = None  # mean over the busiest
    registers: int | None = None  # a thread, of the longest kernel
    flops_useful: int = 0
    flops_executed: int = 0
    tile_efficiency: float = 1.0  # of wanted rows: keys wanted over keys computed
    row_efficiency: float = 1.0  # query rows wanted over rows computed
    transaction_use: float = 1.0  # of a line, by one key's row
    workspace_reserved: int = 0  # the upper bound; reserved memory is used memory
    workspace_used: int = 0  # by this batch
    metadata_bytes: int = 0  # lists, tasks, tables
    row_lengths: Lengths = Lengths()
    programs: int = 0
    program_work: Lengths = Lengths()  # keys a program takes
    program_histogram: list[Bin] = []
    longest_over_fair: float = 0.0  # the longest program over an equal share for every processor
    valid_tokens: int = 0
    processed_tokens: int = 0
    recompiles: int = 0
    fallbacks: dict[str, int] = {}


@dataclass(frozen=True)
class Work:
    """Tasks of a plan, over its launches."""

    keys: Ints  # (tasks,) keys each takes
    computed_keys: Ints  # the same, filled up to whole tiles
    rows: Ints  # query rows times heads
    computed_rows: Ints
    partial_bytes: int
    table_bytes: int

    @property
    def edges_of_rows(self) -> int:
        """(row and head, key) pairs of the tiles, rows that only fill a tile left out."""
        return int((self.computed_keys * self.rows).sum())

    @property
    def edges_computed(self) -> int:
        return int((self.computed_keys * self.computed_rows).sum())


def work_of(plan: Any) -> Work:
    """What the launches of a bundled plan do, read from their task tables."""
    parts = launch_parts(plan) if plan.union is None else [union_part(plan.union)]
    keys, computed, rows, computed_rows = (np.concatenate([part[i] for part in parts]) for i in range(4))
    return Work(keys, computed, rows, computed_rows, plan.workspace_bytes, table_bytes_of(plan))


def launch_parts(plan: Any) -> list[tuple[Ints, Ints, Ints, Ints]]:
    """Keys, computed keys, rows and computed rows of every task, by launch."""
    from attnconform.kernels.sparse_attention.tasks import TASK_FIELDS

    column = {name: i for i, name in enumerate(TASK_FIELDS)}
    parts = []
    for launch in plan.launches:
        table = launch.tasks.cpu().numpy().astype(np.int64)
        keys = table[:, column["kv_end"]] - table[:, column["kv_start"]]
        rows = table[:, column["q_count"]] * table[:, column["head_count"]]
        parts.append((keys, whole_tiles(keys, launch.shape.tile_kv), rows, np.full_like(keys, launch.shape.tile_m)))
    return parts


def union_part(union: Any) -> tuple[Ints, Ints, Ints, Ints]:
    """The same of union tiles, whose keys are those of any of their rows."""
    from attnconform.kernels.sparse_attention.union import UNION_FIELDS

    column = {name: i for i, name in enumerate(UNION_FIELDS)}
    table = union.tasks.cpu().numpy().astype(np.int64)
    keys = (table[:, column["entry_end"]] - table[:, column["entry_start"]]) * union.block_size
    rows = table[:, column["q_count"]] * table[:, column["head_count"]]
    return keys, whole_tiles(keys, union.shape.tile_kv), rows, np.full_like(keys, union.shape.tile_m)


def whole_tiles(keys: Ints, tile_kv: int) -> Ints:
    return -(-keys // tile_kv) * tile_kv


def table_bytes_of(plan: Any) -> int:
    """Memory of task and merge tables, and of union tiles."""
    tables = [table for launch in plan.launches for table in (launch.tasks, launch.merges)]
    if plan.union is not None:
        tables += [plan.union.tasks, plan.union.blocks, plan.union.members]
    return sum(int(table.nbytes) for table in tables)


def list_bytes(plan: Any) -> int:
    """Memory of a plan's lists and tables."""
    tensors = (plan.list_indptr, plan.list_positions, plan.list_slots, plan.list_members, plan.page_table)
    return sum(t.nbytes for t in tensors if t is not None)


def key_use(head_dim: int, element_size: int) -> float:
    """Wanted part of the lines that one key's row takes, where rows begin lines. [COST-TRANSACTION]"""
    useful = head_dim * element_size
    return transaction_utilization(useful, -(-useful // LINE), transaction_bytes=LINE)


def histogram(work: Ints) -> list[Bin]:
    """Programs by work, a bin to a power of two."""
    if not len(work):
        return []
    exponents = np.where(work > 0, np.floor(np.log2(np.maximum(work, 1))).astype(np.int64) + 1, 0)
    return [
        Bin(low=0 if e == 0 else 2 ** (int(e) - 1), high=2 ** int(e), programs=int((exponents == e).sum()))
        for e in np.unique(exponents)
    ]


def longest_over_fair(keys: Ints, processors: int) -> float:
    """How much longer the longest program is than an equal share of all work; at most 1 is a balanced schedule."""
    total = float(keys.sum())
    return float(keys.max()) / (total / processors) if total else 0.0


def plan_figures(
    plan: Any,
    *,
    processors: int,
    lengths: Ints,  # (lists,) or (rows,) wanted keys
    edges: int,  # wanted (row, head, key) triples
    bytes_ideal: int,
    reserved: int | None = None,
    recompiles: int = 0,
) -> Figures:
    """Figures of one launch of a bundled plan."""
    work = work_of(plan)
    element = plan.dtype.itemsize
    dims = plan.head_dim_qk + plan.head_dim_vo
    rows, computed_rows = int(work.rows.sum()), int(work.computed_rows.sum())
    index_read = index_bytes(plan, work)
    key_bytes = sum(
        dim * (element if quant is None else quant.dtype.itemsize)
        for dim, quant in ((plan.head_dim_qk, plan.k_quant), (plan.head_dim_vo, plan.v_quant))
    )
    physical = int(work.keys.sum()) * key_bytes + rows * (dims * element + 4) + 2 * work.partial_bytes + index_read
    return Figures(
        bytes_ideal=bytes_ideal,
        bytes_physical=physical,
        flops_useful=2 * edges * dims,
        flops_executed=2 * work.edges_computed * dims,
        tile_efficiency=tile_efficiency(edges, work.edges_of_rows, 1),
        row_efficiency=rows / computed_rows if computed_rows else 1.0,
        transaction_use=key_use(plan.head_dim_qk, plan.k_quant.dtype.itemsize if plan.k_quant else element),
        workspace_reserved=work.partial_bytes if reserved is None else reserved,
        workspace_used=work.partial_bytes,
        metadata_bytes=list_bytes(plan) + work.table_bytes,
        row_lengths=Lengths.of(lengths),
        programs=len(work.keys),
        program_work=Lengths.of(work.keys),
        program_histogram=histogram(work.keys),
        longest_over_fair=longest_over_fair(work.keys, processors),
        valid_tokens=plan.total_q,
        processed_tokens=processed_rows(plan, work),
        recompiles=recompiles,
    )


def index_bytes(plan: Any, work: Work) -> int:
    """What the programs read of lists: a slot for every key, or a block and its rows for every entry of a union."""
    if plan.union is not None:
        return int(plan.union.blocks.nbytes + plan.union.members.nbytes)
    return 0 if plan.list_slots is None else int(work.keys.sum()) * int(plan.list_slots.element_size())


def processed_rows(plan: Any, work: Work) -> int:
    """Query tokens as tiles compute them: rows with padding over the heads, every row tile counted once."""
    wanted = int(work.rows.sum())
    return round(plan.total_q * int(work.computed_rows.sum()) / wanted) if wanted else 0


def with_counters(figures: Figures, counted: Figures | None) -> Figures:
    """The same with what a hardware profiler measured, where it did."""
    if counted is None:
        return figures
    return replace(figures, **{name: getattr(counted, name) for name in MEASURED})
