"""The reference in the steps plan, run, replan and capture: what deviations of a lifecycle are variations of."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Forward, Tensors
from attnconform.conformance.views import ProblemView
from attnconform.reference.attention import check_tensors
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.planned_attention import PlannedAttention


@dataclass
class Plan:
    """A reference plan, and float64 copies of a run's tensors; allocated when it is made. [PLAN-ALLOCATE]"""

    planned: PlannedAttention
    layout: str
    q: torch.Tensor  # (total_q, num_qo_heads, head_dim_qk) float64
    k: torch.Tensor  # (num_pages, page_size, num_kv_heads, head_dim_qk), whatever the cache's layout
    v: torch.Tensor


@dataclass
class Repeats:
    """A captured run: calls what was captured, and reads whatever its storage holds by then."""

    launch: Callable[[], Forward]

    def replay(self) -> Forward:
        return self.launch()


class ReferencePlans(StepsBackend):
    """The reference's steps, planned once and run as often as one likes."""

    name = "reference-plans"

    def plan(self, problem: ProblemView, dtype: torch.dtype) -> Plan:
        spec = problem.spec
        self.steps.refuse(spec)
        cache = (spec.cache.num_pages, spec.cache.page_size, spec.num_kv_heads)
        shapes = (
            (spec.total_q, spec.num_qo_heads, spec.head_dim_qk),
            (*cache, spec.head_dim_qk),
            (*cache, spec.head_dim_vo),
        )
        q, k, v = (torch.empty(shape, dtype=torch.float64) for shape in shapes)
        return Plan(PlannedAttention(spec, steps=self.steps), spec.cache.layout, q, k, v)

    def run(self, handle: Plan, tensors: Tensors) -> Forward:
        q, k, v = self.load(handle, tensors)
        spec = handle.planned.problem
        check_tensors(spec, q, k, v)
        result = handle.planned.run(q, k, v)
        self.store(tensors, result)
        return Forward(tensors.out, tensors.lse, path="native", saved=result)

    def load(self, handle: Plan, tensors: Tensors) -> tuple[FloatArray, FloatArray, FloatArray]:
        """q, and k and v by slot, in the plan's own float64 storage."""
        for into, given in ((handle.q, tensors.q), (handle.k, tensors.k_cache), (handle.v, tensors.v_cache)):
            into.copy_(given.transpose(1, 2) if given.dim() == 4 and handle.layout == "HND" else given)
        num_slots = handle.k.shape[0] * handle.k.shape[1]
        q, k, v = (np.asarray(x.numpy()) for x in (handle.q, handle.k, handle.v))
        return q, k.reshape(num_slots, *k.shape[2:]), v.reshape(num_slots, *v.shape[2:])

    def replan(self, handle: Plan, problem: ProblemView) -> Plan:
        self.steps.refuse(problem.spec)
        handle.planned.replan(problem.spec)
        return handle

    def capture(self, handle: Plan, tensors: Tensors) -> Repeats:
        return Repeats(lambda: self.run(handle, tensors))

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        return self.run(self.plan(problem, tensors.q.dtype), tensors)
