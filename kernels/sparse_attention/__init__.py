"""Attention over chosen keys of a paged cache: a plan, its forward and its merge."""

from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.forward import merge_states, run
from attnconform.kernels.sparse_attention.plan import CandidateLists, Plan, plan

__all__ = ["CandidateLists", "Plan", "PlanError", "merge_states", "plan", "run"]
