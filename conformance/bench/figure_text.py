"""What a row is made of, as lines: bytes, FLOPs, programs, memory, throughput, first calls, tails, and its peer."""

from collections.abc import Iterator

from attnconform.conformance.bench.figures import Bin, Figures
from attnconform.conformance.bench.row import BenchRow, Peer
from attnconform.conformance.bench.timing import Ceilings


def figure_lines(row: BenchRow, ceilings: Ceilings) -> Iterator[str]:
    """Everything that is known of an attention row beside its times."""
    f = row.figures
    yield f"{row.key}: {row.path}, {row.sets} input sets rotate"
    yield memory_line(row, ceilings)
    yield compute_line(row, ceilings)
    yield from program_lines(f)
    yield (
        f"  workspace: reserved {size(f.workspace_reserved)}, used {size(f.workspace_used)}, lists and tables "
        f"{size(f.metadata_bytes)}; recompiled {f.recompiles}; fallbacks {fallback_text(f)}"
    )
    yield (
        f"  tokens per second: valid {row.valid_tokens_per_second:.3g}, processed {row.processed_tokens_per_second:.3g}"
    )
    if row.starts is not None:
        s = row.starts
        yield f"  first call: {s.compile:.2f} s compiling, {s.cached:.2f} s from the cache folder, {s.warm:.4f} s warm"
    if row.tuned is not None:
        t = row.tuned
        yield (
            f"  tuning: {t.seconds:.1f} s for {t.tried} of {t.offered} choices, {t.safe_us:.1f} us without one, "
            f"{t.best_us:.1f} us with {t.choice}"
        )
    if row.peer is not None:
        yield peer_line(row.peer)
    yield from slice_lines(row)


def tail_lines(row: BenchRow) -> Iterator[str]:
    """What is known of a row that is no single kernel, and has tails."""
    yield f"{row.key}: {row.path}, fallbacks {fallback_text(row.figures)}"
    yield from slice_lines(row)


def slice_lines(row: BenchRow) -> Iterator[str]:
    for one in row.slices:
        yield f"  {one.by} {one.group}: {one.events} events, median {one.median:.1f} us, P99 {one.p99:.1f} us"


def fallback_text(f: Figures) -> str:
    """How often, by reason."""
    return ", ".join(f"{reason}: {n}" for reason, n in f.fallbacks.items()) or "none"


def memory_line(row: BenchRow, ceilings: Ceilings) -> str:
    f = row.figures
    return (
        f"  bytes: needed {size(f.bytes_ideal)}, asked for {size(f.bytes_physical)}, DRAM {size(f.bytes_dram)}, L2 "
        f"hits {share(f.l2_hit_rate)}, line use {f.transaction_use:.0%}; {row.copy_share(ceilings):.0%} of the copy "
        "bandwidth"
    )


def compute_line(row: BenchRow, ceilings: Ceilings) -> str:
    f = row.figures
    return (
        f"  FLOPs: wanted {f.flops_useful:.3g}, executed {f.flops_executed:.3g}; keys of tiles "
        f"{f.tile_efficiency:.0%}, rows of tiles {f.row_efficiency:.0%}, tensor cores {share(f.tensor_core_share)}; "
        f"{row.matmul_share(ceilings):.0%} of the matrix rate"
    )


def program_lines(f: Figures) -> Iterator[str]:
    """How long lists are, and how they are dealt out."""
    lengths, work = f.row_lengths, f.program_work
    yield (
        f"  lists: mean {lengths.mean:.0f} keys, P50 {lengths.p50}, P95 {lengths.p95}, max {lengths.max}; {f.programs} "
        f"programs: P50 {work.p50} keys, P99 {work.p99}, max {work.max}, longest over fair {f.longest_over_fair:.2f}, "
        f"processors busy {share(f.processors_busy)}"
    )
    if f.program_histogram:
        yield "  programs by keys: " + ", ".join(bin_text(one) for one in f.program_histogram)


def bin_text(one: Bin) -> str:
    """Programs of a bin, whose bounds are powers of two."""
    return f"{one.low} to {one.high - 1}: {one.programs}"


def peer_line(peer: Peer) -> str:
    """What stands beside ours, and on what terms."""
    if peer.error:
        return f"  {peer.name} did not run: {peer.error}"
    first = "" if peer.first_call_seconds is None else f", first call {peer.first_call_seconds:.2f} s"
    path = f"; kernels {peer.path}" if peer.path else ""
    return (
        f"  {peer.name}: the same inputs, gives {peer.outputs}, reserves {size(peer.workspace_bytes)}{first}; "
        f"{peer.difference or 'no answer to compare'}{path}"
    )


def share(value: float | None) -> str:
    """A share that may not have been measured."""
    return "-" if value is None else f"{value:.0%}"


def size(num_bytes: int | None) -> str:
    """In the unit that fits."""
    if num_bytes is None:
        return "-"
    exponent = min(3, max(0, (num_bytes.bit_length() - 1) // 10))
    return f"{num_bytes / 2 ** (10 * exponent):.4g} {('B', 'KiB', 'MiB', 'GiB')[exponent]}"
