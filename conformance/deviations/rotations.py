"""Mistakes about keys that are rotated at read: by which number, which components, and back again. [ROPE]"""

from dataclasses import replace

import numpy as np

from attnconform.conformance.deviations.deviation import deviates
from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.rope import Rope
from attnconform.reference.steps import Steps


@deviates("ROPE-POSITION", fault_class="T", report="article 1, 7.3: rotated by where a key lies")
class RotatesKeysBySlot(Steps):
    """A key turns by its slot."""

    def keys(
        self, problem: AttentionProblem, positions: Positions, slots: IntArray, kv_head: int, k: FloatArray
    ) -> FloatArray:
        return super().keys(problem, Positions(slots), slots, kv_head, k)


@deviates("ROPE-POSITION", fault_class="K", report="article 1, 7.3: gathered keys rotated by their place in the gather")
class RotatesKeysByPlaceInTheList(Steps):
    """A key turns by its place among the keys that were gathered."""

    def turn_keys(self, problem: AttentionProblem, keys: FloatArray, positions: IntArray) -> FloatArray:
        return super().turn_keys(problem, keys, np.arange(len(keys)))


@deviates("ROPE-POSITION", fault_class="M", report="article 2, 5.1: a decoded query counted from 0")
class RotatesQueriesFromTheirFirstRow(Steps):
    """A query turns by its index in its request's rows."""

    def query(self, problem: AttentionProblem, where: QueryRow, q: FloatArray) -> FloatArray:
        return super().query(problem, replace(where, q_idx=where.local), q)


@deviates("ROPE-POSITION", fault_class="A", report="no report: queries taken for rotated ones")
class RotatesKeysAlone(Steps):
    """Queries are not turned."""

    def query(self, problem: AttentionProblem, where: QueryRow, q: FloatArray) -> FloatArray:
        return q


@deviates("ROPE-POSITION", fault_class="A", report="article 1, 7.3: a cache of rotated keys, rotated once more")
class RotatesEncodedKeysAgain(Steps):
    """Keys are turned whatever the cache says of them."""

    def query(self, problem: AttentionProblem, where: QueryRow, q: FloatArray) -> FloatArray:
        return super().query(as_raw(problem), where, q)

    def turn_keys(self, problem: AttentionProblem, keys: FloatArray, positions: IntArray) -> FloatArray:
        return super().turn_keys(as_raw(problem), keys, positions)


def as_raw(problem: AttentionProblem) -> AttentionProblem:
    """The problem with keys that are said to be raw."""
    return replace(problem, rope=None if problem.rope is None else replace(problem.rope, k_position="raw"))


class TurnsOtherwise(Steps):
    """The reference with one hook: the rotation that is used."""

    def query(self, problem: AttentionProblem, where: QueryRow, q: FloatArray) -> FloatArray:
        return super().query(self.changed(problem), where, q)

    def turn_keys(self, problem: AttentionProblem, keys: FloatArray, positions: IntArray) -> FloatArray:
        return super().turn_keys(self.changed(problem), keys, positions)

    def changed(self, problem: AttentionProblem) -> AttentionProblem:
        """The problem with the rotation that the mistake uses."""
        return problem if problem.rope is None else replace(problem, rope=self.rope(problem, problem.rope))

    def rope(self, problem: AttentionProblem, rope: Rope) -> Rope:
        """That rotation."""
        raise NotImplementedError


@deviates("ROPE-PAIRS", fault_class="D", report="no report: the two conventions of pairing, exchanged")
class PairsTheOtherWay(TurnsOtherwise):
    """Neighbours turn together where halves should, and the other way round."""

    def rope(self, problem: AttentionProblem, rope: Rope) -> Rope:
        return replace(rope, interleaved=not rope.interleaved)


@deviates("ROPE-PAIRS", fault_class="D", report="no report: a partial rotation done to the whole head")
class TurnsTheWholeHead(TurnsOtherwise):
    """Components past rotary_dim turn as well."""

    def rope(self, problem: AttentionProblem, rope: Rope) -> Rope:
        return replace(rope, rotary_dim=problem.head_dim_qk // 2 * 2)


@deviates("ROPE-ENCODED", fault_class="T", report="article 1, 7.3: a shared prefix at another logical place")
class AcceptsRotatedPagesAnywhere(Steps):
    """A page of rotated keys may stand at two logical places."""

    def refuse(self, problem: AttentionProblem) -> None:
        super().refuse(replace(problem, rope=None))


@deviates("ROPE-GRAD", fault_class="R", report="no report: dq left in the rotated frame")
class LeavesTheGradientOfQTurned(Steps):
    """dq is that of the turned query."""

    def to_query(self, problem: AttentionProblem, where: QueryRow, gradient: FloatArray) -> FloatArray:
        return gradient


@deviates("ROPE-GRAD", fault_class="R", report="no report: dk left in the rotated frame")
class LeavesTheGradientOfKTurned(Steps):
    """dk is that of the turned keys."""

    def to_keys(self, problem: AttentionProblem, positions: Positions, gradient: FloatArray) -> FloatArray:
        return gradient


@deviates("ROPE-GRAD", fault_class="R", report="no report: a rotation for its inverse")
class TurnsGradientsForward(Steps):
    """dk is turned once more instead of back."""

    def to_keys(self, problem: AttentionProblem, positions: Positions, gradient: FloatArray) -> FloatArray:
        return super().to_keys(problem, Positions(-positions.values), gradient)
