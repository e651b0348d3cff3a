"""Backends by name: bundled ones, entry points, MODULE:CLASS, and exec:COMMAND."""

import importlib
import os
import sys
from importlib.metadata import entry_points

import torch

from attnconform.conformance.adapters.declaration import check_declaration
from attnconform.conformance.backend import Backend, Unavailable

# short name -> module:class; imported only when asked for, so that a missing package matters to nobody else
BUNDLED: dict[str, str] = {
    "triton": "attnconform.conformance.adapters.triton_kernels:TritonKernels",
    "triton-atomic": "attnconform.conformance.adapters.triton_kernels:TritonAtomic",
    "triton-device-plan": "attnconform.conformance.adapters.triton_kernels:TritonDevicePlan",
    "triton-hopper": "attnconform.conformance.adapters.triton_kernels:TritonHopper",
    "triton-hybrid": "attnconform.conformance.adapters.triton_hybrid:TritonHybrid",
    "sdpa": "attnconform.conformance.adapters.sdpa:Sdpa",
    "sdpa-lse": "attnconform.conformance.adapters.sdpa:SdpaFlashCpu",
    "flex-eager": "attnconform.conformance.adapters.flex:FlexEager",
    "flex-compiled": "attnconform.conformance.adapters.flex:FlexCompiled",
    "ort-attention": "attnconform.conformance.adapters.onnx_runtime:OrtAttention",
    "ort-gqa": "attnconform.conformance.adapters.onnx_runtime:OrtGroupQuery",
    "ort-sparse": "attnconform.conformance.adapters.onnx_runtime:OrtSparse",
    "flex-decode": "attnconform.conformance.adapters.flex_decode:FlexDecode",
    "flex-paged": "attnconform.conformance.adapters.flex_paged:FlexPaged",
    "flex-paged-cleared": "attnconform.conformance.adapters.flex_paged:FlexPagedCleared",
    "flashinfer-decode": "attnconform.conformance.adapters.flashinfer_decode:FlashInferDecode",
    "flashinfer-decode-tc": "attnconform.conformance.adapters.flashinfer_decode:FlashInferDecodeTensorCores",
    "flashinfer-decode-pages": "attnconform.conformance.adapters.flashinfer_decode:FlashInferDecodePages",
    "flashinfer-prefill": "attnconform.conformance.adapters.flashinfer_prefill:FlashInferPrefill",
    "flashinfer-bsr": "attnconform.conformance.adapters.flashinfer_sparse:FlashInferBlockSparse",
    "flashinfer-bsr-lists": "attnconform.conformance.adapters.flashinfer_sparse:FlashInferListedBlocks",
    "flashinfer-variable-bsr": "attnconform.conformance.adapters.flashinfer_sparse:FlashInferVariableBlocks",
    "flashinfer-merge-cuda": "attnconform.conformance.adapters.flashinfer_cuda_merge:FlashInferCudaMerge",
    "fa3-tokens": "attnconform.conformance.adapters.flash_attention3:FlashAttention3Tokens",
    "fa3-pages": "attnconform.conformance.adapters.flash_attention3:FlashAttention3Pages",
    "flash-mla-sparse": "attnconform.conformance.adapters.flash_mla:FlashMla",
    "fla-nsa": "attnconform.conformance.adapters.fla_nsa:FlaNsa",
    "fla-nsa-any-width": "attnconform.conformance.adapters.fla_nsa:FlaNsaAnyWidth",
    "fla-nsa-plain-interpreter": "attnconform.conformance.adapters.fla_nsa:FlaNsaPlainInterpreter",
    "attn-gym": "attnconform.conformance.adapters.attn_gym:Gather",
    "attn-gym-repeats": "attnconform.conformance.adapters.attn_gym:GatherRepeats",
    "flashinfer-merge": "attnconform.conformance.adapters.flashinfer_merge:FlashInferMerge",
    "flashinfer-merge-states": "attnconform.conformance.adapters.flashinfer_merge:FlashInferMergeStates",
    "jax-xla": "attnconform.conformance.adapters.jax_attention:JaxXla",
    "jax-paged": "attnconform.conformance.adapters.jax_attention:JaxPaged",
    "sglang-merge": "attnconform.conformance.adapters.sglang_kernels:SglangMerge",
    "sglang-decode": "attnconform.conformance.adapters.sglang_kernels:SglangDecode",
    "sglang-msa-decode": "attnconform.conformance.adapters.sglang_blocks:SglangBlocksDecode",
    "sglang-msa-prefill": "attnconform.conformance.adapters.sglang_blocks:SglangBlocksPrefill",
    "jax-splash": "attnconform.conformance.adapters.jax_splash:JaxSplash",
    "vllm-decode": "attnconform.conformance.adapters.vllm_dense:VllmDecode",
    "vllm-unified": "attnconform.conformance.adapters.vllm_dense:VllmUnified",
    "vllm-m3-decode": "attnconform.conformance.adapters.vllm_sparse:VllmMiniMaxDecode",
    "vllm-m3-prefill": "attnconform.conformance.adapters.vllm_sparse:VllmMiniMaxPrefill",
    "vllm-mla-sparse": "attnconform.conformance.adapters.vllm_sparse:VllmSparseLatent",
    "reference": "attnconform.conformance.adapters.reference_steps:StepsBackend",
    # wrong on purpose
    "flex-compiled-skips": "attnconform.conformance.adapters.negative:FlexCompiledSkips",
    "flex-eager-trusts-blocks": "attnconform.conformance.adapters.negative:FlexEagerTrustsBlocks",
}
ENTRY_POINTS = "attnconform.backends"
EXEC_PREFIX = "exec:"


