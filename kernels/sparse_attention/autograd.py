"""Sparse attention as a differentiable function of q, the caches, the sink logits and the score rules' numbers.

The backward uses the plan's lists, whatever selector or table made them has become since, and the numbers the forward
used: slopes, caps, tables, data, sinks and the dropout seed are copied when it runs, a few numbers each, so that an
optimizer step or a new seed before the backward changes nothing. What is too large to copy (q, the caches, out, the
data of a Custom mask) is saved as autograd saves it: editing it in place before the backward is an error of torch's.
Under activation checkpointing the region is run twice: make the plan outside it, or keep the one that the first run
made, since a selection made again may be another. [GRAD-SET, GRAD-FORMULA, GRAD-RULE]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnconform.kernels.sparse_attention.backward import backward, refuse_quantized
from attnconform.kernels.sparse_attention.backward_hints import Mode
from attnconform.kernels.sparse_attention.backward_plan import BackwardPlan
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.forward import run
from attnconform.kernels.sparse_attention.plan import Plan
from attnconform.kernels.sparse_attention.rules import Alibi, CustomScore, RelativeBias, ScoreRule


def sparse_attention(
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    sink_logits: Tensor | None = None,  # the tensor the plan was given, where it wants a gradient
    score_params: Sequence[Tensor | None] | None = None,  # one per score rule, used instead of the rule's own numbers
    mode: Mode | None = None,
    work: BackwardPlan | None = None,  # plan_backward(plan), which the backward makes where it is not given
) -> tuple[Tensor, Tensor]:
    """`run` with gradients: out and lse, both differentiable by every tensor given here. [GRAD-FORMULA]

    A rule's tensor has the shape of its gradient: (num_qo_heads,) slopes, () cap, (num_qo_heads, 2 D + 1) tables,
    (len(data),) data. The plan keeps its values from then on; they are not read back, so that caps are not checked.
    Raises PlanError where a cache is quantized, or a tensor is not of the plan. [QUANT-GRAD, GRAD-RULE]
    """
    refuse_quantized(plan)
    if sink_logits is not None:
        _check_sink_logits(plan, sink_logits)
    params = tuple(score_params or ())
    if params:
        _check_score_params(plan, params)
        write_score_params(plan, params)
    out, lse = _SparseAttention.apply(plan, q, k_cache, v_cache, sink_logits, mode, work, *params)
    return out, lse


def _check_sink_logits(plan: Plan, sink_logits: Tensor) -> None:
    """Refuses sink logits other than the plan's, whose gradient would be of another function."""
    if plan.sink_logits is None:
        raise PlanError("LSE-SINK", "sink_logits", tuple(sink_logits.shape), "the plan has none")
    is_same = sink_logits.shape == plan.sink_logits.shape and (
        sink_logits.data_ptr() == plan.sink_logits.data_ptr()
        or torch.equal(sink_logits.detach().to(plan.sink_logits), plan.sink_logits)
    )
    if not is_same:
        raise PlanError("LSE-SINK", "sink_logits", sink_logits.tolist(), f"the plan has {plan.sink_logits.tolist()}")


def _check_score_params(plan: Plan, params: tuple[Tensor | None, ...]) -> None:
    """Refuses tensors of another count, shape or device than the plan's rules. [GRAD-RULE]"""
    if len(params) != len(plan.score_rules):
        raise PlanError("GRAD-RULE", "len(score_params)", len(params), f"the plan has {len(plan.score_rules)} rules")
    for r, (param, rule) in enumerate(zip(params, plan.score_rules, strict=True)):
        if param is None:
            continue
        if param.shape != parameter_shape(rule):
            limit = f"{type(rule).__name__} has {parameter_shape(rule)}"
            raise PlanError("GRAD-RULE", "score_params", f"of shape {tuple(param.shape)}", limit, (r,))
        if param.device != plan.device:
            raise PlanError("GRAD-RULE", "score_params", f"on {param.device}", f"the plan is on {plan.device}", (r,))


def parameter_shape(rule: ScoreRule) -> tuple[int, ...]:
    """Of a rule's numbers, and of their gradient."""
    match rule:
        case Alibi(slopes):
            return (len(slopes),)
        case RelativeBias(tables):
            return (len(tables), len(tables[0]))
        case CustomScore(data=data):
            return (len(data),)
    return ()


@torch.no_grad()
def write_score_params(plan: Plan, params: tuple[Tensor | None, ...]) -> None:
    """Puts values into the plan, without a synchronization; where a tensor is None the plan's stay."""
    start = 0
    for r, (param, rule) in enumerate(zip(params, plan.score_rules, strict=True)):
        is_tabled = isinstance(rule, RelativeBias | CustomScore)
        size = max(1, torch.Size(parameter_shape(rule)).numel()) if is_tabled else 0
        if param is not None and is_tabled:
            assert plan.score_tables is not None
            plan.score_tables[start : start + param.numel()].copy_(param.flatten())
        elif param is not None:
            plan.score_params[r].copy_(param.expand(plan.num_qo_heads))
        start += size


def keep_numbers(plan: Plan) -> Plan:
    """The same plan with copies of the numbers that may be edited between two runs."""

    def copied(numbers: Tensor | None) -> Tensor | None:
        return None if numbers is None else numbers.detach().clone()

    names = ("score_params", "score_tables", "sink_logits", "dropout_words")
    return replace(plan, **{name: copied(getattr(plan, name)) for name in names})


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        sink_logits: Tensor | None,
        mode: Mode | None,
        work: BackwardPlan | None,
        *params: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out, lse = run(plan, q, k_cache, v_cache)
        ctx.save_for_backward(q, k_cache, v_cache, out, lse, plan.mask_data)
        ctx.plan, ctx.mode, ctx.work = keep_numbers(plan), mode, work
        ctx.sink_dtype = None if sink_logits is None else sink_logits.dtype
        ctx.param_dtypes = tuple(None if param is None else param.dtype for param in params)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        *saved, _ = ctx.saved_tensors
        wants_params = any(ctx.needs_input_grad[7:])
        dq, dk, dv, dsink, dscore = backward(
            ctx.plan, *saved, dout, dlse=dlse, mode=ctx.mode, work=ctx.work, score_gradients=wants_params
        )
        dsink = None if ctx.sink_dtype is None or dsink is None else dsink.to(ctx.sink_dtype)
        dparams = [
            None if dtype is None or dscore is None else dscore[r].to(dtype) for r, dtype in enumerate(ctx.param_dtypes)
        ]
        return None, dq, dk, dv, dsink, None, None, *dparams
