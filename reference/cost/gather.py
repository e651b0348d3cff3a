"""Reading scattered keys directly, or copying them together first: which takes less time."""

from dataclasses import dataclass
from math import floor, inf

from attnconform.reference.cost.positive import check_counts, check_positive


@dataclass(frozen=True, kw_only=True)
class Bandwidths:
    """Sustained bandwidths in bytes per second (article 1, 2.2)."""

    direct: float  # B_s: scattered reads inside attention
    gather: float  # B_g: scattered reads of the copy; they may be as irregular as B_s
    write: float  # B_w: writing the copy
    contiguous: float  # B_c: reading the copy


def direct_time(num_bytes: float, bandwidths: Bandwidths, *, num_reads: int) -> float:
    """Seconds of num_reads scattered readings: r T / B_s. [COST-GATHER]

    A kernel that keeps the keys on chip between uses has one reading, not r.

    >>> example = Bandwidths(direct=100e9, gather=100e9, write=1000e9, contiguous=1000e9)
    >>> [round(direct_time(1e9, example, num_reads=r), 3) for r in (1, 8)]  # per GB
    [0.01, 0.08]
    """
    check_counts("COST-GATHER", num_bytes=num_bytes, num_reads=num_reads)
    check_bandwidths(bandwidths)
    return num_reads * num_bytes / bandwidths.direct


def gather_time(num_bytes: float, bandwidths: Bandwidths, *, num_reads: int, launch: float = 0.0) -> float:
    """Seconds of a copy and num_reads readings of it: T/B_g + T/B_w + r T/B_c + launch. [COST-GATHER]

    >>> example = Bandwidths(direct=100e9, gather=100e9, write=1000e9, contiguous=1000e9)
    >>> [round(gather_time(1e9, example, num_reads=r), 3) for r in (1, 8)]  # per GB: slower for one use
    [0.012, 0.019]
    """
    check_counts("COST-GATHER", num_bytes=num_bytes, num_reads=num_reads, launch=launch)
    check_bandwidths(bandwidths)
    copy = num_bytes / bandwidths.gather + num_bytes / bandwidths.write
    return copy + num_reads * num_bytes / bandwidths.contiguous + launch


def break_even_reads(num_bytes: float, bandwidths: Bandwidths, *, launch: float = 0.0) -> float:
    """The least number of readings for which the copy is faster; infinite where it never is. [COST-GATHER]

    >>> example = Bandwidths(direct=100e9, gather=100e9, write=1000e9, contiguous=1000e9)
    >>> break_even_reads(1e9, example), break_even_reads(1e6, example, launch=5e-6)
    (2, 2)
    """
    check_positive("COST-GATHER", num_bytes=num_bytes)
    saved = direct_time(num_bytes, bandwidths, num_reads=1) - num_bytes / bandwidths.contiguous
    if saved <= 0:
        return inf
    return floor(gather_time(num_bytes, bandwidths, num_reads=0, launch=launch) / saved) + 1


def gather_traffic(num_tokens: int, bytes_per_token: float) -> float:
    """Bytes that a copy used once adds to the first reading, written and read: 2 k B_kv. [COST-GATHER] (formula 3)

    >>> gather_traffic(2048, 512) / 2**20  # MiB
    2.0
    """
    check_counts("COST-GATHER", num_tokens=num_tokens, bytes_per_token=bytes_per_token)
    return 2 * num_tokens * bytes_per_token


def check_bandwidths(bandwidths: Bandwidths) -> None:
    """Refuses bandwidths that are not above 0. [COST-GATHER]"""
    check_positive(
        "COST-GATHER",
        direct=bandwidths.direct,
        gather=bandwidths.gather,
        write=bandwidths.write,
        contiguous=bandwidths.contiguous,
    )
