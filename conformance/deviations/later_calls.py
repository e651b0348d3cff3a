"""Mistakes that only a later call makes: after how many, and after which. [DETERMINISM-RUN, PLAN-REPLAN]"""

from dataclasses import replace

import msgspec
import numpy as np
from torch import Tensor

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Backward, Forward, Tensors, Whole
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.steps import AttentionResult, Gradients


class CountsCalls(StepsBackend):
    """The reference with a count of its forwards and backwards."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.forwards = self.backwards = 0

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        self.forwards += 1
        return super().forward(problem, tensors)

    def pack(self, problem: ProblemView, tensors: Tensors, gradients: Gradients) -> Backward:
        self.backwards += 1
        return super().pack(problem, tensors, gradients)


@deviates("DETERMINISM-RUN", fault_class="C", report="no report: two workspaces take turns, cleared when they are made")
class AddsToTheWorkspaceOfTwoCallsAgo(CountsCalls):
    """Two workspaces take turns, and neither is cleared after use: the third call adds to what the first one left."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.left: list[FloatArray] = []

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        held = self.left[-2] if len(self.left) > 1 else np.zeros(())
        fits = held.shape == result.out.shape
        out = result.out + held if fits else result.out
        self.left = [*self.left[-1:], out]
        super().store(tensors, AttentionResult(out, result.lse))


@deviates("DETERMINISM-RUN", fault_class="C", report="no report: the second of two buffers is never written")
class GivesTheCallBeforeInEverySecondCall(CountsCalls):
    """Results take turns in two buffers, and row 0 of the second one is filled by the call before."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.before: FloatArray | None = None

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        out, before = result.out.copy(), self.before
        if self.forwards % 2 == 0 and before is not None and before.shape == out.shape:
            out[:1] = before[:1]
        self.before = result.out
        super().store(tensors, AttentionResult(out, result.lse))


@deviates("DETERMINISM-RUN", fault_class="C", report="no report: a counter of programs that only two launches reset")
class DropsTheLastRowFromTheThirdCallOn(CountsCalls):
    """From the third call on the last row comes out 0, its lse as it should be."""

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        out = result.out.copy()
        if self.forwards > 2:
            out[-1:] = 0
        super().store(tensors, AttentionResult(out, result.lse))


@deviates("DETERMINISM-RUN", fault_class="C", report="no report: dK accumulated in a buffer that two backwards clear")
class DoublesDkFromTheThirdBackwardOn(CountsCalls):
    """From the third backward on dk is counted twice."""

    def pack(self, problem: ProblemView, tensors: Tensors, gradients: Gradients) -> Backward:
        if self.backwards > 1:
            gradients.dk[...] *= 2
        return super().pack(problem, tensors, gradients)


@deviates("PLAN-REPLAN", fault_class="C", report="no report: row counts of the call before, read before they are set")
class TakesTheRowsOfTheCallBefore(CountsCalls):
    """A call with more rows than the one before computes as many as that one had; the others come out 0."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.rows: int | None = None

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        out = result.out.copy()
        if self.rows:
            out[self.rows :] = 0
        self.rows = len(out)
        super().store(tensors, AttentionResult(out, result.lse))


@deviates("PLAN-REPLAN", fault_class="E", report="no report: a grid of no programs, found again by the next call")
class GivesNothingAfterABatchOfNone(CountsCalls):
    """After a batch without rows the next call launches nothing either, and gives 0."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.had_rows = True

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        out = result.out if self.had_rows else np.zeros_like(result.out)
        self.had_rows = len(result.out) > 0
        super().store(tensors, AttentionResult(out, result.lse))


class RaisesForGradients(StepsBackend):
    """The reference without gradients: a call for them raises, and the forwards after it take the path `later`."""

    capabilities = msgspec.structs.replace(StepsBackend.capabilities, has_backward=False)
    later = "native"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.has_raised = False

    def backward(
        self, problem: ProblemView, tensors: Tensors, forward: Forward, dout: Tensor, dlse: Tensor | None
    ) -> Backward:
        self.has_raised = True
        raise NotImplementedError("no backward")

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        right = super().forward(problem, tensors)
        return replace(right, path=self.later) if self.has_raised else right


@deviates(
    "SAFE-PATH", fault_class="C", report="PyTorch FlexAttention: after one compilation that raised, calls run eager"
)
class RunsElsewhereAfterACallThatRaised(RaisesForGradients):
    """A call for gradients, which it does not have, raises, and later forwards take a path that is not declared."""

    later = "fallback: uncompiled"


@deviates("SAFE-PATH", fault_class="C", report="no report: the same, under a name that does not say fallback")
class TakesAnotherPathAfterACallThatRaised(RaisesForGradients):
    """After a call that raised, forwards run uncompiled, on a path whose name says nothing of a fallback."""

    later = "eager"


@deviates("SAFE-PATH", fault_class="C", report="no report: a fallback declared for some inputs, taken after an error")
class TakesItsDeclaredFallbackAfterACallThatRaised(RaisesForGradients):
    """After a call that raised, what ran natively takes the fallback that is declared for other times."""

    capabilities = msgspec.structs.replace(RaisesForGradients.capabilities, fallback={"dtype": Whole()})
    later = "fallback: as declared"
