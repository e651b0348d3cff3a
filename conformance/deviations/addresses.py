"""Mistakes about where a tensor begins, how far apart its elements are, and which pages a table names. [COORD]"""

from dataclasses import replace

import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend, to_float64
from attnconform.conformance.backend import Backward, Forward, Tensors
from attnconform.conformance.deviations.coordinates import (
    AddressesMemory,
    LooksUpPages,
    dense_strides,
    element_offsets,
)
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import FloatArray, IntArray, PageOffsets, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.steps import Steps


def from_the_beginning(tensor: torch.Tensor) -> torch.Tensor:
    """What the same strides find from a storage's first element on."""
    return tensor.as_strided(tensor.shape, tensor.stride(), 0)


def as_dense(tensor: torch.Tensor) -> torch.Tensor:
    """What the strides of a contiguous tensor find from its first element on; a wild address stays in the storage."""
    size = tensor.untyped_storage().nbytes() // tensor.element_size()
    offsets = element_offsets(tuple(tensor.shape), dense_strides(tuple(tensor.shape))) + tensor.storage_offset()
    return tensor.as_strided((size,), (1,), 0)[torch.from_numpy(offsets % size)]


class ReadsOtherwise(StepsBackend):
    """The reference with one hook: the tensors that a call reads."""

    def inputs(self, problem: ProblemView, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        return super().inputs(problem, self.read(tensors))

    def read(self, tensors: Tensors) -> Tensors:
        """The tensors as the mistake sees them."""
        raise NotImplementedError


@deviates("COORD-STRIDE", fault_class="T", report="no report: the pointer of a storage for that of a tensor")
class ReadsQFromItsStoragesBeginning(ReadsOtherwise):
    """q is read from the first element of its storage, wherever it begins in there."""

    def read(self, tensors: Tensors) -> Tensors:
        return replace(tensors, q=from_the_beginning(tensors.q))


@deviates("COORD-STRIDE", fault_class="T", report="no report: a cache that is a part of a larger allocation")
class ReadsCachesFromTheirStoragesBeginning(ReadsOtherwise):
    """K and V are read from the first element of the allocation that they are views of."""

    def read(self, tensors: Tensors) -> Tensors:
        k, v = from_the_beginning(tensors.k_cache), from_the_beginning(tensors.v_cache)
        return replace(tensors, k_cache=k, v_cache=v)


@deviates("COORD-STRIDE", fault_class="T", report="no report: one base pointer where K and V share an allocation")
class ReadsValuesFromTheBaseOfTheKeys(ReadsOtherwise):
    """V begins where K does in the allocation that both are views of."""

    def read(self, tensors: Tensors) -> Tensors:
        v = tensors.v_cache
        return replace(tensors, v_cache=v.as_strided(v.shape, v.stride(), tensors.k_cache.storage_offset()))


@deviates("COORD-STRIDE", fault_class="T", report="no report: q as a part of packed q, k and v")
class TakesAPackedQForDense(ReadsOtherwise):
    """Rows of q are taken to follow one another."""

    def read(self, tensors: Tensors) -> Tensors:
        return replace(tensors, q=as_dense(tensors.q))


@deviates("COORD-STRIDE", fault_class="T", report="BR-56 NVIDIA/TensorRT-LLM#17285: an index tensor that is a view")
class TakesAPaddedPageTableForDense(StepsBackend):
    """Rows of the page table are taken to be as far apart as they are long."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        spec = problem.spec
        read = as_dense(problem.tensor(spec.cache.page_table, torch.int64)).numpy()
        # what another row does not use is page 0 here: reading on where nothing is mapped would end the process
        table = np.where(spec.cache.page_table < 0, spec.cache.page_table, np.maximum(read, 0))
        return super().forward(
            replace(problem, spec=replace(spec, cache=replace(spec.cache, page_table=table))), tensors
        )


@deviates("COORD-STRIDE", fault_class="T", report="no report: lists that are a part of a larger buffer")
class ReadsSinksFromTheirStoragesBeginning(StepsBackend):
    """Sink logits are read from the first element of the buffer that they lie in."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        if problem.spec.sink_logits is None:
            return super().forward(problem, tensors)
        sinks = to_float64(from_the_beginning(problem.tensor(problem.spec.sink_logits, torch.float32)))
        return super().forward(replace(problem, spec=replace(problem.spec, sink_logits=sinks)), tensors)


class ReadsUpstream(StepsBackend):
    """The reference with one hook: how dout and dlse are read."""

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Backward:
        read, read_lse = self.read(dout), None if dlse is None else self.read_lse(dlse)
        return super().backward(problem, tensors, forward, read, read_lse)

    def read(self, dout: torch.Tensor) -> torch.Tensor:
        """dout as the mistake sees it."""
        return dout

    def read_lse(self, dlse: torch.Tensor) -> torch.Tensor:
        """dlse as the mistake sees it."""
        return dlse


@deviates("COORD-STRIDE", fault_class="R", report="BR-88 Dao-AILab/flash-attention#355: an output gradient as a view")
class ReadsDoutFromItsStoragesBeginning(ReadsUpstream):
    """dout is read from the first element of its storage."""

    def read(self, dout: torch.Tensor) -> torch.Tensor:
        return from_the_beginning(dout)


@deviates("COORD-STRIDE", fault_class="R", report="BR-88: the gradient of a sum is expanded from one element")
class TakesAnExpandedDoutForDense(ReadsUpstream):
    """Strides of dout are honoured unless they are 0, which is taken for a stride that nobody set."""

    def read(self, dout: torch.Tensor) -> torch.Tensor:
        return as_dense(dout) if 0 in dout.stride() and dout.numel() else dout


@deviates("COORD-STRIDE", fault_class="R", report="BR-28 Dao-AILab/flash-attention#2842: two layouts of one lse")
class IgnoresTheStridesOfDlse(ReadsUpstream):
    """dlse is read as if it were contiguous."""

    def read_lse(self, dlse: torch.Tensor) -> torch.Tensor:
        return as_dense(dlse)


@deviates("COORD-SLOT", fault_class="T", report="no report: page ids sorted for reads that follow one another")
class SortsThePageTable(LooksUpPages):
    """A request's page ids are put in order before they are used."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        used = -(-int(problem.seqlen_kv[where.request]) // problem.cache.page_size)
        pages = np.sort(problem.cache.page_table[where.request, :used])
        return np.asarray(pages[at.page] * problem.cache.page_size + at.offset)


@deviates("COORD-SLOT", fault_class="T", report="no report: a request's pages taken for one run")
class TakesPagesForOneRun(LooksUpPages):
    """Every page of a request is taken to follow its first one."""

    def look_up(self, problem: AttentionProblem, where: QueryRow, at: PageOffsets) -> IntArray:
        first = problem.cache.page_table[where.request, :1]
        return np.asarray((first + at.page) * problem.cache.page_size + at.offset)


@deviates("MASK-TAIL", fault_class="T", report="no report: last_page_len indexed one request off")
class TakesTheLastPagesLengthOfTheRequestBefore(Steps):
    """A request's last page is as full as the one of the request before it in the batch."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed = super().candidates(problem, where, qo_head)
        own, before = (int(problem.seqlen_kv[n]) for n in (where.request, where.request - 1))
        if not own or not before or where.request == 0:
            return listed
        size = problem.cache.page_size
        length = (own - 1) // size * size + (before - 1) % size + 1
        return (
            Positions(np.arange(length))
            if problem.candidates is None
            else Positions(listed.values[listed.values < length])
        )


@deviates("COORD-STRIDE", fault_class="T", report="BR-55 ROCm/aiter#3498: strides by the head dimension of the other")
class TakesTheHeadStrideForTheHeadDim(AddressesMemory):
    """Heads of a cache are taken to lie one head dimension apart; every other stride is honoured."""

    def offsets(self, problem: ProblemView, cache: torch.Tensor) -> IntArray:
        strides = list(cache.stride())
        strides[2 if problem.spec.cache.layout == "NHD" else 1] = cache.shape[-1]
        return element_offsets(tuple(cache.shape), tuple(strides))
