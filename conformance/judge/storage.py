"""Tensors of a case in the layout it asks for, with outputs that start poisoned between guard bands."""

from dataclasses import dataclass

import torch

from attnconform.conformance.backend import Tensors
from attnconform.conformance.cases.structure import Structure
from attnconform.reference.coordinates import FloatArray
from attnconform.reference.problem import AttentionProblem

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GUARD_ELEMENTS = 256
GUARD_VALUE = 7.25  # exact in every storage dtype
SPARE_DIM = 8  # elements between neighbouring rows of an interleaved pool


@dataclass(frozen=True)
class Guarded:
    """An output tensor in the middle of a larger buffer."""

    buffer: torch.Tensor  # (GUARD_ELEMENTS + n + GUARD_ELEMENTS,)
    view: torch.Tensor

    def is_intact(self) -> bool:
        """Whether nothing was written before or after the output. [SAFE-BOUNDS]"""
        ends = torch.cat([self.buffer[:GUARD_ELEMENTS], self.buffer[-GUARD_ELEMENTS:]])
        return bool((ends == GUARD_VALUE).all())


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str, poison: float) -> Guarded:
    """An output of one shape, filled with poison."""
    size = int(torch.Size(shape).numel())
    buffer = torch.full((size + 2 * GUARD_ELEMENTS,), GUARD_VALUE, dtype=dtype, device=device)
    view = buffer[GUARD_ELEMENTS : GUARD_ELEMENTS + size].view(shape)
    view.fill_(poison)
    return Guarded(buffer, view)


def store_cache(
    k: FloatArray,  # (num_slots, num_kv_heads, head_dim_qk)
    v: FloatArray,
    structure: Structure,
    device: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V caches in the structure's layout; views of one interleaved pool where it says so. [COORD-STRIDE]"""
    heads = k.shape[1]  # the tensor's own count: a corrupted case disagrees with its structure on purpose
    dim = max(k.shape[2], v.shape[2]) + SPARE_DIM
    order = (structure.num_pages, structure.page_size, heads)
    if structure.layout == "HND":
        order = (structure.num_pages, heads, structure.page_size)
    dtype = TORCH_DTYPES[structure.dtype]
    shape = (*order[:2], 2, order[2], dim)
    pool = wide_pool(shape, structure.page_stride, dtype, device)
    stored = []
    for i, by_slot in enumerate((k, v)):
        tensor = torch.from_numpy(by_slot).to(dtype).view(structure.num_pages, structure.page_size, heads, -1)
        paged = (tensor if structure.layout == "NHD" else tensor.transpose(1, 2)).to(device)
        if structure.interleaved or structure.page_stride is not None:
            view = pool[:, :, i, :, : paged.shape[-1]]
            view.copy_(paged)
            stored.append(view)
        else:
            stored.append(paged.contiguous())
    return stored[0], stored[1]


def wide_pool(shape: tuple[int, ...], page_stride: int | None, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A pool of NaN; its pages `page_stride` elements apart where that is given. [COORD-WIDE]

    Memory between pages is never touched, so on a CPU it is never there.
    """
    if page_stride is None:
        return torch.full(shape, float("nan"), dtype=dtype, device=device)
    inner = torch.Size(shape[1:]).numel()
    storage = torch.empty((shape[0] - 1) * page_stride + inner, dtype=dtype, device=device)
    strides = torch.empty(shape[1:], device="meta").stride()
    return storage.as_strided(shape, (page_stride, *strides)).fill_(float("nan"))


def store_inputs(
    structure: Structure,
    problem: AttentionProblem,
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    *,
    device: str,
    poison: float,
) -> tuple[Tensors, tuple[Guarded, Guarded]]:
    """The tensors of one call, and the guards of its two outputs."""
    dtype = TORCH_DTYPES[structure.dtype]
    rows, heads = problem.total_q, problem.num_qo_heads
    out = guarded((rows, heads, problem.head_dim_vo), dtype, device, poison)
    lse = guarded((rows, heads), torch.float32, device, poison)
    k_cache, v_cache = store_cache(k, v, structure, device)
    q_stored = torch.from_numpy(q).to(dtype).to(device)
    return Tensors(q_stored, k_cache, v_cache, out.view, lse.view), (out, lse)
