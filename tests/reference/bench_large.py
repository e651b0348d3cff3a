"""Times the reference on the 64K decode row of the articles; run by hand, asserts nothing.

    python bench_large.py steps|numpy|torch|cuda

`steps` is the authority, the others are the large oracle on a library or device. One request of 65,536 keys, 4,224
candidates a KV head (256 random pages of 16 and the last 8), 32 query heads over 8 KV heads, head_dim 128, one query
row.
"""

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnconform.reference.attention import effective_sets
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import Candidates
from attnconform.reference.large import large_attention, large_gradients
from attnconform.reference.problem import AttentionProblem
from attnconform.reference.results import AttentionResult, Gradients
from attnconform.reference.rules import Causal
from attnconform.reference.steps import Steps

SEQLEN_KV, PAGE_SIZE, NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM = 65_536, 16, 32, 8, 128
NUM_RANDOM_PAGES, NUM_LAST_PAGES = 256, 8


def build_large_problem(rng: np.random.Generator) -> AttentionProblem:
    """The decode row, its pages in random order."""
    num_pages = SEQLEN_KV // PAGE_SIZE
    last = np.arange(num_pages - NUM_LAST_PAGES, num_pages)
    lists = [
        np.concatenate([np.sort(rng.choice(num_pages - NUM_LAST_PAGES, NUM_RANDOM_PAGES, replace=False)), last])
        for _ in range(NUM_KV_HEADS)
    ]
    return AttentionProblem(
        qo_indptr=np.array([0, 1]),
        seqlen_kv=np.array([SEQLEN_KV]),
        q_offset=np.array([SEQLEN_KV - 1]),
        num_qo_heads=NUM_QO_HEADS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim_qk=HEAD_DIM,
        head_dim_vo=HEAD_DIM,
        cache=PagedCache(page_size=PAGE_SIZE, num_pages=num_pages, page_table=rng.permutation(num_pages)[None]),
        sm_scale=HEAD_DIM**-0.5,
        candidates=Candidates(
            indptr=np.arange(NUM_KV_HEADS + 1) * (NUM_RANDOM_PAGES + NUM_LAST_PAGES),
            indices=np.concatenate(lists),
            granularity="block",
            block_size=PAGE_SIZE,
            sharing="kv_head",
        ),
        mask_rule=Causal(),
    )


@dataclass(frozen=True)
class Oracle:
    """Forward and backward of one implementation, and how it takes and waits for arrays."""

    forward: Callable[..., AttentionResult]
    backward: Callable[..., Gradients]
    take: Callable[[np.ndarray], Any] = np.asarray
    wait: Callable[[], object] = lambda: None


def oracle_of(name: str) -> Oracle:
    """One of the four by name; torch is imported where it is asked for, so that its memory counts nowhere else."""
    steps = Steps()
    if name == "steps":
        return Oracle(steps.forward, steps.backward)
    if name == "numpy":
        return Oracle(large_attention, large_gradients)
    import torch

    torch.set_num_threads(1)
    device = "cuda" if name == "cuda" else "cpu"
    wait = torch.cuda.synchronize if name == "cuda" else lambda: None
    return Oracle(large_attention, large_gradients, lambda x: torch.from_numpy(x).to(device), wait)


def moment() -> tuple[float, float]:
    """Wall clock and this process's time on a core: they differ where others use the machine."""
    return time.perf_counter(), time.process_time()


def peak() -> float:
    """Largest resident memory so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> None:
    oracle = oracle_of(sys.argv[1])
    rng = np.random.default_rng(0)
    problem = build_large_problem(rng)
    q = rng.standard_normal((1, NUM_QO_HEADS, HEAD_DIM))
    k, v = (rng.standard_normal((problem.cache.num_slots, NUM_KV_HEADS, HEAD_DIM)) for _ in range(2))
    q, k, v, dout = (oracle.take(x) for x in (q, k, v, rng.standard_normal(q.shape)))
    oracle.wait()
    before, start = peak(), moment()
    result = oracle.forward(problem, q, k, v)
    oracle.wait()
    forward = moment()
    gradients = oracle.backward(problem, q, k, v, result, dout)
    oracle.wait()
    backward = moment()
    counts = effective_sets(problem).counts()
    print(f"{sys.argv[1]}: keys a head {counts.min()} to {counts.max()}; dk {tuple(gradients.dk.shape)}")
    for name, begin, end in (
        ("forward", start, forward),
        ("backward", forward, backward),
        ("together", start, backward),
    ):
        print(f"{name} {end[0] - begin[0]:.3f} s, of which {end[1] - begin[1]:.3f} s on a core")
    print(f"inputs and libraries {before:.2f} GiB, peak {peak():.2f} GiB, extra {peak() - before:.2f} GiB")


if __name__ == "__main__":
    main()
