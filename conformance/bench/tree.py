"""The profile decision tree (article 1, 5.2, 6.1, 7.1): from figures to a named conclusion, and where to look next.

Bytes come first, since no tuning of tiles takes away a copy; then the schedule, since a long tail leaves memory and
tensor cores idle alike; then what the step is made of; then what the host does between kernels; last the tail, which no
median shows. Every branch gives its evidence in numbers. A subject on which none fires is healthy, and is told which
roof it is under.
"""

from collections.abc import Callable

import msgspec

from attnconform.conformance.bench.evidence import Evidence

EXTRA_BYTES = 1.5  # measured over ideal from which bytes are too many
COPIED = 0.3  # written over ideal from which keys were copied, not only read
NEAR_ROOF = 0.75  # of the copy bandwidth or the matrix rate
BUSY = 0.6  # processors' mean over the busiest below which some wait for a few
FAIR = 1.5  # longest program over an equal share above which it decides the time
INDEX_SHARE = 0.5  # of an end-to-end step
MERGE_SHARE = 0.25  # of attention
TILE_SHARE = 0.6  # wanted keys of those computed
TENSOR_IDLE = 0.15  # of the cycles
HOST_GAP = 1.5  # host time over device time
HOST_GAP_MICROSECONDS = 100.0  # launches of a short step take this long without any fault
TAIL = 3.0  # P99 over median
TAIL_MICROSECONDS = 500.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A conclusion with its evidence."""

    conclusion: str
    evidence: list[str]
    look_next: str

    @property
    def is_fault(self) -> bool:
        return self.conclusion not in HEALTHY


HEALTHY = ("at the memory roof", "at the compute roof", "healthy below the roof")


def diagnose(evidence: Evidence) -> list[Finding]:
    """Findings in the tree's order, the first of which is the conclusion; one healthy finding where nothing fired."""
    faults = [finding for branch in BRANCHES if (finding := branch(evidence)) is not None]
    return faults or [healthy(evidence)]


def extra_traffic(e: Evidence) -> Finding | None:
    """Measured bytes far above those that must move."""
    m = e.memory
    if m.bytes_dram is None or m.bytes_dram < EXTRA_BYTES * m.bytes_ideal:
        return None
    evidence = [
        f"DRAM moved {mb(m.bytes_dram)}, {m.bytes_dram / m.bytes_ideal:.1f} times the {mb(m.bytes_ideal)} needed"
    ]
    copied = ((m.bytes_written_dram or 0) - m.bytes_output) / m.bytes_ideal
    if copied >= COPIED:
        evidence.append(f"it wrote {mb(m.bytes_written_dram or 0)}: {copied:.1f} copies of the candidates")
        kernels = sorted(e.kernels.items(), key=lambda item: -item[1])[:3]
        evidence.append("longest kernels: " + ", ".join(f"{name} {time:.0f} us" for name, time in kernels))
        return Finding(
            conclusion="candidates are copied before they are read",
            evidence=evidence,
            look_next="the gather: one scratch copy for a group, or loads from the pages themselves; tiles do not help",
        )
    return Finding(
        conclusion="more is read than the candidates",
        evidence=evidence,
        look_next="repeated entries, blocks wider than what was listed, transactions half used, a dense pass",
    )


def long_programs(e: Evidence) -> Finding | None:
    """Most processors wait for a few programs."""
    s = e.scheduling
    if max(e.bandwidth_share, e.compute_share) >= NEAR_ROOF:
        return None
    idle = s.processors_busy is not None and s.processors_busy < BUSY
    unfair = s.longest_over_fair is not None and s.longest_over_fair > FAIR
    known = [sign for sign, value in ((idle, s.processors_busy), (unfair, s.longest_over_fair)) if value is not None]
    if not known or not all(known):
        return None
    evidence = [f"{e.bandwidth_share:.0%} of the copy bandwidth, {e.compute_share:.0%} of the matrix rate"]
    if s.processors_busy is not None:
        evidence.append(f"processors are busy {s.processors_busy:.0%} of the time of the busiest")
    if s.longest_over_fair is not None:
        evidence.append(f"the longest program has {s.longest_over_fair:.1f} times an equal share of the work")
    evidence.append(f"rows: mean {s.row_mean:.0f} keys, longest {s.row_max}")
    return Finding(
        conclusion="a few long rows decide the time",
        evidence=evidence,
        look_next="split long rows, sort tasks longest first, or a queue of programs; more warps would idle too",
    )


def empty_tiles(e: Evidence) -> Finding | None:
    """Tensor cores idle and much of what they are given is masked out."""
    c = e.compute
    if e.moved_share >= NEAR_ROOF or c.tile_efficiency >= TILE_SHARE:
        return None
    if c.tensor_core_share is not None and c.tensor_core_share >= TENSOR_IDLE and e.compute_share >= NEAR_ROOF:
        return None
    busy = "not measured" if c.tensor_core_share is None else f"{c.tensor_core_share:.0%}"
    return Finding(
        conclusion="tiles are mostly padding",
        evidence=[f"{c.tile_efficiency:.0%} of the computed keys are wanted", f"tensor cores busy: {busy}"],
        look_next="tile and block sizes against head_dim and the candidates' clustering",
    )


