"""The reference itself: attention forward and backward as a handful of short steps.

Each step is a method, so that a deviation or a faithful variant can replace exactly one idea and leave the rest.
Every step works on one query row and one query head; the loops over rows and heads are in `forward` and `backward`.
"""

from dataclasses import dataclass

import numpy as np

from attnconform.reference import candidates as candidate_lists
from attnconform.reference.coordinates import FloatArray, IntArray, Positions, Slots
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem, QueryRow, check_problem
from attnconform.reference.rule_values import apply_score_rule, mask_allows, score_rule_slope
from attnconform.reference.states import PartialState, add_sink, finish, merge_all, softmax_state


@dataclass(frozen=True)
class AttentionResult:
    """Forward result in float64."""

    out: FloatArray  # (total_q, num_qo_heads, head_dim_vo)
    lse: FloatArray  # (total_q, num_qo_heads) natural log; -inf for a row that sees no key


@dataclass(frozen=True)
class Gradients:
    """Backward result in float64; dk and dv keep only the slots that some row attended. [GRAD-ZERO]"""

    dq: FloatArray  # (total_q, num_qo_heads, head_dim_qk)
    slots: IntArray  # (n,) ascending
    dk: FloatArray  # (n, num_kv_heads, head_dim_qk) at those slots; exactly 0 everywhere else
    dv: FloatArray  # (n, num_kv_heads, head_dim_vo)
    dsink: FloatArray | None  # (num_qo_heads,)

    def in_pool(self, num_slots: int) -> tuple[FloatArray, FloatArray]:
        """dk and dv over the whole pool, (num_slots, num_kv_heads, head_dim)."""
        dk, dv = (np.zeros((num_slots, *compact.shape[1:])) for compact in (self.dk, self.dv))
        dk[self.slots], dv[self.slots] = self.dk, self.dv
        return dk, dv


