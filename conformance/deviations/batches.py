"""Mistakes about what a batch has of the one before it: its size, its rows, its ended requests, its queries. [PLAN]"""

from dataclasses import replace

import numpy as np
import torch

from attnconform.conformance.adapters.reference_plans import Plan, ReferencePlans
from attnconform.conformance.adapters.reference_steps import StepsBackend
from attnconform.conformance.backend import Forward, Tensors
from attnconform.conformance.deviations.deviation import deviates
from attnconform.conformance.views import ProblemView
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.steps import AttentionResult, Steps


@deviates("PLAN-REPLAN", fault_class="C", report="BR-95 alibaba/rtp-llm#378: the longest request of a capture")
class CutsToTheLongestOfTheFirstCall(StepsBackend):
    """No request is attended further than the longest one of the first call was long."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.longest: int | None = None

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        lengths = problem.spec.seqlen_kv
        if self.longest is None:
            self.longest = int(lengths.max(initial=0))
        if problem.spec.candidates is None:
            cut = replace(problem.spec, seqlen_kv=np.minimum(lengths, self.longest))
            problem = replace(problem, spec=cut)
        return super().forward(problem, tensors)


@deviates("PLAN-REPLAN", fault_class="C", report="flashinfer-ai/flashinfer#2046: the batch size of a capture")
class RunsAsManyRequestsAsTheFirstCallHad(StepsBackend):
    """Requests beyond the number of those in the first call are not written."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.requests: int | None = None

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        out, lse = tensors.out.clone(), tensors.lse.clone()
        done = super().forward(problem, tensors)
        if self.requests is None:
            self.requests = problem.spec.batch_size
        end = int(problem.spec.qo_indptr[min(self.requests, problem.spec.batch_size)])
        tensors.out[end:], tensors.lse[end:] = out[end:], lse[end:]
        return done


@deviates("PLAN-REPLAN", fault_class="E", report="vllm-project/vllm#37442: places of a batch that are no longer used")
class KeepsTheResultsOfEndedRequests(ReferencePlans):
    """Rows of a request that has no keys any more come out as they did in the plan's run before."""

    def run(self, handle: Plan, tensors: Tensors) -> Forward:
        out, lse = (torch.from_numpy(x.copy()) for x in (handle.planned.out, handle.planned.lse))
        done = super().run(handle, tensors)
        spec = handle.planned.problem
        for n in np.flatnonzero(spec.seqlen_kv == 0).tolist():
            rows = slice(int(spec.qo_indptr[n]), int(spec.qo_indptr[n + 1]))
            tensors.out[rows], tensors.lse[rows] = out[rows].to(tensors.out.dtype), lse[rows].to(torch.float32)
        return done


@deviates("PLAN-REPLAN", fault_class="C", report="no report: where rows begin, copied when the plan was made")
class KeepsItsRowsWhenPlannedAgain(ReferencePlans):
    """Rows belong to the requests that they belonged to when the plan was made, where nothing is listed."""

    def replan(self, handle: Plan, problem: ProblemView) -> Plan:
        before = handle.planned.problem.qo_indptr
        handle = super().replan(handle, problem)
        now = handle.planned.problem
        fits = now.candidates is None and len(before) == len(now.qo_indptr)
        handle.planned.problem = replace(now, qo_indptr=before) if fits else now
        return handle


@deviates("PLAN-APART", fault_class="C", report="BR-95 alibaba/rtp-llm#1084: two wrappers, one set of parameters")
class TakesTheScaleOfTheNextPlan(ReferencePlans):
    """A plan scales by what the plan that was made after it is to scale by."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.before: Plan | None = None

    def plan(self, problem: ProblemView, dtype: torch.dtype) -> Plan:
        made = super().plan(problem, dtype)
        if self.before is not None:
            spec = self.before.planned.problem
            self.before.planned.problem = replace(spec, sm_scale=problem.spec.sm_scale)
        self.before = made
        return made


@deviates("PLAN-WORKSPACE", fault_class="P", report="BR-19 flashinfer-ai/flashinfer#1046: on-chip memory of another op")
class AddsZeroTimesTheQueriesBefore(StepsBackend):
    """Rows are added to 0 times the queries of the call before, which NaN survives."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.queries: FloatArray = np.zeros(0)

    def store(self, tensors: Tensors, result: AttentionResult) -> None:
        left = 0.0 * self.queries.sum()
        self.queries = tensors.q.to(torch.float64).numpy().copy()
        super().store(tensors, AttentionResult(result.out + left, result.lse))


@deviates("MASK-INTERFERE", fault_class="P", report="BR-20 sgl-project/sglang#15757: NaN in another request's query")
class AddsZeroTimesTheRowBefore(Steps):
    """The query of the row before takes part with a weight of 0, as a lane of the same tile."""

    def forward(self, problem: AttentionProblem, q: FloatArray, k: FloatArray, v: FloatArray) -> AttentionResult:
        right = super().forward(problem, q, k, v)
        beside = 0.0 * np.concatenate([np.zeros_like(q[:1]), q[:-1]]).sum(axis=(1, 2))
        return replace(right, out=right.out + beside[:, None, None])
