"""Which path a batch takes, why it is not the sparse one, and what is written down about it.

What the sparse path cannot do at all comes before what it would only be slower at. Whether dense is faster is a matter
of the candidate rate, with a threshold to leave the sparse path and a lower one to come back, so that a rate near one
does not flip the path from batch to batch. An input that is refused, another request's page above all, ends the call
on every path: no path may read what it names. An empty row is no reason.
[FALLBACK-REASON, FALLBACK-HYSTERESIS, FALLBACK-RECORD, FALLBACK-COUNT, FALLBACK-SECURITY, FALLBACK-EMPTY]
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.candidates import CandidateLists, listed_keys
from attnconform.kernels.sparse_attention.dense import plan_dense, run_dense
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.forward import run
from attnconform.kernels.sparse_attention.numerics import IS_INTERPRETED
from attnconform.kernels.sparse_attention.plan import DTYPES, MAX_HEAD_DIMS, Plan, plan
from attnconform.kernels.sparse_attention.rules import And, Custom, MaskRule, Or

Reason = Literal["architecture", "dtype", "head_dim", "block_size", "rule", "workspace", "dense_rate"]
PRIORITY: tuple[Reason, ...] = get_args(Reason)
OLDEST_CAPABILITY = (8, 0)  # bfloat16 products and asynchronous copies


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Part of the committed blocks that are candidates: above one dense, below the other sparse again."""

    leave_above: Fraction = Fraction(1, 2)
    enter_below: Fraction = Fraction(2, 5)

    def __post_init__(self) -> None:
        if not self.enter_below <= self.leave_above:
            limit = f"leave_above is {self.leave_above}"
            raise PlanError("FALLBACK-HYSTERESIS", "enter_below", self.enter_below, limit)

    def is_dense(self, rate: Fraction, *, was_dense: bool) -> bool:
        """The state after a batch of this rate; between the thresholds it stays as it was."""
        return rate >= self.enter_below if was_dense else rate > self.leave_above


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the sparse path is used for, within what its kernels take; None leaves it to them."""

    block_sizes: frozenset[int] | None = None
    workspace_bytes: int | None = None
    thresholds: Thresholds = Thresholds()


@dataclass(frozen=True, kw_only=True)
class Record:
    """One batch that fell back."""

    reason: Reason
    seqlens_kv: tuple[int, ...]
    batch_size: int
    seconds: float


@dataclass
class Log:
    """What happened to batch after batch."""

    records: list[Record] = field(default_factory=list)
    num_refused: int = 0  # batches
    num_requests: int = 0  # of batches that ran, on whatever path

    @property
    def counts(self) -> dict[str, int]:
        """Batches by reason; reasons that never occurred are left out."""
        return dict(Counter(record.reason for record in self.records))

    @property
    def request_share(self) -> float:
        """Requests in batches that fell back, of all requests that were run."""
        fallen = sum(record.batch_size for record in self.records)
        return fallen / self.num_requests if self.num_requests else 0.0


@dataclass(frozen=True, kw_only=True)
class Attended:
    """What a batch gave, and on which path."""

    out: Tensor
    lse: Tensor
    reason: Reason | None  # None: the sparse path


def first_reason(fails: Mapping[Reason, bool]) -> Reason | None:
    """The first reason that holds, by priority. [FALLBACK-REASON]"""
    return next((reason for reason in PRIORITY if fails.get(reason)), None)


class Attention:
    """Batches of `plan`'s arguments, on the sparse path or the dense one."""

    def __init__(self, limits: Limits | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.limits, self.clock = limits or Limits(), clock
        self.log = Log()
        self.is_dense = False

    def __call__(
        self,
        arguments: Mapping[str, Any],  # of plan
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        **tensors: Tensor | None,  # k_scale, v_scale, out, lse
    ) -> Attended:
        """Attention of one batch. Raises PlanError where it is refused, which is counted and never a reason."""
        start = self.clock()
        try:
            reason, run_batch = self._choose(arguments)
        except PlanError:
            self.log.num_refused += 1
            raise
        out, lse = run_batch(q, k_cache, v_cache, **tensors)
        self._write_down(arguments, reason, self.clock() - start)
        return Attended(out=out, lse=lse, reason=reason)

    def _choose(self, arguments: Mapping[str, Any]) -> tuple[Reason | None, Callable[..., tuple[Tensor, Tensor]]]:
        """The first reason to leave the sparse path, and the planned run of the path taken."""
        dense = None
        reason = unfit_reason(arguments, self.limits)
        if reason is not None:
            # planned before the state moves: a refused batch moves nothing
            dense = plan_dense(**arguments)
        sparse = None if dense else plan(**arguments)
        is_dense = self.limits.thresholds.is_dense(candidate_rate(arguments), was_dense=self.is_dense)
        if sparse is not None:
            reason = first_reason({"workspace": self._is_too_large(sparse), "dense_rate": is_dense})
            dense = plan_dense(**arguments) if reason else None
        self.is_dense = is_dense
        if dense is not None:
            planned = dense
            return reason, lambda *args, **tensors: run_dense(planned, *args, **tensors)
        assert sparse is not None
        return None, lambda *args, **tensors: run(sparse, *args, **tensors)

    def _is_too_large(self, sparse: Plan) -> bool:
        limit = self.limits.workspace_bytes
        return limit is not None and sparse.workspace_bytes > limit

    def _write_down(self, arguments: Mapping[str, Any], reason: Reason | None, seconds: float) -> None:
        lengths = tuple(int(n) for n in arguments["seqlen_kv"])
        self.log.num_requests += len(lengths)
        if reason is not None:
            record = Record(reason=reason, seqlens_kv=lengths, batch_size=len(lengths), seconds=seconds)
            self.log.records.append(record)


def unfit_reason(arguments: Mapping[str, Any], limits: Limits) -> Reason | None:
    """What the sparse kernels cannot do of a call, or are not to be used for. [FALLBACK-REASON]"""
    lists: CandidateLists | None = arguments.get("candidates")
    block_sizes = limits.block_sizes
    return first_reason(
        {
            "architecture": not _has_kernels(torch.device(arguments["device"])),
            "dtype": arguments["dtype"] not in DTYPES,
            "head_dim": any(arguments[name] > most for name, most in MAX_HEAD_DIMS.items()),
            "block_size": block_sizes is not None and lists is not None and lists.block_size not in block_sizes,
            "rule": not _is_lowered(arguments.get("mask_rule")),
        }
    )


def _has_kernels(device: torch.device) -> bool:
    """Whether the kernels are compiled for the device, or interpreted on it."""
    if device.type != "cuda":
        return bool(IS_INTERPRETED.value)
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= OLDEST_CAPABILITY


def _is_lowered(rule: MaskRule | None) -> bool:
    """Whether the kernels take a rule: at most one Custom, alone or directly inside an And."""
    parts = rule.rules if isinstance(rule, And) else (rule,)
    customs = [part for part in parts if isinstance(part, Custom)]
    return len(customs) <= 1 and not any(_holds_custom(part) for part in parts if not isinstance(part, Custom))


def _holds_custom(rule: MaskRule | None) -> bool:
    if isinstance(rule, And | Or):
        return any(_holds_custom(part) for part in rule.rules)
    return isinstance(rule, Custom)


def candidate_rate(arguments: Mapping[str, Any]) -> Fraction:
    """Part of the committed blocks of all lists that are listed, each once; 0 of none."""
    lists: CandidateLists | None = arguments.get("candidates")
    if lists is None:
        return Fraction(0)  # no candidates, no choice: the kernels read all of it as it is
    lengths = torch.as_tensor(arguments["seqlen_kv"]).long().cpu()
    rows = torch.as_tensor(arguments["qo_indptr"]).long().cpu().diff()
    row_blocks = (rows + lists.q_block_size - 1) // lists.q_block_size
    num_lists = lists.indptr.numel() - 1
    per_block = num_lists // max(int(row_blocks.sum()), 1)
    num_blocks = int((row_blocks * per_block * ((lengths + lists.block_size - 1) // lists.block_size)).sum())
    num_listed = listed_keys(lists, num_lists, lists.indices.device).numel()
    return Fraction(num_listed, num_blocks) if num_blocks else Fraction(0)