class BackendError(ValueError):
    """A backend that does not load; one line says why."""


def load_backend(spec: str, device: str) -> Backend:
    """A backend, ready to run on a device.

    Raises BackendError where the name, its module, its class or its declaration is wrong, Unavailable where it cannot
    run here.
    """
    check_device(device)
    backend = load_program(spec, device) if spec.startswith(EXEC_PREFIX) else load_class(spec, device)
    try:
        check_declaration(backend.capabilities)
    except ValueError as error:
        backend.close()
        raise BackendError(f"backend {spec!r}: {error}") from None
    return backend


def load_class(spec: str, device: str) -> Backend:
    """A backend of a class that Python imports. Raises as load_backend."""
    target = BUNDLED.get(spec) or installed_backends().get(spec) or spec
    module_name, _, class_name = target.partition(":")
    if not class_name:
        known = ", ".join(sorted({*BUNDLED, *installed_backends()}))
        raise BackendError(f"backend is {spec!r}, but must be MODULE:CLASS or one of {known}, or exec:COMMAND")
    if os.getcwd() not in sys.path:  # a console script, unlike python -m, does not see the folder it is called in
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), class_name, None)
    except Unavailable:
        raise
    except Exception as error:  # an adapter may raise anything while it is imported
        raise BackendError(f"backend {spec!r}: {module_name} does not import: {one_line(error)}") from error
    if found is None:
        raise BackendError(f"backend {spec!r}: {module_name} has no {class_name}")
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BackendError(f"backend {spec!r}: {class_name} in {module_name} is not a subclass of Backend")
    try:
        return found(device)
    except Unavailable:
        raise
    except Exception as error:
        raise BackendError(f"backend {spec!r} did not start: {one_line(error)}") from error


def load_program(spec: str, device: str) -> Backend:
    """A backend in a program of its own. Raises BackendError where it does not start, or does not speak."""
    from attnconform.conformance.adapters.exec_process import ExecBackend

    try:
        return ExecBackend(device, command=spec.removeprefix(EXEC_PREFIX))
    except Unavailable:
        raise
    except Exception as error:  # whatever keeps a program from starting
        raise BackendError(f"backend {spec!r} did not start: {one_line(error)}") from error


def check_device(device: str) -> None:
    """Raises BackendError for a device that torch does not know or see."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise BackendError(f"device is {device!r}, which torch does not know") from None
    if torch.cuda.is_available():
        return
    if kind == "cuda":
        raise BackendError(f"device is {device!r}, but torch sees no GPU")
    # Triton decides when it is first imported, and Dynamo imports it too: whichever backend comes first must say so.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def installed_backends() -> dict[str, str]:
    """Backends that other distributions announce, by name."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINTS)}


def one_line(error: Exception) -> str:
    """An exception's type and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
