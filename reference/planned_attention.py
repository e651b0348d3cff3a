"""Attention in two steps: a plan that owns all it needs, and runs that read nothing else than their tensors. [PLAN]"""

from copy import deepcopy

import numpy as np

from attnconform.reference.coordinates import FloatArray
from attnconform.reference.errors import RefusedInput
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.steps import AttentionResult, Steps


class PlannedAttention:
    """A plan: a copy of the problem, and a workspace for its rows that no other plan shares. [PLAN-APART, PLAN-COPY]"""

    def __init__(self, problem: AttentionProblem, *, steps: Steps | None = None) -> None:
        self.steps = steps or Steps()
        shape = (problem.total_q, problem.num_qo_heads)
        self.out: FloatArray = np.empty((*shape, problem.head_dim_vo))
        self.lse: FloatArray = np.empty(shape)
        self.replan(problem)

    @property
    def workspace_bytes(self) -> int:
        """What a run may write besides its outputs, known before any run. [PLAN-ALLOCATE]"""
        return self.out.nbytes + self.lse.nbytes

    def replan(self, problem: AttentionProblem) -> None:
        """The same storage for another problem; nothing of the one before is left. [PLAN-REPLAN, PLAN-COPY]

        Raises RefusedInput where the rows do not fit, and then the plan before still stands. [PLAN-CAPACITY]
        """
        shape = (problem.total_q, problem.num_qo_heads, problem.head_dim_vo)
        if shape != self.out.shape:
            raise RefusedInput("PLAN-CAPACITY", "out.shape", shape, f"the plan was made for {self.out.shape}")
        self.problem = deepcopy(problem)

    def run(self, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        """Attention of tensors as they are now, in the plan's own workspace. [PLAN-INPUTS, PLAN-WORKSPACE]"""
        result = self.steps.forward(self.problem, q, k, v)
        self.out[...], self.lse[...] = result.out, result.lse
        return result
