"""Suite quant: decode over a quantized cache, beside the same kernels over the same numbers unquantized.

The baseline reads the dequantized cache, so that both compute the same answer; what quantization itself changes is a
figure of its own, against the numbers before they were quantized.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from msgspec.structs import replace as replaced

from attnconform.conformance.bench.blocks import Block, Taken, blocks
from attnconform.conformance.bench.bundled import PlanRun, path_of
from attnconform.conformance.bench.decode_work import TINY, DecodeShape, DecodeWork, make_work, our_plan
from attnconform.conformance.bench.figures import plan_figures
from attnconform.conformance.bench.honesty import reference_output, relative_error
from attnconform.conformance.bench.machine import Machine
from attnconform.conformance.bench.options import BenchOptions
from attnconform.conformance.bench.peers.peer import PeerBench, PeerRun
from attnconform.conformance.bench.row import BenchRow
from attnconform.reference.cost.scales import scale_bytes

Granularity = Literal["tensor", "head", "page", "token", "channel"]
KINDS: tuple[tuple[str, Granularity], ...] = (
    ("float8_e4m3", "tensor"),
    ("float8_e4m3", "head"),
    ("float8_e4m3", "page"),
    ("float8_e4m3", "channel"),
    ("float8_e5m2", "tensor"),
    ("int8", "page"),
    ("int8", "token"),
)
PARTS = 16
LARGEST = {"int8": 127.0, "float8_e4m3": 448.0, "float8_e5m2": 57344.0}
CODES = {"int8": torch.int8, "float8_e4m3": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, eq=False)
class Codes:
    """One quantized cache."""

    codes: torch.Tensor  # in the cache's shape
    scale: torch.Tensor  # float32, in the shape of its granularity

    def dequantized(self, granularity: Granularity, dtype: torch.dtype) -> torch.Tensor:
        """The numbers that the codes stand for, rounded to a dtype."""
        scale = spread_scale(self.scale, granularity, self.codes.shape)
        return by_parts(lambda codes, one: (codes.float() * one).to(dtype), self.codes, scale)


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


def by_parts(convert: Callable[..., torch.Tensor], cache: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Some pages at a time: a large cache in float32 would not fit beside itself."""
    whole = scale.expand(cache.shape[0], *scale.shape[1:])
    pairs = zip(cache.chunk(PARTS), whole.chunk(PARTS), strict=True)
    return torch.cat([convert(part, one) for part, one in pairs])


def quantize(cache: torch.Tensor, form: str, granularity: Granularity) -> Codes:
    """Codes with the least scale that reaches every value that shares it."""
    axes = {"tensor": (0, 1, 2, 3), "head": (0, 1, 3), "page": (1, 3), "token": (3,), "channel": (0, 1)}[granularity]
    most = cache.abs().amax(axes, keepdim=True).float().clamp_min(1e-12)
    scale = most / LARGEST[form]

    def code(numbers: torch.Tensor, one: torch.Tensor) -> torch.Tensor:
        scaled = numbers.float() / one
        return (scaled.round() if form == "int8" else scaled).to(CODES[form])

    codes = by_parts(code, cache, scale)
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
    """Pages of a large batch in every form, each beside the same numbers unquantized."""
    for form, granularity in KINDS:
        yield quant_row(form, granularity, machine, options)


def quant_row(form: str, granularity: Granularity, machine: Machine, options: BenchOptions) -> BenchRow:
    """Quantized beside unquantized, in blocks."""
    shape = DecodeShape(batch=64) if machine.is_real else TINY
    taken, peer, rows = Taken(), PeerBench("unquantized", machine), list[BenchRow]()
    for block in blocks(machine):
        work = make_work(shape, machine)
        rows += time_block(make_quantized(work, form, granularity), granularity, block, taken, peer, options)
        del work
    samples, peers = taken.joined()["attention"], peer.by_stage()
    figures = replaced(rows[0].figures, recompiles=samples.recompiles)
    return replaced(
        rows[0], ours=samples.timing, figures=figures, work=f"{form} per {granularity}, {shape.name}",
        peer=peers.get("attention", peers.get("")),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Quantized:
    """A batch by its codes, and by the numbers that they stand for."""

    run: QuantRun
    plain: PlanRun
    change: float  # of the answer, by the quantization


def make_quantized(work: DecodeWork, form: str, granularity: Granularity) -> Quantized:
    """Both runs over the same lists."""
    from attnconform.kernels.sparse_attention.quantization import KVQuantization

    kind = KVQuantization(form, granularity)
    k, v = (quantize(cache, form, granularity) for cache in (work.k_cache, work.v_cache))
    k_cache, v_cache = (codes.dequantized(granularity, work.shape.dtype) for codes in (k, v))
    plain = PlanRun.sparse(replace(work, k_cache=k_cache, v_cache=v_cache))
    run = QuantRun(work, k, v, our_plan(work, k_quant=kind, v_quant=kind))
    run()
    return Quantized(run, plain, relative_error(run.out, reference_output(work)))


def time_block(
    pair: Quantized, granularity: Granularity, block: Block, taken: Taken, peer: PeerBench, options: BenchOptions
) -> list[BenchRow]:
    """Codes, then numbers; in the first block, the row, whose times are those of this block."""
    run, plain = pair.run, pair.plain
    samples = taken.add("attention", block.measure(run, options.seconds))
    plain()

    def build() -> PeerRun:
        told = f"out, lse; codes change the answer by {pair.change:.1e}"
        return PeerRun(
            name="unquantized, same kernels", stages={"attention": [plain]}, answer=lambda: (plain.out, plain.lse),
            outputs=told,
        )  # fmt: skip

    peer.time(block, build, (run.out, run.lse), seconds=options.seconds)
    if not block.is_first:
        return []
    work = run.work
    figures = plan_figures(
        run.plan, processors=block.machine.processors, lengths=work.list_lengths, edges=work.edges,
        bytes_ideal=quantized_bytes(work, granularity),
    )  # fmt: skip
    row = BenchRow(
        suite="quant", phase="decode", work="", stage="attention", ours=samples.timing, figures=figures,
        rate=work.rate, error=relative_error(run.out, reference_output(plain.work)), path=path_of(run.plan),
    )  # fmt: skip
    return [row]


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
