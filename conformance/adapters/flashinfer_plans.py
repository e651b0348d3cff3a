"""Plan, run, replan and capture of FlashInfer's paged wrappers, one wrapper for each group of heads."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnconform.conformance.adapters.cuda_graphs import CapturedRun
from attnconform.conformance.adapters.flashinfer_package import FlashInfer, HeadGroup, head_groups
from attnconform.conformance.backend import Forward, Tensors
from attnconform.conformance.views import ProblemView

NAN = float("nan")


@dataclass(frozen=True)
class Part:
    """A planned wrapper of heads that attend alike, with outputs of its own, which have no gaps."""

    group: HeadGroup
    wrapper: Any
    dtype: torch.dtype
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Plan:
    """All that runs of a problem need."""

    problem: ProblemView
    parts: list[Part]


class FlashInferPaged(FlashInfer):
    """A paged wrapper of FlashInfer's; subclasses say which, and how it is planned."""

    def wrapper(self, problem: ProblemView, group: HeadGroup, for_graph: bool) -> Any:
        """A new wrapper, with index buffers of its own where it is to be captured."""
        raise NotImplementedError

    def fill(self, wrapper: Any, problem: ProblemView, group: HeadGroup, dtype: torch.dtype) -> None:
        """Plans a wrapper, for the first time or again."""
        raise NotImplementedError

    def caches(self, problem: ProblemView, tensors: Tensors, group: HeadGroup) -> tuple[Tensor, Tensor]:
        """K and V pages of a group's heads."""
        raise NotImplementedError

    def part(self, problem: ProblemView, group: HeadGroup, dtype: torch.dtype, for_graph: bool) -> Part:
        """The plan of one group of heads."""
        wrapper, spec = self.wrapper(problem, group, for_graph), problem.spec
        self.fill(wrapper, problem, group, dtype)
        out = torch.empty((spec.total_q, group.num_qo_heads, spec.head_dim_vo), dtype=dtype, device=self.device)
        lse = torch.empty((spec.total_q, group.num_qo_heads), dtype=torch.float32, device=self.device)
        return Part(group, wrapper, dtype, out, lse)

    def parts(self, problem: ProblemView, dtype: torch.dtype, for_graph: bool) -> Plan:
        groups = head_groups(problem.spec)
        return Plan(problem, [self.part(problem, group, dtype, for_graph) for group in groups])

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        return self.run(self.parts(problem, tensors.q.dtype, for_graph=False), tensors)

    def plan(self, problem: ProblemView, dtype: torch.dtype) -> Plan:
        return self.parts(problem, dtype, for_graph=True)

    def replan(self, handle: Plan, problem: ProblemView) -> Plan:
        """In the wrappers and buffers that are there, as a captured graph needs it."""
        for part in handle.parts:
            self.fill(part.wrapper, problem, part.group, part.dtype)
        return Plan(problem, handle.parts)

    def run(self, handle: Plan, tensors: Tensors) -> Forward:
        for part in handle.parts:
            run_part(part, tensors, self.caches(handle.problem, tensors, part.group))
        return Forward(tensors.out, tensors.lse, path=self.name)

    def capture(self, handle: Plan, tensors: Tensors) -> CapturedRun:
        return CapturedRun(lambda: self.run(handle, tensors), self.device)


def run_part(part: Part, tensors: Tensors, caches: tuple[Tensor, Tensor]) -> None:
    """One call, straight into the outputs where it gives all heads and they have no gaps, which it takes for granted.

    What it leaves unwritten stays poisoned.
    """
    is_whole = part.out.shape == tensors.out.shape
    if is_whole and tensors.out.is_contiguous() and tensors.lse.is_contiguous():
        part.wrapper.run(tensors.q, caches, out=tensors.out, lse=tensors.lse, return_lse=True)
        return
    heads, out, lse = part.group.qo_heads, part.out.fill_(NAN), part.lse.fill_(NAN)
    part.wrapper.run(tensors.q[:, heads], caches, out=out, lse=lse, return_lse=True)
    tensors.out[:, heads], tensors.lse[:, heads] = out, lse
