"""Attention that others wrote stays within the bounds of the class it belongs to. [BOUND-OUT] [BOUND-GRAD]"""

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from attnconform.conformance.bounds import NUMERICS_CLASSES

ATTENTION = (
    ("fp32-unfused", torch.float32, SDPBackend.MATH),
    ("fp32", torch.float32, SDPBackend.FLASH_ATTENTION),
    ("bf16-unfused", torch.bfloat16, SDPBackend.MATH),
    ("float64", torch.float64, SDPBackend.MATH),
)


@pytest.fixture
def reduced_precision_math():
    # Without this torch widens bfloat16 before its unfused formula.
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    yield
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


def attend(case, dtype, backend):
    q, k, v, do = (
        torch.as_tensor(x).to(dtype)[None, None] for x in (case.block.q, case.block.k, case.block.v, case.do)
    )
    inputs = [x.requires_grad_(True) for x in (q, k, v)]
    mask = torch.as_tensor(case.block.mask)
    with sdpa_kernel([backend]):
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=case.block.sm_scale)
    grads = torch.autograd.grad(out, inputs, do)
    names = ("out", "dq", "dk", "dv")
    return {name: x.detach()[0, 0].double().numpy() for name, x in zip(names, (out, *grads), strict=True)}


@pytest.mark.parametrize(("name", "dtype", "backend"), ATTENTION)
def test_torch_cpu_attention_stays_within_its_bounds(make_case, reduced_precision_math, family, name, dtype, backend):
    case = make_case(family, 7, rows=12, keys=70, head_dim=64)
    # Rows without keys have bounds of 0 and their own tests.
    case = case.with_block(mask=np.where(case.block.mask.any(1, keepdims=True), case.block.mask, True))

    ratios = case.ratios(NUMERICS_CLASSES[name], attend(case, dtype, backend))

    print(name, family, {bound: round(ratio, 3) for bound, ratio in ratios.items()})
    assert max(ratios.values()) <= 1
