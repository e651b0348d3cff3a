"""The reference itself: the forward's steps, and the backward as the explicit formula over the same edges."""

from dataclasses import dataclass

import numpy as np

from attnconform.reference.coordinates import FloatArray, IntArray, Positions
from attnconform.reference.epilogue import epilogue_slope
from attnconform.reference.forward_steps import ForwardSteps
from attnconform.reference.problem import AttentionProblem, QueryRow
from attnconform.reference.results import AttentionResult, Gradients
from attnconform.reference.rope import rotate
from attnconform.reference.rule_values import (
    apply_score_rule,
    parameter_gradient,
    parameter_shape,
    score_rule_slope,
)

__all__ = ["AttentionResult", "Gradients", "Steps", "Upstream"]


@dataclass(frozen=True)
class Upstream:
    """What enters the backward of one row and head."""

    q: FloatArray  # (head_dim_qk,)
    merged: FloatArray  # (head_dim_vo,) out before the epilogue
    lse: float
    dout: FloatArray  # (head_dim_vo,) gradient of the merged output
    dlse: float


class Steps(ForwardSteps):
    """The steps of forward and backward; the loops over rows and heads are in `forward` and `backward`."""

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
        """Gradients by the explicit formula over the forward's own edges. [GRAD-FORMULA, GRAD-SET, GRAD-SUM]

        Those of k and v are with respect to the numbers attention computes with: of a quantized cache, the
        dequantized ones. [QUANT-GRAD]
        """
        into = self.no_gradients(problem)
        for where in problem.rows():
            for h in range(problem.num_qo_heads):
                row = (where.row, h)
                merged = result.before_epilogue[row]
                arrives = Upstream(
                    q=q[row],
                    merged=merged,
                    lse=float(result.lse[row]),
                    dout=self.through_epilogue(problem, h, merged, dout[row]),
                    dlse=0.0 if dlse is None else float(dlse[row]),
                )
                self.add_row(problem, where, h, k, v, arrives, into)
        return into

    def no_gradients(self, problem: AttentionProblem) -> Gradients:
        """Zeros in the shape of the gradients, to be added to."""
        touched = self.touched_slots(problem)
        return Gradients(
            dq=np.zeros((problem.total_q, problem.num_qo_heads, problem.head_dim_qk)),
            slots=touched,
            dk=np.zeros((len(touched), problem.num_kv_heads, problem.head_dim_qk)),
            dv=np.zeros((len(touched), problem.num_kv_heads, problem.head_dim_vo)),
            dsink=None if problem.sink_logits is None else np.zeros(problem.num_qo_heads),
            dscore=tuple(np.zeros(parameter_shape(rule)) for rule in problem.score_rules),
        )

    def add_row(
        self,
        problem: AttentionProblem,
        where: QueryRow,
        qo_head: int,
        k: FloatArray,
        v: FloatArray,
        arrives: Upstream,
        into: Gradients,
    ) -> None:
        """Adds one row and head's part of every gradient."""
        kv_head = self.kv_head(problem, qo_head)
        positions = self.effective_in_backward(problem, where, qo_head)
        slots = self.head_slots(problem, self.slots(problem, where, positions), kv_head)
        at = np.searchsorted(into.slots, slots)
        query, keys = (
            self.query(problem, where, arrives.q),
            self.keys(problem, positions, slots, kv_head, k),
        )
        weights = self.dropout_weights_in_backward(problem, where, qo_head, positions)
        dot = keys @ query
        scores, slope = self.scores(problem, where, qo_head, positions, dot)
        p = self.probabilities(scores, arrives.lse)
        dp = weights * (self.values(problem, slots, kv_head, v) @ arrives.dout)
        delta = self.delta(arrives.dout, arrives.merged, arrives.dlse)
        ds = self.score_gradient(p, dp, delta, slope)
        into.dq[where.row, qo_head] = self.to_query(problem, where, np.asarray(problem.sm_scale * (ds @ keys)))
        # a slot may appear twice, under two positions, and then takes both contributions [SET-ALIAS]
        to_keys = self.to_keys(problem, positions, np.asarray(problem.sm_scale * np.outer(ds, query)))
        self.accumulate(into.dk[:, kv_head], at, to_keys)
        self.accumulate(into.dv[:, kv_head], at, np.asarray(np.outer(weights * p, arrives.dout)))
        if into.dsink is not None and problem.sink_logits is not None:
            into.dsink[qo_head] += self.sink_gradient(float(problem.sink_logits[qo_head]), arrives.lse, delta)
        upstream = self.score_gradient(p, dp, delta, np.ones_like(slope))
        for total, part in zip(
            into.dscore, self.rule_gradients(problem, where, qo_head, positions, dot, upstream), strict=True
        ):
            total[...] += part

    def through_epilogue(
        self, problem: AttentionProblem, qo_head: int, merged: FloatArray, dout: FloatArray
    ) -> FloatArray:
        """Gradient of the merged output from that of out. [GRAD-EPILOGUE]"""
        return dout * epilogue_slope(problem.epilogue, merged, qo_head) if problem.epilogue else dout

    def effective_in_backward(self, problem: AttentionProblem, where: QueryRow, qo_head: int) -> Positions:
        """The saved edges of the forward, never a new selection. [GRAD-SET]"""
        return self.effective(problem, where, qo_head)

    def dropout_weights_in_backward(
        self, problem: AttentionProblem, where: QueryRow, qo_head: int, positions: Positions
    ) -> FloatArray:
        """The same weights as in the forward. [DROPOUT-BACKWARD]"""
        return self.dropout_weights(problem, where, qo_head, positions)

    def probabilities(self, scores: FloatArray, lse: float) -> FloatArray:
        """Softmax weights from the saved lse; an empty row has none. [GRAD-FORMULA, EMPTY-GRAD]"""
        return np.exp(scores - lse) if len(scores) else scores

    def delta(self, dout: FloatArray, out: FloatArray, dlse: float) -> float:
        """What every key of the row subtracts: sum of p * dp, less the gradient that enters by lse. [GRAD-LSE]"""
        return float(dout @ out) - dlse

    def score_gradient(self, p: FloatArray, dp: FloatArray, delta: float, slope: FloatArray) -> FloatArray:
        """Gradient of the scaled dot products. [GRAD-FORMULA, GRAD-SOFTCAP]"""
        return p * (dp - delta) * slope

    def to_query(self, problem: AttentionProblem, where: QueryRow, gradient: FloatArray) -> FloatArray:
        """Gradient of the query as it arrived, from that of the turned one. [ROPE-GRAD]"""
        if problem.rope is None or not problem.rope.turns:
            return gradient
        return rotate(gradient[None], np.array([where.q_idx]), problem.rope, inverse=True)[0]

    def to_keys(self, problem: AttentionProblem, positions: Positions, gradient: FloatArray) -> FloatArray:
        """Gradients of the keys as the cache holds them, from those of the turned ones. [ROPE-GRAD]"""
        if problem.rope is None or not problem.rope.turns:
            return gradient
        return rotate(gradient, positions.values, problem.rope, inverse=True)

    def rule_gradients(
        self,
        problem: AttentionProblem,
        where: QueryRow,
        qo_head: int,
        positions: Positions,
        dot: FloatArray,  # (n,) q . k
        upstream: FloatArray,  # (n,) gradient of the final scores
    ) -> list[FloatArray]:
        """Gradients of each score rule's parameters, last rule first in the chain. [GRAD-RULE]"""
        inputs, scores = [], self.scale(problem, dot)
        for rule in problem.score_rules:
            inputs.append(scores)
            scores = apply_score_rule(rule, scores, qo_head, where.q_idx, positions.values)
        gradients: list[FloatArray] = []
        for rule, given in zip(reversed(problem.score_rules), reversed(inputs), strict=True):
            gradients.insert(0, parameter_gradient(rule, given, upstream, qo_head, where.q_idx, positions.values))
            upstream = upstream * score_rule_slope(rule, given, qo_head, where.q_idx, positions.values)
        return gradients

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
        parts = [np.empty(0, dtype=np.int64)]
        for where in problem.rows():
            for h in range(problem.num_qo_heads):
                slots = self.slots(problem, where, self.effective_in_backward(problem, where, h))
                parts.append(self.head_slots(problem, slots, self.kv_head(problem, h)))
        return np.unique(np.concatenate(parts))
