"""Suite quant: decode over a quantized cache, beside the same kernels over the same numbers unquantized.

The baseline reads the dequantized cache, so that both compute the same answer; what quantization itself changes is a
figure of its own, against the numbers before they were quantized.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.bundled import PlanRun, path_of
from attnconform.conformance.bench.decode_work import TINY, DecodeShape, DecodeWork, make_work, our_plan
from attnconform.conformance.bench.figures import plan_figures
from attnconform.conformance.bench.honesty import reference_output, relative_error
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.row import BenchRow, Peer
from attnconform.conformance.bench.timing import measure
from attnconform.reference.cost.scales import scale_bytes

Granularity = Literal["tensor", "head", "page", "token", "channel"]
KINDS: tuple[tuple[str, Granularity], ...] = (
    ("int8", "token"),
    ("int8", "page"),
    ("float8_e4m3", "head"),
    ("float8_e4m3", "channel"),
)
LARGEST = {"int8": 127.0, "float8_e4m3": 448.0}


@dataclass(frozen=True, eq=False)
class Codes:
    """One quantized cache."""

    codes: torch.Tensor  # in the cache's shape
    scale: torch.Tensor  # float32, in the shape of its granularity

    def dequantized(self, granularity: Granularity, dtype: torch.dtype) -> torch.Tensor:
        """The numbers that the codes stand for, rounded to a dtype."""
        return (self.codes.float() * spread_scale(self.scale, granularity, self.codes.shape)).to(dtype)


def spread_scale(scale: torch.Tensor, granularity: Granularity, shape: torch.Size) -> torch.Tensor:
    """A scale that broadcasts over (num_pages, page_size, num_kv_heads, head_dim)."""
    pages, page_size, heads, _ = shape
    views = {
        "tensor": (1, 1, 1, 1),
        "head": (1, 1, heads, 1),
        "page": (pages, 1, heads, 1),
        "token": (pages, page_size, heads, 1),
        "channel": (1, 1, heads, -1),
    }
    return scale.view(views[granularity])


def quantize(cache: torch.Tensor, form: str, granularity: Granularity) -> Codes:
    """Codes with the least scale that reaches every value that shares it."""
    axes = {"tensor": (0, 1, 2, 3), "head": (0, 1, 3), "page": (1, 3), "token": (3,), "channel": (0, 1)}[granularity]
    most = cache.abs().amax(axes, keepdim=True).float().clamp_min(1e-12)
    scale = most / LARGEST[form]
    scaled = cache.float() / scale
    codes = scaled.round().to(torch.int8) if form == "int8" else scaled.to(torch.float8_e4m3fn)
    pages, page_size, heads, dim = cache.shape
    shapes = {"tensor": (1,), "head": (heads,), "page": (pages, heads), "token": (pages * page_size, heads)}
    return Codes(codes, scale.reshape(shapes.get(granularity, (heads, dim))).contiguous())


@dataclass(eq=False)
class QuantRun:
    """The launch of a plan over codes."""

    work: DecodeWork
    k: Codes
    v: Codes
    plan: Any
    out: torch.Tensor = field(init=False)
    lse: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.out = torch.full_like(self.work.q, float("nan"))
        self.lse = torch.full(self.work.q.shape[:2], float("nan"), device=self.work.q.device)

    def __call__(self) -> None:
        from attnconform.kernels.sparse_attention import run

        scales = {"k_scale": self.k.scale, "v_scale": self.v.scale}
        run(self.plan, self.work.q, self.k.codes, self.v.codes, **scales, out=self.out, lse=self.lse)


def quant_shapes(machine: Machine) -> list[DecodeShape]:
    return [DecodeShape(batch=8), DecodeShape(batch=32)] if machine.is_real else [TINY]


def quant_rows(machine: Machine, options: BenchOptions) -> Iterator[BenchRow]:
    """Every kind of quantization at every batch."""
    for shape in quant_shapes(machine):
        work = make_work(shape, machine)
        before = reference_output(work)
        for form, granularity in KINDS:
            yield quant_row(work, before, form, granularity, machine, options)
            machine.release()


def quant_row(
    work: DecodeWork, before: torch.Tensor, form: str, granularity: Granularity, machine: Machine, options: BenchOptions
) -> BenchRow:
    """Quantized beside unquantized, on the same numbers."""
    from attnconform.kernels.sparse_attention.quantization import KVQuantization

    s, kind = work.shape, KVQuantization(form, granularity)
    k, v = (quantize(cache, form, granularity) for cache in (work.k_cache, work.v_cache))
    k_cache, v_cache = (codes.dequantized(granularity, s.dtype) for codes in (k, v))
    plain = PlanRun.sparse(replace(work, k_cache=k_cache, v_cache=v_cache))
    quantized = QuantRun(work, k, v, our_plan(work, k_quant=kind, v_quant=kind))
    quantized()
    plain()
    error = relative_error(quantized.out, reference_output(plain.work))
    taken = measure(quantized, machine, seconds=options.seconds)
    baseline = measure(plain, machine, seconds=options.seconds)
    return BenchRow(
        suite="quant",
        phase="decode",
        work=f"{form} per {granularity}, {s.name}",
        stage="attention",
        ours=taken.timing,
        figures=replaced(
            plan_figures(
                quantized.plan,
                processors=machine.processors,
                lengths=work.list_lengths,
                edges=work.edges,
                bytes_ideal=quantized_bytes(work, granularity),
            ),
            recompiles=taken.recompiles,
        ),
        peer=Peer(
            name="unquantized, same kernels",
            timing=baseline.timing,
            difference=f"quantization changes the answer by {relative_error(quantized.out, before):.1e}",
        ),
        rate=work.rate,
        error=error,
        path=path_of(quantized.plan),
    )


def quantized_bytes(work: DecodeWork, granularity: Granularity) -> int:
    """What must move: codes of a byte, and the scales of the pages that are read. [COST-SCALES]"""
    s = work.shape
    keys = int(work.list_lengths.sum())
    unquantized = 2 * keys * s.head_dim * s.dtype.itemsize
    pages = keys // s.page_size  # over all lists, each of one KV head
    scales = scale_bytes(
        granularity, granularity, num_pages=pages, page_size=s.page_size, num_kv_heads=1, head_dim=s.head_dim
    )
    return work.bytes - unquantized + 2 * keys * s.head_dim + scales