class Steps:
    """The steps, in the order in which they run."""

    # -- which keys ------------------------------------------------------------------------------------------------

    def refuse(self, problem: AttentionProblem) -> None:
        """Raises RefusedInput before anything is computed. [SAFE-REFUSE]"""
        check_problem(problem)

    def candidates(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        """S: the positions a row lists. [SET-IDENTITY, GQA-LISTS]"""
        seqlen_kv = int(problem.seqlen_kv[where.request])
        if problem.candidates is None:
            return Positions(np.arange(seqlen_kv))
        lists = problem.candidates
        return candidate_lists.candidate_set(
            lists.entries(problem.list_index(where, qo_head)),
            q_idx=where.q_idx,
            seqlen_kv=seqlen_kv,
            block_size=lists.block_size,
            window=lists.window,
            num_sink_tokens=lists.num_sink_tokens,
        )

    def effective(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        """E = S ∩ {mask true}: the keys a row attends. [BLOCK-MEMBER, MASK-BEFORE-MAX, MASK-TAIL]"""
        listed = self.candidates(problem, where, qo_head)
        allowed = mask_allows(problem.mask_rule, where.request, where.q_idx, listed.values)
        return Positions(listed.values[allowed])

    def slots(self, problem: AttentionProblem, where: QueryRow, positions: Positions) -> Slots:
        """Where the keys lie in the pool. [COORD-SLOT]"""
        return problem.cache.slots(where.request, positions)

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        """The KV head a query head reads. [GQA-MAP]"""
        return qo_head // problem.group_size

    # -- forward ---------------------------------------------------------------------------------------------------

    def scale(self, problem: AttentionProblem, dot: FloatArray) -> FloatArray:
        """Scaled dot products. [SCORE-SCALE]"""
        return problem.sm_scale * dot

    def scores(
        self,
        problem: AttentionProblem,
        where: QueryRow,
        qo_head: int,
        positions: Positions,
        dot: FloatArray,  # (n,) q . k
    ) -> tuple[FloatArray, FloatArray]:
        """Scores, and their slope with respect to the scaled dot product. [SCORE-ORDER, GRAD-SOFTCAP]"""
        scores = self.scale(problem, dot)
        slope = np.ones_like(scores)
        for rule in problem.score_rules:
            slope = slope * score_rule_slope(rule, scores)
            scores = apply_score_rule(rule, scores, qo_head, where.q_idx, positions.values)
        return scores, slope

    def splits(self, num_keys: int) -> list[slice]:
        """How a row's keys are divided before the merge; one piece here. [MERGE-SPLIT]"""
        return [slice(0, num_keys)]

    def state(self, scores: FloatArray, v: FloatArray) -> PartialState:
        """Softmax state over one piece. [MERGE-STATE]"""
        return softmax_state(scores, v)

    def merge(self, states: list[PartialState], head_dim_vo: int) -> PartialState:
        """All pieces of a row as one state. [MERGE-DISJOINT]"""
        return merge_all(states, head_dim_vo)

    def finish(self, problem: AttentionProblem, qo_head: int, state: PartialState) -> tuple[FloatArray, float]:
        """Output and lse of one row and head. [EMPTY-OUT, EMPTY-LSE, LSE-NATURAL, LSE-SINK]"""
        if problem.sink_logits is not None:
            state = add_sink(state, float(problem.sink_logits[qo_head]))
        return finish(state)

    def attend(
        self,
        problem: AttentionProblem,
        where: QueryRow,
        qo_head: int,
        q: FloatArray,  # (head_dim_qk,)
        k: FloatArray,  # (num_slots, num_kv_heads, head_dim_qk)
        v: FloatArray,  # (num_slots, num_kv_heads, head_dim_vo)
    ) -> tuple[FloatArray, float]:
        """One row and head, from its candidates to its output."""
        positions = self.effective(problem, where, qo_head)
        if not len(positions) and problem.empty_row == "refuse":
            raise RefusedInput("EMPTY-POLICY", "row", where.row, "it sees no key and empty_row is 'refuse'")
        slots, kv_head = self.slots(problem, where, positions).values, self.kv_head(problem, qo_head)
        scores, _ = self.scores(problem, where, qo_head, positions, k[slots, kv_head] @ q)
        values = v[slots, kv_head]
        states = [self.state(scores[piece], values[piece]) for piece in self.splits(len(scores))]
        return self.finish(problem, qo_head, self.merge(states, v.shape[2]))

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        """Attention of every row and head; shapes as in `attend`, with q (total_q, num_qo_heads, head_dim_qk)."""
        self.refuse(problem)
        out = np.zeros((problem.total_q, problem.num_qo_heads, problem.head_dim_vo))
        lse = np.full((problem.total_q, problem.num_qo_heads), -np.inf)
        for where in problem.rows():
            for h in range(problem.num_qo_heads):
                out[where.row, h], lse[where.row, h] = self.attend(problem, where, h, q[where.row, h], k, v)
        return AttentionResult(out, lse)

    # -- backward --------------------------------------------------------------------------------------------------

    def backward(
        self,
        problem: AttentionProblem,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        result: AttentionResult,  # of the same problem and tensors
        dout: FloatArray,  # (total_q, num_qo_heads, head_dim_vo)
        dlse: FloatArray | None = None,  # (total_q, num_qo_heads); None is all 0
    ) -> Gradients:
        """Gradients by the explicit formula over the forward's own edges. [GRAD-FORMULA, GRAD-SET, GRAD-SUM]"""
        dq = np.zeros((problem.total_q, problem.num_qo_heads, problem.head_dim_qk))
        dsink = None if problem.sink_logits is None else np.zeros(problem.num_qo_heads)
        touched = self.touched_slots(problem)
        dk = np.zeros((len(touched), problem.num_kv_heads, problem.head_dim_qk))
        dv = np.zeros((len(touched), problem.num_kv_heads, problem.head_dim_vo))
        for where in problem.rows():
            for h in range(problem.num_qo_heads):
                kv_head, row = self.kv_head(problem, h), (where.row, h)
                positions = self.effective_in_backward(problem, where, h)
                slots = self.slots(problem, where, positions).values
                at = np.searchsorted(touched, slots)
                k_rows, v_rows = k[slots, kv_head], v[slots, kv_head]
                scores, slope = self.scores(problem, where, h, positions, k_rows @ q[row])
                p = self.probabilities(scores, result.lse[row])
                delta = self.delta(dout[row], result.out[row], 0.0 if dlse is None else float(dlse[row]))
                ds = self.score_gradient(p, v_rows @ dout[row], delta, slope)
                dq[row] = problem.sm_scale * (ds @ k_rows)
                # a slot may appear twice, under two positions, and then takes both contributions [SET-ALIAS]
                self.accumulate(dk[:, kv_head], at, problem.sm_scale * np.outer(ds, q[row]))
                self.accumulate(dv[:, kv_head], at, np.outer(p, dout[row]))
                if dsink is not None and problem.sink_logits is not None:
                    dsink[h] += self.sink_gradient(float(problem.sink_logits[h]), float(result.lse[row]), delta)
        return Gradients(dq, touched, dk, dv, dsink)

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        """The saved edges of the forward, never a new selection. [GRAD-SET]"""
        return self.effective(problem, where, qo_head)

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        """Softmax weights from the saved lse; an empty row has none. [GRAD-FORMULA, EMPTY-GRAD]"""
        return np.exp(scores - lse) if len(scores) else scores

    def delta(self, dout: FloatArray, out: FloatArray, dlse: float) -> float:
        """What every key of the row subtracts: sum of p * dp, less the gradient that enters by lse. [GRAD-LSE]"""
        return float(dout @ out) - dlse

    def score_gradient(self, p: FloatArray, dp: FloatArray, delta: float, slope: FloatArray) -> FloatArray:
        """Gradient of the scaled dot products. [GRAD-FORMULA, GRAD-SOFTCAP]"""
        return p * (dp - delta) * slope

    def accumulate(self, into: FloatArray, at: IntArray, values: FloatArray) -> None:
        """Adds each key's contribution; many rows may hit one slot. [GRAD-SUM]"""
        if len(np.unique(at)) == len(at):
            into[at] += values  # the same sum, ten times faster than add.at
        else:
            np.add.at(into, at, values)

    def sink_gradient(self, sink_logit: float, lse: float, delta: float) -> float:
        """One row's part of d loss / d sink logit. [GRAD-SINK]"""
        return -float(np.exp(sink_logit - lse)) * delta

    def touched_slots(self, problem: AttentionProblem) -> IntArray:
        """Every slot that some row attends, ascending. [GRAD-ZERO]"""
        parts = [
            self.slots(problem, where, self.effective_in_backward(problem, where, h)).values
            for where in problem.rows()
            for h in range(problem.num_qo_heads)
        ]
        return np.unique(np.concatenate([np.empty(0, dtype=np.int64), *parts]))
