"""The slope of a soft cap errs by no more than the declared accuracy of its tanh allows, from one end to the other."""

import math
import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton
import triton.language as tl

from attnconform.conformance.bounds.numerics import NUMERICS_CLASSES, Numerics
from attnconform.kernels.sparse_attention import backward_edges
from attnconform.kernels.sparse_attention.backward_edges import tanh_with_slope
from attnconform.kernels.sparse_attention.hopper_choice import why_not_here

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE = 1024
U = 2.0**-24


@triton.jit
def tanh_kernel(x_ptr, tanh_ptr, slope_ptr, SIZE: tl.constexpr):
    """tanh of SIZE numbers a program, and its slope."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tanh, slope = tanh_with_slope(tl.load(x_ptr + i))
    tl.store(tanh_ptr + i, tanh)
    tl.store(slope_ptr + i, slope)


def scores() -> torch.Tensor:
    """Scores over the cap of every size, of both signs, small ones and large ones beside each other; whole programs."""
    sizes = np.concatenate([[0.0], np.geomspace(1e-7, 40.0, 16383)]).astype(np.float32)
    both = np.concatenate([sizes, -sizes])
    return torch.from_numpy(np.random.default_rng(7).permutation(both)).to(DEVICE)


def true_slope(x: torch.Tensor) -> torch.Tensor:
    """1 - tanh^2 in float64, by what does not cancel."""
    decay = torch.exp(-2 * x.double().abs())
    return 4 * decay / (1 + decay) ** 2


def declared_error(slope: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """What 1 - t^2 may be off by where t is, as chapter Bounds has it (4.10), the score itself being exact."""
    tanh_error = numerics.tanh_error + 2 * numerics.u
    return 2 * tanh_error * torch.sqrt(1 - slope) + tanh_error**2 + 3 * numerics.u


@triton.jit
def too_large(x):
    """1 / x, and the unit in its last place that a GPU may be off by."""
    return (1.0 / x) * (1.0 + 2.0**-23)


@triton.jit
def too_small(x):
    """Likewise."""
    return (1.0 / x) * (1.0 - 2.0**-23)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("reciprocal", [None, too_large, too_small])
def test_a_slope_errs_by_what_is_declared_and_little_of_itself(
    name: str, reciprocal: triton.JITFunction | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reciprocal is not None:
        if DEVICE.type == "cuda":
            pytest.skip("a GPU has a reciprocal of its own")
        monkeypatch.setattr(backward_edges, "reciprocal", reciprocal)
    x = scores()
    tanh, slope = torch.empty_like(x), torch.empty_like(x)
    tanh_kernel[(x.numel() // SIZE,)](x, tanh, slope, SIZE=SIZE)
    want, numerics = true_slope(x), NUMERICS_CLASSES[name]
    error = (slope - want).abs()
    assert float((tanh - torch.tanh(x.double())).abs().max()) <= numerics.tanh_error
    assert bool((error <= declared_error(want, numerics)).all())
    # the exponent's own rounding is the larger the larger it is
    assert bool((error <= (12 + 4 * x.double().abs()) * U * want).all())


@pytest.mark.skipif(why_not_here(DEVICE) is not None, reason="needs a Hopper GPU")
def test_the_slope_of_hopper_errs_by_what_is_declared() -> None:
    """Relatively, too, where tanh is not negative; it shares reciprocals, so that any two sizes are neighbours."""
    from hopper_tanh import slope_kernel

    factor = float(np.float32(2 / math.log(2)))
    x = scores()
    tanh, slope = torch.empty_like(x), torch.empty_like(x)
    slope_kernel[(x.numel() // SIZE,)](x, tanh, slope, factor, SIZE=SIZE, num_warps=4)
    x = (x * factor).double() / factor  # what rounding x * factor costs is the score's own
    want, numerics = true_slope(x), NUMERICS_CLASSES["bf16-hopper"]
    error = (slope - want).abs()
    assert float((tanh - torch.tanh(x)).abs().max()) <= numerics.tanh_error
    assert bool((error <= declared_error(want, numerics)).all())
    is_small = (x >= 0) & (x < 20)  # past that the slope is kept from vanishing
    assert bool((error <= 24 * U * want)[is_small].all())
