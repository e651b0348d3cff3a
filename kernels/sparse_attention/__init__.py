"""Attention over chosen keys of a paged cache: a plan, its forward, its merge and its backward.

For candidates that change from step to step there are tiers (`plan_tier`), by capacity (`TierCache`) and in turn
(`TierRing`); for batches that may have to be dense, `Attention`; for candidates that are read many times,
`plan_gather`. Block masks are in `block_mask`, measured choices in `autotune`, all other choices of speed in `tuning`.
"""

from attnconform.kernels.sparse_attention.autograd import sparse_attention
from attnconform.kernels.sparse_attention.backward import Gradients, backward
from attnconform.kernels.sparse_attention.backward_hints import BackwardHints
from attnconform.kernels.sparse_attention.backward_plan import BackwardPlan, plan_backward
from attnconform.kernels.sparse_attention.backward_transpose import transpose_plan
from attnconform.kernels.sparse_attention.dense import plan_dense, run_dense
from attnconform.kernels.sparse_attention.dropout import Dropout
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.fallback import Attention
from attnconform.kernels.sparse_attention.forward import replay, run
from attnconform.kernels.sparse_attention.gather import plan_gather
from attnconform.kernels.sparse_attention.merging import merge_states
from attnconform.kernels.sparse_attention.plan import CandidateLists, Plan, plan
from attnconform.kernels.sparse_attention.quantization import KVQuantization
from attnconform.kernels.sparse_attention.run_checks import check_scale_values
from attnconform.kernels.sparse_attention.tier import Tier, plan_tier
from attnconform.kernels.sparse_attention.tier_cache import TierCache
from attnconform.kernels.sparse_attention.tier_ring import TierRing

__all__ = [
    "Attention",
    "BackwardHints",
    "BackwardPlan",
    "CandidateLists",
    "Dropout",
    "Gradients",
    "KVQuantization",
    "Plan",
    "PlanError",
    "Tier",
    "TierCache",
    "TierRing",
    "backward",
    "check_scale_values",
    "merge_states",
    "plan",
    "plan_backward",
    "plan_dense",
    "plan_gather",
    "plan_tier",
    "replay",
    "run",
    "run_dense",
    "sparse_attention",
    "transpose_plan",
]
