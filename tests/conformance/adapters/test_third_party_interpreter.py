"""The interpreter as other projects' kernels need it, and that without it their answers are wrong or none."""

from unittest import mock

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("Triton compiles here", allow_module_level=True)

import triton
import triton.language as tl
from triton.runtime.interpreter import interpreter_semantic

from attnconform.conformance.adapters.third_party_interpreter import third_party_kernels

SIZE = 16


@triton.autotune(configs=[triton.Config({"TILE": 16}), triton.Config({"TILE": 32})], key=[])
@triton.jit
def tuned_kernel(out, TILE: tl.constexpr):
    tl.store(out, TILE)


@triton.jit
def product_kernel(a, b, out, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    at = rows * SIZE + columns
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def elementwise_kernel(a, b, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, (tl.load(a + at) * tl.load(b + at)).to(tl.float32))


@triton.jit
def one_answer_kernel(index, length, values, out, SIZE: tl.constexpr):
    at, entry = tl.arange(0, SIZE), tl.load(index)
    mask = (at < length) & ((entry >= 0) & (entry < length))
    tl.store(out + at, tl.load(values + at, mask=mask, other=0.0))


@triton.jit
def cast_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at).to(tl.bfloat16))


def product(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel gives and what it should give."""
    a, b = (torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (0, 1))
    out = torch.empty(SIZE, SIZE)
    product_kernel[(1,)](a, b, out, SIZE=SIZE)
    return out, a.float() @ b.float()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_products_of_bfloat16_are_right_with_it_and_wrong_without() -> None:
    with third_party_kernels():
        torch.testing.assert_close(*product(torch.bfloat16))
    got, want = product(torch.bfloat16)
    assert not torch.allclose(got, want, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_products_are_left_alone(dtype: torch.dtype) -> None:
    plain, _ = product(dtype)
    with third_party_kernels():
        assert torch.equal(product(dtype)[0], plain)


def test_an_autotuned_kernel_runs_its_first_configuration() -> None:
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="active drivers"):
        tuned_kernel[(1,)](out)
    with third_party_kernels():
        tuned_kernel[(1,)](out)
    assert out.item() == 16


def elementwise() -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel gives and what it should give, rounded once."""
    a, b = (torch.randn(SIZE, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    out = torch.empty(SIZE)
    elementwise_kernel[(1,)](a, b, out, SIZE=SIZE)
    return out, (a * b).float()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_elementwise_products_of_bfloat16_are_right_with_it_and_wrong_without() -> None:
    with third_party_kernels():
        assert torch.equal(*elementwise())
    assert not torch.equal(*elementwise())


@pytest.mark.parametrize("entry", [3, -1])
def test_one_answer_for_a_whole_tile_is_a_mask_with_it_and_none_without(entry: int) -> None:
    index, values, out = torch.tensor([entry], dtype=torch.int32), torch.ones(SIZE), torch.empty(SIZE)
    arguments = (index, 5, values, out)
    with third_party_kernels():
        one_answer_kernel[(1,)](*arguments, SIZE=SIZE)
    assert out.sum() == (5 if entry >= 0 else 0)
    # Triton's own check: the one that `quickened_language` remembers leaves the tile to numpy
    check = "binary_op_type_checking_impl"
    as_it_is = getattr(type(interpreter_semantic), check).__get__(interpreter_semantic)
    with (
        mock.patch.object(interpreter_semantic, check, as_it_is),
        pytest.raises(Exception, match="mask has unsupported dtype"),
    ):
        one_answer_kernel[(1,)](*arguments, SIZE=SIZE)


def test_float32_is_rounded_to_the_nearest_bfloat16_with_it_and_cut_without() -> None:
    x, out = torch.randn(SIZE, generator=torch.Generator().manual_seed(0)), torch.empty(SIZE).bfloat16()
    with third_party_kernels():
        cast_kernel[(1,)](x, out, SIZE=SIZE)
    assert torch.equal(out, x.bfloat16())
    cast_kernel[(1,)](x, out, SIZE=SIZE)
    assert not torch.equal(out, x.bfloat16())
