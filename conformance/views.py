"""The problem in the forms that kernels take, so that an adapter writes no index code of its own."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np
import torch

from attnconform.conformance.embedding import embedded
from attnconform.reference.candidates import HOLE
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray, Positions
from attnconform.reference.formats import csr_to_fixed_width, dense_masks
from attnconform.reference.problem import AttentionProblem

SPARE = 3  # entries between rows of a strided table


class Hints(msgspec.Struct, frozen=True, kw_only=True):
    """How to run, never what to compute: no hint may change the answer. [MERGE-SPLIT]"""

    num_kv_splits: int | None = None
    tile_kv: int | None = None


@dataclass(frozen=True)
class ProblemView:
    """One problem, as data and as tensors on a device."""

    spec: AttentionProblem
    hints: Hints = field(default_factory=Hints)
    device: str = "cpu"
    strided: bool = False  # index tensors begin within their storages, and rows of a table are farther apart than long

    def tensor(self, array: IntArray | BoolArray | FloatArray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Any array of the problem on the device."""
        made = torch.as_tensor(np.ascontiguousarray(array)).to(dtype).to(self.device, non_blocking=True)
        return embedded(made, 0, spare=SPARE if made.ndim > 1 else 0) if self.strided else made

    @cached_property
    def masks(self) -> list[torch.Tensor]:
        """Per request (num_qo_heads, seqlen_q, seqlen_kv): True where a row attends, candidates and rules folded in."""
        return [self.tensor(mask, torch.bool) for mask in dense_masks(self.spec)]

    @cached_property
    def candidate_masks(self) -> list[torch.Tensor]:
        """Per request (num_qo_heads, seqlen_q, seqlen_kv): True where a row lists a position, before any rule."""
        return [self.tensor(mask, torch.bool) for mask in dense_masks(without_mask_rule(self.spec))]

    def q_rows(self, request: int) -> slice:
        """Rows of q and out that belong to a request."""
        return slice(int(self.spec.qo_indptr[request]), int(self.spec.qo_indptr[request + 1]))

    def slots(self, request: int, kv_head: int = 0) -> torch.Tensor:
        """Slot of every committed position of a request for one KV head, (seqlen_kv,); heads differ by head_pages."""
        positions = Positions(np.arange(int(self.spec.seqlen_kv[request])))
        cache = self.spec.cache
        return self.tensor(cache.head_slots(cache.slots(request, positions), kv_head).values, torch.int64)

    def by_slot(self, cache: torch.Tensor) -> torch.Tensor:
        """A cache as (num_slots, num_kv_heads, head_dim), whatever its layout."""
        nhd = cache if self.spec.cache.layout == "NHD" else cache.transpose(1, 2)
        return nhd.reshape(self.spec.cache.num_slots, *nhd.shape[2:])

    def to_cache(self, by_slot: torch.Tensor) -> torch.Tensor:
        """The inverse of `by_slot`, for gradients."""
        spec = self.spec.cache
        nhd = by_slot.reshape(spec.num_pages, spec.page_size, *by_slot.shape[1:])
        return nhd if spec.layout == "NHD" else nhd.transpose(1, 2)

    def gathered(self, cache: torch.Tensor, request: int) -> torch.Tensor:
        """A request's keys or values in logical order, (seqlen_kv, num_kv_heads, head_dim)."""
        return self.by_slot(cache)[self.slots(request)]

    @cached_property
    def fixed_width_candidates(self) -> torch.Tensor:
        """Candidate lists as (num_lists, width) with holes after each list's end."""
        lists = self.spec.candidates
        assert lists is not None
        width = int(np.diff(lists.indptr).max(initial=0))
        return self.tensor(csr_to_fixed_width(lists.indptr, lists.indices, width))

    @property
    def hole(self) -> int:
        return HOLE


def without_mask_rule(spec: AttentionProblem) -> AttentionProblem:
    """The same problem with no mask rule: its edges are the candidate sets themselves."""
    return replace(spec, mask_rule=None)
