"""The interpreter as other projects' kernels need it, and that without it their answers are wrong or none."""

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("Triton compiles here", allow_module_level=True)

import triton
import triton.language as tl

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
