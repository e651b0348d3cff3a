"""Mistakes about numbers that tests rarely have: far positions, odd rates, wide seeds, large sinks, full tiles."""

from dataclasses import replace

import ml_dtypes
import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.deviations.dropout import DrawsEdges
from attnconform.conformance.deviations.sets import ReadsEntries
from attnconform.reference.candidates import HOLE
from attnconform.reference.coordinates import BoolArray, FloatArray, IntArray, Positions
from attnconform.reference.dropout import Dropout, kept_edges
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rope import Rope
from attnconform.reference.rules import Alibi
from attnconform.reference.states import PartialState
from attnconform.reference.steps import Steps

TILE_OF_ROWS, TILE_OF_ENTRIES = 64, 64
LARGEST_EXPONENT = 88.0  # of a float32, about
USUAL_BASE = 10000.0


def in_bf16(positions: IntArray) -> IntArray:
    """Positions as bfloat16 holds them: every one to 256, then every second, and so on."""
    return positions.astype(ml_dtypes.bfloat16).astype(np.int64)


@deviates("MASK-OFFSET", fault_class="M", report="BR-41 Dao-AILab/flash-attention#2528: a row's place in a packed tile")
class CountsRowsFromTheirTile(Steps):
    """From a request's second tile of 64 query rows on, rows are masked as those of the first."""

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        tile = where.local // TILE_OF_ROWS * TILE_OF_ROWS
        return super().effective(problem, replace(where, q_idx=where.q_idx - tile), qo_head)


@deviates("SCORE-SCALE", fault_class="A", report="SKaiNET-developers/SKaiNET#880: a scale of 0 stands for the default")
class TakesAScaleOfZeroForNone(Steps):
    """A scale of 0 is taken for one that was not given, and becomes 1 / sqrt(head_dim)."""

    def scale(self, problem: AttentionProblem, dot: FloatArray) -> FloatArray:
        return (problem.sm_scale or problem.head_dim_qk**-0.5) * dot


class TurnsOtherwise(Steps):
    """The reference, with keys and queries turned from other positions or by another rotation."""

    def turn_keys(self, problem: AttentionProblem, keys: FloatArray, positions: IntArray) -> FloatArray:
        return super().turn_keys(self.turned(problem), keys, self.place(positions))

    def query(self, problem: AttentionProblem, where: QueryRow, q: FloatArray) -> FloatArray:
        there = replace(where, q_idx=int(self.place(np.array([where.q_idx]))[0]))
        return super().query(self.turned(problem), there, q)

    def turned(self, problem: AttentionProblem) -> AttentionProblem:
        return problem if problem.rope is None else replace(problem, rope=self.rope(problem.rope))

    def place(self, positions: IntArray) -> IntArray:
        """Positions as the rotation sees them."""
        return positions

    def rope(self, rope: Rope) -> Rope:
        """The rotation as the mistake has it."""
        return rope


@deviates("ROPE-POSITION", fault_class="Q", report="huggingface/candle#3520: positions past 256 in bf16")
class RotatesByPositionsInBf16(TurnsOtherwise):
    """Keys and queries turn by positions that were rounded to bfloat16."""

    def place(self, positions: IntArray) -> IntArray:
        return in_bf16(positions)


@deviates("ROPE-PAIRS", fault_class="A", report="vllm-project/vllm#1004: another base than the usual one")
class TurnsByTheUsualBase(TurnsOtherwise):
    """The base of a rotation is 10000, whatever the problem has."""

    def rope(self, rope: Rope) -> Rope:
        return replace(rope, theta=USUAL_BASE)


@deviates("SCORE-ALIBI", fault_class="Q", report="NVIDIA/TensorRT-Model-Connect#667: positions of ALiBi in bf16")
class BiasesByDistancesInBf16(Steps):
    """ALiBi sees distances that were rounded to bfloat16."""

    def scores(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions, dot: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        if any(isinstance(rule, Alibi) for rule in problem.score_rules):
            positions = Positions(where.q_idx + in_bf16(positions.values - where.q_idx))
        return super().scores(problem, where, qo_head, positions, dot)


@deviates("DROPOUT-COUNTER", fault_class="Q", report="NVIDIA/TransformerEngine#2014: dropout by words of 8 bits")
class DropsByEightBits(DrawsEdges):
    """The rate is rounded down to a multiple of 1/256; the factor is the rate's own."""

    def kept(
        self, problem: AttentionProblem, dropout: Dropout, where: QueryRow, qo_head: int, positions: Positions
    ) -> BoolArray:
        coarse = replace(dropout, rate=float(np.floor(256 * dropout.rate) / 256))
        return kept_edges(coarse, where.request, qo_head, where.q_idx, positions.values)


@deviates("DROPOUT-COUNTER", fault_class="O", report="no report: a seed of 64 bits passed as an int")
class LosesTheUpperHalfOfTheSeed(DrawsEdges):
    """The upper half of the seed is lost."""

    def kept(
        self, problem: AttentionProblem, dropout: Dropout, where: QueryRow, qo_head: int, positions: Positions
    ) -> BoolArray:
        short = replace(dropout, seed=dropout.seed & 0xFFFFFFFF)
        return kept_edges(short, where.request, qo_head, where.q_idx, positions.values)


@deviates("LSE-SINK", fault_class="Z", report="Dao-AILab/flash-attention#2752: exp(sink - maximum) for a sink of 100")
class ExponentiatesASinkAboveTheMaximum(Steps):
    """The maximum that is subtracted is that of the keys, so that a far larger sink overflows in float32."""

    def finish(self, problem: AttentionProblem, qo_head: int, state: PartialState) -> tuple[FloatArray, float]:
        out, lse = super().finish(problem, qo_head, state)
        sinks = problem.sink_logits
        if sinks is None or not 0 < sinks[qo_head] - state.m - LARGEST_EXPONENT < np.inf:
            return out, lse
        return np.zeros_like(out), np.inf


@deviates("SET-IDENTITY", fault_class="K", report="no report: length % tile is taken for what the last tile holds")
class LosesALastTileOfEntriesThatIsFull(ReadsEntries):
    """Of a list whose length is a multiple of 64, the last 64 entries are not read."""

    def change(self, entries: IntArray, last_entry: int) -> IntArray:
        return entries[:-TILE_OF_ENTRIES] if len(entries) and len(entries) % TILE_OF_ENTRIES == 0 else entries


@deviates("SET-UNION", fault_class="E", report="BR-08 NVIDIA/cudnn-frontend#439: an early exit where topk_length is 0")
class LeavesARowWithoutEntries(Steps):
    """A row whose list is empty sees nothing, whatever window and sink positions it has."""

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        listed, lists = super().candidates(problem, where, qo_head), problem.candidates
        if lists is None or (lists.entries(problem.list_index(where, qo_head)) != HOLE).any():
            return listed
        return Positions(listed.values[:0])
