"""Times the reference on the 64K decode row of the articles; run by hand, asserts nothing.

One request of 65,536 keys, 4,224 candidates a KV head (256 random pages of 16 and the last 8), 32 query heads over
8 KV heads, head_dim 128, one query row.
"""

import resource
import time

import numpy as np

from attnconform.reference.attention import effective_sets
from attnconform.reference.cache import PagedCache
from attnconform.reference.candidates import Candidates
from attnconform.reference.problem import AttentionProblem, check_problem
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


def main() -> None:
    rng = np.random.default_rng(0)
    problem = build_large_problem(rng)
    q = rng.standard_normal((1, NUM_QO_HEADS, HEAD_DIM))
    k, v = (rng.standard_normal((problem.cache.num_slots, NUM_KV_HEADS, HEAD_DIM)) for _ in range(2))
    dout, steps = rng.standard_normal(q.shape), Steps()
    start = time.perf_counter()
    check_problem(problem)
    checked = time.perf_counter()
    result = steps.forward(problem, q, k, v)
    forward = time.perf_counter()
    gradients = steps.backward(problem, q, k, v, result, dout)
    backward = time.perf_counter()
    counts = effective_sets(problem).counts()
    print(
        f"keys a head {counts.min()} to {counts.max()}; dk {gradients.dk.shape}, {gradients.dk.nbytes / 2**20:.0f} MiB"
    )
    print(f"check {checked - start:.3f} s, forward {forward - checked:.3f} s, backward {backward - forward:.3f} s")
    print(
        f"together {backward - start:.3f} s, peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB"
    )


if __name__ == "__main__":
    main()
