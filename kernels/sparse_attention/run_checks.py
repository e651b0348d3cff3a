"""What a run is given, against what its plan was made for. [SAFE-SHAPE, QUANT-SCALE]"""

from __future__ import annotations

import torch
from torch import Tensor

from attnconform.kernels.sparse_attention.candidates import enumerate_runs, first_index, to_slots
from attnconform.kernels.sparse_attention.errors import PlanError
from attnconform.kernels.sparse_attention.numerics import IS_INTERPRETED
from attnconform.kernels.sparse_attention.plan import Plan


def check_run(
    plan: Plan,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Refuses what a launch could not read or write safely."""
    if plan.device.type == "cpu" and not IS_INTERPRETED:
        limit = "Triton runs there only with TRITON_INTERPRET=1 set before it is imported"
        raise PlanError("SAFE-SHAPE", "device", plan.device, limit)
    check_tensors(plan, (q, k_cache, v_cache, out, lse))
    check_scales(plan, (k_scale, v_scale))


def check_tensors(plan: Plan, tensors: tuple[Tensor, ...]) -> None:
    """Refuses tensors of another shape, dtype or device than planned. [SAFE-SHAPE]"""
    for tensor, (name, shape, dtype) in zip(tensors, plan.tensor_shapes, strict=True):
        if tensor.shape != shape:
            raise PlanError("SAFE-SHAPE", f"{name}.shape", tuple(tensor.shape), f"the plan is for {shape}")
        if tensor.dtype != dtype:
            raise PlanError("SAFE-SHAPE", f"{name}.dtype", tensor.dtype, f"the plan is for {dtype}")
        if tensor.device != plan.device:
            raise PlanError("SAFE-SHAPE", f"{name}.device", tensor.device, f"the plan is for {plan.device}")


def check_scales(plan: Plan, scales: tuple[Tensor | None, Tensor | None]) -> None:
    """Refuses scales that are missing, not asked for, or of another shape, dtype or device. [QUANT-SCALE]"""
    for scale, (name, shape) in zip(scales, plan.scale_shapes, strict=True):
        if scale is None and shape is None:
            continue
        if scale is None or shape is None:
            got, limit = ("None", f"the plan is for {shape}") if scale is None else ("given", "the plan has no codes")
            raise PlanError("QUANT-SCALE", name, got, limit)
        if scale.shape != shape:
            raise PlanError("QUANT-SCALE", f"{name}.shape", tuple(scale.shape), f"the plan is for {shape}")
        if scale.dtype != torch.float32:
            raise PlanError("QUANT-SCALE", f"{name}.dtype", scale.dtype, "must be float32")
        if scale.device != plan.device:
            raise PlanError("QUANT-SCALE", f"{name}.device", scale.device, f"the plan is for {plan.device}")


def check_scale_values(plan: Plan, *, k_scale: Tensor | None = None, v_scale: Tensor | None = None) -> None:
    """Refuses scales that are not finite and above 0; those of pages and slots that no request owns may be anything.

    A run does not look, since it would have to synchronize: call this where scales come from outside. [QUANT-SCALE]
    """
    check_scales(plan, (k_scale, v_scale))
    request, position = enumerate_runs(plan.seqlen_kv)
    slots = to_slots(request, position, plan.page_table, plan.page_size)
    for name, quant, scale in (("k_scale", plan.k_quant, k_scale), ("v_scale", plan.v_quant, v_scale)):
        if quant is None or scale is None:
            continue
        is_owned = torch.ones(scale.shape, dtype=torch.bool, device=scale.device)
        if quant.granularity in ("page", "token"):
            is_owned.zero_()
            is_owned[slots // plan.page_size if quant.granularity == "page" else slots] = True
        is_bad = is_owned & ~(torch.isfinite(scale) & (scale > 0))
        if bool(is_bad.any()):
            index = first_index(is_bad)
            raise PlanError("QUANT-SCALE", name, float(scale[index]), "must be finite and above 0", index)
