"""An adapter whose package is missing says in one line what to install, and the command ends with 2."""

import importlib.util
import sys

import pytest
from click.testing import CliRunner

from attnconform.conformance.adapters.registry import BUNDLED, load_backend
from attnconform.conformance.backend import Unavailable
from attnconform.conformance.command_line import main

# backend -> the package it needs, and the extra that brings it
NEEDED = {
    "ort-attention": ("onnxruntime", "onnx"),
    "ort-gqa": ("onnxruntime", "onnx"),
    "ort-sparse": ("onnx", "onnx"),
    "fla-nsa": ("fla", "fla"),
    "fla-nsa-any-width": ("fla", "fla"),
    "fla-nsa-plain-interpreter": ("fla", "fla"),
    "attn-gym": ("attn_gym", "attn-gym"),
    "attn-gym-repeats": ("attn_gym", "attn-gym"),
    "flashinfer-merge": ("flashinfer", "flashinfer"),
    "flashinfer-merge-states": ("flashinfer", "flashinfer"),
    "flashinfer-merge-cuda": ("flashinfer", "flashinfer"),
    "flashinfer-decode": ("flashinfer", "flashinfer"),
    "flashinfer-decode-tc": ("flashinfer", "flashinfer"),
    "flashinfer-decode-pages": ("flashinfer", "flashinfer"),
    "flashinfer-prefill": ("flashinfer", "flashinfer"),
    "flashinfer-bsr": ("flashinfer", "flashinfer"),
    "flashinfer-bsr-lists": ("flashinfer", "flashinfer"),
    "flashinfer-variable-bsr": ("flashinfer", "flashinfer"),
    "jax-xla": ("jax", "jax"),
    "jax-paged": ("jax", "jax"),
    "jax-splash": ("jax", "jax"),
    "fa3-tokens": ("flash_attn_interface", "fa3"),
    "fa3-pages": ("flash_attn_interface", "fa3"),
    "flash-mla-sparse": ("flash_mla", "flash-mla"),
}


# of packages that are installed without what they ask for, or not at all: no extra could say that
ALONE = {
    "sglang-decode": "sglang",
    "sglang-merge": "sglang",
    "sglang-msa-decode": "sglang",
    "sglang-msa-prefill": "sglang",
    "vllm-decode": "vllm",
    "vllm-unified": "vllm",
    "vllm-m3-decode": "vllm",
    "vllm-m3-prefill": "vllm",
    "vllm-mla-sparse": "vllm",
}


# of nothing but what the suite itself requires: a kernel of the GPU says so, the others run
ON_A_GPU = ("triton-hopper", "flex-decode", "flex-paged", "flex-paged-cleared")
ANYWHERE = (
    "triton", "triton-atomic", "triton-device-plan", "triton-hybrid", "sdpa", "sdpa-lse", "flex-eager", "flex-compiled",
    "flex-compiled-skips", "flex-eager-trusts-blocks", "reference",
)  # fmt: skip


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch):
    """Makes a package one that is not installed."""

    def hide(package: str) -> None:
        find_spec = importlib.util.find_spec
        for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))

    return hide


@pytest.mark.parametrize("backend", NEEDED)
def test_the_message_names_the_extra(backend: str, without) -> None:
    package, extra = NEEDED[backend]
    without(package)
    with pytest.raises(Unavailable) as missing:
        load_backend(backend, "cpu")
    assert f"pip install 'attnconform[{extra}]'" in str(missing.value)


@pytest.mark.parametrize("backend", NEEDED)
def test_the_command_prints_one_line_and_ends_with_2(backend: str, without, tmp_path) -> None:
    package, extra = NEEDED[backend]
    without(package)
    called = CliRunner().invoke(main, ["run", "-b", backend, "--device", "cpu", "--out", str(tmp_path / "out")])
    assert called.exit_code == 2
    assert called.output.count("\n") == 1
    assert f"pip install 'attnconform[{extra}]'" in called.output


@pytest.mark.parametrize("backend", ALONE)
def test_a_package_without_an_extra_is_named(backend: str, without, tmp_path) -> None:
    without(ALONE[backend])
    called = CliRunner().invoke(main, ["run", "-b", backend, "--device", "cpu", "--out", str(tmp_path / "out")])
    assert called.exit_code == 2
    assert called.output.count("\n") == 1
    assert f"pip install --no-deps {ALONE[backend]}" in called.output


def test_no_bundled_backend_is_left_out():
    named = (*NEEDED, *ALONE, *ON_A_GPU, *ANYWHERE)
    assert len(set(named)) == len(named)
    assert set(named) == set(BUNDLED)


@pytest.mark.parametrize("backend", ON_A_GPU)
def test_a_kernel_of_the_gpu_says_so_and_ends_with_2(backend: str, tmp_path) -> None:
    called = CliRunner().invoke(main, ["run", "-b", backend, "--device", "cpu", "--out", str(tmp_path / "out")])
    assert called.exit_code == 2
    assert called.output.count("\n") == 1
    assert f"{backend} is a kernel of the GPU" in called.output