def little_in_flight(e: Evidence) -> Finding | None:
    """Neither bytes nor FLOPs near their roof, on a balanced schedule of full tiles."""
    if max(e.moved_share, e.compute_share) >= NEAR_ROOF / 2:
        return None
    if long_programs(e) or extra_traffic(e) or empty_tiles(e):
        return None
    return Finding(
        conclusion="too little is in flight",
        evidence=[
            f"{e.moved_share:.0%} of the copy bandwidth, {e.compute_share:.0%} of the matrix rate",
            f"attention alone takes {e.times.attention:.0f} us, dense {e.times.dense:.0f} us",
        ],
        look_next="programs per processor, pipeline stages, width of loads, TLB misses; or the batch is too small",
    )


def index_dominates(e: Evidence) -> Finding | None:
    """Selector, top-k and index take most of a step."""
    t = e.times
    around = t.index + t.selector
    if around < INDEX_SHARE * t.end_to_end:
        return None
    return Finding(
        conclusion="the index takes longer than attention",
        evidence=[
            f"selector {t.selector:.0f} us and index {t.index:.0f} us of {t.end_to_end:.0f} us end to end",
            f"attention {t.attention:.0f} us",
        ],
        look_next="share indices over heads or layers, fuse the selector, choose coarser blocks",
    )


def merge_dominates(e: Evidence) -> Finding | None:
    """The merge of partial states takes a large part of attention."""
    t = e.times
    if t.merge < MERGE_SHARE * t.attention:
        return None
    return Finding(
        conclusion="the merge takes much of attention",
        evidence=[f"merge {t.merge:.0f} us of {t.attention:.0f} us"],
        look_next="fewer splits: rows that are short need none",
    )


def host_gap(e: Evidence) -> Finding | None:
    """The usual step takes the host much longer than the device."""
    t = e.times
    work = t.attention + t.index
    gap = t.host_median - work
    if t.host_median < HOST_GAP * work or gap < HOST_GAP_MICROSECONDS:
        return None
    f = e.fixed
    return Finding(
        conclusion="the device waits for the host",
        evidence=[
            f"a step takes {t.host_median:.0f} us by the host's clock, its kernels {work:.0f} us",
            f"waits a call {f.waits:.1f}, driver allocations {f.device_allocations}, plans {f.replans}, graph exits "
            f"{f.graph_exits}",
        ],
        look_next="synchronizations, allocations and plans inside a step; capture it in a graph",
    )


def tail(e: Evidence) -> Finding | None:
    """The median is well and the P99 is not."""
    t = e.times
    if t.host_p99 < TAIL * t.host_median or t.host_p99 - t.host_median < TAIL_MICROSECONDS:
        return None
    f = e.fixed
    evidence = [
        f"end to end {t.host_median:.0f} us at the median, {t.host_p99:.0f} us at P99; kernel {t.attention:.0f} us"
    ]
    causes = {"driver allocations": f.device_allocations, "plans": f.replans, "graph exits": f.graph_exits}
    causes |= {f"fallbacks: {reason}": n for reason, n in f.fallbacks.items()}
    evidence += [f"{name}: {n}" for name, n in causes.items() if n]
    evidence += worst_slices(e)
    if f.replans or f.graph_exits or f.fallbacks:
        return Finding(
            conclusion="steps outgrow their workspace tier",
            evidence=evidence,
            look_next="a larger usual tier, the next one prepared ahead, the fallback's reason in the schedule",
        )
    return Finding(
        conclusion="some steps are far slower than others",
        evidence=evidence,
        look_next="the slices: candidate blocks, pages touched, longest row, new shapes that compile",
    )


def worst_slices(e: Evidence) -> list[str]:
    """The group of events with the highest P99, of each fact that has several."""
    found = []
    for by in sorted({s.by for s in e.slices}):
        groups = [s for s in e.slices if s.by == by and s.events]
        if len(groups) > 1:
            worst = max(groups, key=lambda s: s.p99)
            found.append(
                f"worst by {by.replace('_', ' ')}: {worst.group}, P99 {worst.p99:.0f} us of {worst.events} events"
            )
    return found


def healthy(e: Evidence) -> Finding:
    """What to expect from further work where nothing is wrong."""
    evidence = [f"{e.moved_share:.0%} of the copy bandwidth, {e.compute_share:.0%} of the matrix rate"]
    if e.memory.bytes_dram is not None:
        evidence.append(f"DRAM moved {e.memory.bytes_dram / e.memory.bytes_ideal:.2f} times the bytes needed")
    if e.moved_share >= NEAR_ROOF:
        look = "fewer bytes: fewer candidates or a narrower dtype; faster tensor cores change nothing"
        return Finding(conclusion="at the memory roof", evidence=evidence, look_next=look)
    if e.compute_share >= NEAR_ROOF:
        look = "fewer FLOPs: tighter tiles; more bandwidth changes nothing"
        return Finding(conclusion="at the compute roof", evidence=evidence, look_next=look)
    look = "nothing is out of proportion; what is left is occupancy and pipeline depth"
    return Finding(conclusion="healthy below the roof", evidence=evidence, look_next=look)


def mb(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"


BRANCHES: tuple[Callable[[Evidence], Finding | None], ...] = (
    extra_traffic,
    long_programs,
    empty_tiles,
    little_in_flight,
    index_dominates,
    merge_dominates,
    host_gap,
    tail,
)
