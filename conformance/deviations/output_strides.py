"""Mistakes about where an out or an lse that is a view is written, and where the backward reads them. [COORD-STRIDE]"""

from dataclasses import replace

import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend, to_float64
from attnconform.conformance.backend import Backward, Forward, Tensors
from attnconform.conformance.deviations.addresses import as_dense
from attnconform.conformance.deviations.coordinates import dense_strides
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import FloatArray


def with_strides(tensor: torch.Tensor, *strides: int) -> torch.Tensor:
    """What other strides find from a tensor's first element on; they are no wider than its own."""
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


def without_gaps(tensor: torch.Tensor) -> torch.Tensor:
    """What the strides of a tensor without gaps find from a tensor's first element on."""
    return with_strides(tensor, *dense_strides(tuple(tensor.shape)))


class WritesElsewhere(StepsBackend):
    """The reference with two hooks: where out and lse are written. What is returned are the tensors as given."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        written = replace(tensors, out=self.of_out(problem, tensors.out), lse=self.of_lse(tensors.lse))
        return replace(super().forward(problem, written), out=tensors.out, lse=tensors.lse)

    def of_out(self, problem: ProblemView, out: torch.Tensor) -> torch.Tensor:
        """out as the mistake sees it."""
        return out

    def of_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """lse as the mistake sees it."""
        return lse


@deviates("COORD-STRIDE", fault_class="T", report="Dao-AILab/flash-attention#2670: layouts synthesized from the shape")
class WritesOutWithoutGaps(WritesElsewhere):
    """Rows of out are written one after the other, whatever its strides."""

    def of_out(self, problem: ProblemView, out: torch.Tensor) -> torch.Tensor:
        return without_gaps(out)


@deviates("COORD-STRIDE", fault_class="T", report="no report: the row stride rebuilt from the head's")
class TakesARowOfOutForItsHeads(WritesElsewhere):
    """Rows of out are taken to lie as far apart as their heads fill; the stride between heads is honoured."""

    def of_out(self, problem: ProblemView, out: torch.Tensor) -> torch.Tensor:
        return with_strides(out, out.shape[1] * out.stride(1), out.stride(1), out.stride(2))


@deviates("COORD-STRIDE", fault_class="T", report="no report: one stride of out passed to the kernel")
class TakesAHeadOfOutForItsHeadDim(WritesElsewhere):
    """Heads of out are taken to lie one head dimension apart; the stride between rows is honoured."""

    def of_out(self, problem: ProblemView, out: torch.Tensor) -> torch.Tensor:
        return with_strides(out, out.stride(0), out.shape[2], out.stride(2))


@deviates("COORD-STRIDE", fault_class="S", report="flagos-ai/FlagGems#5235: the combine kernel's rows of out")
class MergesSplitsIntoAnOutWithoutGaps(WritesElsewhere):
    """The merge of split rows writes out as if it had no gaps; rows that are not split are written where they lie."""

    def of_out(self, problem: ProblemView, out: torch.Tensor) -> torch.Tensor:
        return without_gaps(out) if (problem.hints.num_kv_splits or 1) > 1 else out


@deviates("COORD-STRIDE", fault_class="T", report="BR-29 Dao-AILab/flash-attention#2388: strides of lse not asked for")
class WritesLseWithoutGaps(WritesElsewhere):
    """lse is written row after row, whatever its strides."""

    def of_lse(self, lse: torch.Tensor) -> torch.Tensor:
        return without_gaps(lse)


@deviates("COORD-STRIDE", fault_class="T", report="vllm-project/flash-attention#139: two layouts of one lse")
class TakesHeadsOfLseForDense(WritesElsewhere):
    """An lse whose rows lie side by side is written head after head without gaps."""

    def of_lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse if lse.is_contiguous() else with_strides(lse, 1, lse.shape[0])


@deviates("SAFE-BOUNDS", fault_class="D", report="no report: a store as wide as the padded head dimension")
class StoresThePaddingOfAVector(StepsBackend):
    """A vector of out is stored with some lanes more than its head dimension, where its neighbour leaves room."""

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        given = super().forward(problem, tensors)
        out = tensors.out
        spare = out.stride(1) - out.shape[2]
        if spare > 0 and out.numel():
            padding = out.as_strided((*out.shape[:2], spare), out.stride(), out.storage_offset() + out.shape[2])
            padding.zero_()
        return given


class ReadsTheForwardsOutputs(StepsBackend):
    """The reference with two hooks: how the backward reads the forward's out and lse."""

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: torch.Tensor, dlse: torch.Tensor | None
    ) -> Backward:
        assert forward.lse is not None
        saved = forward.saved
        if not problem.spec.epilogue:  # else the forward's out is not what D is made of
            saved = replace(saved, out=self.out(forward.out, saved.out))
        saved = replace(saved, lse=self.lse(forward.lse, saved.lse))
        return super().backward(problem, tensors, replace(forward, saved=saved), dout, dlse)

    def out(self, stored: torch.Tensor, exact: FloatArray) -> FloatArray:
        """out as the mistake reads it."""
        return exact

    def lse(self, stored: torch.Tensor, exact: FloatArray) -> FloatArray:
        """lse as the mistake reads it."""
        return exact


@deviates("COORD-STRIDE", fault_class="R", report="BR-88 Dao-AILab/flash-attention#355: strides of what enters D")
class ReadsTheForwardsOutWithoutGaps(ReadsTheForwardsOutputs):
    """The backward reads the forward's out as if it had no gaps."""

    def out(self, stored: torch.Tensor, exact: FloatArray) -> FloatArray:
        return exact if stored.is_contiguous() else np.nan_to_num(to_float64(as_dense(stored)))


@deviates("COORD-STRIDE", fault_class="R", report="BR-28 Dao-AILab/flash-attention#2842: two layouts of one lse")
class ReadsTheForwardsLseWithoutGaps(ReadsTheForwardsOutputs):
    """The backward reads the forward's lse as if it had no gaps."""

    def lse(self, stored: torch.Tensor, exact: FloatArray) -> FloatArray:
        return exact if stored.is_contiguous() else to_float64(as_dense(stored))
