"""Mistakes about rows that see no key, and about their neighbours. [EMPTY]"""

from dataclasses import replace

import msgspec
import numpy as np

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Forward, Tensors
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import BoolArray, FloatArray, Positions
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.states import PartialState
from attnconform.reference.steps import AttentionResult, Steps


def is_empty(steps: Steps, problem: AttentionProblem) -> BoolArray:
    """(total_q, num_qo_heads) True where a row sees no key."""
    empty = np.zeros((problem.total_q, problem.num_qo_heads), dtype=bool)
    for where in problem.rows():
        for h in range(problem.num_qo_heads):
            empty[where.row, h] = not len(steps.effective(problem, where, h))
    return empty


class FinishesEmptyRows(Steps):
    """The reference with one hook: output and lse of a row with neither key nor sink."""

    def finish(self, problem: AttentionProblem, qo_head: int, state: PartialState) -> tuple[FloatArray, float]:
        out, lse = super().finish(problem, qo_head, state)
        return self.empty(out) if np.isneginf(lse) else (out, lse)

    def empty(self, out: FloatArray) -> tuple[FloatArray, float]:
        """What an empty row gives; out is all 0."""
        raise NotImplementedError


@deviates("EMPTY-OUT", fault_class="E", report="flash-linear-attention and SGLang decode: an empty row is NaN")
class DividesAnEmptyRowByZero(FinishesEmptyRows):
    """An empty row is 0 / 0."""

    def empty(self, out: FloatArray) -> tuple[FloatArray, float]:
        return np.full_like(out, np.nan), -np.inf


@deviates("EMPTY-LSE", fault_class="E", report="BR-04 Dao-AILab/flash-attention#978; FlashMLA")
class GivesAnEmptyRowAnLseOfPlusInfinity(FinishesEmptyRows):
    """The lse of an empty row is +inf."""

    def empty(self, out: FloatArray) -> tuple[FloatArray, float]:
        return out, np.inf


@deviates("EMPTY-LSE", fault_class="E", report="BR-01 flashinfer-ai/flashinfer#4452")
class GivesAnEmptyRowAFiniteLse(FinishesEmptyRows):
    """The lse of an empty row is a large negative number."""

    def empty(self, out: FloatArray) -> tuple[FloatArray, float]:
        return out, -5e4 + float(np.log(512.0))


@deviates("EMPTY-LSE", fault_class="E", report="torch's CPU flash attention: lse 0")
class GivesAnEmptyRowAnLseOfZero(FinishesEmptyRows):
    """The lse of an empty row is 0."""

    def empty(self, out: FloatArray) -> tuple[FloatArray, float]:
        return out, 0.0


@deviates("EMPTY-OUT", fault_class="E", report="ONNX Runtime SparseAttention: the mean of V")
class AveragesAllKeysOfAnEmptyRow(Steps):
    """A row whose keys are all masked attends to every committed key alike."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        return kept if len(kept) else Positions(np.arange(int(problem.seqlen_kv[where.request])))


@deviates("EMPTY-OUT", fault_class="E", report="article 1, 3.2: a local window put under rows that list nothing")
class GivesAnEmptyRowItsOwnToken(Steps):
    """A row that sees no key attends to its own position."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        kept = super().effective(problem, where, qo_head)
        own = min(where.q_idx, int(problem.seqlen_kv[where.request]) - 1)
        return kept if len(kept) or own < 0 else Positions(np.array([own]))


