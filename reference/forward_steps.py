"""Attention forward as a handful of short steps, each of one query row and one query head.

Each step is a method, so that a deviation or a faithful variant can replace exactly one idea and leave the rest.
"""

import numpy as np

from attnconform.reference import candidates as candidate_lists
from attnconform.reference.coordinates import FloatArray, IntArray, Positions, Slots
from attnconform.reference.dropout import kept_edges
from attnconform.reference.epilogue import apply_epilogue
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem, QueryRow, check_problem
from attnconform.reference.quantization import dequantize
from attnconform.reference.results import AttentionResult
from attnconform.reference.rope import rotate
from attnconform.reference.rule_values import apply_score_rule, mask_allows, score_rule_slope
from attnconform.reference.states import PartialState, add_sink, finish, merge_all, softmax_state


class ForwardSteps:
    """The steps, in the order in which they run; the loop over rows and heads is in `forward`."""

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
        """E = S ∩ {mask true}: the keys a row attends. [BLOCK-MEMBER, MASK-BEFORE-MAX, MASK-TAIL, MASK-HEAD-WINDOW]"""
        listed = self.candidates(problem, where, qo_head)
        allowed = mask_allows(problem.mask_rule, where.request, where.q_idx, listed.values, qo_head)
        return Positions(listed.values[allowed])

    def slots(self, problem: AttentionProblem, where: QueryRow, positions: Positions) -> Slots:
        """Where the keys lie in the pool. [COORD-SLOT]"""
        return problem.cache.slots(where.request, positions)

    def kv_head(self, problem: AttentionProblem, qo_head: int) -> int:
        """The KV head a query head reads. [GQA-MAP]"""
        return qo_head // problem.group_size

    def head_slots(self, problem: AttentionProblem, slots: Slots, kv_head: int) -> IntArray:
        """Where one KV head's part of the slots lies, (n,). [COORD-HEAD-PAGE]"""
        return problem.cache.head_slots(slots, kv_head).values

    # -- what is computed with ------------------------------------------------------------------------------------

    def query(self, problem: AttentionProblem, where: QueryRow, q: FloatArray) -> FloatArray:
        """The query as scores see it, (head_dim_qk,). [ROPE-POSITION]"""
        if problem.rope is None or not problem.rope.turns:
            return q
        return rotate(q[None], np.array([where.q_idx]), problem.rope)[0]

    def key_numbers(self, problem: AttentionProblem, slots: IntArray, kv_head: int, k: FloatArray) -> FloatArray:
        """The keys as the cache holds them, dequantized, (n, head_dim_qk). [QUANT-VALUE]"""
        return dequantize(k[slots, kv_head], problem.k_quant, slots, kv_head, page_size=problem.cache.page_size)

    def turn_keys(self, problem: AttentionProblem, keys: FloatArray, positions: IntArray) -> FloatArray:
        """The keys as scores see them. [ROPE-POSITION]"""
        if problem.rope is None or not problem.rope.turns:
            return keys
        return rotate(keys, positions, problem.rope)

    def keys(
        self, problem: AttentionProblem, positions: Positions, slots: IntArray, kv_head: int, k: FloatArray
    ) -> FloatArray:
        """The keys at some positions, as scores see them, (n, head_dim_qk)."""
        return self.turn_keys(problem, self.key_numbers(problem, slots, kv_head, k), positions.values)

    def values(self, problem: AttentionProblem, slots: IntArray, kv_head: int, v: FloatArray) -> FloatArray:
        """The values that are summed, (n, head_dim_vo). [QUANT-VALUE]"""
        return dequantize(v[slots, kv_head], problem.v_quant, slots, kv_head, page_size=problem.cache.page_size)

    def dropout_weights(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions
    ) -> FloatArray:
        """What each probability is multiplied by in the numerator, (n,). [DROPOUT-COUNTER, DROPOUT-NUMERATOR]"""
        if problem.dropout is None:
            return np.ones(len(positions))
        kept = kept_edges(problem.dropout, where.request, qo_head, where.q_idx, positions.values)
        return np.where(kept, problem.dropout.factor, 0.0)

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
            slope = slope * score_rule_slope(rule, scores, qo_head, where.q_idx, positions.values)
            scores = apply_score_rule(rule, scores, qo_head, where.q_idx, positions.values)
        return scores + self.rank_bias(problem, where, qo_head, positions), slope

    def rank_bias(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions
    ) -> FloatArray | float:
        """What a sequence's ranks add to the scores; 0 for a set. [SET-SEQUENCE]"""
        lists = problem.candidates
        if lists is None or lists.rank_bias is None:
            return 0.0
        entries = lists.entries(problem.list_index(where, qo_head))
        return candidate_lists.rank_bias_of(entries, positions.values, lists.rank_bias)

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

    def epilogue(self, problem: AttentionProblem, qo_head: int, out: FloatArray) -> FloatArray:
        """What is done to a complete row. [MERGE-EPILOGUE]"""
        return apply_epilogue(problem.epilogue, out, qo_head)

    def load(
        self,
        problem: AttentionProblem,
        where: QueryRow,
        qo_head: int,
        positions: Positions,
        q: FloatArray,  # (head_dim_qk,)
        k: FloatArray,  # (num_slots, num_kv_heads, head_dim_qk)
        v: FloatArray,  # (num_slots, num_kv_heads, head_dim_vo)
    ) -> tuple[FloatArray, FloatArray]:
        """Scores of some keys, (n,), and the values that are summed under them, (n, head_dim_vo)."""
        kv_head = self.kv_head(problem, qo_head)
        slots = self.head_slots(problem, self.slots(problem, where, positions), kv_head)
        dot = self.keys(problem, positions, slots, kv_head, k) @ self.query(problem, where, q)
        scores, _ = self.scores(problem, where, qo_head, positions, dot)
        weights = self.dropout_weights(problem, where, qo_head, positions)
        return scores, weights[:, None] * self.values(problem, slots, kv_head, v)

    def attend(
        self,
        problem: AttentionProblem,
        where: QueryRow,
        qo_head: int,
        q: FloatArray,  # (head_dim_qk,)
        k: FloatArray,  # (num_slots, num_kv_heads, head_dim_qk)
        v: FloatArray,  # (num_slots, num_kv_heads, head_dim_vo)
    ) -> tuple[FloatArray, float]:
        """One row and head, from its candidates to its merged output and lse."""
        positions = self.effective(problem, where, qo_head)
        if not len(positions) and problem.empty_row == "refuse":
            raise RefusedInput("EMPTY-POLICY", "row", where.row, "it sees no key and empty_row is 'refuse'")
        scores, values = self.load(problem, where, qo_head, positions, q, k, v)
        states = [self.state(scores[piece], values[piece]) for piece in self.splits(len(scores))]
        return self.finish(problem, qo_head, self.merge(states, v.shape[2]))

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        """Attention of every row and head; shapes as in `attend`, with q (total_q, num_qo_heads, head_dim_qk)."""
        self.refuse(problem)
        merged = np.zeros((problem.total_q, problem.num_qo_heads, problem.head_dim_vo))
        lse = np.full((problem.total_q, problem.num_qo_heads), -np.inf)
        for where in problem.rows():
            for h in range(problem.num_qo_heads):
                merged[where.row, h], lse[where.row, h] = self.attend(problem, where, h, q[where.row, h], k, v)
        if not problem.epilogue:
            return AttentionResult(merged, lse)
        out = np.stack([self.epilogue(problem, h, merged[:, h]) for h in range(problem.num_qo_heads)], axis=1)
        return AttentionResult(out, lse, merged)
