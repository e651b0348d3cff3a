"""Tensors of a case in the layout it asks for, with outputs that start poisoned between guard bands."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from attnconform.conformance.backend import Tensors
from attnconform.conformance.cases.structure import Structure
from attnconform.conformance.embedding import LEAD, embedded
from attnconform.reference.coordinates import BoolArray, FloatArray
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.quantization import LARGEST, QuantFormat, Quantization

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CODE_DTYPES = {"int8": torch.int8, "float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}
NO_NUMBER_CODE = 113  # stands for NaN and for huge numbers where a format has neither
GUARD_ELEMENTS = 256
BETWEEN = "between rows of"
# what each guard band holds, exact in every storage dtype: a band that is copied onto another one shows as well
GUARD_VALUES = {
    ("out", "before"): 7.25, ("out", "past"): 7.5, ("out", BETWEEN): 7.75,
    ("lse", "before"): 6.75, ("lse", "past"): 6.5, ("lse", BETWEEN): 6.25,
}  # fmt: skip
SPARE_DIM = 8  # elements between neighbouring rows of an interleaved pool, and of an output with strides
SPARE_ROWS = 3  # elements between neighbouring heads of an lse whose rows lie side by side


@dataclass(frozen=True)
class Guarded:
    """An output tensor in the middle of a larger buffer, whose rows may lie apart."""

    name: str  # out or lse
    buffer: torch.Tensor  # (GUARD_ELEMENTS + n + GUARD_ELEMENTS,)
    view: torch.Tensor  # from element GUARD_ELEMENTS on; n elements or fewer

    @property
    def overruns(self) -> tuple[str, ...]:
        """The bands that were written to, as `past out`; none where the output alone was. [SAFE-BOUNDS]"""
        return true_ones(self.overrun)

    @property
    def overrun(self) -> dict[str, torch.Tensor]:
        """Whether each band was written to, on the device."""
        bands = {"before": self.buffer[:GUARD_ELEMENTS], "past": self.buffer[-GUARD_ELEMENTS:]}
        if self.view.numel() < self.buffer.numel() - 2 * GUARD_ELEMENTS:
            bands[BETWEEN] = self.without_output
        return {f"{side} {self.name}": (x != GUARD_VALUES[self.name, side]).any() for side, x in bands.items()}

    @property
    def without_output(self) -> torch.Tensor:
        """(n,) What lies between the outer bands, with the gaps' mark wherever the output lies."""
        held = self.buffer[GUARD_ELEMENTS:-GUARD_ELEMENTS].clone()
        held.as_strided(self.view.shape, self.view.stride()).fill_(GUARD_VALUES[self.name, BETWEEN])
        return held


