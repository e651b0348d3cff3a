"""The bundled Triton kernels' tiers: decode plans of fixed storage, renewed in place and replayed. [PLAN-REPLAN]"""

from dataclasses import dataclass
from typing import Any

import torch
from msgspec.structs import replace

from attnconform.conformance.adapters.triton_kernels import TritonKernels, refuse_inexpressible, sink_tensor
from attnconform.conformance.backend import Domain, Forward, OneOf, Tensors
from attnconform.conformance.views import ProblemView
from attnconform.reference.candidates import Candidates
from attnconform.reference.errors import RefusedInput

# one query row a request, at its last committed position, which sees what its list admits
OF_A_TIER: dict[str, Domain] = {
    "phase": OneOf(("decode",)),
    "lengths": OneOf(("one", "page_edge", "tile_edge", "long_and_short")),
    "granularity": OneOf(("token", "block")),
    "q_block": OneOf(("1",)),
    "mask": OneOf(("none",)),
    "dropout": OneOf(("none",)),
    "refusal": OneOf(()),
}


@dataclass
class TierHandle:
    """A tier, what it was made for, and the index tensors that its last update read."""

    tier: Any
    made_for: tuple[Any, ...]
    indices: tuple[torch.Tensor, ...] = ()


class TritonTiers(TritonKernels):
    """plan_tier, update and run of kernels/sparse_attention."""

    name = "triton-tiers"

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        supported = {**self.capabilities.supported, **OF_A_TIER}
        self.capabilities = replace(self.capabilities, supported=supported, has_backward=False)

    def plan(self, problem: ProblemView, dtype: torch.dtype) -> TierHandle:
        spec, lists = problem.spec, lists_of(problem)
        longest = max(int(spec.seqlen_kv.max(initial=0)), 1)
        tier = self.kernels.plan_tier(
            batch_size=spec.batch_size,
            capacity=-(-longest // lists.block_size) * lists.block_size,
            max_seqlen_kv=longest,
            page_size=spec.cache.page_size,
            num_pages=spec.cache.num_pages,
            num_qo_heads=spec.num_qo_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim_qk=spec.head_dim_qk,
            head_dim_vo=spec.head_dim_vo,
            sm_scale=spec.sm_scale,
            dtype=dtype,
            device=self.device,
            granularity=lists.granularity,
            block_size=lists.block_size,
            sharing=lists.sharing,
            window=lists.window,
            num_sink_tokens=lists.num_sink_tokens,
            score_rules=[self.lower(rule) for rule in spec.score_rules],
            sink_logits=sink_tensor(spec, self.device),
            num_kv_splits=problem.hints.num_kv_splits,
            layout=spec.cache.layout,
            k_quant=self.quantization(spec.k_quant),
            v_quant=self.quantization(spec.v_quant),
        )
        return self.replan(TierHandle(tier, kept_by_a_tier(problem)), problem)

    def replan(self, handle: TierHandle, problem: ProblemView) -> TierHandle:
        spec, lists = problem.spec, lists_of(problem)
        if handle.made_for != kept_by_a_tier(problem):
            return self.plan(problem, handle.tier.plan.dtype)
        table = torch.full_like(handle.tier.plan.page_table, -1)
        given = problem.tensor(spec.cache.page_table)
        table[:, : given.shape[1]] = given
        owned = None if spec.cache.owned is None else problem.tensor(spec.cache.owned, torch.bool)
        handle.indices = (
            problem.tensor(spec.seqlen_kv),
            table,
            problem.tensor(lists.indptr),
            problem.tensor(lists.indices),
        )
        names = ("seqlen_kv", "page_table", "indptr", "indices")
        handle.tier.update(**dict(zip(names, handle.indices, strict=True)), owned=owned)
        handle.tier.raise_if_refused()
        return handle

    def forward(self, problem: ProblemView, tensors: Tensors) -> Forward:
        handle = self.plan(problem, tensors.q.dtype)
        self.kernels.check_scale_values(handle.tier.plan, k_scale=tensors.k_scale, v_scale=tensors.v_scale)
        return self.run(handle, tensors)

    def run(self, handle: TierHandle, tensors: Tensors) -> Forward:
        return super().run(handle.tier.plan, tensors)


def kept_by_a_tier(problem: ProblemView) -> tuple[Any, ...]:
    """Numbers that an update does not renew: another tier is made for others."""
    spec, lists = problem.spec, lists_of(problem)
    sinks = None if spec.sink_logits is None else tuple(spec.sink_logits)
    return spec.sm_scale, sinks, spec.score_rules, lists.window, lists.num_sink_tokens


def lists_of(problem: ProblemView) -> Candidates:
    """The lists of a decode batch. Raises RefusedInput for what a tier has no place for. [PLAN-CAPACITY]"""
    spec, lists = problem.spec, problem.spec.candidates
    if lists is None:
        raise RefusedInput("PLAN-CAPACITY", "candidates", None, "a tier has a list for each row")
    if spec.mask_rule is not None:
        raise RefusedInput("PLAN-CAPACITY", "mask_rule", spec.mask_rule, "a tier's rows see what their lists admit")
    refuse_inexpressible(spec)
    rows = spec.qo_indptr.tolist()
    if rows != list(range(spec.batch_size + 1)) or (spec.q_offset != spec.seqlen_kv - 1).any():
        raise RefusedInput("PLAN-CAPACITY", "qo_indptr", rows, "a tier has one row a request, at its last position")
    return lists
