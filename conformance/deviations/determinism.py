"""Mistakes that change from call to call: races, leftovers, orders. All are seeded. [DETERMINISM]"""

import numpy as np

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Tensors
from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference import philox
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.states import PartialState
from attnconform.reference.steps import AttentionResult, Steps


class Races(Steps):
    """The reference with a seeded source of what a race would decide."""

    def __init__(self) -> None:
        self.draws = 0

    def chance(self, one_in: int) -> bool:
        """True once in so many draws, in no order that a caller can know."""
        self.draws += 1
        return bool(philox.integers(0x2ACE, self.draws, (1,), low=0, high=one_in)[0] == 0)

    def order(self, size: int) -> IntArray:
        """Another permutation at every call."""
        self.draws += 1
        return philox.permutation(0x2ACE, self.draws, size)


@deviates("DETERMINISM-RUN", fault_class="N", report="BR-116 Dao-AILab/flash-attention#359")
class LosesAKeyNowAndThen(Races):
    """One row in eight reads a list whose first entry is not there yet."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        return Positions(kept.values[1:]) if self.chance(8) else kept


@deviates("DETERMINISM-RUN", fault_class="N", report="BR-118 vllm-project/vllm-ascend#15173")
class AddsKeysInAnyOrder(Races):
    """Keys are added in float32 in an order that changes from run to run, and run-to-run equality is declared."""

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        right = super().state(scores, v)
        if not len(scores):
            return right
        order = self.order(len(scores))
        p = np.exp(scores - right.m).astype(np.float32)[order]
        terms = p[:, None] * v.astype(np.float32)[order]
        return PartialState(right.m, float(np.cumsum(p)[-1]), np.cumsum(terms, axis=0)[-1].astype(np.float64))


@deviates(
    "DETERMINISM-RUN", fault_class="C", report="BR-98 vllm-project/vllm#25520; BR-05 Dao-AILab/flash-attention#2906"
)
class KeepsLeftoverAccumulators(StepsBackend):
    """Accumulators are not cleared between calls; the first call is right."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.leftover: FloatArray | None = None

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        leftover = self.leftover
        out = result.out if leftover is None or leftover.shape != result.out.shape else result.out + leftover
        self.leftover = result.out
        super().store(tensors, AttentionResult(out, result.lse))


@deviates(
    "DETERMINISM-RUN", fault_class="D", report="BR-86 turboderp-org/exllamav3#316: calls that differ on a padded head"
)
class ReadsAnUninitializedLane(StepsBackend):
    """The last component of the output takes what an earlier call left beside it."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.calls = 0

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        self.calls += 1
        out = result.out.copy()
        out[..., -1] += 2.0**-4 * (self.calls % 3)
        super().store(tensors, AttentionResult(out, result.lse))


@deviates("GRAD-SUM", fault_class="N", report="BR-116 Dao-AILab/flash-attention#359: updates lost in the backward")
class LosesAnUpdateNowAndThen(Races):
    """One update of dk or dv in sixteen is overwritten by another."""

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        if not self.chance(16):
            super().accumulate(into, at, values)


@deviates(
    "DETERMINISM-RUN", fault_class="N", report="BR-116 Dao-AILab/flash-attention#2033: atomics where order is promised"
)
class AddsGradientsInAnyOrder(Races):
    """dk and dv are rounded to float32 and added in an order that changes, and run-to-run equality is declared."""

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        jitter = 1 + 2.0**-23 * (self.order(len(values)) % 3 - 1) if len(values) else np.ones(0)
        super().accumulate(into, at, values * jitter[:, None])