class FillsEmptyRows(Steps):
    """The reference with the mean of V in the output of rows that see no key, and one hook: in which of them."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        out, lse = super().attend(problem, where, qo_head, q, k, v)
        committed = Positions(np.arange(int(problem.seqlen_kv[where.request])))
        if len(self.effective(problem, where, qo_head)) or not len(committed) or not self.is_filled(problem):
            return out, lse
        kv_head = self.kv_head(problem, qo_head)
        slots = self.head_slots(problem, self.slots(problem, where, committed), kv_head)
        return self.values(problem, slots, kv_head, v).mean(axis=0), lse

    def is_filled(self, problem: AttentionProblem) -> bool:
        """Whether empty rows of this problem are filled."""
        return True


@deviates("EMPTY-OUT", fault_class="E", report="ONNX Runtime SparseAttention: the mean of V")
class AveragesValuesOfAnEmptyRow(FillsEmptyRows):
    """The output of a row that sees no key is the mean of the committed values, and its lse is right."""


@deviates("EMPTY-OUT", fault_class="E", report="ONNX Runtime SparseAttention: the mean of V, from which no lse comes")
class AveragesValuesOfAnEmptyRowWithoutAnLse(StepsBackend):
    """The output of a row that sees no key is the mean of the committed values, and no lse is returned."""

    steps = AveragesValuesOfAnEmptyRow()
    capabilities = msgspec.structs.replace(StepsBackend.capabilities, returns_lse=False)

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        return replace(super().forward(problem, tensors), lse=None)


@deviates("EMPTY-OUT", fault_class="E", report="BR-07 ikawrakow/ik_llama.cpp#2344: empty rows with sinks on")
class TakesASinkForAKeyOfAnEmptyRow(FillsEmptyRows):
    """Rows without a key are told by an lse of -inf, so that one with a sink keeps the mean of the values."""

    def is_filled(self, problem: AttentionProblem) -> bool:
        return problem.sink_logits is not None


class RewritesResults(Steps):
    """The reference with one hook: what happens to a result once it is known which rows are empty."""

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        result = super().forward(problem, q, k, v)
        out, lse = result.out.copy(), result.lse.copy()
        self.rewrite(out, lse, is_empty(self, problem))
        return replace(result, out=out, lse=lse)

    def rewrite(self, out: FloatArray, lse: FloatArray, empty: BoolArray) -> None:
        """Changes out and lse in place."""
        raise NotImplementedError


@deviates("EMPTY-OUT", fault_class="E", report="BR-05 Dao-AILab/flash-attention#2906: leftover accumulators")
class LeavesTheRowBeforeInAnEmptyRow(RewritesResults):
    """An empty row gives what the row before it left in the accumulator."""

    def rewrite(self, out: FloatArray, lse: FloatArray, empty: BoolArray) -> None:
        for row, head in np.argwhere(empty[1:]):
            out[row + 1, head] = out[row, head]


@deviates("EMPTY-OUT", fault_class="E", report="BR-07 ikawrakow/ik_llama.cpp#2344")
class BreaksOnLeadingEmptyRows(RewritesResults):
    """Empty rows at the start of the batch are NaN, and nowhere else."""

    def rewrite(self, out: FloatArray, lse: FloatArray, empty: BoolArray) -> None:
        out[np.asarray(np.logical_and.accumulate(empty, axis=0))] = np.nan


@deviates(
    "EMPTY-NEIGHBOUR", fault_class="E", report="BR-08 NVIDIA/cudnn-frontend#439: a loop that ends at an empty row"
)
class StopsAtAnEmptyRow(RewritesResults):
    """Rows after an empty one are not computed and stay 0."""

    def rewrite(self, out: FloatArray, lse: FloatArray, empty: BoolArray) -> None:
        after = np.asarray(np.logical_or.accumulate(empty, axis=0))
        out[after], lse[after] = 0.0, -np.inf


@deviates("EMPTY-NEIGHBOUR", fault_class="E", report="BR-28 Dao-AILab/flash-attention#2842")
class WritesTheLseOfAnEmptyRowIntoItsNeighbour(RewritesResults):
    """The early exit of an empty row stores its lse one row off."""

    def rewrite(self, out: FloatArray, lse: FloatArray, empty: BoolArray) -> None:
        for row, head in np.argwhere(empty):
            lse[(row + 1) % len(lse), head] = -np.inf


@deviates("EMPTY-NEIGHBOUR", fault_class="E", report="BR-07 ikawrakow/ik_llama.cpp#2344: NaN that spreads in a tile")
class SpreadsAnEmptyRowOverItsTile(RewritesResults):
    """The NaN of an empty row reaches the row after it, which shares its tile."""

    def rewrite(self, out: FloatArray, lse: FloatArray, empty: BoolArray) -> None:
        spread = ~empty[1:] & empty[:-1]
        out[1:][spread] = np.nan


@deviates("EMPTY-POLICY", fault_class="E", report="article 1, 3.2: an empty row is defined and recorded")
class IgnoresTheEmptyRowPolicy(Steps):
    """A row that sees no key gives zeros though the problem says that it is refused."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        return super().attend(replace(problem, empty_row="zero"), where, qo_head, q, k, v)


@deviates("EMPTY-POLICY", fault_class="E", report="BR-10 Dao-AILab/flash-attention#2776: an empty domain that raises")
class RefusesEveryEmptyRow(Steps):
    """A row that sees no key is refused though the problem says that it is zero."""

    def attend(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, q: FloatArray, k: FloatArray, v: FloatArray
    ) -> tuple[FloatArray, float]:
        if not len(self.effective(problem, where, qo_head)):
            raise RefusedInput("EMPTY-POLICY", "row", where.row, "it sees no key")
        return super().attend(problem, where, qo_head, q, k, v)
