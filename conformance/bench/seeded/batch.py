"""The batch of a diagnosis: most rows have 32 blocks, one has 800 (article 1, 7.1), and now and then more."""

from dataclasses import dataclass, replace

import torch

from attnconform.conformance.bench.decode_work import TINY, DecodeShape, DecodeWork, draw_queries, make_work
from attnconform.conformance.bench.machine import Machine


@dataclass(frozen=True)
class RaggedShape:
    """How many blocks rows have."""

    shape: DecodeShape
    short: int
    long: int
    long_rows: int
    extra: int  # blocks that a long row has more in a set that outgrows the tier
    num_sets: int
    longer_every: int  # one set of so many outgrows the tier


REAL = RaggedShape(
    DecodeShape(batch=32, page_size=64), short=32, long=800, long_rows=1, extra=64, num_sets=50, longer_every=25
)
SMALL = RaggedShape(
    replace(TINY, seqlen_kv=128, page_size=8), short=1, long=8, long_rows=1, extra=4, num_sets=2, longer_every=2
)


def ragged(machine: Machine) -> RaggedShape:
    return REAL if machine.is_real else SMALL


def usual_capacity(machine: Machine) -> int:
    """Tokens of the longest usual list."""
    r = ragged(machine)
    return r.long * r.shape.page_size


def make_batches(machine: Machine, count: int | None = None) -> list[DecodeWork]:
    """Input sets over one cache; the last of every longer_every outgrows the usual tier."""
    r = ragged(machine)
    wanted = r.num_sets if count is None else count
    first = make_work(replace(r.shape, candidates=r.shape.page_size), machine)
    return [draw_batch(r, first, machine, is_longer=n % r.longer_every == r.longer_every - 1) for n in range(wanted)]


def draw_batch(r: RaggedShape, first: DecodeWork, machine: Machine, *, is_longer: bool) -> DecodeWork:
    """Random blocks, as many as each row has; the long rows come last."""
    counts = row_counts(r, is_longer=is_longer)
    per_list = torch.tensor(counts, device=machine.device).repeat_interleave(r.shape.num_kv_heads)
    ranks = torch.rand(r.shape.num_lists, r.shape.pages, device=machine.device).argsort(-1).argsort(-1)
    chosen = (ranks < per_list[:, None]).nonzero()[:, 1].int()  # ascending in every list
    indptr = torch.cat([per_list.new_zeros(1), per_list.cumsum(0)]).int()
    return replace(first, q=draw_queries(r.shape, machine.device), indptr=indptr, indices=chosen)


def row_counts(r: RaggedShape, *, is_longer: bool) -> list[int]:
    """Blocks of every request's lists."""
    long = r.long + (r.extra if is_longer else 0)
    return [r.short] * (r.shape.batch - r.long_rows) + [long] * r.long_rows
