"""When a call runs on another path than the sparse one, why, and what is written down about it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, get_args

from attnconform.reference.errors import RefusedInput

Reason = Literal["architecture", "dtype", "head_dim", "block_size", "rule", "workspace", "dense_rate"]
# what the sparse path cannot do at all comes before what it would only be slower at
PRIORITY: tuple[Reason, ...] = get_args(Reason)
Path = Literal["sparse", "fallback", "refused"]


@dataclass(frozen=True, kw_only=True)
class SparsePath:
    """What the sparse path takes, and between which candidate rates it is left and entered again."""

    architectures: frozenset[str]
    dtypes: frozenset[str]
    head_dims: frozenset[tuple[int, int]]  # (head_dim_qk, head_dim_vo)
    block_sizes: frozenset[int]
    rules: frozenset[str]
    workspace_bytes: int
    leave_above: Fraction  # part of the committed blocks that are candidates: above it, dense
    enter_below: Fraction  # and sparse again below it


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """What one batch asks, as far as the choice of a path may look at it."""

    architecture: str
    dtype: str
    head_dim: tuple[int, int]
    block_size: int
    rules: tuple[str, ...]
    workspace_bytes: int
    seqlens_kv: tuple[int, ...]
    num_candidate_blocks: int
    num_blocks: int  # committed
    num_empty_rows: int = 0
    fault: str | None = None  # clause by which the batch is refused, such as SAFE-OWNER
    seconds: float = 0.0  # what the call took, on whatever path

    @property
    def candidate_rate(self) -> Fraction:
        """Part of the committed blocks that are candidates; 0 of none."""
        return Fraction(self.num_candidate_blocks, self.num_blocks) if self.num_blocks else Fraction(0)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The path of one batch, and why it is not the sparse one; a refused batch names its clause."""

    path: Path
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class FallbackRecord:
    """One batch that fell back. [FALLBACK-RECORD]"""

    reason: Reason
    seqlens_kv: tuple[int, ...]
    batch_size: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class FallbackReport:
    """What happened to batch after batch. [FALLBACK-COUNT, FALLBACK-RECORD]"""

    decisions: tuple[Decision, ...]
    records: tuple[FallbackRecord, ...]  # one a batch that fell back, in order
    counts: dict[str, int]  # batches by reason; reasons that never occurred are left out
    num_refused: int  # batches
    request_share: float  # requests in batches that fell back, of all requests that were run


def reasons_of(facts: BatchFacts, path: SparsePath) -> list[Reason]:
    """Everything the sparse path cannot do for a batch, by priority; the candidate rate apart. [FALLBACK-REASON]"""
    fails: dict[Reason, bool] = {
        "architecture": facts.architecture not in path.architectures,
        "dtype": facts.dtype not in path.dtypes,
        "head_dim": facts.head_dim not in path.head_dims,
        "block_size": facts.block_size not in path.block_sizes,
        "rule": not path.rules.issuperset(facts.rules),
        "workspace": facts.workspace_bytes > path.workspace_bytes,
    }
    return [reason for reason in PRIORITY if fails.get(reason)]


def is_dense_now(rate: Fraction, path: SparsePath, *, was_dense: bool) -> bool:
    """Whether the candidate rate asks for the dense path; between the thresholds it stays as it was.

    [FALLBACK-HYSTERESIS]

    Raises RefusedInput for thresholds that do not leave room between them.
    """
    if not path.enter_below <= path.leave_above:
        limit = f"leave_above is {path.leave_above}"
        raise RefusedInput("FALLBACK-HYSTERESIS", "enter_below", path.enter_below, limit)
    return rate >= path.enter_below if was_dense else rate > path.leave_above


def choose_path(facts: BatchFacts, path: SparsePath, *, is_dense: bool) -> Decision:
    """The path of one batch; the first reason by priority. [FALLBACK-REASON, FALLBACK-EMPTY]

    Raises RefusedInput for a fault, whatever else holds. [FALLBACK-SECURITY]
    """
    if facts.fault is not None:
        raise RefusedInput(facts.fault, "batch", "faulty", "no path may read what it names")
    reasons = [*reasons_of(facts, path), *(["dense_rate"] if is_dense else [])]
    return Decision(path="fallback", reason=reasons[0]) if reasons else Decision(path="sparse")


def choose_paths(batches: Sequence[BatchFacts], path: SparsePath) -> FallbackReport:
    """Batch after batch from a sparse start: paths, records, counts. [FALLBACK-COUNT, FALLBACK-HYSTERESIS]

    The candidate rate moves the state whatever path a batch takes for other reasons; a refused batch moves nothing.
    """
    is_dense, decisions = False, []
    for facts in batches:
        if facts.fault is not None:
            decisions.append(Decision(path="refused", reason=facts.fault))
            continue
        is_dense = is_dense_now(facts.candidate_rate, path, was_dense=is_dense)
        decisions.append(choose_path(facts, path, is_dense=is_dense))
    return report(batches, decisions)


def report(batches: Sequence[BatchFacts], decisions: Sequence[Decision]) -> FallbackReport:
    """Records and counts of decisions that were made. [FALLBACK-COUNT, FALLBACK-RECORD]"""
    records = tuple(
        FallbackRecord(
            reason=reason,
            seqlens_kv=facts.seqlens_kv,
            batch_size=len(facts.seqlens_kv),
            seconds=facts.seconds,
        )
        for facts, decision in zip(batches, decisions, strict=True)
        for reason in PRIORITY
        if decision == Decision(path="fallback", reason=reason)
    )
    ran = sum(len(b.seqlens_kv) for b, d in zip(batches, decisions, strict=True) if d.path != "refused")
    return FallbackReport(
        decisions=tuple(decisions),
        records=records,
        counts=dict(Counter(record.reason for record in records)),
        num_refused=sum(decision.path == "refused" for decision in decisions),
        request_share=sum(record.batch_size for record in records) / ran if ran else 0.0,
    )
