"""Attention over chosen keys of a paged cache: a plan, its forward, its merge and its backward; and tiers of plans."""

from attnconform.kernels.sparse_attention.backward import Gradients, backward, sparse_attention
from attnconform.kernels.sparse_attention.backward_transpose import transpose_plan
from attnconform.kernels.sparse_attention.dropout import Dropout
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.forward import check_scale_values, merge_states, run
from attnconform.kernels.sparse_attention.plan import CandidateLists, Plan, plan
from attnconform.kernels.sparse_attention.quantization import KVQuantization
from attnconform.kernels.sparse_attention.tier import Tier, plan_tier

__all__ = [
    "CandidateLists",
    "Dropout",
    "Gradients",
    "KVQuantization",
    "Plan",
    "PlanError",
    "Tier",
    "backward",
    "check_scale_values",
    "merge_states",
    "plan",
    "plan_tier",
    "run",
    "sparse_attention",
    "transpose_plan",
]