def true_ones(flags: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """Names of the flags that are set, for which the device is waited for once."""
    if not flags:
        return ()
    return tuple(name for name, is_set in zip(flags, torch.stack(list(flags.values())).tolist(), strict=True) if is_set)


def guarded_out(
    shape: tuple[int, int, int],  # total_q, num_qo_heads, head_dim_vo
    dtype: torch.dtype,
    device: str,
    poison: float,
    *,
    strided: bool,
) -> Guarded:
    """An out full of poison; `strided`: every vector and every row lies apart from the next one. [COORD-STRIDE]"""
    rows, heads, dim = shape
    if not strided:
        return guarded("out", shape, dtype, device, poison, slice(None))
    return guarded("out", (rows, heads + 1, dim + SPARE_DIM), dtype, device, poison, (..., slice(heads), slice(dim)))


def guarded_lse(shape: tuple[int, int], device: str, poison: float, *, strided: bool) -> Guarded:
    """A float32 lse full of poison; `strided`: a view of (heads, rows), whose heads lie apart. [COORD-STRIDE]"""
    rows, heads = shape
    if not strided:
        return guarded("lse", shape, torch.float32, device, poison, slice(None))
    wide = guarded("lse", (heads, rows + SPARE_ROWS), torch.float32, device, poison, (..., slice(rows)))
    return replace(wide, view=wide.view.t())


def guarded(name: str, wide: tuple[int, ...], dtype: torch.dtype, device: str, poison: float, part: Any) -> Guarded:
    """An output that is a part of a wide tensor, filled with poison; the rest of it and what is around are guards."""
    size = int(torch.Size(wide).numel())
    buffer = torch.full((size + 2 * GUARD_ELEMENTS,), GUARD_VALUES[name, BETWEEN], dtype=dtype, device=device)
    buffer[:GUARD_ELEMENTS] = GUARD_VALUES[name, "before"]
    buffer[-GUARD_ELEMENTS:] = GUARD_VALUES[name, "past"]
    view = buffer[GUARD_ELEMENTS : GUARD_ELEMENTS + size].view(wide)[part]
    view.fill_(poison)
    return Guarded(name, buffer, view)


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
    shape = (*order[:2], 2, order[2], dim)
    pools: dict[torch.dtype, torch.Tensor] = {}
    stored = []
    for i, (by_slot, quant) in enumerate(((k, structure.k_quant), (v, structure.v_quant))):
        flat = as_stored(by_slot, structure.dtype, None if quant is None else quant.format)
        tensor = flat.view(structure.num_pages, structure.page_size, heads, -1)
        paged = (tensor if structure.layout == "NHD" else tensor.transpose(1, 2)).to(device, non_blocking=True)
        if structure.interleaved or structure.page_stride is not None:
            if flat.dtype not in pools:
                pools[flat.dtype] = wide_pool(shape, structure.page_stride, flat.dtype, device)
            view = pools[flat.dtype][:, :, i, :, : paged.shape[-1]]
            view.copy_(paged)
            stored.append(view)
        else:
            stored.append(within_storage(paged))
    return stored[0], stored[1]


def within_storage(tensor: torch.Tensor, *, spare: int = 0) -> torch.Tensor:
    """A tensor's numbers as a view that begins within its storage, NaN all around. [COORD-STRIDE]

    `spare` entries of the second axis stand between neighbours of the first, as K and V do where q, k and v are packed.
    """
    return embedded(tensor, no_number(tensor.dtype), spare=spare, axis=1)


def no_number(dtype: torch.dtype) -> float:
    """What fills memory that nobody may read."""
    return float("nan") if dtype.is_floating_point else NO_NUMBER_CODE


def store_upstream(
    dout: FloatArray,  # (total_q, num_qo_heads, head_dim_vo)
    dlse: FloatArray | None,  # (total_q, num_qo_heads)
    structure: Structure,
    device: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What enters a backward, in the structure's layout."""
    stored = [
        None if x is None else upstream_view(x, t, structure, device)
        for x, t in ((dout, structure.dtype), (dlse, "float32"))
    ]
    assert stored[0] is not None
    return stored[0], stored[1]


def upstream_view(numbers: FloatArray, dtype: str, structure: Structure, device: str) -> torch.Tensor:
    """One number for all is expanded from one element, as in the backward of a sum; heads may be outermost in memory.

    [COORD-STRIDE]
    """
    stored = torch.from_numpy(numbers).to(TORCH_DTYPES[dtype])
    tensor = stored.to(device, non_blocking=True)
    if stored.numel() and bool((stored == stored.flatten()[0]).all()):
        alone = within_storage(tensor.flatten())
        alone[1:] = no_number(alone.dtype)
        return alone.as_strided(tensor.shape, (0,) * tensor.ndim)
    if structure.interleaved:
        return within_storage(tensor.transpose(0, 1).contiguous()).transpose(0, 1)
    return within_storage(tensor)


def as_stored(numbers: FloatArray, dtype: str, code_format: QuantFormat | None) -> torch.Tensor:
    """Numbers in a cache's dtype, or codes; what a code cannot say becomes a large one."""
    if code_format is None:
        return torch.from_numpy(numbers).to(TORCH_DTYPES[dtype])
    largest = LARGEST[code_format]
    if code_format == "int8":
        numbers = np.where(np.isfinite(numbers) & (np.abs(numbers) <= largest + 1), numbers, NO_NUMBER_CODE)
    return torch.from_numpy(np.clip(numbers, -largest - (code_format == "int8"), largest)).to(CODE_DTYPES[code_format])


def store_scales(
    quantization: Quantization | None, owned: BoolArray, page_size: int, fill: float, device: str
) -> torch.Tensor | None:
    """A cache's scales in float32; those of pages and slots that nobody owns hold `fill`. [MASK-INTERFERE]"""
    if quantization is None:
        return None
    scale = quantization.scale.copy()
    if quantization.granularity == "token":
        scale[~owned] = fill
    if quantization.granularity == "page":
        scale[~owned.reshape(-1, page_size, owned.shape[1]).any(axis=1)] = fill
    return within_storage(torch.from_numpy(scale).to(torch.float32).to(device, non_blocking=True))


def wide_pool(shape: tuple[int, ...], page_stride: int | None, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A pool of NaN; its pages `page_stride` elements apart where that is given. [COORD-WIDE]

    Memory between pages is never touched, so on a CPU it is never there. Raises ValueError where pages would overlap.
    """
    inner = torch.Size(shape[1:]).numel()
    apart = inner if page_stride is None else page_stride
    if apart < inner:
        raise ValueError(f"page_stride is {apart}, but must be at least {inner}, the elements of a page of K and V")
    storage = torch.empty(LEAD + (shape[0] - 1) * apart + inner, dtype=dtype, device=device)
    storage[:LEAD] = no_number(dtype)
    strides = torch.empty(shape[1:], device="meta").stride()
    return storage.as_strided(shape, (apart, *strides), LEAD).fill_(no_number(dtype))


def store_inputs(
    structure: Structure,
    problem: AttentionProblem,
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    *,
    owned: BoolArray | None = None,  # (num_slots, num_kv_heads); None: every slot
    device: str,
    unowned: float = float("nan"),
    poison: float,
) -> tuple[Tensors, tuple[Guarded, Guarded]]:
    """The tensors of one call, and the guards of its two outputs."""
    dtype = TORCH_DTYPES[structure.dtype]
    rows, heads = problem.total_q, problem.num_qo_heads
    strided = structure.interleaved
    out = guarded_out((rows, heads, problem.head_dim_vo), dtype, device, poison, strided=strided)
    lse = guarded_lse((rows, heads), device, poison, strided=strided)
    k_cache, v_cache = store_cache(k, v, structure, device)
    packed = 2 * problem.num_kv_heads if structure.interleaved else 0
    q_stored = within_storage(torch.from_numpy(q).to(dtype).to(device, non_blocking=True), spare=packed)
    if owned is None:
        owned = np.ones((problem.cache.num_slots, problem.num_kv_heads), dtype=bool)
    k_scale, v_scale = (
        store_scales(quant, owned, problem.cache.page_size, unowned, device)
        for quant in (problem.k_quant, problem.v_quant)
    )
    return Tensors(q_stored, k_cache, v_cache, out.view, lse.view, k_scale, v_scale), (out, lse)
